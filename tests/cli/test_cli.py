"""The frame of the command line: listing, dispatch, exit statuses, encodings, speed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import quantkit
from quantkit import cli
from quantkit.errors import DataError

COMMAND = [sys.executable, "-m", "quantkit"]


def run(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *args], capture_output=True, encoding="utf-8", env=os.environ | environment, check=False
    )


@pytest.fixture
def added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of commands in place of quantkit's own."""
    monkeypatch.setattr(cli, "__file__", str(tmp_path / "__init__.py"))
    monkeypatch.setattr(cli, "__path__", [str(tmp_path)])
    yield tmp_path
    for path in tmp_path.glob("*.py"):
        sys.modules.pop(f"quantkit.cli.{path.stem}", None)


def command(folder: Path, name: str, body: str, doc: str = "Do it. Then more.") -> None:
    code = f'from quantkit.errors import DataError\ndef {name}(x: int = 1) -> None:\n    """{doc}"""\n    {body}\n'
    (folder / f"{name}.py").write_text(code)


def test_the_list_is_the_modules(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    page = capsys.readouterr().out
    assert {"quantize", "types", "diff"} <= set(cli.commands())
    for name in cli.commands():
        function = cli.load(name)
        assert callable(function), name
        assert function.__doc__, f"{name} has no docstring"
        assert f"  {name} " in page


@pytest.mark.parametrize("name", cli.commands())
def test_every_command_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    for path in ([name], *([name, sub] for sub in cli.subcommands(name))):
        assert cli.main([*path, "--help"]) == 0
        assert f"quantkit {' '.join(path)}" in capsys.readouterr().out
        if name == "lm-eval":  # whose options are lm_eval's
            continue
        assert cli.main([*path, "--no-such-option"]) == 2
        assert "--no-such-option" in capsys.readouterr().err


def test_statuses_of_a_command(added: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command(added, "fine", "print(x)")
    command(added, "bad_data", "raise DataError('a.gguf: x is 3')")
    command(added, "no_file", "open('/no/such/file')")
    command(added, "stopped", "raise KeyboardInterrupt")
    assert cli.commands() == ["bad-data", "fine", "no-file", "stopped"]
    assert cli.main(["fine", "--x", "7"]) == 0
    assert capsys.readouterr().out == "7\n"
    assert cli.main(["bad-data"]) == 1
    assert capsys.readouterr().err == "error: a.gguf: x is 3\n"
    assert cli.main(["no-file"]) == 1
    assert capsys.readouterr().err == "error: /no/such/file: No such file or directory\n"
    assert cli.main(["stopped"]) == 130
    assert "interrupted" in capsys.readouterr().err
    assert cli.main(["fine", "--x", "seven"]) == 2


def test_a_bug_shows_its_traceback(added: Path) -> None:
    command(added, "buggy", "raise ZeroDivisionError")
    with pytest.raises(ZeroDivisionError):
        cli.main(["buggy"])


def test_subcommands(added: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command(added, "measure", "print('measure', x)")
    with (added / "measure.py").open("a") as file:
        file.write("def show(name: str) -> None:\n    'Show.'\n    print('show', name)\nSUBCOMMANDS = {'show': show}\n")
    assert cli.main(["measure", "--x", "2"]) == 0
    assert cli.main(["measure", "show", "it"]) == 0
    assert capsys.readouterr().out == "measure 2\nshow it\n"


def test_unknown_and_missing_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["quantise"]) == 2
    assert "Did you mean quantize" in capsys.readouterr().err
    assert cli.main(["nothing-like-it"]) == 2
    assert "No such command 'nothing-like-it'" in capsys.readouterr().err
    assert cli.main([]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "Usage" in said.err


def test_version() -> None:
    assert run("--version").stdout == f"quantkit {quantkit.__version__}\n"


def test_help_is_fast_and_loads_nothing_heavy() -> None:
    times = []
    for _ in range(3):
        before = os.times()
        assert run("--help").returncode == 0
        after = os.times()  # CPU seconds of the process: the machine may be busy with other tests
        times.append(after.children_user + after.children_system - before.children_user - before.children_system)
    assert min(times) < 0.6
    code = """import sys
from quantkit.cli import main
main(["--help"])
print(sorted({"numpy", "numba", "torch", "matplotlib", "tokenizers", "tqdm", "rich"} & set(sys.modules)))"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.endswith("[]\n")


def test_output_is_utf8_everywhere(added: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = "import quantkit.cli as cli; cli.load = lambda name: lambda: print('\u0120\u4f60'); cli.main(['types'])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True, env=os.environ | {"PYTHONIOENCODING": "ascii"}
    )
    assert done.stdout.decode() == "\u0120\u4f60\n"


def test_a_closed_pipe_is_quiet() -> None:
    process = subprocess.Popen([*COMMAND, "types", "--layouts"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == cli.BROKEN_PIPE


def test_completion() -> None:
    """What a shell asks for as its user presses Tab (click's protocol)."""
    environment = {"_QUANTKIT_COMPLETE": "complete_bash", "COMP_WORDS": "quantkit qu", "COMP_CWORD": "1"}
    assert run(**environment).stdout.split() == ["quantize"]
    environment |= {"COMP_WORDS": "quantkit quantize --custom", "COMP_CWORD": "2"}
    assert "--custom-q" in run(**environment).stdout.split()


def test_errors_of_the_library_are_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "no.gguf").write_bytes(b"nonsense")
    done = run("quantize", str(tmp_path / "no.gguf"), str(tmp_path / "out.gguf"), "Q8_0")
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {tmp_path / 'no.gguf'}: ")
    assert done.stderr.count("\n") == 1
    assert issubclass(DataError, quantkit.errors.QuantkitError)
