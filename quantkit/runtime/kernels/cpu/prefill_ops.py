"""The operations of a prompt's pass besides products: norm, rope and cache, attention, swiglu; see ops.py and gemm.py.

Tokens are rows of float32 arrays; a thread's share is a run of tokens, whole tiles of gemm.py, so that what follows on
the same tokens needs no wait. The tokens may be the next ones of several sequences, each with a cache of its own:

    state    int64: tokens, next piece of attention, spans; then of each span its first token, its tokens, and the
             position of the first one in its sequence
    caches   int64[spans, 3]: addresses of keys and of values, and the positions there is room for
"""

from __future__ import annotations

import functools

import numpy as np

from quantkit.codegen.callbacks import Callback, callback
from quantkit.codegen.jit import kernel
from quantkit.codegen.simd import (
    F32,
    IrBuilder,
    Value,
    atomic_add,
    floats,
    load_float,
    load_int,
    simd_intrinsic,
    store_int,
    vector,
)
from quantkit.placement.kernel_sizes import KEYS, piece_bytes, piece_rows
from quantkit.runtime.kernels.cpu.attention import rope_into
from quantkit.runtime.kernels.cpu.decode_ops import SIGNATURE, norm_into, swiglu_range
from quantkit.runtime.kernels.cpu.float_gemm import ROWS, float_tile, tile_lanes, transpose_block
from quantkit.runtime.kernels.cpu.gemm import token_share
from quantkit.runtime.kernels.cpu.kv_rows import Heads, keep, rotate, row_floats

TOKENS, PIECE, SPANS, TABLE = 0, 8, 16, 24  # byte offsets in state
SPAN = 24  # bytes of a span, and of a cache
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


ROPE = ("state", "q", "k", "v", "cos", "sin", "rope_dim", "step", "pair", "caches", "kv_heads", "scale")


@functools.cache
def rope(shape: Heads) -> Callback:
    """The operation that turns, scales and rotates q in place, and puts k and v, both overwritten, in the caches."""
    group, dim_k, dim_v, k_type, v_type, rotate_k, rotate_v = shape
    k_bytes, v_bytes = shape.k_bytes, shape.v_bytes

    @callback(SIGNATURE)
    def run(p, thread, threads):
        state, caches = load_int(p), load_int(p + 72)
        rope_dim, step, pair = load_int(p + 48), load_int(p + 56), load_int(p + 64)
        kv_heads, scale = load_int(p + 80), load_float(load_int(p + 88))
        heads = kv_heads * group
        first, last = token_share(load_int(state + TOKENS), thread, threads)
        for s in range(load_int(state + SPANS)):
            span, cache = state + TABLE + s * SPAN, caches + s * SPAN
            begin, stop = load_int(span), load_int(span) + load_int(span + 8)
            k_cache, v_cache, n_ctx = load_int(cache), load_int(cache + 8), load_int(cache + 16)
            for token in range(max(first, begin), min(last, stop)):
                position = load_int(span + 16) + token - begin
                cos = floats(load_int(p + 32) + position * rope_dim * 2, rope_dim // 2)
                sin = floats(load_int(p + 40) + position * rope_dim * 2, rope_dim // 2)
                q, k = load_int(p + 8) + token * heads * dim_k * 4, load_int(p + 16) + token * kv_heads * dim_k * 4
                v = load_int(p + 24) + token * kv_heads * dim_v * 4
                for head in range(heads):
                    x = floats(q + head * dim_k * 4, dim_k)
                    rope_into(x, x, dim_k, cos, sin, rope_dim, step, pair, scale)
                for head in range(kv_heads):
                    x = floats(k + head * dim_k * 4, dim_k)
                    rope_into(x, x, dim_k, cos, sin, rope_dim, step, pair, np.float32(1))
                rotate(q, heads * dim_k, rotate_k)
                rotate(k, kv_heads * dim_k, rotate_k)
                rotate(v, kv_heads * dim_v, rotate_v)
                for head in range(kv_heads):
                    at = head * n_ctx + position
                    keep(k_type, k + head * dim_k * 4, dim_k, k_cache + at * k_bytes)
                    keep(v_type, v + head * dim_v * 4, dim_v, v_cache + at * v_bytes)
        if thread == 0:
            store_int(0, state + PIECE)

    return run


# ----------------------------------------------------------------------------------------------------------- attention

ATTENTION = ("state", "q", "caches", "kv_heads", "window", "span", "out", "scratch", "private_stride")


def attention_scratch_bytes(shape: Heads, tokens: int, span: int) -> int:
    """Of each thread, for pieces of `tokens` tokens and `span` positions at a time."""
    return piece_bytes(shape.group, shape.dim_k, shape.dim_v, tokens, span)


@simd_intrinsic("void")
def _decode(
    ir: IrBuilder, kind: int, rows: Value, stride: int, count: Value, dim: int, out: Value, out_stride: Value
) -> None:
    """`count` rows of a cache as float32; strides in bytes."""
    with ir.loop(0, count) as i:
        for c, v in row_floats(ir, kind, rows + i * stride, 0, dim):
            ir.store(v, out + i * out_stride + 4 * c)


@simd_intrinsic("void")
def _soften(ir, scores, count, first, last, dim, out, top_and_sum):
    """One row of the streaming softmax: scores[first .. last - 1] of `count` to e^(score - top), the others to 0.

    Where top grows, out float32[dim] and the sum shrink.
    """
    lowest = ir.constant(_FLOATS16, -1e30)
    lanes = ir.constant(vector(16, first.type), range(16))

    def masked(i):
        place = lanes + ir.splat(i, 16)
        inside = ir.between(place, ir.splat(first, 16), ir.splat(last, 16))
        return ir.choose(inside, ir.load(_FLOATS16, scores + i * 4), lowest)

    old = ir.load(F32, top_and_sum)
    top = ir.variable(ir.splat(old, 16))
    with ir.loop(0, count, 16) as i:
        top.set(ir.max(top.get(), masked(i)))
    new = ir.largest(top.get())
    total = ir.variable(ir.zero(_FLOATS16))
    with ir.loop(0, count, 16) as i:
        weights = ir.exp(masked(i) - ir.splat(new, 16))
        ir.store(weights, scores + i * 4)
        total.set(total.get() + weights)
    shrink = ir.exp(ir.splat(old - new, 16))
    with ir.loop(0, dim, 16) as i:
        ir.store(ir.load(_FLOATS16, out + i * 4) * shrink, out + i * 4)
    ir.store(new, top_and_sum)
    ir.store(ir.load(F32, top_and_sum + 4) * shrink.lane(0) + ir.sum(total.get()), top_and_sum + 4)


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
def _find(state, piece, tokens, kv_heads):
    """(span, piece within it) of a piece of attention; (spans, …) beyond the last."""
    for s in range(load_int(state + SPANS)):
        here = -(-load_int(state + TABLE + s * SPAN + 8) // tokens) * kv_heads
        if piece < here:
            return s, piece
        piece -= here
    return load_int(state + SPANS), piece


@kernel
def _begin(x, step, count, queries, width, results, size, tops, rows):
    """Queries float32[count, width] from rows of x `step` bytes apart; no results yet, tops below any score."""
    for t in range(count):
        floats(queries + t * width * 4, width)[:] = floats(x + t * step, width)
    floats(results, size)[:] = 0
    start = floats(tops, rows * 2)
    for row in range(rows):
        start[2 * row], start[2 * row + 1] = -1e30, 0


@kernel
def _columns(decoded, count, dim, keys):
    """keys float32[dim, KEYS] of `count` decoded ones; those that are missing are 0."""
    floats(decoded, KEYS * dim)[count * dim :] = 0
    for i in range(0, KEYS, 16):
        for j in range(0, dim, 16):
            transpose_block(decoded + (i * dim + j) * 4, dim * 4, keys + (j * KEYS + i) * 4, KEYS * 4)


@kernel
def _divide(result, dim, total, out):
    x, y = floats(result, dim), floats(out, dim)
    inverse = np.float32(1) / load_float(total)
    for i in range(dim):
        y[i] = x[i] * inverse


@functools.cache
def attention(shape: Heads, tokens: int) -> Callback:
    """The operation out = softmax(q k^T) v for all tokens and heads, `tokens` of them a piece; q comes scaled.

    As in attention.py, `span` positions at a time: KEYS for a streaming softmax, all there are for plain attention.
    The threads take pieces, the ones with the most keys of a sequence first, until there are none left.
    """
    group, dim_k, dim_v, k_type, v_type, _, rotate_v = shape
    k_bytes, v_bytes = shape.k_bytes, shape.v_bytes
    rows, wide = piece_rows(group, tokens), -(-dim_v // 32) * 32

    @callback(SIGNATURE)
    def run(p, thread, threads):
        state, kv_heads, window, span = load_int(p), load_int(p + 24), load_int(p + 32), load_int(p + 40)
        decoded = load_int(p + 56) + thread * load_int(p + 64)
        keys = decoded + KEYS * dim_k * 4
        values = keys + KEYS * dim_k * 4
        queries = values + KEYS * wide * 4
        results = queries + rows * dim_k * 4
        tops = results + rows * wide * 4
        scores = tops + rows * 2 * 4
        while True:
            s, piece = _find(state, atomic_add(1, state + PIECE), tokens, kv_heads)
            if s == load_int(state + SPANS):
                break
            table, cache = state + TABLE + s * SPAN, load_int(p + 16) + s * SPAN
            count, n_ctx = load_int(table + 8), load_int(cache + 16)
            head, first = piece % kv_heads, (-(-count // tokens) - 1 - piece // kv_heads) * tokens
            many, position = min(tokens, count - first), load_int(table + 16) + first
            k_rows, v_rows = load_int(cache) + head * n_ctx * k_bytes, load_int(cache + 8) + head * n_ctx * v_bytes
            place = (load_int(table) + first) * kv_heads + head  # of the first query and result, in groups
            x, step = load_int(p + 8) + place * group * dim_k * 4, kv_heads * group * dim_k * 4
            _begin(x, step, many, queries, group * dim_k, results, rows * wide, tops, rows)
            used = -(-many * group // ROWS) * ROWS
            for start in range(max(0, position + 1 - window) // KEYS * KEYS, position + many, span):
                stop = min(start + span, position + many)
                for at in range(start, stop, KEYS):
                    here, to = min(KEYS, stop - at), scores + (at - start) * 4
                    _decode(k_type, k_rows + at * k_bytes, k_bytes, here, dim_k, decoded, dim_k * 4)
                    _columns(decoded, here, dim_k, keys)
                    lanes = -(-here // 32) * 32
                    _tiles(queries, dim_k * 4, keys, KEYS * 4, dim_k, to, span * 4, used, lanes, False)
                for row in range(many * group):
                    seen, lanes = position + row // group + 1 - start, -(-(stop - start) // 32) * 32
                    mine, result = scores + row * span * 4, results + row * wide * 4
                    _soften(mine, lanes, max(0, seen - window), seen, dim_v, result, tops + row * 8)
                for at in range(start, stop, KEYS):
                    here, weights = min(KEYS, stop - at), scores + (at - start) * 4
                    _decode(v_type, v_rows + at * v_bytes, v_bytes, here, dim_v, values, wide * 4)
                    floats(values, KEYS * wide)[here * wide :] = 0
                    lanes = -(-here // 32) * 32
                    _tiles(weights, span * 4, values, wide * 4, lanes, results, wide * 4, used, wide, True)
            for row in range(many * group):
                out = load_int(p + 48) + ((place + row // group * kv_heads) * group + row % group) * dim_v * 4
                _divide(results + row * wide * 4, dim_v, tops + row * 8 + 4, out)
                rotate(out, dim_v, rotate_v)

    return run
