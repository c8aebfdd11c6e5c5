"""Variables for habits: the help shows each beside its option, a page lists them, and an option counts more."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.main import get_command

from quantkit import cli
from quantkit.cli import main
from quantkit.codegen import disk_cache, thread_pool
from quantkit.formats.gguf import dialects

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "environment.md"


def parsers() -> Iterator[tuple[str, object]]:
    yield "", get_command(cli.app)
    for command in cli.commands():
        for path in ([command], *([command, name] for name in cli.subcommands(command))):
            yield " ".join(path), cli.parser(*path)


def test_the_page_lists_the_variables_of_all_options() -> None:
    listed = set(re.findall(r"QUANTKIT_[A-Z_]+", PAGE.read_text()))
    shown = {param.envvar: param for _, parser in parsers() for param in parser.params if param.envvar}  # type: ignore[attr-defined]
    assert listed == set(shown)
    others = {"QUANTKIT_API_KEY", "QUANTKIT_CACHE_DIR", "QUANTKIT_PROGRESS", "QUANTKIT_THREADS"}
    assert set(shown) == {dialects.VARIABLE, *others}


def test_every_option_of_a_habit_has_its_variable() -> None:
    habits = {"--threads": "QUANTKIT_THREADS", "--progress": "QUANTKIT_PROGRESS", "--cache-dir": "QUANTKIT_CACHE_DIR"}
    found = dict.fromkeys(habits, 0)
    for name, parser in parsers():
        for param in parser.params:  # type: ignore[attr-defined]
            for option in habits.keys() & set(param.opts):
                assert param.envvar == habits[option], f"{name} {option}"
                found[option] += 1
    assert found["--threads"] > 15
    assert found["--progress"] > 15
    assert found["--cache-dir"] == 1


def test_the_help_shows_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["repack", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "[env var: QUANTKIT_THREADS; x>=-1]" in text
    assert "[env var: QUANTKIT_PROGRESS]" in text


def test_cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("QUANTKIT_CACHE_DIR", "elsewhere")  # restored after the test
    assert main(["--cache-dir", str(tmp_path), "types"]) == 0
    assert os.environ["QUANTKIT_CACHE_DIR"] == str(tmp_path)
    assert disk_cache.root() == tmp_path


def test_threads_of_the_variable_do_not_contradict_an_argument(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("QUANTKIT_THREADS", "1")
    thread_pool.default_threads.cache_clear()
    assert main(["quantize", str(tmp_path / "missing.gguf"), str(tmp_path / "q.gguf"), "Q8_0", "2"]) == 1
    assert "missing.gguf" in capsys.readouterr().err
    monkeypatch.setenv("QUANTKIT_THREADS", "many")
    assert main(["quantize", str(tmp_path / "missing.gguf"), str(tmp_path / "q.gguf"), "Q8_0"]) == 2
    assert "QUANTKIT_THREADS" in capsys.readouterr().err
    thread_pool.default_threads.cache_clear()
