"""Long runs of perplexity and divergence: killed and taken up again, and layer by layer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from quantkit import cli
from quantkit.evaluate.perplexity import PerplexityOptions, perplexity
from tests.archs.files import written
from tests.evaluate import test_imatrix
from tests.evaluate.conftest import rewrite

model, run = test_imatrix.model, test_imatrix.run  # fixtures


@pytest.fixture
def text(golden: Path, tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text((golden / "eval.txt").read_text()[:7000])
    return path


def killed(args: list[object], log, rng) -> bool:
    """Start a command and kill it at a random moment after its log has another line; False where it was done before."""
    lines = log.read_bytes().count(b"\n") if log.exists() else 1
    command = [sys.executable, "-m", "quantkit", *map(str, args)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None and not (log.exists() and log.read_bytes().count(b"\n") > lines):
        time.sleep(0.005)
    time.sleep(rng.uniform(0, 0.1))
    if process.poll() is not None:
        return False
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    return True


@pytest.mark.parametrize(("form", "times"), [("qkld", 1), pytest.param("kld", 5, marks=pytest.mark.full)])
def test_killed_and_run_again(run, model, text, tmp_path, rng, form, times):
    """Base, lines and divergences are those of runs that nobody killed."""
    for folder in ("whole", "killed"):
        (tmp_path / folder).mkdir()
    candidate = rewrite(model, tmp_path / "q8_0.gguf", "q8_0", lambda t: len(t.shape) > 1 and "gate_inp" not in t.name)
    base, log, again = f"base.{form}", "x.jsonl", "y.jsonl"
    writing = ("perplexity", model, "-f", text, "-c", 64, "--chunks", 6 + 6 * times, "-b", 128)
    reading = ("perplexity", candidate, "--kl-divergence", "-b", 128)
    outputs, kills = {}, 0
    for folder in (tmp_path / "whole", tmp_path / "killed"):
        first = [*writing, "--kl-divergence-base", folder / base, "--jsonl", folder / log]
        second = [*reading, "--kl-divergence-base", folder / base, "--jsonl", folder / again]
        for args, lines in ((first, log), (second, again)):
            if folder.name == "killed" and (lines == log or times > 1):
                kills += sum(killed(args, folder / lines, rng) for _ in range(times))
            elif folder.name == "killed":  # as a kill leaves it
                data = (tmp_path / "whole" / lines).read_bytes().splitlines(keepends=True)
                (folder / lines).write_bytes(b"".join(data[:6]) + data[6][:50])
            outputs[folder.name] = run(*args)
            assert not list(folder.glob("*.partial-*"))
    assert kills
    for name in (base, log, again):
        a, b = ((tmp_path / folder / name).read_bytes() for folder in ("whole", "killed"))
        assert a.replace(b"/whole/", b"/killed/") == b, name
    assert outputs["whole"].partition("=====")[2] == outputs["killed"].partition("=====")[2]


def test_layer_by_layer_gives_the_same_bits(run, model, text, tmp_path, capsys):
    args = ("perplexity", model, "-f", text, "-c", 64, "--chunks", 5, "-b", 128, "--kl-divergence-base")
    outputs = [run(*args, tmp_path / "a.kld"), run(*args, tmp_path / "b.kld", "--by-layer")]
    assert outputs[0] == outputs[1]
    assert (tmp_path / "a.kld").read_bytes() == (tmp_path / "b.kld").read_bytes()
    assert cli.main([*map(str, args), str(tmp_path / "c.kld"), "--by-layer", "--numerics", "fast"]) == 1
    assert "exact numerics" in capsys.readouterr().err


def test_layers_share_the_positions_that_one_selects(tmp_path):
    """A layer without an indexer takes those of its own chunks. The last batch has fewer chunks than the others."""
    path, text = written(tmp_path / "m.gguf", "glm-dsa", tokenizer=True), tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog 0123456789 " * 12)
    options = PerplexityOptions(ctx_size=64, chunks=5, batch_size=128)
    found = [perplexity(path, text, replace(options, by_layer=chosen)).nll for chosen in (False, True)]
    np.testing.assert_array_equal(*found)


def test_lines_of_a_run_under_other_options_are_not_taken_up(capsys, model, text, tmp_path):
    lines = tmp_path / "x.jsonl"
    args = ["perplexity", str(model), "-f", str(text), "-c", "32", "-b", "32", "--chunks", "2", "--jsonl", str(lines)]
    assert cli.main(args) == 0
    assert cli.main(args) == 0
    before = lines.read_bytes()
    capsys.readouterr()
    assert cli.main([*args, "-ser", "1,1"]) == 1
    assert "belongs to another run" in capsys.readouterr().err
    text.write_text(text.read_text()[::-1])
    assert cli.main(args) == 1
    assert lines.read_bytes() == before
