"""Operations of residual streams that gates of low rank mix (archs.blocks.StreamMixer).

They are plain in `runtime/blocks/hyper_connections.py`. The products with down, up and inject are operations between
them. Streams are float32[n, width] of a token.

For one token each thread norms all streams into its own activation buffer, and threads split the columns of the rest;
in a batch they split the tokens. Memory bounds them: each reads n or 2 n numbers for a column.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from quantkit.codegen.callbacks import callback
from quantkit.codegen.jit import kernel
from quantkit.codegen.simd import floats, load_float
from quantkit.runtime.kernels.cpu.activations import quantize
from quantkit.runtime.kernels.cpu.decode_ops import rms_norm_into
from quantkit.runtime.kernels.cpu.operation import OPERATION, load_record, row_share
from quantkit.runtime.kernels.cpu.prefill_ops import batch_share
from quantkit.runtime.kernels.reference import exp


class MixerParameters(NamedTuple):
    """Parameters of all operations of this file."""

    state: int  # address of a BatchState; 0 for one token
    streams: int  # float32[tokens, n, width]
    n: int
    width: int
    weight: int  # float32[n, width], of the norm
    eps: int  # address of a float32
    normed: int  # float32[tokens, n, width]; for one token an activation buffer of each thread
    normed_stride: int  # from one thread's to the next; 0 for a batch
    gates: int  # float32[tokens, n, width], before the sigmoid
    shares: int  # float32[tokens, n], before the sigmoid
    out: int  # float32[tokens, width]: what the part reads
    x: int  # float32[tokens, width]: what the part makes
    clears: int  # 1: x = 0 with what the part reads
    multiple: int  # columns that are not split between threads, of one token


@kernel
def norm_streams(streams, weight, n, width, eps, out):
    """out float32[n, width]: the RMS norm of each stream."""
    for i in range(n):
        at = i * width * 4
        rms_norm_into(streams + at, weight + at, width, eps, out + at)


@kernel
def _mix(normed, gates, n, width, first, last, out):
    """out = 1/n sum over streams of sigmoid(gates) * normed, columns first … last."""
    y, part = floats(out, width), np.float32(1) / np.float32(n)
    y[first:last] = np.float32(0)
    for i in range(n):
        x, gate = floats(normed + i * width * 4, width), floats(gates + i * width * 4, width)
        for c in range(first, last):
            y[c] += x[c] / (np.float32(1) + exp(-gate[c]))
    for c in range(first, last):
        y[c] *= part


@kernel
def _write(streams, shares, n, width, first, last, made):
    """Each stream += 2 sigmoid(its share) * made, columns first … last."""
    y, given = floats(made, width), floats(shares, n)
    for i in range(n):
        x, share = floats(streams + i * width * 4, width), np.float32(2) / (np.float32(1) + exp(-given[i]))
        for c in range(first, last):
            x[c] += share * y[c]


@callback(OPERATION)
def norm_token(parameters, thread, threads):
    """Write the norms of all streams, quantized, to the thread's activation buffer."""
    p = load_record(MixerParameters, parameters)
    buffer = p.normed + thread * p.normed_stride
    norm_streams(p.streams, p.weight, p.n, p.width, load_float(p.eps), buffer)
    quantize(buffer, p.n * p.width)


@callback(OPERATION)
def mix_token(parameters, thread, threads):
    """out = what the part reads of the streams that `norm_token` has normed; x = 0."""
    p = load_record(MixerParameters, parameters)
    first, last = row_share(p.width, p.multiple, thread, threads)
    _mix(p.normed + thread * p.normed_stride, p.gates, p.n, p.width, first, last, p.out)
    if p.clears != 0:
        floats(p.x, p.width)[first:last] = np.float32(0)


@callback(OPERATION)
def write_token(parameters, thread, threads):
    """Add what the part made to the streams."""
    p = load_record(MixerParameters, parameters)
    first, last = row_share(p.width, p.multiple, thread, threads)
    _write(p.streams, p.shares, p.n, p.width, first, last, p.x)


@callback(OPERATION)
def norm_batch(parameters, thread, threads):
    """The norms of all streams of each token."""
    p = load_record(MixerParameters, parameters)
    first, last = batch_share(p.state, thread, threads)
    for token in range(first, last):
        at = token * p.n * p.width * 4
        norm_streams(p.streams + at, p.weight, p.n, p.width, load_float(p.eps), p.normed + at)


@callback(OPERATION)
def mix_batch(parameters, thread, threads):
    """As `mix_token`, for each token."""
    p = load_record(MixerParameters, parameters)
    first, last = batch_share(p.state, thread, threads)
    for token in range(first, last):
        at = token * p.width * 4
        _mix(p.normed + at * p.n, p.gates + at * p.n, p.n, p.width, 0, p.width, p.out + at)
        if p.clears != 0:
            floats(p.x + at, p.width)[:] = np.float32(0)


@callback(OPERATION)
def write_batch(parameters, thread, threads):
    """As `write_token`, for each token."""
    p = load_record(MixerParameters, parameters)
    first, last = batch_share(p.state, thread, threads)
    for token in range(first, last):
        at = token * p.width * 4
        _write(p.streams + at * p.n, p.shares + token * p.n * 4, p.n, p.width, 0, p.width, p.x + at)
