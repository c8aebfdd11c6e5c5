"""Names, metadata and paths of files do not steer the terminal, whatever command prints them."""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from quantkit import types
from quantkit.cli import main
from quantkit.cli.common.card import card
from quantkit.cli.common.output import print_json, table
from quantkit.cli.common.terminal import escaped_controls, message, visible
from quantkit.formats import gguf

ESCAPE = "\x1b]0;title\x07\x1b[2K\x9b31m\x7f\u202egnp\u2066"
STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A GGUF file whose names and values hold escape sequences and line breaks."""
    metadata = gguf.Metadata()
    for key, value in (
        ("general.architecture", "llama"),
        ("general.name", f"name{ESCAPE}\nerror: no\r<b>[x](y) `z` |"),
        (f"general.{ESCAPE}", "value"),
        ("quantize.imatrix.file", f"file{ESCAPE}.dat"),
        ("quantkit.version", f"1{ESCAPE}"),
    ):
        metadata.set(key, value, "str")
    names = [f"blk.0.{ESCAPE}\nfake.weight", f"blk.0.`{ESCAPE}|\r.weight", "output.weight"]
    specs = [gguf.TensorSpec(name, (32, 32), types.get("f32")) for name in names]
    path = tmp_path / f"model{ESCAPE}\n.gguf"
    with gguf.Writer(path, metadata, specs) as writer:
        for name in names:
            writer.write(name, np.ones((32, 32), np.float32).view(np.uint8))
    return path


COMMANDS: dict[str, list[str]] = {
    "inspect": ["inspect", "{}"],
    "all tensors": ["inspect", "{}", "--tensors"],
    "card": ["inspect", "{}", "--card"],
    "json": ["inspect", "{}", "--json"],
    "metadata": ["metadata", "list", "{}"],
    "metadata as json": ["metadata", "list", "{}", "--json"],
    "verify": ["verify", "{}"],
    "diff": ["diff", "{}", "{}"],
    "plan": ["plan", "{}", "Q4_0"],
    "quantize": ["quantize", "{}", "{}.out", "Q4_0", "--allow-requantize", "--dry-run"],
    "split": ["split", "{}", "{}.out", "--split-max-tensors", "1", "--dry-run"],
    "generate": ["generate", "{}", "-p", "x"],
    "no such file": ["inspect", "{}.none"],
    "no such command": [f"insp{ESCAPE}", "{}"],
    "no such option": ["inspect", f"--x{ESCAPE}", "{}"],
}


@pytest.mark.parametrize("case", COMMANDS)
def test_no_command_prints_what_steers_a_terminal(hostile: Path, case: str, capsys: pytest.CaptureFixture[str]) -> None:
    main([word.format(hostile) for word in COMMANDS[case]])
    done = capsys.readouterr()
    for text in (done.out, done.err):
        assert not (found := STEERING.search(text)), ascii(text[max(0, found.start() - 40) : found.end() + 40])
        assert "\nerror: no" not in text
        assert "\nfake.weight" not in text
    assert done.out + done.err


def test_json_keeps_every_character(hostile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(hostile), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [tensor["name"] for tensor in found["tensors"]] == list(gguf.open(hostile).tensors)


def test_a_card_shows_names_as_text(hostile: Path) -> None:
    text = card(gguf.open(hostile))
    assert r"\<b>\[x](y) \`z\` \|" in text
    assert "<b>" not in text.replace(r"\<b>", "")
    assert r"`` blk.*.`\x1b]0;" in text


def test_errors_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x\nerror: all is well\x1b[A.gguf"
    path.write_bytes(b"not a model")
    assert main(["inspect", str(path)]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert r"x\nerror: all is well\x1b[A.gguf" in said


def test_only_indented_line_breaks_of_a_message_stay() -> None:
    assert message("2 tensors:\n  a\x1b\n  b\nwarning: fake") == "2 tensors:\n  a\\x1b\n  b\\nwarning: fake"


def test_what_people_write_is_printed_as_it_is() -> None:
    for text in ("naïve 北京 \U0001f468\u200d\U0001f469 \u0645\u06cc\u200c\u062e\n\ta\r\n", "± … ·"):
        assert visible(text) == text


def test_streams_are_restored_and_stay_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.TextIOWrapper(io.BytesIO(), "utf-8")
    monkeypatch.setattr(sys, "stdout", out)
    with escaped_controls():
        stale = sys.stdout
        assert not sys.stdout.isatty()
        print("a\x1bb", flush=True)
        sys.stdout.writelines(["c\x07", "d\n"])
    assert sys.stdout is out
    with contextlib.suppress(KeyError), escaped_controls():
        raise KeyError
    assert sys.stdout is out
    stale.write("\x1b[0m\x1b[1;31me\x07")  # as colorama at exit
    out.flush()
    assert out.buffer.getvalue() == b"a\\x1bb\nc\\x07d\ne\\x07"  # type: ignore[attr-defined]


def test_tables_and_json_of_controls(capsys: pytest.CaptureFixture[str]) -> None:
    assert table(("a",), [("x\ny\x9b",)]).splitlines()[-1] == r"x\ny\x9b"
    print_json("quantkit.a/1", {"a": "\x7f\x9b\u2028\u202e\x1b\n"})
    printed = capsys.readouterr().out
    assert not STEERING.search(printed)
    assert json.loads(printed) == {"schema": "quantkit.a/1", "a": "\x7f\x9b\u2028\u202e\x1b\n"}
