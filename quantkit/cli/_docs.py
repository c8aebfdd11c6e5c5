"""Generate the pages docs/cli.md and docs/types.md and the table in README.md: `python -m quantkit.cli._docs`.

A test fails when a page is stale. The table in README.md shows the figures in docs/demo.json.
`python -m quantkit.cli._docs demo/results.json` (`make readme`) replaces them by the results of a demo.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from quantkit import cli
from quantkit.cli.common.output import table

DOCS = Path(__file__).parents[2] / "docs"
README, FIGURES, PICTURE = DOCS.parent / "README.md", DOCS / "demo.json", DOCS / "demo.png"
_BLOCK = re.compile(r"(<!-- what `make demo` prints, kept by `make readme` -->\n```\n).*?(\n```\n)", re.DOTALL)
_FIGURES = ("path", "bytes", "bits_per_weight", "ppl", "ppl_error_over_tokens", "kld", "kld_error_over_chunks",
            "same_top", "prompt_tokens_per_second", "generation_tokens_per_second")  # fmt: skip
WIDTH = 92  # characters of a code block on the site, in a window of 1,280 pixels
_MADE = "<!-- made by `python -m quantkit.cli._docs` with typer {}; do not edit -->\n"


def made() -> str:
    """The first line of a page. It names the version of typer, because each formats help differently."""
    return _MADE.format(importlib.metadata.version("typer"))


def cli_page() -> str:
    """docs/cli.md: the help of every command, as printed."""
    parts = [made(), "# The command line\n\n", "```\n", _help([]), "```\n"]
    for command in cli.commands():
        for path in ([command], *([command, name] for name in cli.subcommands(command))):
            parts.append(f"\n## quantkit {' '.join(path)}\n\n```\n{_help(path)}```\n")
    return "".join(parts)


def types_page() -> str:
    """docs/types.md: types with a codec, then those that are only recognised."""
    from quantkit import types
    from quantkit.cli.types import HEADER, LEFT, records, row

    every = records(layouts=True)
    known = [r for r in every if r["decode"]]
    others = ", ".join(f"{r['name']} ({r['id']})" for r in every if not r["decode"])
    listed = table(HEADER, [row(r) for r in known], left=LEFT)
    remarks = "".join(f"- **{t.name}**: {t.remark}\n" for t in types.all() if t.remark)
    return (
        f"{made()}# Tensor types\n\nAs `quantkit types` prints them. The file of a type in "
        f"`quantkit/types` begins with its byte map.\n\n```\n{listed}\n```\n\n"
        f"Where two reconstructions exist:\n\n{remarks}\n"
        f"quantkit reads, sizes and copies these types, but neither decodes nor encodes them: {others}.\n"
    )


def readme() -> str:
    """README.md with the table of the figures in docs/demo.json."""
    from quantkit.cli.demo import summary

    printed = summary(json.loads(FIGURES.read_text(encoding="utf-8")))
    text, count = _BLOCK.subn(lambda found: f"{found[1]}{printed}{found[2]}", README.read_text(encoding="utf-8"))
    assert count == 1, f"{README} has {count} blocks for the demo's table, not one"
    return text


def store_figures(results: Path) -> None:
    """Copy the results of a demo, and the picture beside them, to docs for README.md."""
    found = json.loads(results.read_text(encoding="utf-8"))
    models = [{key: model[key] for key in _FIGURES if key in model} for model in found["models"]]
    for model in models:
        model["path"] = Path(model["path"]).name
    stored = {"models": models, "conditions": found["conditions"] | {"text": Path(found["conditions"]["text"]).name}}
    FIGURES.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    if (picture := results.with_name("comparison.png")).exists():
        shutil.copyfile(picture, PICTURE)


PAGES = {"cli.md": cli_page, "types.md": types_page}


def _help(path: list[str]) -> str:
    """The output of `quantkit PATH --help` on a terminal of a fixed width."""
    printed = io.StringIO()
    with _columns(WIDTH), contextlib.redirect_stdout(printed):
        cli.main([*path, "--help"])
    return printed.getvalue()


@contextlib.contextmanager
def _columns(width: int) -> Iterator[None]:
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = str(width)
    try:
        yield
    finally:
        if before is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = before


def main(results: list[str]) -> None:
    """Write the pages; with the path of a demo's results, store their figures first."""
    DOCS.mkdir(exist_ok=True)
    for path in results:
        store_figures(Path(path))
    for name, page in PAGES.items():
        (DOCS / name).write_text(page(), encoding="utf-8")
        print(f"wrote {DOCS / name}")
    README.write_text(readme(), encoding="utf-8")
    print(f"wrote {README}")


if __name__ == "__main__":
    main(sys.argv[1:])
