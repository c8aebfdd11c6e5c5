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
from quantkit.evaluate.collect_imatrix import Saved
from quantkit.evaluate.text import conversations
from quantkit.formats import journal
from quantkit.inputs import json_input
from quantkit.recipe.models import read_config
from quantkit.tokenizers import hf_tokenizer, merges_txt, vocab
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
    with pytest.raises(FormatError, match="8 bytes, quantkit reads JSON of up to 7"):
        json_input.read(tmp_path / "a.json")
    assert json_input.read_object(tmp_path / "none.json") == {}


def test_readers_of_json_refuse_deep_documents(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "vocab.json", "a.jsonl"):
        (tmp_path / name).write_text(DEEP, "utf-8")
    readers: list[Any] = [
        lambda: read_config(tmp_path),
        lambda: vocab.read(tmp_path, {"vocab_size": 5}),
        lambda: merges_txt.tokenizer_json(tmp_path / "vocab.json", {}, None),
        lambda: hf_tokenizer.tokenizer_json({hf_tokenizer.EXACT: DEEP, "tokenizer.ggml.model": "gpt2"}),
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
        Saved.load(path)
