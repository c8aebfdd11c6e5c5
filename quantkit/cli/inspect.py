"""`quantkit inspect`: show the contents of a GGUF file."""

from __future__ import annotations

import json as json_module
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quantkit.cli.common.command import takes_model
from quantkit.cli.common.hub import from_hub
from quantkit.cli.common.options import Json
from quantkit.cli.common.output import gib, print_json, print_table
from quantkit.cli.common.progress_options import takes_quiet
from quantkit.errors import printable

if TYPE_CHECKING:
    from quantkit.formats.gguf import GGUF

SHOWN_ELEMENTS = 8  # of an array
SHOWN_PROBLEMS = 20
SHOWN_CHARACTERS = 100  # of a value in the table


@takes_quiet
@takes_model("path")
@from_hub("path", headers=True)
def inspect(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="A GGUF file, any shard of a split one, or hf://ORG/NAME/FILE.gguf.",
            show_default=False,
        ),
    ],
    json: Json = False,
    tensors: Annotated[bool, typer.Option("--tensors/--no-tensors", help="List every tensor.")] = True,
    as_card: Annotated[bool, typer.Option("--card", help="Print Markdown for a model card.")] = False,
) -> None:
    """Show a GGUF file: metadata, tensors, sizes by type.

    Contradictions between metadata keys, or between metadata and tensors, are listed at the end. Long arrays are
    truncated, in JSON too; `quantkit metadata` prints them in full. Shapes are in numpy's order: (experts, rows,
    columns). --card prints Markdown for a model card: size, classes of tensors by type, recipe and commands.
    """
    from quantkit.formats import gguf

    file = gguf.open(path)
    if as_card:
        if json:
            raise typer.BadParameter("--card is Markdown and --json is not; drop one of them")
        from quantkit.cli.common.card import card

        print(card(file), end="")
        return
    if json:
        print_json("quantkit.inspect/1", record(file, tensors))
        return
    _print_text(file, tensors)


def record(file: GGUF, tensors: bool = True) -> dict[str, Any]:
    """The contents of a file as one dictionary, for --json."""
    from quantkit.archs.common import validate

    found: dict[str, Any] = {
        "paths": file.paths,
        "version": file.version,
        "bytes": file.size,
        "metadata": {key: _value_record(file, key) for key in file.metadata},
        "types": totals(file),
        "problems": validate.problems(file.metadata, file.tensors),
    }
    if tensors:
        found["tensors"] = [
            {"name": t.name, "type": t.type.name, "shape": t.shape, "bytes": t.nbytes} for t in file.tensors.values()
        ]
    return found


def totals(file: GGUF) -> list[dict[str, Any]]:
    """One dictionary per type, largest first, then totals: tensors, elements, bytes, bits per weight."""
    by_type: dict[str, list[int]] = {}
    for tensor in file.tensors.values():
        sums = by_type.setdefault(tensor.type.name, [0, 0, 0])
        for i, n in enumerate((1, math.prod(tensor.shape), tensor.nbytes)):
            sums[i] += n
    rows = sorted(by_type.items(), key=lambda item: -item[1][2])
    rows.append(("all", [sum(sums[i] for sums in by_type.values()) for i in range(3)]))
    return [
        {
            "type": name,
            "tensors": n,
            "elements": elements,
            "bytes": size,
            "bits_per_weight": 8 * size / elements if elements else 0.0,
        }
        for name, (n, elements, size) in rows
    ]


def _value_record(file: GGUF, key: str) -> dict[str, Any]:
    value, kind = file.metadata[key], file.metadata.kind(key)
    if not isinstance(value, list):
        return {"kind": kind, "value": value}
    return {"kind": f"{kind}[]", "count": len(value), "first": value[:SHOWN_ELEMENTS]}


def _print_text(file: GGUF, tensors: bool) -> None:
    for path in file.paths:
        print(path)
    print(f"GGUF version {file.version}, {gib(file.size)}, {len(file.tensors)} tensors\n")
    rows = [(printable(key), *_value_text(_value_record(file, key))) for key in file.metadata]
    print_table(("key", "kind", "value"), rows, left=3, end="\n\n")
    if tensors:
        listed = [(printable(t.name), t.type.name, _shape(t.shape), t.nbytes) for t in file.tensors.values()]
        print_table(("tensor", "type", "shape", "bytes"), listed, left=2, end="\n\n")
    header = ("type", "tensors", "elements", "GiB", "bpw")
    summed = [
        (t["type"], t["tensors"], t["elements"], f"{t['bytes'] / 2**30:.3f}", f"{t['bits_per_weight']:.4f}")
        for t in totals(file)
    ]
    print_table(header, summed)
    _print_problems(file)


def _print_problems(file: GGUF) -> None:
    """Print the problems that keep the model from running: contradictions in metadata and tensors."""
    from quantkit.archs.common import validate

    found = validate.problems(file.metadata, file.tensors)
    if found:
        print()
    for sentence in found[:SHOWN_PROBLEMS]:
        print(f"problem: {printable(sentence)}")
    if found:
        more = f"{len(found) - SHOWN_PROBLEMS} more problems; " if len(found) > SHOWN_PROBLEMS else ""
        print(f"{more}{validate.REMEDY}")


def _value_text(record: dict[str, Any]) -> tuple[str, str]:
    """Kind and value as two cells."""
    is_list = "first" in record
    values = record["first"] if is_list else [record["value"]]
    if record["kind"].startswith("f32"):
        import numpy as np

        values = [float(str(np.float32(v))) for v in values]  # 1e-05, not the 9.999999747378752e-06 that it is
    text = printable(json_module.dumps(values if is_list else values[0], ensure_ascii=False))
    if len(text) > SHOWN_CHARACTERS:
        note = "" if is_list else f" {len(text)} characters"
        text = f"{text[:SHOWN_CHARACTERS]}…{note}"
    if is_list and record["count"] > SHOWN_ELEMENTS:
        text = f"{text.rstrip(']…')}… {record['count']} in all"
    return record["kind"], text


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))
