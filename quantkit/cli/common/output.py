"""What the commands print: sizes, tables, JSON, the tensors that a conversion leaves out."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from quantkit.cli.common.terminal import CONTROLS, EscapingStream, message
from quantkit.errors import printable
from quantkit.progress import is_terminal

_MIN_FOLDED = 8  # columns of a text column that is folded
_MIN_PROSE = 16  # of one with words, which are folded before names are


def gib(size: float) -> str:
    """Bytes as in model cards: "226.003 GiB"."""
    return f"{size / 2**30:.3f} GiB"


def mib(size: float) -> str:
    """Bytes as "12.50 MiB"."""
    return f"{size / 2**20:.2f} MiB"


def json_text(value: object, indent: int | None = None) -> str:
    """JSON text. Paths become strings; NaN and infinities, which JSON lacks, become null."""
    try:
        return json.dumps(value, ensure_ascii=False, default=_plain, allow_nan=False, indent=indent)
    except ValueError:
        known = json.loads(json.dumps(value, default=_plain), parse_constant=lambda _: None)
        return json.dumps(known, ensure_ascii=False, indent=indent)


def with_schema(schema: str, document: Mapping[str, object]) -> dict[str, Any]:
    """The document with `schema` as its first field, for example "quantkit.plan/1".

    docs/reference/json.md documents every schema. Adding a field keeps the version; removing a field or changing its
    meaning raises it.
    """
    return {"schema": schema, **{name: value for name, value in document.items() if name != "schema"}}


def print_json(schema: str, document: Mapping[str, object]) -> None:
    """Print one JSON object on stdout, with its schema first. Bytes that are not UTF-8 become lone surrogates.

    Control characters that JSON does not require to escape, such as DEL and C1, are escaped too.
    """
    text = json_text(with_schema(schema, document))
    print(re.sub(f"[\ud800-\udfff{CONTROLS}]", lambda found: f"\\u{ord(found[0]):04x}", text))


def _plain(value: object) -> Any:
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "tolist"):  # numpy scalars and arrays
        return value.tolist()
    raise TypeError(f"{type(value).__name__} has no JSON form")


def table(header: Sequence[str], rows: Sequence[Sequence[Any]], left: int = 1) -> str:
    """A text table: the first `left` columns are left-aligned, the others right-aligned."""
    cells = [[printable(str(cell)) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        return "  ".join(f"{c:<{w}}" if i < left else f"{c:>{w}}" for i, (c, w) in enumerate(zip(row, widths))).rstrip()

    return "\n".join([line(cells[0]), line(["-" * w for w in widths]), *map(line, cells[1:])])


def print_table(
    header: Sequence[str], rows: Sequence[Sequence[Any]], left: int = 1, *, end: str = "\n", file: TextIO | None = None
) -> None:
    """Print a table to stdout, or to `file`. On a terminal rich draws it; elsewhere it is the text of `table`.

    Text columns that do not fit the terminal are folded. Numbers are never cut.
    """
    stream = file or sys.stdout
    if not is_terminal(stream):
        print(table(header, rows, left), end=end, file=stream)
        return
    text = _drawn_table(header, rows, left, _columns(stream))
    if isinstance(stream, EscapingStream):
        stream.write_styled(text + end)
    else:
        stream.write(text + end)


def _drawn_table(header: Sequence[str], rows: Sequence[Sequence[Any]], left: int, columns: int) -> str:
    """A table as rich draws it, in the first of these forms that fits: as it is, with folded text, transposed.

    If none fits, the terminal wraps the lines.
    """
    from rich.cells import cell_len

    def widths(cells: Sequence[Sequence[str]]) -> list[int]:
        return [max(map(cell_len, column)) for column in zip(*cells)]

    cells = [[printable(str(cell)) for cell in row] for row in (header, *rows)]
    natural = widths(cells)
    prose = [i for i in range(left) if any(" " in row[i] for row in cells[1:])]
    if folded := _folded(natural, prose, left, columns):
        return _rendered(cells, folded, left)
    transposed = [list(row) for row in zip(*cells)]
    narrow = widths([["0" * _MIN_FOLDED] * len(cells), *transposed[1:]])  # names in the header are folded
    narrow[0] = max(map(cell_len, cells[0]))
    if _total(narrow) <= columns:
        return _rendered(transposed, narrow, 1)
    return _rendered(cells, natural, left)


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + 2 * (len(widths) - 1)


def _folded(widths: Sequence[int], prose: Sequence[int], left: int, columns: int) -> list[int] | None:
    """Widths that fit: the widest columns of prose are made narrower, then names. None if that is not enough."""
    found = list(widths)
    for of_text, minimum in ((prose, _MIN_PROSE), (range(left), _MIN_FOLDED)):
        while _total(found) > columns and (wide := [i for i in of_text if found[i] > minimum]):
            found[max(wide, key=lambda i: found[i])] -= 1
    return found if _total(found) <= columns else None


def _rendered(cells: Sequence[Sequence[str]], widths: Sequence[int], left: int) -> str:
    """A table with a bold header; without escape sequences if NO_COLOR is set."""
    import io

    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    for i, (title, width) in enumerate(zip(cells[0], widths)):
        drawn.add_column(Text(title), justify="left" if i < left else "right", width=width, overflow="fold")
    for row in cells[1:]:
        drawn.add_row(*map(Text, row))
    is_plain = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
    console = Console(
        file=io.StringIO(), force_terminal=True, color_system=None if is_plain else "standard",
        width=_total(widths) + 2, highlight=False, markup=False, emoji=False, legacy_windows=False,
    )  # fmt: skip
    with console.capture() as captured:
        console.print(drawn)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def _columns(stream: TextIO) -> int:
    """Columns of a terminal."""
    with contextlib.suppress(OSError, ValueError):
        if columns := os.get_terminal_size(stream.fileno()).columns:
            return columns
    return 80


def print_left_out(left_out: Mapping[str, Sequence[str]], warnings: Sequence[str] = ()) -> None:
    """Print the tensors of a checkpoint that are not converted, by kind, and the warnings of the conversion."""
    for warning in warnings:
        print(f"warning: {message(warning)}", file=sys.stderr)
    for what, names in left_out.items():
        print(f"left out: {what}: {len(names)} tensors, {printable(names[0])}{' …' if names[1:] else ''}")


def print_unfinished(out: Path) -> None:
    """After an error or an interrupt, print what is saved and how to resume."""
    from quantkit.pipelines.resume import unfinished

    if left := unfinished(out):
        print(
            f"\n{left[0]} of {left[1]} tensors are done and saved in {out}.partial-job; run the same command to "
            "resume, or add --restart to start over",
            file=sys.stderr,
        )
