"""Operations of embeddings of n-grams (archs.blocks.NGrams); plain in `runtime/blocks/ngrams.py`.

The rows of the table are looked up before an operation list runs, and the products with key and value are operations
before these. A batch is spans of several sequences, as in prefill_ops.py; a single token is a batch of one.

    gate        threads split the tokens: scores of keys and streams, v, its norm; v is added to the streams |
    convolve    threads split the channels: the dilated convolution of the norms, SiLU, add; the states advance |

For one token that leaves the first to one thread: it reads a few times the numbers of the streams, once in a model.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from quantkit.codegen.callbacks import callback
from quantkit.codegen.jit import kernel
from quantkit.codegen.simd import copy_floats, floats, load_float
from quantkit.runtime.kernels.cpu.decode_ops import rms_norm_into, rms_scale
from quantkit.runtime.kernels.cpu.delta_net import STATES_BYTES, LayerStates, StatesView
from quantkit.runtime.kernels.cpu.operation import OPERATION, load_record, row_share
from quantkit.runtime.kernels.cpu.prefill_ops import SPAN_BYTES, STATE_BYTES, BatchState, SpanState, batch_share
from quantkit.runtime.kernels.reference import exp

_LEAST = np.float32(1e-6)  # of the scores whose roots are taken


class NGramParameters(NamedTuple):
    """Parameters of `gate` and `convolve`."""

    state: int  # address of a BatchState
    layer_states: int  # address of a StatesView
    streams: int  # float32[tokens, n, width]
    n: int
    width: int
    keys: int  # float32[tokens, n, width]; `gate` makes it the inputs of the convolution
    value: int  # float32[tokens, width]
    key_weight: int  # float32[n, width], of norms
    query_weight: int
    conv_weight: int
    key_eps: int  # addresses of float32
    query_eps: int
    conv_eps: int
    taps: int  # float32[kernel, n, width]
    kernel: int
    dilation: int
    multiple: int  # channels that are not split between threads


@kernel
def _score(key, key_weight, key_scale, query, query_weight, query_scale, width):
    """The product of a stream's normed key and query, over sqrt(width)."""
    k, a, q, b = floats(key, width), floats(key_weight, width), floats(query, width), floats(query_weight, width)
    total = 0.0
    for c in range(width):
        total += (k[c] * key_scale * a[c]) * (q[c] * query_scale * b[c])
    return np.float32(total / np.sqrt(width))


@kernel
def _gate(score):
    """sigmoid(sign(score) sqrt(max(|score|, 1e-6)))."""
    root = np.sqrt(max(abs(score), _LEAST))
    signed = root if score > 0 else (-root if score < 0 else np.float32(0))
    if score != score:
        signed = score
    return np.float32(1) / (np.float32(1) + exp(-signed))


@callback(OPERATION)
def gate(parameters, thread, threads):
    """v is added to the streams; keys become conv_norm(v)."""
    p = load_record(NGramParameters, parameters)
    first, last = batch_share(p.state, thread, threads)
    width = p.width
    for token in range(first, last):
        value = floats(p.value + token * width * 4, width)
        for i in range(p.n):
            at, weight = (token * p.n + i) * width * 4, i * width * 4
            key, stream = p.keys + at, p.streams + at
            key_scale = rms_scale(key, width, load_float(p.key_eps))
            query_scale = rms_scale(stream, width, load_float(p.query_eps))
            score = _score(key, p.key_weight + weight, key_scale, stream, p.query_weight + weight, query_scale, width)
            share, v, x = _gate(score), floats(key, width), floats(stream, width)
            for c in range(width):
                v[c] = share * value[c]
            for c in range(width):
                x[c] += v[c]
            rms_norm_into(key, p.conv_weight + weight, width, load_float(p.conv_eps), key)


@kernel
def _add_taps(p, past, inputs, t, out, first, last):
    """out float32[channels] += silu of the convolution at token t of a span; `past` rows are before token 0."""
    stride, rows = p.n * p.width * 4, (p.kernel - 1) * p.dilation
    x = floats(out, p.n * p.width)
    for c in range(first, last):
        total = np.float32(0)
        for j in range(p.kernel):
            at = t - (p.kernel - 1 - j) * p.dilation
            row = inputs + at * stride if at >= 0 else past + (rows + at) * stride
            total += load_float(p.taps + j * stride + c * 4) * load_float(row + c * 4)
        x[c] += total / (np.float32(1) + exp(-total))


@kernel
def _advance(past, rows, inputs, tokens, stride, first, last):
    """`past` float32[rows, channels] becomes the last inputs, channels first … last."""
    for row in range(rows):
        at = row + tokens - rows
        source = inputs + at * stride if at >= 0 else past + (row + tokens) * stride
        copy_floats(past + row * stride + first * 4, source + first * 4, last - first)


@callback(OPERATION)
def convolve(parameters, thread, threads):
    """The convolution of what `gate` left in keys, added to the streams; states get the last inputs."""
    p = load_record(NGramParameters, parameters)
    view, channels = load_record(StatesView, p.layer_states), p.n * p.width
    stride = channels * 4
    first, last = row_share(channels, p.multiple, thread, threads)
    for s in range(load_record(BatchState, p.state).spans):
        span = load_record(SpanState, p.state + STATE_BYTES + s * SPAN_BYTES)
        past, inputs = load_record(LayerStates, view.states + s * STATES_BYTES).inputs, p.keys + span.start * stride
        for t in range(span.tokens):
            _add_taps(p, past, inputs, t, p.streams + (span.start + t) * stride, first, last)
        _advance(past, (p.kernel - 1) * p.dilation, inputs, span.tokens, stride, first, last)
