"""Unpack EXPERT_ROWS rows of an expert's matrix, and multiply them by a tile of tokens.

Products of experts in prefill take one unit of work at a time: EXPERT_ROWS rows of one expert. Unpacking and
multiplying are two C functions per type, compiled once and called by address from all operations that need them.
Quantized types use the integer panels of gemm.py, float types the float32 panels of float_gemm.py.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from quantkit.codegen.callbacks import Callback, callback
from quantkit.codegen.simd import I64, IrBuilder, Value, simd_intrinsic
from quantkit.placement.kernel_sizes import (
    EXPERT_ROWS,
    FLOAT_TILE_TOKENS,
    PANEL_ROWS,
    TILE_TOKENS,
    expert_panels_bytes,
    float_lanes,
)
from quantkit.runtime.kernels.cpu import float_gemm, gemm
from quantkit.runtime.kernels.cpu.dequantize import decode_rows_into
from quantkit.runtime.kernels.cpu.formats.registry import FORMATS

UNPACK_SIGNATURE = "void(int64, int64, int64)"
PRODUCT_SIGNATURE = "void(int64, int64, int64, int64, int64, int64)"


class ExpertKernels(NamedTuple):
    """How EXPERT_ROWS rows of a type are multiplied by a tile of `tokens` entries.

    unpack        void(weights, n, panel): the rows as `product` reads them
    product       void(panel, n, x, out, stride, 0): out[t, 0 .. EXPERT_ROWS - 1], its rows `stride` bytes apart
    quantized     x is a tile of gemm.py; otherwise the addresses of float32 rows
    panel_bytes   of 32 columns
    """

    unpack: Callback
    product: Callback
    quantized: bool
    tokens: int
    panel_bytes: int

    def scratch_bytes(self, n: int) -> int:
        """Bytes of panels and results that a thread needs for matrices of n columns."""
        return expert_panels_bytes(n, self.tokens, self.panel_bytes)


@functools.cache
def expert_kernels(ggml_type: int, quantized: bool) -> ExpertKernels:
    """Kernels of a type: integer ones for types of FORMATS, float32 ones for these and for float types."""
    if quantized:
        size = EXPERT_ROWS // PANEL_ROWS * gemm.record_bytes(FORMATS[ggml_type])
        return ExpertKernels(_unpack_integers(ggml_type), _integer_product(ggml_type), True, TILE_TOKENS, size)
    return ExpertKernels(_unpack_floats(ggml_type), _float_product, False, FLOAT_TILE_TOKENS, 8 * EXPERT_ROWS * 32)


@simd_intrinsic("void")
def _unpack_integer_panels(ir: IrBuilder, ggml_type: int, weights: Value, n: Value, panel: Value) -> None:
    f = FORMATS[ggml_type]
    row_bytes = (n >> (f.columns.bit_length() - 1)) * (f.nbytes // f.rows) + f.head // f.rows
    with ir.loop(0, EXPERT_ROWS // PANEL_ROWS) as i:
        size = (n >> 5) * gemm.record_bytes(f)
        gemm.unpack_panel(ir, ggml_type, weights + row_bytes * PANEL_ROWS * i, n, PANEL_ROWS, panel + size * i)


@simd_intrinsic("void")
def _unpack_float_panels(ir: IrBuilder, ggml_type: int, weights: Value, n: Value, panel: Value) -> None:
    """Transposed panels of `float_lanes()` rows; after them, as scratch, the decoded rows."""
    panel_rows = float_lanes()
    rows = panel + n * 4 * EXPERT_ROWS
    decode_rows_into(ir, ggml_type, weights, n, EXPERT_ROWS, rows)
    with ir.loop(0, EXPERT_ROWS, 16) as i, ir.loop(0, n, 16) as j:
        target = panel + n * 4 * (i & -panel_rows) + j * (4 * panel_rows) + (i & (panel_rows - 1)) * 4
        float_gemm.transpose16x16(ir, rows + (n * i + j) * 4, n * 4, target, 4 * panel_rows)


@simd_intrinsic("void")
def _multiply_integers(
    ir: IrBuilder, ggml_type: int, panel: Value, n: Value, x: Value, out: Value, stride: Value
) -> None:
    gemm.multiply_tile(ir, ggml_type, panel, n, x, out, stride, 0)


@simd_intrinsic("void")
def _multiply_floats(ir: IrBuilder, panel: Value, n: Value, x: Value, out: Value, stride: Value) -> None:
    wide = float_lanes()
    rows = [ir.load(I64, x + 8 * i) for i in range(FLOAT_TILE_TOKENS)]
    for first in range(0, EXPERT_ROWS, wide):
        float_gemm.multiply_rows(ir, rows, panel + n * 4 * first, 4 * wide, n, out + 4 * first, stride, 0)


@functools.cache
def _unpack_integers(ggml_type: int) -> Callback:
    @callback(UNPACK_SIGNATURE)
    def unpack(weights, n, panel):
        _unpack_integer_panels(ggml_type, weights, n, panel)

    return unpack


@functools.cache
def _integer_product(ggml_type: int) -> Callback:
    @callback(PRODUCT_SIGNATURE)
    def product(panel, n, x, out, stride, unused):
        _multiply_integers(ggml_type, panel, n, x, out, stride)

    return product


@functools.cache
def _unpack_floats(ggml_type: int) -> Callback:
    @callback(UNPACK_SIGNATURE)
    def unpack(weights, n, panel):
        _unpack_float_panels(ggml_type, weights, n, panel)

    return unpack


@callback(PRODUCT_SIGNATURE)
def _float_product(panel, n, x, out, stride, unused):
    _multiply_floats(panel, n, x, out, stride)
