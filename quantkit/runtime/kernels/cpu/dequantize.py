"""Decode rows of weights to float32, through the same format descriptions as the integer kernels.

y = scale * (code - offset) + minimum. The product is rounded before the minimum is added, so the values are those of
the types' own `decode_rows`, bit for bit.
"""

from __future__ import annotations

from quantkit.codegen.simd import F32, I16, I32, IrBuilder, Value, simd_intrinsic, vector
from quantkit.runtime.kernels.cpu.formats.base import InterleavedSubBlock
from quantkit.runtime.kernels.cpu.formats.registry import FORMATS

FLOAT_TYPES = {0: "f32", 1: "f16", 30: "bf16"}
_FLOATS16 = vector(16, F32)
_LANE_OF_COLUMN = [column // 4 for column in range(32)]


def load_floats(ir: IrBuilder, ggml_type: int, address: Value) -> Value:
    """16 floats stored as F32, F16 or BF16."""
    name = FLOAT_TYPES[ggml_type]
    if name == "f32":
        return ir.load(_FLOATS16, address)
    bits = ir.load(vector(16, I16), address)
    return ir.half_to_float(bits) if name == "f16" else (bits.unsigned(I32) << 16).view(_FLOATS16)


def decode_rows_into(ir: IrBuilder, ggml_type: int, weights: Value, n: Value, rows: Value | int, out: Value) -> None:
    """Decode to float32[rows, n]; `rows` is a multiple of the rows interleaved, n of the block and of 32."""
    if ggml_type in FLOAT_TYPES:
        width = 4 if FLOAT_TYPES[ggml_type] == "f32" else 2
        with ir.loop(0, n * rows, 16) as at:
            ir.store(load_floats(ir, ggml_type, weights + at * width), out + at * 4)
        return
    f = FORMATS[ggml_type]
    blocks = n >> (f.columns.bit_length() - 1)
    with ir.loop(0, rows, f.rows) as row, ir.loop(0, blocks) as b:
        group = weights + f.row_group_bytes(blocks) * (row >> (f.rows.bit_length() - 1))
        for i, sub_block in enumerate(f.sub_blocks(ir, group, b)):
            target = out + (row * n + b * f.columns + 32 * i) * 4
            if isinstance(sub_block, InterleavedSubBlock):
                _store_interleaved(ir, sub_block, f.offset, f.rows, n, target)
                continue
            codes = (sub_block.codes.unsigned(I32) - f.offset).real()
            values = codes * ir.shuffle(sub_block.scale, None, _LANE_OF_COLUMN)
            if sub_block.minimum:
                values = values + ir.shuffle(sub_block.minimum, None, _LANE_OF_COLUMN)
            ir.store(values, target)


decode_rows = simd_intrinsic("void")(decode_rows_into)


def _store_interleaved(
    ir: IrBuilder, sub_block: InterleavedSubBlock, offset: int, rows: int, n: Value, target: Value
) -> None:
    """Store 32 columns of `rows` interleaved rows, each at its row of float32[rows, n]."""
    for codes, low, high in sub_block.steps:
        scale = ir.shuffle(sub_block.scale, None, _LANE_OF_COLUMN)
        values = (codes.unsigned(I32) - offset).real() * scale
        if sub_block.minimum:
            values = values + ir.shuffle(sub_block.minimum, None, _LANE_OF_COLUMN)
        for lane in range(8):
            column = low if lane < 4 else high
            ir.store(ir.part(values, 4 * lane, 4), target + n * (4 * (lane % rows)) + 4 * column)
