"""Float32 products of a batch: one inner loop for weights, and for scores and values of attention.

`float_tile` multiplies FLOAT_TILE_TOKENS rows of A, read one number at a time, by a panel of B, read in whole vectors:

    c[i, lane] (+)= sum over j of a[i, j] * b[j, lane]        i < FLOAT_TILE_TOKENS, lane < float_lanes()

The sums stay in registers. Weights become transposed panels of float_lanes() rows: b[j, lane] is column j of row
`lane`.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from quantkit.codegen.callbacks import Callback, callback
from quantkit.codegen.jit import kernel
from quantkit.codegen.simd import F32, IrBuilder, Value, floats, load_float, load_int, simd_intrinsic, vector
from quantkit.placement.kernel_sizes import FLOAT_TILE_TOKENS, float_lanes
from quantkit.runtime.kernels.cpu.dequantize import FLOAT_TYPES, decode_rows
from quantkit.runtime.kernels.cpu.formats.registry import FORMATS
from quantkit.runtime.kernels.cpu.operation import OPERATION, claim_rows, load_record

_FLOATS16 = vector(16, F32)


@simd_intrinsic("int64")
def panel_rows(ir):
    """In kernels: `float_lanes()`."""
    return ir.integer(float_lanes())


def multiply_rows(
    ir: IrBuilder,
    rows: list[Value],
    b: Value,
    b_stride: Value | int,
    n: Value,
    c: Value,
    c_stride: Value | int,
    add: int,
) -> None:
    """Multiply rows of A at these addresses, n columns each, by a panel of B; see the module. Strides in bytes."""
    wide = float_lanes() // 2
    kind = vector(wide, F32)
    positions = [(i, v) for i in range(len(rows)) for v in range(2)]
    targets = {(i, v): c + c_stride * i + 4 * wide * v for i, v in positions}
    totals = {p: ir.variable(ir.load(kind, targets[p]) if add else ir.zero(kind)) for p in positions}
    with ir.loop(0, n) as j:
        vectors = [ir.load(kind, b + j * b_stride + 4 * wide * v) for v in range(2)]
        for i, row in enumerate(rows):
            number = ir.splat(ir.load(F32, row + j * 4), wide)
            for v in range(2):
                totals[i, v].set(ir.fma(number, vectors[v], totals[i, v].get()))
    for p in positions:
        ir.store(totals[p].get(), targets[p])


@simd_intrinsic("void")
def float_tile(
    ir: IrBuilder, a: Value, a_stride: Value, b: Value, b_stride: Value, n: Value, c: Value, c_stride: Value, add: int
) -> None:
    """Multiply FLOAT_TILE_TOKENS rows of A, n columns each, by a panel of B; see the module. Strides in bytes."""
    multiply_rows(ir, [a + a_stride * i for i in range(FLOAT_TILE_TOKENS)], b, b_stride, n, c, c_stride, add)


def transposed_vectors(ir: IrBuilder, v: list[Value]) -> list[Value]:
    """Transpose 16 vectors of 16 lanes: in four rounds, swap blocks of 8, 4, 2 and 1 across the diagonal."""
    for w in (8, 4, 2, 1):
        first = [j if not j & w else j - w + 16 for j in range(16)]
        second = [j + w if not j & w else j + 16 for j in range(16)]
        for i in (i for i in range(16) if not i & w):
            a, b = v[i], v[i + w]
            v[i], v[i + w] = ir.shuffle(a, b, first), ir.shuffle(a, b, second)
    return v


def transpose16x16(ir: IrBuilder, x: Value, x_stride: Value, y: Value, y_stride: Value | int) -> None:
    """y[j, i] = x[i, j] for 16 x 16 float32; strides in bytes."""
    rows = [ir.load(_FLOATS16, x + x_stride * i) for i in range(16)]
    for j, column in enumerate(transposed_vectors(ir, rows)):
        ir.store(column, y + y_stride * j)


transpose_block = simd_intrinsic("void")(transpose16x16)


@kernel
def transpose_rows(x, n, rows, y, y_stride):
    """Panel y[j, i] = x[i, j] of x float32[rows, n]; rows and n multiples of 16."""
    for i in range(0, rows, 16):
        for j in range(0, n, 16):
            transpose_block(x + (i * n + j) * 4, n * 4, y + j * y_stride + i * 4, y_stride)


@kernel
def copy_tile(source, source_width, out, width, tokens, rows, add):
    """Copy (or add) the first `rows` columns of a tile float32[tokens, source_width] to rows of `width` floats."""
    for t in range(tokens):
        x, y = floats(source + t * source_width * 4, rows), floats(out + t * width * 4, rows)
        for i in range(rows):
            y[i] = x[i] + y[i] if add else x[i]


@kernel
def add_bias(bias, out, first, last, rows, tokens):
    """out[t, first .. last - 1] += bias, out float32[tokens, rows]."""
    b, y = floats(bias, rows), floats(out, rows * tokens)
    for t in range(tokens):
        for row in range(first, last):
            y[t * rows + row] += b[row]


@kernel
def scale_rows(scale, out, first, last, rows, tokens):
    """out[t, first .. last - 1] *= the float32 at an address, out float32[tokens, rows]."""
    factor, y = load_float(scale), floats(out, rows * tokens)
    for t in range(tokens):
        for row in range(first, last):
            y[t * rows + row] *= factor


class MultiplyParameters(NamedTuple):
    """Parameters of the product of a batch, here and in gemm.py."""

    weights: int
    n: int  # columns
    rows: int
    tokens: int  # address of an int64
    x: int  # float32[tokens, n], or tiles of gemm.py
    out: int  # float32[tokens, rows]
    bias: int  # float32[rows], or 0
    scratch: int
    private_stride: int
    claims: int  # `OpList.claims`
    scale: int = 0  # address of a float32 that products are multiplied by, or 0


@functools.cache
def multiply(ggml_type: int, add: int) -> Callback:
    """The operation out[token, row] (+)= W x (* scale) (+ bias) in float32, with MultiplyParameters.

    There is no `scale` with `add`.
    """
    if ggml_type in FLOAT_TYPES:
        block, nbytes, head = 1, 4 if FLOAT_TYPES[ggml_type] == "f32" else 2, 0
    else:
        f = FORMATS[ggml_type]
        block, nbytes, head = f.columns, f.nbytes // f.rows, f.head // f.rows

    @callback(OPERATION)
    def run(parameters, thread, threads):
        p = load_record(MultiplyParameters, parameters)
        n, rows, count, step = p.n, p.rows, load_int(p.tokens), panel_rows()
        decoded = p.scratch + thread * p.private_stride
        panel = decoded + step * n * 4
        padded_x = panel + step * n * 4
        results = padded_x + FLOAT_TILE_TOKENS * n * 4
        first = end = 0
        while True:
            if first == end:
                first, end = claim_rows(p.claims, rows, step, thread, threads)
                if first == end:
                    return
            row_count = min(step, rows - first)
            decode_rows(ggml_type, p.weights + first * (n // block * nbytes + head), n, row_count, decoded)
            transpose_rows(decoded, n, step, panel, step * 4)
            for token in range(0, count, FLOAT_TILE_TOKENS):
                token_count = min(FLOAT_TILE_TOKENS, count - token)
                x, out = p.x + token * n * 4, p.out + (token * rows + first) * 4
                if token_count == FLOAT_TILE_TOKENS and row_count == step:
                    float_tile(x, n * 4, panel, step * 4, n, out, rows * 4, add)
                else:
                    if token_count < FLOAT_TILE_TOKENS:
                        copy_tile(x, n, padded_x, n, token_count, n, 0)
                        x = padded_x
                    float_tile(x, n * 4, panel, step * 4, n, results, step * 4, 0)
                    copy_tile(results, step, out, rows, token_count, row_count, add)
            if p.scale != 0:
                scale_rows(p.scale, p.out, first, first + row_count, rows, count)
            if p.bias != 0:
                add_bias(p.bias, p.out, first, first + row_count, rows, count)
            first += row_count

    return run
