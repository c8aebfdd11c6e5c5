"""ruff and mypy, as tests: what they complain about fails here."""

from __future__ import annotations

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
