"""The operations of a single token's pass, as C functions `void(parameters, thread, threads)` for team.py.

Each reads its parameters, int64s named below, and does the share of `thread`. What is small (a norm, the activations'
quantization) every thread does for itself in a buffer of its own: that is cheaper than waiting for another to do it.
Such buffers are given as base and `private_stride`, which is never 0. An operation that only reads one takes `stride`;
0 is a buffer that all share.

`split` cuts rows between threads; operations that pass rows on without a wait between them must cut alike.
"""

from __future__ import annotations

import numpy as np

from quantkit.codegen.callbacks import callback
from quantkit.codegen.jit import kernel
from quantkit.codegen.simd import F32, call6, floats, load_float, load_int, simd_intrinsic, vector
from quantkit.runtime.kernels.cpu.activations import quantize, quantize_range

SIGNATURE = "void(int64, int64, int64)"


@kernel(inline="always")
def split(rows, multiple, thread, threads):
    """Where the share of a thread begins; shares are multiples of `multiple` rows, but for the last."""
    return min(rows, -(-rows // multiple) * thread // threads * multiple)


# ------------------------------------------------------------------------------------------------------------- rms norm

NORM = ("x", "weight", "n", "eps", "buffer", "private_stride")  # eps points to a float32


@simd_intrinsic("float32")
def _squares(ir, x, n):
    """Their sum, in an order of its own: that of 32 lanes, then what is left."""
    kind, whole = vector(32, F32), n & -32
    lanes, rest = ir.variable(ir.zero(kind)), ir.variable(ir.constant(F32, 0.0))
    with ir.loop(0, whole, 32) as i:
        v = ir.load(kind, x + i * 4)
        lanes.set(ir.fma(v, v, lanes.get()))
    with ir.loop(whole, n) as i:
        v = ir.load(F32, x + i * 4)
        rest.set(ir.fma(v, v, rest.get()))
    return ir.sum(lanes.get()) + rest.get()


@kernel
def norm_into(x, weight, n, eps, out):
    """out = x / sqrt(mean(x^2) + eps) * weight, float32[n]."""
    total = _squares(x, n)
    x, weight, y = floats(x, n), floats(weight, n), floats(out, n)
    scale = np.float32(1) / np.sqrt(total / np.float32(n) + eps)
    for i in range(n):
        y[i] = x[i] * scale * weight[i]


@callback(SIGNATURE)
def norm(p, thread, threads):
    """buffer = norm of x, quantized; by every thread for itself."""
    n = load_int(p + 16)
    buffer = load_int(p + 32) + thread * load_int(p + 40)
    norm_into(load_int(p), load_int(p + 8), n, load_float(load_int(p + 24)), buffer)
    quantize(buffer, n)


HEAD_NORM = ("x", "weight", "rows", "dim", "eps", "multiple")


@callback(SIGNATURE)
def head_norm(p, thread, threads):
    """Every head of x float32[rows / dim, dim] normed in place; shares are whole heads."""
    rows, dim, multiple = load_int(p + 16), load_int(p + 24), load_int(p + 40)
    eps = load_float(load_int(p + 32))
    for row in range(split(rows, multiple, thread, threads), split(rows, multiple, thread + 1, threads), dim):
        norm_into(load_int(p) + row * 4, load_int(p + 8), dim, eps, load_int(p) + row * 4)


# ------------------------------------------------------------------------------------------------------- matrix-vector

MATVEC = ("kernel", "weights", "n", "rows", "multiple", "buffer", "stride", "out", "bias", "residual")


@callback(SIGNATURE)
def matvec(p, thread, threads):
    """out = W buffer (+ bias) for the thread's rows; residual += out where there is one. Absent: address 0."""
    rows, multiple = load_int(p + 24), load_int(p + 32)
    first = split(rows, multiple, thread, threads)
    last = split(rows, multiple, thread + 1, threads)
    address = load_int(p + 56)
    call6(
        load_int(p),
        load_int(p + 8),
        load_int(p + 16),
        first,
        last,
        load_int(p + 40) + thread * load_int(p + 48),
        address,
    )
    out = floats(address, rows)
    if load_int(p + 64) != 0:
        bias = floats(load_int(p + 64), rows)
        for i in range(first, last):
            out[i] += bias[i]
    if load_int(p + 72) != 0:
        residual = floats(load_int(p + 72), rows)
        for i in range(first, last):
            residual[i] += out[i]


# -------------------------------------------------------------------------------------------------------------- swiglu

SWIGLU = ("gate", "up", "n", "multiple", "buffer")


@simd_intrinsic("void")
def swiglu_range(ir, gate, up, first, last, out):
    """out = gate / (1 + e^-gate) * up, n a multiple of 32."""
    kind = vector(16, F32)
    with ir.loop(first, last, 16) as i:
        g = ir.load(kind, gate + i * 4)
        sigmoid = ir.constant(kind, 1.0) / (ir.exp(g * -1.0) + 1.0)
        ir.store(g * sigmoid * ir.load(kind, up + i * 4), out + i * 4)


@callback(SIGNATURE)
def swiglu(p, thread, threads):
    """buffer = gate * sigmoid(gate) * up, quantized: the thread's rows only."""
    n, multiple, buffer = load_int(p + 16), load_int(p + 24), load_int(p + 32)
    first = split(n, multiple, thread, threads)
    last = split(n, multiple, thread + 1, threads)
    swiglu_range(load_int(p), load_int(p + 8), first, last, buffer)
    quantize_range(buffer, n, first, last)
