"""Rows of latents and matrices of heads: what decodes and stores them (formulas: latent_attention.py).

What depends on a type is a C function of six int64, whose address is a parameter of the operations.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from quantkit.codegen.callbacks import Callback, callback
from quantkit.codegen.simd import F32, IrBuilder, Value, simd_intrinsic, vector
from quantkit.runtime.kernels.cpu.dequantize import FLOAT_TYPES, decode_rows, decode_rows_into
from quantkit.runtime.kernels.cpu.float_gemm import transpose_rows
from quantkit.runtime.kernels.cpu.formats.registry import FORMATS
from quantkit.runtime.kernels.cpu.kv_rows import NAMES, rotate, store_row
from quantkit.runtime.kernels.cpu.matvec import SIGNATURE
from quantkit.runtime.kernels.cpu.prefill_attention import decode_keys
from quantkit.types import layout

_FLOATS16 = vector(16, F32)


class LatentRows(NamedTuple):
    """The rows of a cache that kernels are compiled for."""

    dim: int  # kv_lora + rope elements, a multiple of 16; of 32 for quantized types
    values: int  # kv_lora: the first elements, which are the value
    ggml_type: int
    rotation: int  # elements rotated together; 0: not rotated

    @property
    def nbytes(self) -> int:
        """Bytes of a row."""
        return layout(NAMES[self.ggml_type]).row_bytes(self.dim)


class Sizes(NamedTuple):
    """The sizes of a block with latent attention; nope, kv_lora and dim_v are multiples of 32, rope of 16."""

    heads: int
    nope: int
    rope: int
    kv_lora: int
    dim_v: int
    pair_step: int  # RoPE pair j is elements j * pair_step and j * pair_step + pair_stride
    pair_stride: int


class HeadMatrices(NamedTuple):
    """k_h and v_h of all heads: those of head h are h times as many bytes further on."""

    keys: int
    key_bytes: int
    keys_transposed: int  # 1: stored as [kv_lora, nope]; 0: as [nope, kv_lora]
    values: int  # [dim_v, kv_lora]
    value_bytes: int


# ---------------------------------------------------------------------------------------- what depends on a type alone


def rows_at_a_time(ggml_type: int) -> int:
    """Rows that `transposed_product` decodes together."""
    return 8 if ggml_type in FLOAT_TYPES else max(8, FORMATS[ggml_type].rows)


@simd_intrinsic("void")
def _transposed_product(
    ir: IrBuilder, ggml_type: int, weights: Value, n: Value, rows: Value, x: Value, out: Value, scratch: Value
) -> None:
    """out float32[n] = sum over the rows of x[row] * row."""
    count = rows_at_a_time(ggml_type)
    if ggml_type in FLOAT_TYPES:
        group_bytes = n * (count * (4 if FLOAT_TYPES[ggml_type] == "f32" else 2))
    else:
        f = FORMATS[ggml_type]
        group_bytes = f.row_group_bytes(n >> (f.columns.bit_length() - 1)) * (count // f.rows)
    with ir.loop(0, n, 16) as c:
        ir.store(ir.zero(_FLOATS16), out + c * 4)
    with ir.loop(0, rows, count) as row:
        decode_rows_into(ir, ggml_type, weights + group_bytes * (row >> (count.bit_length() - 1)), n, count, scratch)
        factors = [ir.splat(ir.load(F32, x + (row + r) * 4), 16) for r in range(count)]
        with ir.loop(0, n, 16) as c:
            total = ir.load(_FLOATS16, out + c * 4)
            for r, factor in enumerate(factors):
                total = ir.fma(factor, ir.load(_FLOATS16, scratch + (n * r + c) * 4), total)
            ir.store(total, out + c * 4)


@functools.cache
def transposed_product(ggml_type: int) -> Callback:
    """out float32[n] = W^T x for W [rows, n] of a type: (weights, n, rows, x, out, scratch), rows a multiple of 32."""

    @callback(SIGNATURE)
    def run(weights, n, rows, x, out, scratch):
        _transposed_product(ggml_type, weights, n, rows, x, out, scratch)

    return run


@functools.cache
def matrix_reader(ggml_type: int, transposed: bool) -> Callback:
    """Decode a matrix [rows, n] to out float32, as it is or `transposed`: (weights, rows, n, out, scratch, -)."""

    @callback(SIGNATURE)
    def run(weights, rows, n, out, scratch, _):
        decode_rows(ggml_type, weights, n, rows, scratch if transposed else out)
        if transposed:
            transpose_rows(scratch, n, rows, out, rows * 4)

    return run


@functools.cache
def latent_reader(rows: LatentRows) -> Callback:
    """Decode rows of a cache to out float32[count, dim], rotated back if `back`: (row, count, out, back, -, -)."""
    dim, _, ggml_type, rotation = rows
    nbytes = rows.nbytes

    @callback(SIGNATURE)
    def run(first, count, out, back, _, __):
        decode_keys(ggml_type, first, nbytes, count, dim, out, dim * 4)
        if back != 0:
            rotate(out, count * dim, rotation)

    return run


@functools.cache
def latent_writer(rows: LatentRows) -> Callback:
    """Rotate a latent float32[dim] and encode it to a row of a cache: (latent, row, -, -, -, -)."""
    dim, _, ggml_type, rotation = rows

    @callback(SIGNATURE)
    def run(x, row, _, __, ___, ____):
        rotate(x, dim, rotation)
        store_row(ggml_type, x, dim, row)

    return run


@functools.cache
def rotator(block: int) -> Callback:
    """Rotate every `block` of n floats in place: (x, n, -, -, -, -)."""

    @callback(SIGNATURE)
    def run(x, n, _, __, ___, ____):
        rotate(x, n, block)

    return run
