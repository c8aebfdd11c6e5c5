"""Texts for benchmarks, made from what a machine with Python and Debian's base system has; the same ones every time.

    python benchmarks/texts.py FOLDER

    calibration.txt       passages of docstrings, READMEs and licences in random order, 330 KB (about 80,000 tokens)
    calibration-long.txt  the same and more of them, 1 MB
    readmes.txt           READMEs of other packages
    licences.txt          the GNU licences; those of calibration are others
    topics.txt            Python's reference manual (pydoc): a kind of text that calibration lacks

The last three serve as held-out texts. Paragraphs that stand in a calibration text are dropped from them. READMEs are
those of the installed packages, so they differ between machines.
"""

from __future__ import annotations

import ast
import random
import sys
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from pydoc_data import topics

_CALIBRATION, _LONG, _HELD_OUT = 330_000, 1_000_000, 200_000  # characters
_PASSAGE = 2_000  # characters that stay together
_GNU = ("GPL", "LGPL", "GFDL")


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


def licences(gnu: bool) -> Iterator[str]:
    """The GNU licences, or the others."""
    for path in sorted(Path("/usr/share/common-licenses").glob("*")):
        if not path.is_symlink() and path.name.startswith(_GNU) == gnu:
            yield path.read_text(errors="replace")


def readmes(odd: bool) -> Iterator[str]:
    """READMEs of every second installed package."""
    found = sorted(metadata.distributions(), key=lambda d: d.metadata["Name"].lower())
    for package in found[odd::2]:
        yield (package.read_text("METADATA") or "").partition("\n\n")[2]


def paragraphs(parts: Iterable[str], without: frozenset[str] = frozenset()) -> list[str]:
    """The distinct paragraphs of all parts that are not in `without`."""
    found = dict.fromkeys(p for part in parts for p in part.split("\n\n") if p.strip() and p not in without)
    return list(found)


def passages(parts: Iterable[str], characters: int) -> list[str]:
    """Neighbouring paragraphs together, up to a number of characters in all."""
    found, passage, left = [], "", characters
    for paragraph in paragraphs(parts):
        passage += paragraph + "\n\n"
        if len(passage) >= _PASSAGE:
            found.append(passage)
            left, passage = left - len(passage), ""
            if left <= 0:
                break
    return found


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    kinds = passages(docstrings(), _LONG // 2) + passages(readmes(odd=False), _LONG // 2) + passages(
        licences(gnu=False), _LONG)  # fmt: skip
    random.Random(0).shuffle(kinds)
    calibration = "".join(kinds)[:_LONG]
    seen = frozenset(calibration.split("\n\n"))
    texts = {
        "calibration": calibration[:_CALIBRATION],
        "calibration-long": calibration,
        **{
            name: "\n\n".join(paragraphs(parts, seen))[:_HELD_OUT]
            for name, parts in (
                ("readmes", readmes(odd=True)),
                ("licences", licences(gnu=True)),
                ("topics", (topics.topics[name] for name in sorted(topics.topics))),
            )
        },
    }
    for name, text in texts.items():
        (folder / f"{name}.txt").write_text(text + "\n", encoding="utf-8")
        print(f"{folder / name}.txt: {len(text):,} characters")


if __name__ == "__main__":
    main()
