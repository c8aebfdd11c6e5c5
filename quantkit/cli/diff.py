"""`quantkit diff`: the differences between two GGUF files."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quantkit.cli.common.hub import from_hub
from quantkit.cli.common.options import Json, Threads
from quantkit.cli.common.output import print_json, print_table
from quantkit.cli.common.progress_options import shows_progress
from quantkit.errors import printable

if TYPE_CHECKING:
    import numpy as np

    from quantkit.formats.gguf.difference import Difference, KeyDifference, Weights


@shows_progress
@from_hub("a", "b")
def diff(
    a: Annotated[Path, typer.Argument(help="A GGUF file, or hf://ORG/NAME/FILE.gguf.", show_default=False)],
    b: Annotated[Path, typer.Argument(help="The file to compare; errors are relative to A.", show_default=False)],
    values: Annotated[
        bool, typer.Option("--values/--no-values", help="Decode tensors that differ and measure the errors.")
    ] = True,
    imatrix: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also compute errors weighted by an importance matrix.", show_default=False),
    ] = None,
    top: Annotated[
        int | None, typer.Option(metavar="N", help="Show only the N worst tensors.", min=1, show_default=False)
    ] = None,
    exit_code: Annotated[bool, typer.Option("--exit-code", help="Exit with status 1 when anything differs.")] = False,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Compare two GGUF files: metadata, types, shapes, values.

    Values are decoded, and tensors are listed with the largest error first. rms is the relative error ||A - B|| / ||A||
    (root of the sum of squares); weighted is the same with each column's squares times its importance; largest is the
    maximum of |A - B|; cosine is the cosine of the angle between A and B.
    """
    import quantkit
    from quantkit.formats.gguf import difference

    first, second = quantkit.open(a), quantkit.open(b)
    weights = _weights(imatrix) if imatrix else None
    keys = difference.of_metadata(first.metadata, second.metadata)
    found = difference.of_tensors(first, second, values=values, weights=weights, threads=threads, progress=True)
    differing = [d for d in found if d.status != "same"]
    if json:
        print_json(
            "quantkit.diff/1",
            {"paths": [a, b], "metadata": [_key_record(k) for k in keys], "tensors": [_record(d) for d in found]},
        )
    else:
        _print(keys, differing, len(found), top, imatrix is not None)
    if exit_code and (keys or differing):
        raise typer.Exit(1)


def _weights(path: Path) -> Weights:
    """Importance by tensor name; a tensor without an entry uses that of one with the same input, as in quantize."""
    from quantkit.formats import imatrix
    from quantkit.recipe import importance_entry

    matrix = imatrix.read(path)

    def find(name: str, matrices: int, columns: int) -> np.ndarray | None:
        entry = importance_entry(name, matrix)
        fits = entry is not None and matrix[entry].fits(matrices, columns)
        return matrix[entry].columns(columns) if entry is not None and fits else None

    return find


def _key_record(key: KeyDifference) -> dict[str, Any]:
    return {
        "key": key.key,
        "status": key.status,
        "a": _brief(key.a),
        "b": _brief(key.b),
        "kinds": list(key.kinds),
    }


def _record(d: Difference) -> dict[str, Any]:
    """A record for JSON; `error` is relative. Infinite figures, such as an error relative to zeros, are null."""
    same = 0.0 if d.status == "same" else None
    numbers = {"error": same if d.rms is None else d.rms, "weighted_error": d.weighted, "largest": d.largest,
               "cosine": d.cosine}  # fmt: skip
    return {
        "name": d.name,
        "status": d.status,
        "a": d.a.type.name if d.a else None,
        "b": d.b.type.name if d.b else None,
        "shapes": [list(t.shape) if t else None for t in (d.a, d.b)],
        **{name: value if value is not None and math.isfinite(value) else None for name, value in numbers.items()},
        "largest_at": d.place,
        "nonfinite": d.nonfinite,
    }


def _print(keys: list[KeyDifference], differing: list[Difference], count: int, top: int | None, weighted: bool) -> None:
    if keys:
        rows = [(printable(k.key), k.status, _side(k.a, k.kinds[0]), _side(k.b, k.kinds[1])) for k in keys]
        print_table(("key", "differs", "A", "B"), rows, left=4, end="\n\n")
    if differing:
        header = ["tensor", "differs", "A", "B", "weighted", "rms", "largest", "cosine"]
        listed = [_row(d, weighted) for d in differing[:top]]
        if not weighted:
            del header[4]
        print_table(header, listed, left=4, end="\n\n")
        if top is not None and len(differing) > top:
            print(f"and {len(differing) - top} tensors with smaller differences")
    for d in differing:
        if d.nonfinite:
            print(f"warning: {printable(d.name)}: {d.nonfinite} values are NaN or infinite and not part of its figures")
    print(f"{len(keys)} key(s) and {len(differing)} of {count} tensors differ")


def _row(d: Difference, weighted: bool) -> tuple[str, ...]:
    shapes = d.status == "shape"
    sides = ["-" if t is None else f"{t.type.name} {'x'.join(map(str, t.shape))}" if shapes else t.type.name
             for t in (d.a, d.b)]  # fmt: skip
    figures = [f"{d.rms:.6f}", f"{d.largest:.4g}", f"{d.cosine:.6f}"] if d.rms is not None else ["", "", ""]
    if weighted:
        figures.insert(0, "" if d.weighted is None else f"{d.weighted:.6f}")
    return printable(d.name), d.status, *sides, *figures


def _side(value: object, kind: str | None) -> str:
    text = _brief(value)
    return "-" if text is None else f"{kind}{'[]' if isinstance(value, list) else ''}: {printable(text)}"


def _brief(value: object) -> str | None:
    """A value as text for a table; long ones are truncated."""
    if value is None:
        return None
    text = f"[{len(value)} elements] {value[:4]}" if isinstance(value, list) else str(value).replace("\n", "\\n")
    return text if len(text) <= 60 else f"{text[:59]}…"
