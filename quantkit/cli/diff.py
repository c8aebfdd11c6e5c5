"""`quantkit diff`: what differs between two GGUF files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from quantkit.cli._shared import Json, print_json, table

if TYPE_CHECKING:
    from quantkit.files.gguf import GGUF, Tensor

_PIECE_ELEMENTS = 1 << 22


def diff(
    a: Annotated[Path, typer.Argument(help="A GGUF file.", show_default=False)],
    b: Annotated[Path, typer.Argument(help="Another one; errors are relative to A.", show_default=False)],
    values: Annotated[
        bool, typer.Option("--values/--no-values", help="Decode tensors that differ and measure by how much.")
    ] = True,
    exit_code: Annotated[bool, typer.Option("--exit-code", help="Exit with status 1 when anything differs.")] = False,
    json: Json = False,
) -> None:
    """Compare two GGUF files: metadata, and tensor by tensor types, bytes and values.

    The relative error of a tensor is |A - B| / |A|, both as root of the sum of squares over its decoded values.
    """
    import quantkit

    first, second = quantkit.open(a), quantkit.open(b)
    metadata = metadata_differences(first, second)
    tensors = [compare(first, second, name, values) for name in dict.fromkeys([*first.tensors, *second.tensors])]
    differing = [t for t in tensors if t["status"] != "same"]
    if json:
        print_json({"metadata": metadata, "tensors": tensors})
    else:
        _print(metadata, differing, len(tensors))
    if exit_code and (metadata or differing):
        raise typer.Exit(1)


def metadata_differences(a: GGUF, b: GGUF) -> list[dict[str, Any]]:
    """Keys whose value or kind differs; None where a file has no such key."""
    found = []
    for key in dict.fromkeys([*a.metadata, *b.metadata]):
        sides = [(f.metadata.get(key), f.metadata.kind(key) if key in f.metadata else None) for f in (a, b)]
        if sides[0] != sides[1]:
            found.append(
                {"key": key, "a": _brief(sides[0][0]), "b": _brief(sides[1][0]), "kinds": [s[1] for s in sides]}
            )
    return found


def compare(a: GGUF, b: GGUF, name: str, values: bool) -> dict[str, Any]:
    """One tensor of two files. status: "same", "bytes" or "type" or "shape" differ, "only in a", "only in b"."""
    x, y = a.tensors.get(name), b.tensors.get(name)
    found: dict[str, Any] = {
        "name": name,
        "a": x.type.name if x else None,
        "b": y.type.name if y else None,
        "error": None,
    }
    if x is None or y is None:
        return found | {"status": "only in b" if x is None else "only in a"}
    if x.shape != y.shape:
        return found | {"status": "shape", "shapes": [list(x.shape), list(y.shape)]}
    if x.type is y.type and np.array_equal(x.data, y.data):
        return found | {"status": "same", "error": 0.0}
    decodable = x.type.has_codec and y.type.has_codec
    error = relative_error(x, y) if values and decodable else None
    return found | {"status": "bytes" if x.type is y.type else "type", "error": error}


def relative_error(x: Tensor, y: Tensor) -> float:
    """|x - y| / |x| over all values, decoded in pieces; 0 for two zero tensors."""
    step = max(1, _PIECE_ELEMENTS // x.shape[-1] // 16) * 16  # whole groups of any interleaved type
    difference = total = 0.0
    for start in range(0, x.n_rows, step):
        stop = min(start + step, x.n_rows)
        p = x.decode_rows(start, stop).astype(np.float64)
        difference += float(np.square(p - y.decode_rows(start, stop)).sum())
        total += float(np.square(p).sum())
    if difference == 0:
        return 0.0
    return float(np.sqrt(difference / total)) if total else float("inf")


def _print(metadata: list[dict[str, Any]], differing: list[dict[str, Any]], count: int) -> None:
    if metadata:
        print(
            table(("key", "A", "B"), [(m["key"], m["a"] or "-", m["b"] or "-") for m in metadata], left=3), end="\n\n"
        )
    if differing:
        rows = [
            (t["name"], t["status"], t["a"] or "-", t["b"] or "-", "" if t["error"] is None else f"{t['error']:.6f}")
            for t in differing
        ]
        print(table(("tensor", "differs", "A", "B", "relative error"), rows, left=4), end="\n\n")
    print(f"{len(metadata)} key(s) and {len(differing)} of {count} tensors differ")


def _brief(value: Any) -> str | None:
    """A value as text for a table; long ones are cut."""
    if value is None:
        return None
    text = f"[{len(value)} elements] {value[:4]}" if isinstance(value, list) else str(value).replace("\n", "\\n")
    return text if len(text) <= 60 else f"{text[:59]}…"
