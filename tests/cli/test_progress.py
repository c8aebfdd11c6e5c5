"""Bars, tables and interrupts of commands on a pseudo-terminal, and the same commands with pipes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from quantkit import types
from quantkit.cli import commands, load
from quantkit.formats import gguf
from tests.cli.pseudo_terminal import QUANTKIT, Session, run
from tests.cli.running import printed

STOPPING = """
import sys, time
from quantkit.cli import main
from quantkit.formats import pipeline
update = pipeline.Bar.update
def once(*args):
    pipeline.Bar.update = wait
    update(*args)
def wait(*args):
    time.sleep(120)
    update(*args)
pipeline.Bar.update = once
sys.exit(main(sys.argv[1:]))
"""
"""A command that works on one tensor, and waits before it is done with the second."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF file with matrices that `repack` interleaves, without compiling a kernel."""
    metadata, q8_0 = gguf.Metadata(), types.get("q8_0")
    metadata.set("general.architecture", "llama", "str")
    specs = [gguf.TensorSpec(f"blk.{i}.ffn_down.weight", (256, 4096), q8_0) for i in range(8)]
    path = tmp_path_factory.mktemp("progress") / "model.gguf"
    with gguf.Writer(path, metadata, specs) as writer:
        for spec in specs:
            writer.write(spec.name, np.zeros((256, q8_0.row_bytes(4096)), np.uint8))
    return path


def piped(*argv: object, **environment: str) -> subprocess.CompletedProcess[bytes]:
    around = {name: value for name, value in os.environ.items() if name != "QUANTKIT_PROGRESS"}
    return subprocess.run([*QUANTKIT, *map(str, argv)], capture_output=True, check=False, env=around | environment)


def bars(session: Session) -> list[str]:
    return [text for text in session.drawn if "%|" in text]


def without_times(text: str) -> str:
    return re.sub(r"[\d.]+ s, \d+ MiB/s", "", text)


@pytest.mark.parametrize("columns", [80, 50])
def test_a_terminal_shows_a_bar_that_vanishes(model: Path, tmp_path: Path, columns: int) -> None:
    seen = run(["repack", model, tmp_path / "out.gguf"], columns=columns, cwd=tmp_path)
    assert seen.status == 0
    assert "100%|" in bars(seen)[-1]
    assert all(len(text) < columns for text in bars(seen))
    assert not any("%|" in line for line in seen.screen)
    assert seen.screen[-1].startswith("8 tensors changed; ")
    assert seen.cursor == 0


@pytest.mark.parametrize(
    ("options", "environment"),
    [
        (["--no-progress"], {}),
        (["-q"], {}),
        (["--quiet"], {}),
        ([], {"QUANTKIT_PROGRESS": "0"}),
        ([], {"TERM": "dumb"}),
    ],
)
def test_a_terminal_shows_no_bar_if_told_so(
    model: Path, tmp_path: Path, options: list[str], environment: dict[str, str]
) -> None:
    seen = run(["repack", model, tmp_path / "out.gguf", *options], environment=environment)
    assert seen.status == 0
    assert "%|" not in seen.raw
    assert "\r" not in seen.raw.replace("\r\n", "\n")
    assert seen.screen[-1].startswith("8 tensors changed; ")


@pytest.mark.parametrize("value", [None, "0", "1"])
def test_pipes_get_the_same_bytes_and_no_bar(model: Path, tmp_path: Path, value: str | None) -> None:
    environment = {} if value is None else {"QUANTKIT_PROGRESS": value}
    done = [piped("repack", model, tmp_path / "out.gguf", **environment) for _ in range(2)]
    assert [one.returncode for one in done] == [0, 0]
    assert [one.stderr for one in done] == [b"", b""]
    texts = [without_times(one.stdout.decode()) for one in done]
    assert texts[0] == texts[1]
    assert "\r" not in texts[0]
    assert texts[0].startswith(
        "from  to       why not  tensors      size\n----  -------  -------  -------  --------\n"
        "q8_0  q8_0_r8                 8  8.50 MiB\n\nwrote "
    )


def test_a_bar_on_stderr_leaves_stdout_as_it_is(model: Path, tmp_path: Path) -> None:
    seen = run(["repack", model, tmp_path / "out.gguf", "--json"], pipe_stdout=True)
    assert bars(seen)
    assert json.loads(seen.piped)["changed"] == 8
    seen = run(["repack", model, tmp_path / "out.gguf"], pipe_stdout=True)
    assert bars(seen)
    text = piped("repack", model, tmp_path / "out.gguf").stdout.decode()
    assert without_times(seen.piped.decode()) == without_times(text)


def test_another_value_of_the_variable_is_bad_usage(model: Path, tmp_path: Path) -> None:
    done = piped("repack", model, tmp_path / "out.gguf", QUANTKIT_PROGRESS="yes")
    assert done.returncode == 2
    assert b"QUANTKIT_PROGRESS=yes: write 0 (no progress) or 1 (progress)" in done.stderr
    assert not (tmp_path / "out.gguf").exists()


def test_an_interrupt_leaves_the_terminal_clean(model: Path, tmp_path: Path) -> None:
    seen = run(
        ["repack", model, tmp_path / "out.gguf", "-t", "1"], program=(sys.executable, "-c", STOPPING),
        interrupt=lambda text: re.search(r" [1-9]\d?%\|", text) is not None,
    )  # fmt: skip
    assert seen.status == 130, seen.raw
    assert seen.screen[-1] == "interrupted"
    assert seen.cursor == 0
    left = [line for line in seen.screen if "%|" in line]  # how far it came
    assert len(left) == 1
    assert left[0].startswith("repack ")
    assert left[0].endswith("]^C")
    assert not (tmp_path / "out.gguf").exists()


@pytest.mark.parametrize("environment", [{}, {"NO_COLOR": "1"}, {"NO_COLOR": ""}])
def test_tables_on_a_terminal_are_aligned(model: Path, environment: dict[str, str]) -> None:
    seen = run(["inspect", model, "--tensors"], environment=environment)
    assert seen.status == 0
    assert ("\x1b[1m" in seen.raw) is (not environment.get("NO_COLOR"))
    if environment.get("NO_COLOR"):
        assert "\x1b" not in seen.raw
    top = next(i for i, line in enumerate(seen.screen) if line.startswith("tensor "))
    header, rule, *rows = seen.screen[top : top + 10]
    assert set(rule) == {"─"}
    assert [row[: row.index(" ")] for row in rows] == [f"blk.{i}.ffn_down.weight" for i in range(8)]
    assert {row.index("q8_0") for row in rows} == {header.index("type")}
    assert {len(row) for row in [*rows, header]} == {len(rule)}  # numbers end at the right edge


def test_a_table_that_is_too_wide_is_folded_and_complete(tmp_path: Path) -> None:
    metadata, f32 = gguf.Metadata(), types.get("f32")
    metadata.set("general.architecture", "llama", "str")
    metadata.set("general.description", "sixty words " * 60, "str")
    path, name = tmp_path / "model.gguf", "blk.0." + "long" * 12 + ".weight"
    with gguf.Writer(path, metadata, [gguf.TensorSpec(name, (2, 32), f32)]) as writer:
        writer.write(name, np.ones((2, 32), np.float32).view(np.uint8))
    seen = run(["inspect", path, "--tensors"], columns=50)
    top = next(i for i, line in enumerate(seen.screen) if line.startswith("tensor "))
    table = seen.screen[top : seen.screen.index("", top)]
    assert all(len(line) <= 50 for line in table)
    column = table[0].index("type")
    assert "".join(line[:column].strip() for line in table[2:]) == name
    assert table[2].endswith(" 256")


def test_a_table_of_many_numbers_is_transposed(tmp_path: Path) -> None:
    code = """from quantkit.cli.common.output import print_table
print_table([f"title {i}" for i in range(12)], [["a-file-with-a-name"] + ["123.45678"] * 11] * 2)"""
    seen = run([], columns=60, program=(sys.executable, "-c", code))
    assert [line.split() for line in seen.screen[:2]] == [["a-file-wi"] * 2, ["title", "0", *["th-a-name"] * 2]]
    assert [line.split() for line in seen.screen[3:]] == [["title", str(i), *["123.45678"] * 2] for i in range(1, 12)]


def test_what_runs_long_has_the_options() -> None:
    long = {"convert", "convert-mla", "demo", "diff", "export", "merge", "quantize", "repack", "split", "unpack",
            "verify", "batched-bench", "bench", "compare", "fuse-gate-up", "mtp", "prune", "saliency",
            "generate", "imatrix", "perplexity",
            "sensitivity", "serve",
            "sweep-bench", "upload"}  # fmt: skip
    assert long <= set(commands())
    for name in long:
        assert {"bars", "quiet"} <= load(name).__signature__.parameters.keys(), name  # type: ignore[attr-defined]
    short = set(commands()) - long - {"lm-eval"}  # whose options are lm_eval's; QUANTKIT_PROGRESS holds for its bars
    assert short == {"inspect", "metadata", "plan", "recipe", "types"}


def test_the_help_of_what_is_short_does_not_list_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--quiet" not in printed(capsys, "types", "--help")


# --------------------------------------------------------------------------------------------------- measured models


@pytest.fixture(scope="module")
def text(golden: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "short.txt"
    path.write_text((golden / "eval.txt").read_text()[:2000])
    return path


def values(session: Session, quantity: str) -> list[str]:
    return [found[1] for bar in bars(session) if (found := re.search(rf", {quantity} ([\d.]+)\]$", bar))]


def test_perplexity_shows_running_values_in_the_bar(smollm2_q4_1: Path, text: Path) -> None:
    command = ["perplexity", smollm2_q4_1, "-f", text, "-c", 64, "--chunks", 4, "-b", 128]
    seen = run(command)
    assert seen.status == 0
    assert re.search(r"\| 4/4 \[\d\d:\d\d<00:00, \d+ tok/s, PPL \d+\.\d{4}\]$", bars(seen)[-1])
    final = next(line for line in seen.screen if line.startswith("Final estimate: PPL over 4 chunks"))
    assert values(seen, "PPL")[-1] in final
    assert "[1]" not in seen.raw
    to_pipe = run(command, pipe_stdout=True)
    done = piped(*command)
    assert values(to_pipe, "PPL")
    assert to_pipe.piped == done.stdout
    assert re.fullmatch(rb"(\[\d\]\d+\.\d{4},){4}\nFinal estimate: [^\n]*\n", done.stdout)
    assert b"\r" not in done.stderr
    assert b"ETA" not in done.stderr
    assert piped(*command).stderr == done.stderr
    quiet = piped(*command, "-q")
    assert (quiet.stdout, quiet.stderr) == (done.stdout, b"")


def test_windows_leave_their_value_on_the_terminal(smollm2_q4_1: Path, text: Path) -> None:
    seen = run(["perplexity", smollm2_q4_1, "-f", text, "-c", 64, "--chunks", 2, "--ppl-stride", 32])
    assert f"[2]{values(seen, 'PPL')[-1]}" in seen.screen


def test_compare_imatrix_and_benches_show_theirs(smollm2_q4_1: Path, text: Path, tmp_path: Path) -> None:
    about = ["-f", text, "-c", 64, "--chunks", 2]
    seen = run(["compare", smollm2_q4_1, smollm2_q4_1, *about, "--noise-floor", "off"])
    assert seen.status == 0
    assert "| 4/4 [" in bars(seen)[-1]
    assert values(seen, "KLD")[-1] == "0.00000"
    assert "\\x1b" not in seen.raw
    seen = run(["imatrix", smollm2_q4_1, *about, "-o", tmp_path / "imatrix.dat"])
    assert f"Final estimate: PPL = {values(seen, 'PPL')[-1]}" in "\n".join(seen.screen)
    seen = run(["bench", smollm2_q4_1, "-p", 16, "-n", 4, "-r", 2])
    assert re.search(r"\| 6/6 \[\d\d:\d\d<00:00, tg4 [\d.]+ tok/s\]$", bars(seen)[-1])
    assert sum(line.startswith("| smollm2") or " tg4 |" in line for line in seen.screen) >= 1
    seen = run(["sweep-bench", smollm2_q4_1, "-c", 48, "-b", 16], columns=120)
    assert re.search(r"\| 48/48 \[\d\d:\d\d<00:00, PP [\d.]+ TG [\d.]+ tok/s\]$", bars(seen)[-1])
    assert all(len(bar) < 120 for bar in bars(seen))


def test_generate_prints_the_reply_without_a_bar(smollm2_q4_1: Path) -> None:
    seen = run(["generate", smollm2_q4_1, "-p", "One\ntwo", "-n", 8, "--temp", 0])
    assert seen.status == 0
    reply = piped("generate", smollm2_q4_1, "-p", "One\ntwo", "-n", 8, "--temp", 0).stdout.decode()
    assert reply.replace("\n", "\r\n") in seen.raw
