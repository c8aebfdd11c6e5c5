"""The generated pages say what the program says now."""

from __future__ import annotations

import pytest

from quantkit.cli import _docs


@pytest.mark.parametrize("name", list(_docs.PAGES))
def test_generated_pages_are_fresh(name: str) -> None:
    path = _docs.DOCS / name
    assert path.exists(), f"{path} is missing: run python -m quantkit.cli._docs"
    text = path.read_text(encoding="utf-8")
    if (first := text.partition("\n")[0] + "\n") != _docs.made():
        pytest.fail(f"{name} was made by another typer, {first.strip()}: install the one that pyproject.toml pins")
    assert text == _docs.PAGES[name](), f"{path} is stale: run python -m quantkit.cli._docs and commit the result"
