"""JSON from files: limits of depth and size, and who reads it."""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quantkit.errors import FormatError, QuantkitError
from quantkit.evaluate.corpus import conversations
from quantkit.evaluate.imatrix.saved_run import SavedRun
from quantkit.formats import front_matter, journal
from quantkit.formats.kld.bounded_file import is_bounded
from quantkit.inputs import json_input, regular_file
from quantkit.recipe.models import read_config
from quantkit.tokenizers import hf_tokenizer, merges_txt, vocab
from tests.archs.checkpoints import byte_level, write_tokenizer
from tests.cli.running import refused

DEEP = "[" * 100_000 + "]" * 100_000


def nested(depth: int, begin: str = "[", end: str = "]") -> str:
    return begin * depth + "0" + end * depth


@pytest.mark.parametrize(("begin", "end"), [("[", "]"), ('{"a":', "}")])
def test_depth_is_limited(begin: str, end: str) -> None:
    json_input.parse(nested(json_input.MAX_DEPTH, begin, end), "x")
    for depth in (json_input.MAX_DEPTH + 1, 900, 5000, 100_000):
        with pytest.raises(FormatError, match="x: JSON nested deeper than 64"):
            json_input.parse(nested(depth, begin, end), "x")


def test_wide_documents_are_not_deep() -> None:
    wide = {str(i): [[i], {"a": [i]}] for i in range(10_000)}
    assert json_input.parse(json.dumps(wide), "x") == wide


@pytest.mark.parametrize("text", [b"", b"{", b"\xff\xfe\xfa", b"[1,]", b"1" * 5000, b'{"a" 1}'])
def test_what_is_no_json_is_an_error(text: bytes) -> None:
    with pytest.raises(FormatError, match="x: not JSON"):
        json_input.parse(text, "x")


def test_files_are_regular_and_not_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.json").write_text('{"a": 1}', "utf-8")
    assert json_input.read(tmp_path / "a.json") == {"a": 1}
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(FormatError, match="not a regular file"):
        json_input.read(tmp_path / "pipe.json")
    monkeypatch.setattr(json_input, "MAX_BYTES", 7)
    with pytest.raises(FormatError, match="8 bytes, the limit for such files is 7"):
        json_input.read(tmp_path / "a.json")
    assert json_input.read_object(tmp_path / "none.json") == {}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names on this system")
@pytest.mark.parametrize(
    "name", ["tokenizer.model", "x.tiktoken", "merges.txt", "chat_template.jinja", "additional_chat_templates/a.jinja"]
)
def test_pipes_in_a_checkpoint_are_refused_without_waiting(tmp_path: Path, name: str) -> None:
    """Opening a pipe waits for its other end, which a directory from a stranger never gets."""
    if name.endswith(".jinja"):
        write_tokenizer(tmp_path, byte_level())
    if name == "merges.txt":
        (tmp_path / "vocab.json").write_text("{}", "utf-8")
        (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}', "utf-8")
    if name.endswith(".tiktoken"):
        (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "HYTokenizer"}', "utf-8")
    (tmp_path / name).parent.mkdir(exist_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(FormatError, match=rf"{Path(name).name}: not a regular file"):
        vocab.read(tmp_path, {"vocab_size": 320})


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names on this system")
def test_other_readers_do_not_wait_for_pipes(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert not is_bounded(tmp_path / "pipe")
    with pytest.raises(FormatError, match="pipe: not a regular file"):
        front_matter.read(tmp_path / "pipe")


def test_texts_are_utf_8_of_limited_size(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"a\r\nb\rc\xff")
    with pytest.raises(FormatError, match=r"a\.txt: not UTF-8: .* at byte 6"):
        regular_file.read_text(tmp_path / "a.txt")
    (tmp_path / "a.txt").write_bytes(b"a\r\nb\rc")
    assert regular_file.read_text(tmp_path / "a.txt") == (tmp_path / "a.txt").read_text("utf-8") == "a\nb\nc"
    with pytest.raises(FormatError, match=r"a\.txt: 6 bytes, the limit for such files is 5"):
        regular_file.read_text(tmp_path / "a.txt", 5)


def test_readers_of_json_refuse_deep_documents(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "vocab.json", "a.jsonl"):
        (tmp_path / name).write_text(DEEP, "utf-8")
    readers: list[Any] = [
        lambda: read_config(tmp_path),
        lambda: vocab.read(tmp_path, {"vocab_size": 5}),
        lambda: merges_txt.tokenizer_json(tmp_path / "vocab.json", {}, None),
        lambda: hf_tokenizer.tokenizer_json({hf_tokenizer.OVERRIDES: DEEP, "tokenizer.ggml.model": "gpt2"}),
        lambda: conversations(tmp_path / "a.jsonl"),
    ]
    for read in readers:
        with pytest.raises(QuantkitError):
            read()


def test_a_deep_line_ends_a_journal(tmp_path: Path) -> None:
    path = tmp_path / "x.journal"
    path.write_text('{"journal": 1, "job": "a"}\n{"name": "b"}\n{"name": ' + DEEP + "}\n", "utf-8")
    found = journal.read(path)
    assert found is not None
    assert list(found.entries) == ["b"]


def test_commands_refuse_deep_documents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(DEEP, "utf-8")
    said = refused(capsys, "plan", tmp_path / "config.json", "Q4_K_M")
    assert "nested deeper" in said


def test_a_saved_run_that_would_inflate_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "imatrix.resume"
    np.savez(path.open("wb"), about=np.zeros(1, np.uint8))
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("about.npy", bytes(64 << 20))
    with pytest.raises(FormatError, match="a member is compressed"):
        SavedRun.load(path)
