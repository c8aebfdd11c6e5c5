"""Texts for benchmarks, made from what a machine with Python and Debian's base system has; the same ones every time.

    python benchmarks/texts.py FOLDER

    calibration.txt       docstrings of the standard library, about 330 KB (80,000 tokens)
    calibration-long.txt  the same and more of them, about 1 MB
    topics.txt            Python's reference manual (pydoc), in none of the above
    licences.txt          licences of /usr/share/common-licenses
    readmes.txt           descriptions of the installed packages

The last three serve as held-out texts. Paragraphs that stand in a calibration text are dropped from them.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from pydoc_data import topics

_CALIBRATION, _LONG, _HELD_OUT = 330_000, 1_000_000, 200_000  # characters


def docstrings() -> Iterator[str]:
    """Docstrings of the standard library's modules, classes and functions, in the order of file names and lines."""
    library = Path(ast.__file__).parent
    for path in sorted(library.glob("*.py")) + sorted(library.glob("*/*.py")):
        if "site-packages" in path.parts:
            continue
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):  # tests of the parser among them
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = ast.get_docstring(node)
                if text and len(text) > 80:
                    yield text


def licences() -> Iterator[str]:
    for path in sorted(Path("/usr/share/common-licenses").glob("*")):
        if not path.is_symlink():
            yield path.read_text(errors="replace")


def descriptions() -> Iterator[str]:
    for found in sorted(metadata.distributions(), key=lambda d: d.metadata["Name"].lower()):
        yield (found.read_text("METADATA") or "").partition("\n\n")[2]


def joined(parts: Iterable[str], characters: int, without: frozenset[str] = frozenset()) -> str:
    """The distinct paragraphs of all parts that are not in `without`, up to a number of characters."""
    kept: dict[str, None] = {}
    for part in parts:
        for paragraph in part.split("\n\n"):
            if paragraph.strip() and paragraph not in without:
                kept[paragraph] = None
    return "\n\n".join(kept)[:characters] + "\n"


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    calibration = joined(docstrings(), _LONG)
    seen = frozenset(calibration.split("\n\n"))
    texts = {
        "calibration": calibration[:_CALIBRATION],
        "calibration-long": calibration,
        "topics": joined((topics.topics[name] for name in sorted(topics.topics)), _HELD_OUT, seen),
        "licences": joined(licences(), _HELD_OUT, seen),
        "readmes": joined(descriptions(), _HELD_OUT, seen),
    }
    for name, text in texts.items():
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")
        print(f"{folder / name}.txt: {len(text):,} characters")


if __name__ == "__main__":
    main()
