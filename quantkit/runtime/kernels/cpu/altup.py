"""Operations of AltUp, LAuReL and activation sparsity (archs.blocks.AltUp, AltUpHead, Laurel, FeedForward.cutoff).

They are plain in `runtime/blocks/altup.py`. Logits of the router and products with matrices come from operations
before. Stream i of a token is float32[width], `stream_bytes` after stream i - 1. A record of weights, one of each
thread, is float32[n + n * n + STREAM_BLOCK n]: m, P and scratch.

For one token threads split the columns, in a batch they split the tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from quantkit.codegen.callbacks import callback
from quantkit.codegen.jit import kernel
from quantkit.codegen.simd import (
    F32,
    IrBuilder,
    Value,
    copy_floats,
    floats,
    load_float,
    simd_intrinsic,
    vector,
)
from quantkit.placement.kernel_sizes import STREAM_BLOCK
from quantkit.runtime.kernels.cpu.decode_ops import rms_scale, sum_of, sum_of_squares
from quantkit.runtime.kernels.cpu.operation import OPERATION, load_record, row_share
from quantkit.runtime.kernels.cpu.prefill_ops import batch_share
from quantkit.runtime.kernels.reference import expm1

_HALF_ROOT = np.float32(2**-0.5)


class Streams(NamedTuple):
    """The streams of a token or a batch, and what parts read and make of them."""

    streams: int
    stream_bytes: int
    n: int
    width: int
    x: int  # float32[tokens, width]: what a block computes; then what the last norm reads
    entering: int  # float32[tokens, width]: what the per-layer embedding reads
    logits: int  # float32[tokens, n], of the router
    products: int  # with the matrices of the head, of streams 1 to n - 1, `stream_bytes` apart
    least: int  # address of a float32
    weights: int  # a record of each thread
    record_bytes: int


class Coefficients(NamedTuple):
    """The numbers of a block."""

    predict: int  # float32[n * n, n]
    correct: int  # float32[n, n]
    correct_scale: int  # float32[width]


class LaurelSum(NamedTuple):
    """What is added to attention."""

    y: int  # float32[width], or float32[tokens, width] of a batch: the norm of p_0
    stride: int  # bytes from one thread's y to the next, of one token
    product: int  # float32[tokens, width]
    weight: int  # float32[width], of the norm of the product
    eps: int  # address of a float32


# --------------------------------------------------------------------------------- some columns of a token's streams


@kernel
def _tanh(x):
    doubled = np.float32(2) * x
    if doubled > np.float32(80):  # NaN stays NaN
        doubled = np.float32(80)
    e = expm1(doubled)
    return e / (e + np.float32(2))


@kernel
def _size(x, n):
    """sqrt(mean(x^2)) of float32[n]."""
    return np.sqrt(sum_of_squares(x, n) / np.float32(n))


@kernel
def _factor(target, x, n, least):
    """target / sqrt(mean(x^2)), the root at least `least`."""
    size = _size(x, n)
    if size < least:
        size = least
    return target / size


@kernel
def _spread(s, at, first, last):
    """Stream 0 = x, the others = products with the size of x; `at` is the offset of a token's rows."""
    target, least = _size(s.x + at, s.width), load_float(s.least)
    copy_floats(s.streams + at + first * 4, s.x + at + first * 4, last - first)
    for i in range(1, s.n):
        product = s.products + (i - 1) * s.stream_bytes + at
        factor = _factor(target, product, s.width, least)
        given, out = floats(product, s.width), floats(s.streams + i * s.stream_bytes + at, s.width)
        for c in range(first, last):
            out[c] = given[c] * factor


@kernel
def _merge(s, at, first, last):
    """x = the mean of stream 0 and the products, of its size."""
    target, least = _size(s.streams + at, s.width), load_float(s.least)
    out = floats(s.x + at, s.width)
    copy_floats(s.x + at + first * 4, s.streams + at + first * 4, last - first)
    for i in range(1, s.n):
        product = s.products + (i - 1) * s.stream_bytes + at
        factor = _factor(target, product, s.width, least)
        given = floats(product, s.width)
        for c in range(first, last):
            out[c] += given[c] * factor
    for c in range(first, last):
        out[c] /= np.float32(s.n)


@kernel
def _route(logits, n, weights):
    """m of a token's logits."""
    given, out = floats(logits, n), floats(weights, n)
    for i in range(n):
        out[i] = _tanh(given[i])


@kernel
def _predict(s, predict, at, weights, first, last):
    """Stream i += sum over j of P_ij x_j; x = stream 0. m is in the record of weights."""
    n = s.n
    routed, rows, mixing = floats(weights, n), floats(predict, n * n * n), floats(weights + n * 4, n * n)
    for i in range(n * n):
        total = np.float32(0)
        for j in range(n):
            total += rows[i * n + j] * routed[j]
        mixing[i] = total
    scratch = weights + (n + n * n) * 4
    for start in range(first, last, STREAM_BLOCK):
        count = min(STREAM_BLOCK, last - start)
        for j in range(n):
            copy_floats(scratch + j * STREAM_BLOCK * 4, s.streams + j * s.stream_bytes + at + start * 4, count)
        for i in range(n):
            x = floats(s.streams + i * s.stream_bytes + at + start * 4, count)
            for j in range(n):
                before, share = floats(scratch + j * STREAM_BLOCK * 4, count), mixing[i * n + j]
                for c in range(count):
                    x[c] += share * before[c]
    copy_floats(s.x + at + first * 4, s.streams + at + first * 4, last - first)


@kernel
def _correct(s, coefficients, at, weights, first, last):
    """Stream i += (1 + correct m)_i (x - stream 0); entering = correct_scale * stream 0; x = 0."""
    n = s.n
    routed, rows = floats(weights, n), floats(coefficients.correct, n * n)
    active, x = floats(s.streams + at, s.width), floats(s.x + at, s.width)
    for c in range(first, last):
        x[c] -= active[c]
    for i in range(n):
        share = np.float32(1)
        for j in range(n):
            share += rows[i * n + j] * routed[j]
        stream = floats(s.streams + i * s.stream_bytes + at, s.width)
        for c in range(first, last):
            stream[c] += share * x[c]
    scale, entering = floats(coefficients.correct_scale, s.width), floats(s.entering + at, s.width)
    for c in range(first, last):
        entering[c] = scale[c] * active[c]
        x[c] = np.float32(0)


@kernel
def _add(s, at, first, last):
    """Streams but the first += x."""
    x = floats(s.x + at, s.width)
    for i in range(1, s.n):
        stream = floats(s.streams + i * s.stream_bytes + at, s.width)
        for c in range(first, last):
            stream[c] += x[c]


@kernel
def _add_laurel(s, laurel, at, y, first, last):
    """x = 2^-1/2 (x + y + norm(product))."""
    scale = rms_scale(laurel.product + at, s.width, load_float(laurel.eps))
    product, weight = floats(laurel.product + at, s.width), floats(laurel.weight, s.width)
    normed, x = floats(y, s.width), floats(s.x + at, s.width)
    for c in range(first, last):
        x[c] = (x[c] + normed[c] + product[c] * scale * weight[c]) * _HALF_ROOT


# ----------------------------------------------------------------------------------------------------------- one token


class TokenParameters(NamedTuple):
    """Parameters of operations on the streams of one token."""

    streams: int  # address of a Streams
    numbers: int  # address of a Coefficients or a LaurelSum; 0 where none is read
    multiple: int  # columns that are not split between threads


@callback(OPERATION)
def spread_token(parameters, thread, threads):
    """Stream 0 = x, the others = products with the size of x."""
    p = load_record(TokenParameters, parameters)
    s = load_record(Streams, p.streams)
    first, last = row_share(s.width, p.multiple, thread, threads)
    _spread(s, 0, first, last)


@callback(OPERATION)
def merge_token(parameters, thread, threads):
    """x = the mean of stream 0 and the products, of its size."""
    p = load_record(TokenParameters, parameters)
    s = load_record(Streams, p.streams)
    first, last = row_share(s.width, p.multiple, thread, threads)
    _merge(s, 0, first, last)


@callback(OPERATION)
def predict_token(parameters, thread, threads):
    """The streams become p, x = p_0."""
    p = load_record(TokenParameters, parameters)
    s, coefficients = load_record(Streams, p.streams), load_record(Coefficients, p.numbers)
    first, last = row_share(s.width, p.multiple, thread, threads)
    weights = s.weights + thread * s.record_bytes
    _route(s.logits, s.n, weights)
    _predict(s, coefficients.predict, 0, weights, first, last)


@callback(OPERATION)
def correct_token(parameters, thread, threads):
    """The streams, which are p, are corrected by x, which is z; entering = correct_scale * stream 0, x = 0."""
    p = load_record(TokenParameters, parameters)
    s, coefficients = load_record(Streams, p.streams), load_record(Coefficients, p.numbers)
    first, last = row_share(s.width, p.multiple, thread, threads)
    weights = s.weights + thread * s.record_bytes
    _route(s.logits, s.n, weights)
    _correct(s, coefficients, 0, weights, first, last)


@callback(OPERATION)
def add_token(parameters, thread, threads):
    """Streams but the first += x."""
    p = load_record(TokenParameters, parameters)
    s = load_record(Streams, p.streams)
    first, last = row_share(s.width, p.multiple, thread, threads)
    _add(s, 0, first, last)


@callback(OPERATION)
def laurel_token(parameters, thread, threads):
    """x = 2^-1/2 (x + y + norm(product))."""
    p = load_record(TokenParameters, parameters)
    s, laurel = load_record(Streams, p.streams), load_record(LaurelSum, p.numbers)
    first, last = row_share(s.width, p.multiple, thread, threads)
    _add_laurel(s, laurel, 0, laurel.y + thread * laurel.stride, first, last)


# ------------------------------------------------------------------------------------------------------------- a batch


class BatchParameters(NamedTuple):
    """Parameters of operations on the streams of a batch."""

    state: int  # BatchState
    streams: int  # address of a Streams
    numbers: int  # address of a Coefficients or a LaurelSum; 0 where none is read


@callback(OPERATION)
def spread_batch(parameters, thread, threads):
    """As `spread_token`, for each token."""
    p = load_record(BatchParameters, parameters)
    s = load_record(Streams, p.streams)
    first, last = batch_share(p.state, thread, threads)
    for token in range(first, last):
        _spread(s, token * s.width * 4, 0, s.width)


@callback(OPERATION)
def merge_batch(parameters, thread, threads):
    """As `merge_token`, for each token."""
    p = load_record(BatchParameters, parameters)
    s = load_record(Streams, p.streams)
    first, last = batch_share(p.state, thread, threads)
    for token in range(first, last):
        _merge(s, token * s.width * 4, 0, s.width)


@callback(OPERATION)
def predict_batch(parameters, thread, threads):
    """As `predict_token`, for each token."""
    p = load_record(BatchParameters, parameters)
    s, coefficients = load_record(Streams, p.streams), load_record(Coefficients, p.numbers)
    first, last = batch_share(p.state, thread, threads)
    weights = s.weights + thread * s.record_bytes
    for token in range(first, last):
        _route(s.logits + token * s.n * 4, s.n, weights)
        _predict(s, coefficients.predict, token * s.width * 4, weights, 0, s.width)


@callback(OPERATION)
def correct_batch(parameters, thread, threads):
    """As `correct_token`, for each token."""
    p = load_record(BatchParameters, parameters)
    s, coefficients = load_record(Streams, p.streams), load_record(Coefficients, p.numbers)
    first, last = batch_share(p.state, thread, threads)
    weights = s.weights + thread * s.record_bytes
    for token in range(first, last):
        _route(s.logits + token * s.n * 4, s.n, weights)
        _correct(s, coefficients, token * s.width * 4, weights, 0, s.width)


@callback(OPERATION)
def add_batch(parameters, thread, threads):
    """As `add_token`, for each token."""
    p = load_record(BatchParameters, parameters)
    s = load_record(Streams, p.streams)
    first, last = batch_share(p.state, thread, threads)
    for token in range(first, last):
        _add(s, token * s.width * 4, 0, s.width)


@callback(OPERATION)
def laurel_batch(parameters, thread, threads):
    """As `laurel_token`, for each token."""
    p = load_record(BatchParameters, parameters)
    s, laurel = load_record(Streams, p.streams), load_record(LaurelSum, p.numbers)
    first, last = batch_share(p.state, thread, threads)
    for token in range(first, last):
        at = token * s.width * 4
        _add_laurel(s, laurel, at, laurel.y + at, 0, s.width)


# ------------------------------------------------------------------------------------------------- activation sparsity


@simd_intrinsic("float32")
def _sum_of_squares_about(ir: IrBuilder, x: Value, n: Value, mean: float) -> Value:
    """Sum of (x - mean)^2 of float32[n], in a fixed order on every CPU: 32 lanes, then the rest."""
    kind, vector_end = vector(32, F32), n & -32
    lanes, remainder = ir.variable(ir.zero(kind)), ir.variable(ir.constant(F32, 0.0))
    about = ir.splat(mean, 32)  # type: ignore[arg-type]  # float is what kernels pass
    with ir.loop(0, vector_end, 32) as i:
        v = ir.load(kind, x + i * 4) - about
        lanes.set(ir.fma(v, v, lanes.get()))
    with ir.loop(vector_end, n) as i:
        v = ir.load(F32, x + i * 4) - mean
        remainder.set(ir.fma(v, v, remainder.get()))
    return ir.sum(lanes.get()) + remainder.get()


@kernel
def _threshold(gate, n, cutoff):
    """The mean of float32[n] and `cutoff` standard deviations above it."""
    mean = sum_of(gate, n) / np.float32(n)
    return mean + cutoff * np.sqrt(_sum_of_squares_about(gate, n, mean) / np.float32(n))


@kernel
def _above(gate, threshold, first, last, out):
    """out = max(0, gate - threshold) for elements first .. last - 1; NaN stays NaN."""
    given, found = floats(gate, last), floats(out, last)
    for i in range(first, last):
        more = given[i] - threshold
        found[i] = np.float32(0) if more < np.float32(0) else more


class TokenGatesParameters(NamedTuple):
    """Parameters of `largest_gates_token`."""

    gate: int  # float32[n]
    n: int
    cutoff: int  # address of a float32
    multiple: int
    out: int  # float32[n], not gate


@callback(OPERATION)
def largest_gates_token(parameters, thread, threads):
    """out = what is left of all gates above their threshold: every thread computes it and writes its own share."""
    p = load_record(TokenGatesParameters, parameters)
    first, last = row_share(p.n, p.multiple, thread, threads)
    _above(p.gate, _threshold(p.gate, p.n, load_float(p.cutoff)), first, last, p.out)


class BatchGatesParameters(NamedTuple):
    """Parameters of `largest_gates_batch`."""

    state: int  # BatchState
    gate: int  # float32[tokens, n], overwritten
    n: int
    cutoff: int  # address of a float32


@callback(OPERATION)
def largest_gates_batch(parameters, thread, threads):
    """As `largest_gates_token`, for each token, in place."""
    p = load_record(BatchGatesParameters, parameters)
    first, last = batch_share(p.state, thread, threads)
    for token in range(first, last):
        gate = p.gate + token * p.n * 4
        _above(gate, _threshold(gate, p.n, load_float(p.cutoff)), 0, p.n, gate)
