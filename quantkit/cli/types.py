"""`quantkit types`: the registry as a table."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from quantkit.cli._shared import Json, print_json, table

HEADER = ("type", "base", "imatrix", "id", "ftype", "bpw", "block", "bytes", "header", "rows", "decode", "encode")


def records(layouts: bool = False) -> list[dict[str, Any]]:
    """One dictionary a type, in order of id; with `layouts`, also the types that are only recognised."""
    from quantkit import types
    from quantkit.types import base

    listed = sorted(base.layouts(), key=lambda t: t.ggml_type) if layouts else types.all()
    return [
        {
            "name": t.name,
            "id": t.ggml_type,
            "file_type": t.file_type,
            "bits_per_weight": t.bits_per_weight(),
            "block": t.block_size,
            "block_bytes": t.block_bytes,
            "row_header_bytes": t.row_meta_bytes,
            "rows": t.interleave,
            "base": t.base,
            "imatrix": "needed" if t.requires_imatrix else "used" if t.uses_imatrix else "",
            "decode": t.decode_rows is not None,
            "encode": t.encode_rows is not None,
        }
        for t in listed
    ]


def types(
    json: Json = False,
    layouts: Annotated[
        bool, typer.Option("--layouts", help="Also the types whose size is known but that are not decoded.")
    ] = False,
) -> None:
    """List the tensor types: id, bits per weight, block, what they can do.

    Bits per weight are those of the blocks; types with a row header add it once a row. Rows above 1 means that the
    type interleaves so many rows of its base type.
    """
    listed = records(layouts)
    if json:
        print_json(listed)
        return
    print(table(HEADER, [row(record) for record in listed], left=3))


def row(record: dict[str, Any]) -> list[str]:
    """A record as the cells below HEADER."""
    keys = ("name", "base", "imatrix", "id", "file_type", "bits_per_weight", "block", "block_bytes", "row_header_bytes",
            "rows", "decode", "encode")  # fmt: skip
    return [_said(record[key]) for key in keys]


def _said(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "-"
    return f"{value:.4f}" if isinstance(value, float) else str(value)
