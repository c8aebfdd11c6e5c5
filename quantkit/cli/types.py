"""`quantkit types`: list the tensor types."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from quantkit.cli.common.options import Json
from quantkit.cli.common.output import print_json, print_table
from quantkit.cli.common.progress_options import takes_quiet

if TYPE_CHECKING:
    from quantkit.types import QuantType

HEADER = ("type", "base", "repacked", "imatrix", "cpu", "cuda", "read by", "id", "ftype", "bpw", "block", "bytes",
          "header", "rows", "n=4096", "decode", "encode")  # fmt: skip
LEFT = 7  # left-aligned columns


def _cpu_kernel(t: QuantType) -> str:
    """CPU kernel: "integer" or "float" if it reads packed weights, "decode" if it decodes panels for BLAS."""
    from quantkit.runtime.kernels import dispatch
    from quantkit.runtime.kernels.cpu.formats.registry import FORMATS

    if t.decode_rows is None:
        return ""
    if dispatch.product(t) is None:
        return "decode"
    return "integer" if t.ggml_type in FORMATS else "float"


def records(layouts: bool = False) -> list[dict[str, Any]]:
    """One dictionary per type, by id; with `layouts`, also types that are only recognised."""
    from quantkit import types
    from quantkit.repack import interleaved_form
    from quantkit.runtime.kernels.cuda import dispatch as cuda_table
    from quantkit.types import base

    listed = base.layouts() if layouts else types.all()
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
            "row_bytes_of_4096": None if 4096 % t.block_size else t.row_bytes(4096),
            "base": t.base,
            "repacked": form.name if (form := interleaved_form(t)) else None,
            "cpu_kernel": _cpu_kernel(t),
            "cuda_kernel": cuda_table.product(t),
            "imatrix": "needed" if t.requires_imatrix else "used" if t.uses_imatrix else "",
            "readers": list(t.readers),
            "decode": t.decode_rows is not None,
            "encode": t.encode_rows is not None,
        }
        for t in listed
    ]


@takes_quiet
def types(
    json: Json = False,
    layouts: Annotated[
        bool, typer.Option("--layouts", help="Also list types that are recognised but not decoded.")
    ] = False,
) -> None:
    """List the tensor types: bits per weight, blocks, kernels.

    bpw counts blocks only; a row header adds to each row, as n=4096 (bytes of a row of 4096) shows. rows: the number of
    interleaved rows. cpu: the matrix product reads packed weights (integer, float) or decodes a panel at a time
    (decode). cuda: quantkit's CUDA kernel, which reads packed weights. read by: ik (ik_llama.cpp), llama.cpp or both.
    """
    listed = records(layouts)
    if json:
        print_json("quantkit.types/1", {"types": listed})
        return
    print_table(HEADER, [row(record) for record in listed], left=LEFT)


def row(record: dict[str, Any]) -> list[str]:
    """The cells of a record, in the order of HEADER."""
    keys = ("name", "base", "repacked", "imatrix", "cpu_kernel", "cuda_kernel", "readers", "id", "file_type",
            "bits_per_weight", "block", "block_bytes", "row_header_bytes", "rows", "row_bytes_of_4096", "decode",
            "encode")  # fmt: skip
    return [_cell(record[key]) for key in keys]


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "-"
    if isinstance(value, list):
        return "both" if len(value) == 2 else "".join(value)
    return f"{value:.4f}" if isinstance(value, float) else str(value)
