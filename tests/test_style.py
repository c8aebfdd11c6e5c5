"""ruff and mypy, as tests: what they complain about fails here."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(tool: str, *args: str) -> None:
    if importlib.util.find_spec(tool) is None:
        pytest.skip(f"{tool} is not installed (make test installs it)")
    done = subprocess.run([sys.executable, "-m", tool, *args], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{tool} {' '.join(args)}\n{done.stdout[-5000:]}{done.stderr[-2000:]}"


def test_ruff_check() -> None:
    run("ruff", "check", ".")


def test_ruff_format() -> None:
    run("ruff", "format", "--check", ".")


def test_mypy() -> None:
    run("mypy")


@pytest.mark.parametrize("path", sorted((ROOT / "quantkit").rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_files_open_with_a_docstring(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.startswith(('"""', 'r"""')) or not text.strip(), "a file opens by saying what it holds"


def _needs_encoding(call: ast.Call) -> bool:
    """Whether a call reads or writes a file as text without saying in which encoding: it would be the locale's."""
    if "encoding" in {keyword.arg for keyword in call.keywords}:
        return False
    if isinstance(call.func, ast.Attribute) and call.func.attr in ("read_text", "write_text"):
        return True
    if ast.unparse(call.func) not in ("open", "os.fdopen", "io.open"):
        return False
    modes = [*call.args[1:2], *(keyword.value for keyword in call.keywords if keyword.arg == "mode")]
    return not modes or "b" not in ast.unparse(modes[0])


@pytest.mark.parametrize(
    ("call", "needs"),
    [("open(p)", True), ("open(p, 'w')", True), ("open(p, mode='rb')", False), ("open(p, 'wb')", False),
     ("p.read_text()", True), ("p.write_text(x, encoding='utf-8')", False), ("gguf.open(p)", False)],
)  # fmt: skip
def test_the_rule_for_encodings_itself(call: str, needs: bool) -> None:
    found = ast.parse(call, mode="eval").body
    assert isinstance(found, ast.Call)
    assert _needs_encoding(found) is needs


@pytest.mark.parametrize("path", sorted((ROOT / "quantkit").rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_text_files_are_opened_with_an_encoding(path: Path) -> None:
    calls = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
    wrong = [f"line {call.lineno}: {ast.unparse(call)}" for call in calls if _needs_encoding(call)]
    assert not wrong, "a locale that is not UTF-8 would change what these read or write"
