"""The operations of a prompt's pass besides products: norm, rope and cache, attention, swiglu; see ops.py and gemm.py.

Tokens are rows of float32 arrays; a thread's share is a run of tokens, whole tiles of gemm.py, so that what follows on
the same tokens needs no wait. `state` is int64[3]: position of the first token, tokens, next piece of attention.
"""

from __future__ import annotations

import functools

import numpy as np

from quantkit.jit import Callback, callback, kernel
from quantkit.runtime.kernels.cpu.attention import keep, rope_into
from quantkit.runtime.kernels.cpu.floats import ROWS, float_tile, tile_lanes, transpose_block
from quantkit.runtime.kernels.cpu.gemm import token_share
from quantkit.runtime.kernels.cpu.ops import SIGNATURE, norm_into, swiglu_range
from quantkit.simd import F32, I16, Emit, Value, atomic_add, emitted, floats, load_float, load_int, store_int, vector

POSITION, TOKENS, PIECE = 0, 8, 16  # byte offsets in state
_FLOATS16 = vector(16, F32)

# ------------------------------------------------------------------------------------------------- norm, swiglu, rope

NORM = ("state", "x", "weight", "n", "eps", "out")


@callback(SIGNATURE)
def norm(p, thread, threads):
    """out = x / sqrt(mean(x^2) + eps) * weight, for each token."""
    n, eps = load_int(p + 24), load_float(load_int(p + 32))
    first, last = token_share(load_int(load_int(p) + TOKENS), thread, threads)
    for token in range(first, last):
        norm_into(load_int(p + 8) + token * n * 4, load_int(p + 16), n, eps, load_int(p + 40) + token * n * 4)


HEAD_NORM = ("state", "x", "weight", "heads", "dim", "eps")


@callback(SIGNATURE)
def head_norm(p, thread, threads):
    """Every head of x float32[tokens, heads, dim] normed in place."""
    heads, dim, eps = load_int(p + 24), load_int(p + 32), load_float(load_int(p + 40))
    first, last = token_share(load_int(load_int(p) + TOKENS), thread, threads)
    for head in range(first * heads, last * heads):
        norm_into(load_int(p + 8) + head * dim * 4, load_int(p + 16), dim, eps, load_int(p + 8) + head * dim * 4)


SWIGLU = ("state", "gate", "up", "n", "out")


@callback(SIGNATURE)
def swiglu(p, thread, threads):
    """out = gate * sigmoid(gate) * up; out may be gate."""
    n = load_int(p + 24)
    first, last = token_share(load_int(load_int(p) + TOKENS), thread, threads)
    swiglu_range(load_int(p + 8), load_int(p + 16), first * n, last * n, load_int(p + 32))


ROPE = ("state", "q", "k", "v", "cos", "sin", "rope_dim", "step", "pair", "k_cache", "v_cache", "kv_heads", "scale",
        "group", "dim_k", "dim_v", "width", "scratch", "stride")  # fmt: skip


@callback(SIGNATURE)
def rope(p, thread, threads):
    """Turn and scale q in place; put the turned k, and v, in the cache. `width` is 2 for a cache of halves, or 4."""
    state = load_int(p)
    rope_dim, step, pair = load_int(p + 48), load_int(p + 56), load_int(p + 64)
    kv_heads, group, scale = load_int(p + 88), load_int(p + 104), load_float(load_int(p + 96))
    dim_k, dim_v, half = load_int(p + 112), load_int(p + 120), load_int(p + 128) == 2
    turned = load_int(p + 136) + thread * load_int(p + 144)
    k_width, v_width = kv_heads * dim_k, kv_heads * dim_v
    first, last = token_share(load_int(state + TOKENS), thread, threads)
    for token in range(first, last):
        position = load_int(state + POSITION) + token
        cos = floats(load_int(p + 32) + position * rope_dim * 2, rope_dim // 2)
        sin = floats(load_int(p + 40) + position * rope_dim * 2, rope_dim // 2)
        for head in range(kv_heads * group):
            q = floats(load_int(p + 8) + (token * kv_heads * group + head) * dim_k * 4, dim_k)
            rope_into(q, q, dim_k, cos, sin, rope_dim, step, pair, scale)
        for head in range(kv_heads):
            k = floats(load_int(p + 16) + (token * kv_heads + head) * dim_k * 4, dim_k)
            rope_into(k, floats(turned + head * dim_k * 4, dim_k), dim_k, cos, sin, rope_dim, step, pair, np.float32(1))
        v = load_int(p + 24) + token * v_width * 4
        if half:
            keep(turned, k_width, 1, load_int(p + 72) + position * k_width * 2)
            keep(v, v_width, 1, load_int(p + 80) + position * v_width * 2)
        else:
            keep(turned, k_width, 0, load_int(p + 72) + position * k_width * 4)
            keep(v, v_width, 0, load_int(p + 80) + position * v_width * 4)
    if thread == 0:
        store_int(0, state + PIECE)


# ----------------------------------------------------------------------------------------------------------- attention

ATTENTION = ("state", "q", "k_cache", "v_cache", "kv_heads", "window", "out", "scratch", "stride")
QUERIES = 192  # rows of q (tokens times heads of a group) in a piece: decoding the keys for them is a small part
KEYS = 128  # positions at a time; a multiple of 32


def attention_scratch_bytes(group: int, dim_k: int, dim_v: int) -> int:
    """Of each thread: keys decoded and transposed, values decoded, queries, scores, results, tops and sums."""
    rows = piece_rows(group)
    wide = -(-dim_v // 32) * 32
    return 4 * (2 * KEYS * dim_k + KEYS * wide + rows * (dim_k + KEYS + wide + 2))


def piece_tokens(group: int) -> int:
    return max(1, QUERIES // group)


def piece_rows(group: int) -> int:
    """Rows of a piece, whole tiles."""
    return -(-piece_tokens(group) * group // ROWS) * ROWS


@emitted("void")
def _widen(
    e: Emit, half: int, rows: Value, stride: Value, count: Value, dim: int, out: Value, out_stride: Value
) -> None:
    """`count` rows of `dim` elements of a cache as float32; strides in bytes."""
    with e.loop(0, count) as i:
        for c in range(0, dim, 16):
            if half:
                v = e.half_to_float(e.load(vector(16, I16), rows + i * stride + 2 * c))
            else:
                v = e.load(_FLOATS16, rows + i * stride + 4 * c)
            e.store(v, out + i * out_stride + 4 * c)


@emitted("void")
def _soften(e, scores, count, first, last, dim, out, top_and_sum):
    """One row of the streaming softmax: scores[first .. last - 1] of `count` to e^(score - top), the others to 0.

    Where top grows, out float32[dim] and the sum shrink.
    """
    lowest = e.constant(_FLOATS16, -1e30)
    lanes = e.constant(vector(16, first.type), range(16))

    def masked(i):
        place = lanes + e.splat(i, 16)
        inside = e.between(place, e.splat(first, 16), e.splat(last, 16))
        return e.choose(inside, e.load(_FLOATS16, scores + i * 4), lowest)

    old = e.load(F32, top_and_sum)
    top = e.variable(e.splat(old, 16))
    with e.loop(0, count, 16) as i:
        top.set(e.max(top.get(), masked(i)))
    new = e.largest(top.get())
    total = e.variable(e.zero(_FLOATS16))
    with e.loop(0, count, 16) as i:
        weights = e.exp(masked(i) - e.splat(new, 16))
        e.store(weights, scores + i * 4)
        total.set(total.get() + weights)
    shrink = e.exp(e.splat(old - new, 16))
    with e.loop(0, dim, 16) as i:
        e.store(e.load(_FLOATS16, out + i * 4) * shrink, out + i * 4)
    e.store(new, top_and_sum)
    e.store(e.load(F32, top_and_sum + 4) * shrink.lane(0) + e.sum(total.get()), top_and_sum + 4)


@kernel
def _tiles(a, a_stride, b, b_stride, n, c, c_stride, rows, lanes, add):
    """c float32[rows, lanes] (+)= a b; whole tiles, strides in bytes."""
    for lane in range(0, lanes, tile_lanes()):
        for row in range(0, rows, ROWS):
            x, y, z = a + row * a_stride, b + lane * 4, c + row * c_stride + lane * 4
            if add:
                float_tile(x, a_stride, y, b_stride, n, z, c_stride, 1)
            else:
                float_tile(x, a_stride, y, b_stride, n, z, c_stride, 0)


@kernel
def _chunk(k_rows, v_rows, k_stride, v_stride, count, dim_k, dim_v, half, decoded, keys, values, wide):
    """Keys of some positions as float32[dim_k, KEYS], values as float32[KEYS, wide]; those that are missing as 0."""
    if half:
        _widen(1, k_rows, k_stride, count, dim_k, decoded, dim_k * 4)
        _widen(1, v_rows, v_stride, count, dim_v, values, wide * 4)
    else:
        _widen(0, k_rows, k_stride, count, dim_k, decoded, dim_k * 4)
        _widen(0, v_rows, v_stride, count, dim_v, values, wide * 4)
    floats(decoded, KEYS * dim_k)[count * dim_k :] = 0
    floats(values, KEYS * wide)[count * wide :] = 0
    for i in range(0, KEYS, 16):
        for j in range(0, dim_k, 16):
            transpose_block(decoded + (i * dim_k + j) * 4, dim_k * 4, keys + (j * KEYS + i) * 4, KEYS * 4)


@functools.cache
def attention(group: int, dim_k: int, dim_v: int, half: int) -> Callback:
    """The operation out = softmax(q k^T) v for all tokens and heads; q comes scaled. See attention.py.

    The threads take pieces, the ones with the most keys first, until there are none left.
    """
    tokens, rows = piece_tokens(group), piece_rows(group)
    wide, width = -(-dim_v // 32) * 32, 2 if half else 4

    @callback(SIGNATURE)
    def run(p, thread, threads):
        state, kv_heads, window = load_int(p), load_int(p + 32), load_int(p + 40)
        position, count = load_int(state + POSITION), load_int(state + TOKENS)
        k_stride, v_stride = kv_heads * dim_k * width, kv_heads * dim_v * width
        decoded = load_int(p + 56) + thread * load_int(p + 64)
        keys = decoded + KEYS * dim_k * 4
        values = keys + KEYS * dim_k * 4
        queries = values + KEYS * wide * 4
        scores = queries + rows * dim_k * 4
        results = scores + rows * KEYS * 4
        tops = results + rows * wide * 4
        pieces = -(-count // tokens) * kv_heads
        while True:
            piece = pieces - 1 - atomic_add(1, state + PIECE)
            if piece < 0:
                break
            head, first = piece % kv_heads, piece // kv_heads * tokens
            many = min(tokens, count - first)
            for t in range(many):
                x = load_int(p + 8) + ((first + t) * kv_heads + head) * group * dim_k * 4
                floats(queries + t * group * dim_k * 4, group * dim_k)[:] = floats(x, group * dim_k)
            floats(results, rows * wide)[:] = 0
            start = floats(tops, rows * 2)
            for row in range(rows):
                start[2 * row], start[2 * row + 1] = -1e30, 0
            begin = max(0, position + first + 1 - window) // KEYS * KEYS
            for at in range(begin, position + first + many, KEYS):
                here = min(KEYS, position + first + many - at)
                k = load_int(p + 16) + at * k_stride + head * dim_k * width
                v = load_int(p + 24) + at * v_stride + head * dim_v * width
                _chunk(k, v, k_stride, v_stride, here, dim_k, dim_v, half, decoded, keys, values, wide)
                used, lanes = -(-many * group // ROWS) * ROWS, -(-here // 32) * 32
                _tiles(queries, dim_k * 4, keys, KEYS * 4, dim_k, scores, KEYS * 4, used, lanes, False)
                for row in range(many * group):
                    seen = position + first + row // group + 1 - at
                    result = results + row * wide * 4
                    _soften(scores + row * KEYS * 4, lanes, max(0, seen - window), seen, dim_v, result, tops + row * 8)
                _tiles(scores, KEYS * 4, values, wide * 4, lanes, results, wide * 4, used, wide, True)
            for row in range(many * group):
                token, member = first + row // group, row % group
                y = floats(load_int(p + 48) + ((token * kv_heads + head) * group + member) * dim_v * 4, dim_v)
                x = floats(results + row * wide * 4, dim_v)
                inverse = np.float32(1) / start[2 * row + 1]
                for i in range(dim_v):
                    y[i] = x[i] * inverse

    return run
