"""Operations of the decode plan, except attention and experts: norms, matrix-vector products, gated activations.

Small work (a norm, quantizing activations) is repeated by every thread in a buffer of its own: that is cheaper than
waiting for another thread. Such a buffer is given as an address and a `private_stride`, the bytes from one thread's
copy to the next one's, which is never 0. An operation that only reads a buffer takes a `stride`, which is 0 where all
threads read the same bytes.

`multiple` divides rows between threads. Operations that pass rows on without a barrier must use the same `multiple`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from quantkit.codegen.callbacks import callback
from quantkit.codegen.jit import kernel
from quantkit.codegen.simd import F32, call6, copy_floats, floats, load_float, simd_intrinsic, vector
from quantkit.runtime.kernels.cpu.activations import quantize, quantize_range
from quantkit.runtime.kernels.cpu.operation import OPERATION, claim_rows, load_record, row_share

# ------------------------------------------------------------------------------------------------------------- rms norm


@simd_intrinsic("float32")
def sum_of_squares(ir, x, n):
    """Sum of squares of float32[n], in a fixed order on every CPU: 32 lanes, then the rest."""
    kind, vector_end = vector(32, F32), n & -32
    lanes, remainder = ir.variable(ir.zero(kind)), ir.variable(ir.constant(F32, 0.0))
    with ir.loop(0, vector_end, 32) as i:
        v = ir.load(kind, x + i * 4)
        lanes.set(ir.fma(v, v, lanes.get()))
    with ir.loop(vector_end, n) as i:
        v = ir.load(F32, x + i * 4)
        remainder.set(ir.fma(v, v, remainder.get()))
    return ir.sum(lanes.get()) + remainder.get()


@simd_intrinsic("float32")
def sum_of(ir, x, n):
    """Sum of float32[n], in a fixed order on every CPU: 32 lanes, then the rest."""
    kind, vector_end = vector(32, F32), n & -32
    lanes, remainder = ir.variable(ir.zero(kind)), ir.variable(ir.constant(F32, 0.0))
    with ir.loop(0, vector_end, 32) as i:
        lanes.set(lanes.get() + ir.load(kind, x + i * 4))
    with ir.loop(vector_end, n) as i:
        remainder.set(remainder.get() + ir.load(F32, x + i * 4))
    return ir.sum(lanes.get()) + remainder.get()


@kernel
def rms_scale(x, n, eps):
    """1 / sqrt(mean(x^2) + eps) of float32[n]."""
    return np.float32(1) / np.sqrt(sum_of_squares(x, n) / np.float32(n) + eps)


@kernel
def rms_norm_into(x, weight, n, eps, out):
    """out = x / sqrt(mean(x^2) + eps) * weight, float32[n]."""
    scale = rms_scale(x, n, eps)
    x, weight, y = floats(x, n), floats(weight, n), floats(out, n)
    for i in range(n):
        y[i] = x[i] * scale * weight[i]


@kernel
def norm_into(x, weight, n, eps, centred, bias, out):
    """out = norm(x) (+ bias), float32[n]; with `centred` of x - mean(x). Without a weight, out = x."""
    if weight == 0:
        copy_floats(out, x, n)
        return
    source = x
    if centred != 0:
        mean, centre, y = sum_of(x, n) / np.float32(n), floats(x, n), floats(out, n)
        for i in range(n):
            y[i] = centre[i] - mean
        source = out
    rms_norm_into(source, weight, n, eps, out)
    if bias != 0:
        add_range(bias, out, 0, n)


class NormParameters(NamedTuple):
    """Parameters of `norm`."""

    x: int  # float32[n]
    weight: int  # float32[n], or 0: x itself is quantized
    n: int
    eps: int  # address of a float32
    buffer: int  # activation buffer
    private_stride: int
    x_stride: int = 0  # where each thread has an x of its own
    centred: int = 0  # 1: x - mean(x) stands for x
    bias: int = 0  # float32[n], or 0


@callback(OPERATION)
def norm(parameters, thread, threads):
    """Write norm(x) (+ bias), or x itself, quantized, to the thread's activation buffer."""
    p = load_record(NormParameters, parameters)
    buffer = p.buffer + thread * p.private_stride
    norm_into(p.x + thread * p.x_stride, p.weight, p.n, load_float(p.eps), p.centred, p.bias, buffer)
    quantize(buffer, p.n)


class HeadNormParameters(NamedTuple):
    """Parameters of `head_norm`."""

    x: int  # float32[rows / dim, dim]
    weight: int  # float32[dim]
    rows: int
    dim: int
    eps: int  # address of a float32
    multiple: int
    out: int  # float32[rows / dim, dim]; may be x


@callback(OPERATION)
def head_norm(parameters, thread, threads):
    """out = norm(x) of every head. Shares are whole heads."""
    p = load_record(HeadNormParameters, parameters)
    eps = load_float(p.eps)
    first, last = row_share(p.rows, p.multiple, thread, threads)
    for row in range(first, last, p.dim):
        rms_norm_into(p.x + row * 4, p.weight, p.dim, eps, p.out + row * 4)


# ------------------------------------------------------------------------------------------------------- matrix-vector


class MatvecParameters(NamedTuple):
    """Parameters of `matvec`."""

    product: int  # function of matvec.py for the type of the weights
    weights: int
    n: int  # columns
    rows: int
    multiple: int
    buffer: int  # activation buffer
    stride: int
    out: int  # float32[rows]
    bias: int  # float32[rows], or 0
    residual: int  # float32[rows] that the result is added to, or 0
    scale: int = 0  # address of a float32 that the product is multiplied by, or 0
    claims: int = 0  # `OpList.claims`, or 0: each thread computes its share


@callback(OPERATION)
def matvec(parameters, thread, threads):
    """out = W x (* scale) (+ bias); residual += out. Each thread computes its rows, or claims some."""
    p = load_record(MatvecParameters, parameters)
    if p.claims == 0:
        first, last = row_share(p.rows, p.multiple, thread, threads)
        _multiply_rows(p, first, last, thread)
        return
    while True:
        first, last = claim_rows(p.claims, p.rows, p.multiple, thread, threads)
        if first == last:
            return
        _multiply_rows(p, first, last, thread)


@kernel
def _multiply_rows(p, first, last, thread):
    call6(p.product, p.weights, p.n, first, last, p.buffer + thread * p.stride, p.out)
    if p.scale != 0:
        out, scale = floats(p.out, p.rows), load_float(p.scale)
        for i in range(first, last):
            out[i] *= scale
    if p.bias != 0:
        add_range(p.bias, p.out, first, last)
    if p.residual != 0:
        add_range(p.out, p.residual, first, last)


@kernel
def add_range(x, out, first, last):
    """out += x for elements first .. last - 1 of float32."""
    x, y = floats(x, last), floats(out, last)
    for i in range(first, last):
        y[i] += x[i]


@kernel
def scale_range(x, first, last, factor):
    """x *= factor for elements first .. last - 1 of float32."""
    y = floats(x, last)
    for i in range(first, last):
        y[i] *= factor


# --------------------------------------------------------------------------------------------------- gated activations


class GatedParameters(NamedTuple):
    """Parameters of `gated`."""

    activation: int  # function of gated_activations.py
    gate: int  # float32[n]
    up: int  # float32[n]
    n: int
    multiple: int
    buffer: int  # activation buffer
    numbers: int  # those of the activation, or 0


@callback(OPERATION)
def gated(parameters, thread, threads):
    """Write the thread's rows of act(gate) * up, quantized, to an activation buffer that threads share."""
    p = load_record(GatedParameters, parameters)
    first, last = row_share(p.n, p.multiple, thread, threads)
    call6(p.activation, p.gate, p.up, first, last, p.buffer, p.numbers)
    quantize_range(p.buffer, p.n, first, last)
