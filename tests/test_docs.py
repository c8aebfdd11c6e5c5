"""The generated pages say what the program says now."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from quantkit import recipe
from quantkit.cli import _docs, demo
from quantkit.formats import gguf


@pytest.mark.parametrize("name", list(_docs.PAGES))
def test_generated_pages_are_fresh(name: str) -> None:
    path = _docs.DOCS / name
    assert path.exists(), f"{path} is missing: run python -m quantkit.cli._docs"
    text = path.read_text(encoding="utf-8")
    if (first := text.partition("\n")[0] + "\n") != _docs.made():
        pytest.fail(f"{name} was made by another typer, {first.strip()}: install the one that pyproject.toml pins")
    assert text == _docs.PAGES[name](), f"{path} is stale: run python -m quantkit.cli._docs and commit the result"


def test_the_table_of_the_readme_is_what_the_demo_prints() -> None:
    assert _docs.README.read_text(encoding="utf-8") == _docs.readme(), "stale: run make readme, or _docs, and commit"


def test_figures_are_kept_of_a_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results as the demo leaves them give the README's lines; what is not printed is not kept."""
    for name in ("README", "FIGURES", "PICTURE"):
        monkeypatch.setattr(_docs, name, tmp_path / name)
    table = "<!-- what `make demo` prints, kept by `make readme` -->\n```\nold\n```\n"
    (tmp_path / "README").write_text(f"# q\n{table}more\n```\nx\n```\n")
    figures = json.loads((_docs.DOCS / "demo.json").read_text(encoding="utf-8"))
    figures["models"][0]["path"] = "/home/me/bf16.gguf"
    figures["conditions"]["text"] = "/home/me/test.txt"
    (tmp_path / "results.json").write_text(json.dumps(figures))
    (tmp_path / "comparison.png").write_bytes(b"picture")
    _docs.keep_figures(tmp_path / "results.json")
    assert "/home/me" not in (tmp_path / "FIGURES").read_text()
    assert (tmp_path / "PICTURE").read_bytes() == b"picture"
    assert _docs.readme() == f"# q\n{table.replace('old', demo.summary(figures))}more\n```\nx\n```\n"


def test_sizes_of_the_readme_are_those_of_its_model(smollm2_q4_1: Path) -> None:
    """Of the columns that no machine changes."""
    file, options = gguf.open(smollm2_q4_1), recipe.Options(allow_requantize=True)
    rows = re.findall(r"^(\S+)\.gguf +([\d.]+) +([\d.]+) ", _docs.README.read_text(encoding="utf-8"), re.MULTILINE)
    mix = demo.recipe_for(smollm2_q4_1)
    assert [name for name, *_ in rows] == ["bf16", "q8_0", mix, f"{mix}-repacked", "q4_0"]
    for name, gib, bits in rows:
        mine = recipe.find(mix) if name.startswith(mix) else None
        kind = "Q8_0" if mine else name.upper()
        plan = recipe.plan(file.tensors.values(), kind, mine, metadata=file.metadata, options=options)
        assert abs(float(bits) - plan.bits_per_weight) <= 0.0051, name
        assert 0 <= float(gib) * 2**30 - plan.bytes_after < 8 << 20, name  # metadata, most of it the tokenizer
