"""Operations of hyper-connections (archs.blocks.HyperConnection, StreamHead): parts read and write residual streams.

They are plain in `runtime/blocks/hyper_connections.py`. The logits come from a product before. Streams are
float32[n, width] of a token. A record of weights is float32[(2 + n) n + STREAM_BLOCK n]: what a part reads, what it
writes, C, and scratch.

For one token threads split the columns, and each has a record of its own; in a batch they split the tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from quantkit.codegen.callbacks import callback
from quantkit.codegen.jit import kernel
from quantkit.codegen.simd import copy_floats, floats, load_float
from quantkit.placement.kernel_sizes import STREAM_BLOCK
from quantkit.runtime.kernels.cpu.operation import OPERATION, load_record, row_share
from quantkit.runtime.kernels.cpu.prefill_ops import batch_share
from quantkit.runtime.kernels.reference import exp


class Streams(NamedTuple):
    """The streams of a token or a batch, and what parts read and make of them."""

    streams: int  # float32[tokens, n, width]
    n: int
    width: int
    x: int  # float32[tokens, width]: what a part makes; of the head, what the last norm reads
    entering: int  # float32[tokens, width]: what a part reads
    logits: int  # float32[tokens, (2 + n) n], of the head float32[tokens, n]
    weights: int  # records: of each thread for one token, of each token in a batch
    record_bytes: int  # from one record to the next


class Mixing(NamedTuple):
    """The numbers of a connection."""

    scale: int  # float32[3], of the head float32[1]
    base: int  # float32[(2 + n) n], of the head float32[n]
    eps: int  # address of a float32
    iterations: int  # 0: the head


@kernel
def _sigmoid(x):
    return np.float32(1) / (np.float32(1) + exp(-x))


@kernel
def _divide(c, n, line, step, eps):
    """Divide each line of c float32[n * n], n elements `step` apart, by its sum plus eps; lines are `line` apart."""
    for i in range(n):
        total = eps
        for j in range(n):
            total += c[i * line + j * step]
        for j in range(n):
            c[i * line + j * step] /= total


@kernel
def _make_doubly_stochastic(c, n, eps, iterations):
    """c float32[n * n]: logits become a matrix whose rows and columns sum to about 1."""
    for row in range(n):
        largest = c[row * n]
        for i in range(1, n):
            largest = max(largest, c[row * n + i])
        for i in range(n):
            c[row * n + i] = exp(c[row * n + i] - largest)
    _divide(c, n, n, 1, np.float32(0))
    for i in range(n * n):
        c[i] += eps
    _divide(c, n, 1, n, eps)
    for _ in range(iterations - 1):
        _divide(c, n, n, 1, eps)
        _divide(c, n, 1, n, eps)


@kernel
def _weigh(mixing, n, logits, weights):
    """Write the record of weights of a token's logits."""
    eps, scale = load_float(mixing.eps), floats(mixing.scale, 3 if mixing.iterations != 0 else 1)
    count = (2 + n) * n if mixing.iterations != 0 else n
    given, base, out = floats(logits, count), floats(mixing.base, count), floats(weights, count)
    for i in range(n):
        out[i] = _sigmoid(given[i] * scale[0] + base[i]) + eps
    if mixing.iterations == 0:
        return
    for i in range(n, 2 * n):
        out[i] = np.float32(2) * _sigmoid(given[i] * scale[1] + base[i])
    for i in range(2 * n, count):
        out[i] = given[i] * scale[2] + base[i]
    _make_doubly_stochastic(floats(weights + 8 * n, n * n), n, eps, mixing.iterations)


@kernel
def _read(streams, n, width, weights, first, last, out):
    """out = the weighted sum of the streams, columns first … last."""
    shares, y = floats(weights, n), floats(out, width)
    y[first:last] = np.float32(0)
    for i in range(n):
        x, share = floats(streams + i * width * 4, width), shares[i]
        for c in range(first, last):
            y[c] += share * x[c]


@kernel
def _write(streams, n, width, weights, first, last, made):
    """Stream k becomes post_k made + sum over j of C_jk x_j, columns first … last."""
    post, mixing = floats(weights + 4 * n, n), floats(weights + 8 * n, n * n)
    scratch = weights + (2 + n) * n * 4
    for start in range(first, last, STREAM_BLOCK):
        count = min(STREAM_BLOCK, last - start)
        for j in range(n):
            copy_floats(scratch + j * STREAM_BLOCK * 4, streams + (j * width + start) * 4, count)
        y = floats(made + start * 4, count)
        for k in range(n):
            x, share = floats(streams + (k * width + start) * 4, count), post[k]
            for c in range(count):
                x[c] = share * y[c]
            for j in range(n):
                before, weight = floats(scratch + j * STREAM_BLOCK * 4, count), mixing[j * n + k]
                for c in range(count):
                    x[c] += weight * before[c]


class TokenParameters(NamedTuple):
    """Parameters of operations on the streams of one token."""

    streams: int  # address of a Streams
    mixing: int  # address of a Mixing; 0 where none is read
    multiple: int  # columns that are not split between threads


class BatchParameters(NamedTuple):
    """Parameters of operations on the streams of a batch."""

    state: int  # BatchState
    streams: int  # address of a Streams
    mixing: int  # address of a Mixing; 0 where none is read


@callback(OPERATION)
def spread_token(parameters, thread, threads):
    """Every stream = x."""
    p = load_record(TokenParameters, parameters)
    s = load_record(Streams, p.streams)
    first, last = row_share(s.width, p.multiple, thread, threads)
    for i in range(s.n):
        copy_floats(s.streams + (i * s.width + first) * 4, s.x + first * 4, last - first)


@callback(OPERATION)
def read_token(parameters, thread, threads):
    """Weigh the streams. entering = what the part reads, x = 0; of the head, x = what the last norm reads."""
    p = load_record(TokenParameters, parameters)
    s, mixing = load_record(Streams, p.streams), load_record(Mixing, p.mixing)
    first, last = row_share(s.width, p.multiple, thread, threads)
    weights = s.weights + thread * s.record_bytes
    _weigh(mixing, s.n, s.logits, weights)
    out = s.x
    if mixing.iterations != 0:
        floats(s.x, s.width)[first:last] = np.float32(0)
        out = s.entering
    _read(s.streams, s.n, s.width, weights, first, last, out)


@callback(OPERATION)
def write_token(parameters, thread, threads):
    """Write what the part made to the streams, with the weights of `read_token`."""
    p = load_record(TokenParameters, parameters)
    s = load_record(Streams, p.streams)
    first, last = row_share(s.width, p.multiple, thread, threads)
    _write(s.streams, s.n, s.width, s.weights + thread * s.record_bytes, first, last, s.x)


@callback(OPERATION)
def spread_batch(parameters, thread, threads):
    """Every stream = x."""
    p = load_record(BatchParameters, parameters)
    s = load_record(Streams, p.streams)
    first, last = batch_share(p.state, thread, threads)
    for token in range(first, last):
        for i in range(s.n):
            copy_floats(s.streams + (token * s.n + i) * s.width * 4, s.x + token * s.width * 4, s.width)


@callback(OPERATION)
def read_batch(parameters, thread, threads):
    """As `read_token`, for each token."""
    p = load_record(BatchParameters, parameters)
    s, mixing = load_record(Streams, p.streams), load_record(Mixing, p.mixing)
    first, last = batch_share(p.state, thread, threads)
    count = (2 + s.n) * s.n if mixing.iterations != 0 else s.n
    for token in range(first, last):
        weights, at = s.weights + token * s.record_bytes, token * s.width * 4
        _weigh(mixing, s.n, s.logits + token * count * 4, weights)
        out = s.x + at
        if mixing.iterations != 0:
            floats(s.x + at, s.width)[:] = np.float32(0)
            out = s.entering + at
        _read(s.streams + at * s.n, s.n, s.width, weights, 0, s.width, out)


@callback(OPERATION)
def write_batch(parameters, thread, threads):
    """As `write_token`, for each token."""
    p = load_record(BatchParameters, parameters)
    s = load_record(Streams, p.streams)
    first, last = batch_share(p.state, thread, threads)
    for token in range(first, last):
        at = token * s.width * 4
        _write(s.streams + at * s.n, s.n, s.width, s.weights + token * s.record_bytes, 0, s.width, s.x + at)
