"""Latent attention (MLA) in both plans: one latent row per token, shared by all heads.

A token's latent row is [c, r]: c float32[kv_lora] after its norm, r float32[rope] after RoPE. With `mla` 1 to 3 the K
cache holds it, in the K type. Head h has k_h [nope, kv_lora] and v_h [dim_v, kv_lora], and a query [a, b], where RoPE
is applied to b. There are two forms:

    absorbed    query rows [k_h^T a, b], keys are the latent rows, values their first kv_lora elements; then v_h
    expanded    keys [k_h c, r] and values v_h c of every position, then ordinary attention

Matrices are read as they are in the file: k_h by rows (kv_b) or transposed (k_b). One token multiplies them with
quantized activations, or where only the other side of k_h is stored, adds up decoded rows. Batches decode them.

One token is absorbed. A latent is decoded once for all heads; threads share the positions. Four heads by four positions
are multiplied at a time, from registers. That is bound by multiply-adds, 2 kv_lora + rope for each head and position;
with 16 heads it runs at 0.53 of the CPU's peak (scores 0.84, values 0.96, the rest is decoding and reading).

A batch is done in pieces of (sequence, tokens, heads), from the projection of queries to that of the result, so that
no buffer but a thread's scratch grows with the latents. An expanded piece is one head and all tokens, because keys and
values are computed for it once; an absorbed piece has as many heads as fit with its tokens.

What depends on a type is a C function of six int64, whose address is a parameter; the rest is compiled once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from quantkit.codegen.callbacks import Callback, callback
from quantkit.codegen.jit import kernel
from quantkit.codegen.simd import (
    F32,
    IrBuilder,
    Value,
    atomic_add,
    call6,
    copy_floats,
    floats,
    load_float,
    load_int,
    simd_intrinsic,
    store_int,
    vector,
)
from quantkit.placement.kernel_sizes import FLOAT_TILE_TOKENS, KEY_BLOCK, LATENT_BLOCK, LATENT_QUERIES
from quantkit.runtime.kernels.cpu.activations import quantize, quantize_range
from quantkit.runtime.kernels.cpu.decode_attention import apply_rope, span_softmax
from quantkit.runtime.kernels.cpu.decode_ops import rms_norm_into
from quantkit.runtime.kernels.cpu.dequantize import FLOAT_TYPES, decode_rows, decode_rows_into
from quantkit.runtime.kernels.cpu.float_gemm import copy_tile, transpose_block, transpose_rows
from quantkit.runtime.kernels.cpu.formats.registry import FORMATS
from quantkit.runtime.kernels.cpu.gemm import token_share
from quantkit.runtime.kernels.cpu.kv_rows import CACHE_BYTES, NAMES, LayerCache, LayerView, rotate, store_row
from quantkit.runtime.kernels.cpu.matvec import SIGNATURE
from quantkit.runtime.kernels.cpu.operation import OPERATION, load_record, row_share
from quantkit.runtime.kernels.cpu.prefill_attention import decode_keys, divide, matmul, softmax_update
from quantkit.runtime.kernels.cpu.prefill_ops import NEXT_PIECE, SPAN_BYTES, STATE_BYTES, BatchState, SpanState
from quantkit.runtime.kernels.cpu.selection import hide_others, selected_positions
from quantkit.runtime.kernels.reference import exp
from quantkit.types import layout

_FLOATS16 = vector(16, F32)
_MASKED = -1e30  # below any score
ABSORBED, FROM_TOKENS, BY_COST = 0, 1, 2  # which form a sequence of a batch takes: `AttentionParameters.form`
EXPAND = 128  # tokens from which on FROM_TOKENS expands


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


# ------------------------------------------------------------------------------------------------- one token: queries


@kernel
def _angles(view, position, rope):
    """cos and sin of a position, float32[rope / 2]."""
    return floats(view.cos + position * rope * 2, rope // 2), floats(view.sin + position * rope * 2, rope // 2)


@kernel
def _scale(x, n, factor):
    y = floats(x, n)
    for i in range(n):
        y[i] *= factor


@kernel
def query_scale(scale, view, position, head, head_scale, head_bias):
    """The factor of the query of a position and head; `head_scale` and `head_bias` are addresses of float32[heads]."""
    if view.query_factors == 0:
        return scale
    factor = load_float(view.query_factors + position * 4)
    if head_scale != 0:
        factor = load_float(head_scale + head * 4) * factor + load_float(head_bias + head * 4)
    return scale * factor


@kernel
def _head_share(heads, dim, multiple, thread, threads):
    """First and last + 1 of the heads whose rows a thread has computed, `dim` each; they were split at `multiple`."""
    first, last = row_share(heads * dim, multiple, thread, threads)
    return first // dim, last // dim


class QueriesParameters(NamedTuple):
    """Parameters of `absorbed_queries`."""

    position: int  # address of an int64
    sizes: int  # address of a Sizes
    matrices: int  # address of a HeadMatrices
    product: int  # function of matvec.py if keys are transposed, else `transposed_product`
    q: int  # float32[heads, nope + rope], overwritten
    multiple: int  # at which rows of q are split between threads
    scale: int  # address of a float32
    layer_view: int  # address of a LayerView
    rotate: int  # `rotator`, or 0
    out: int  # float32[heads, kv_lora + rope]
    scratch: int  # kernel_sizes.latent_scratch_bytes per thread
    private_stride: int
    head_scale: int = 0  # of blocks.HeadScaling
    head_bias: int = 0


@callback(OPERATION)
def absorbed_queries(parameters, thread, threads):
    """out[h] = [k_h^T a, rope(b)] * scale, rotated, for the thread's heads."""
    p = load_record(QueriesParameters, parameters)
    s, matrices = load_record(Sizes, p.sizes), load_record(HeadMatrices, p.matrices)
    view, position = load_record(LayerView, p.layer_view), load_int(p.position)
    cos, sin = _angles(view, position, s.rope)
    dim, latent = s.nope + s.rope, s.kv_lora + s.rope
    buffer = p.scratch + thread * p.private_stride
    first, last = _head_share(s.heads, dim, p.multiple, thread, threads)
    for head in range(first, last):
        q, out, keys = p.q + head * dim * 4, p.out + head * latent * 4, matrices.keys + head * matrices.key_bytes
        scale = query_scale(load_float(p.scale), view, position, head, p.head_scale, p.head_bias)
        _scale(q, s.nope, scale)
        if matrices.keys_transposed != 0:
            copy_floats(buffer, q, s.nope)
            quantize(buffer, s.nope)
            call6(p.product, keys, s.nope, 0, s.kv_lora, buffer, out)
        else:
            call6(p.product, keys, s.kv_lora, s.nope, q, out, buffer)
        b, y = floats(q + s.nope * 4, s.rope), floats(out + s.kv_lora * 4, s.rope)
        apply_rope(b, y, s.rope, cos, sin, s.rope, s.pair_step, s.pair_stride, scale)
    if p.rotate != 0:
        call6(p.rotate, p.out + first * latent * 4, (last - first) * latent, 0, 0, 0, 0)


class FullHeadsParameters(NamedTuple):
    """Parameters of `full_heads`."""

    position: int  # address of an int64
    sizes: int  # address of a Sizes
    matrices: int  # address of a HeadMatrices
    key_product: int  # `transposed_product` if keys are transposed, else a function of matvec.py
    value_product: int  # function of matvec.py
    q: int  # float32[heads, nope + rope], overwritten
    multiple: int  # at which rows of q are split between threads
    c: int  # activation buffer of the normalized latent
    c_stride: int
    kv: int  # float32[kv_lora + rope]: the latent before its norm, and r before RoPE
    layer_view: int  # address of a LayerView
    k: int  # float32[heads, nope + rope]
    v: int  # float32[heads, dim_v]
    scratch: int  # kernel_sizes.latent_scratch_bytes per thread
    private_stride: int


@callback(OPERATION)
def full_heads(parameters, thread, threads):
    """RoPE of q; k[h] = [k_h c, rope(r)] and v[h] = v_h c, for the thread's heads."""
    p = load_record(FullHeadsParameters, parameters)
    s, matrices = load_record(Sizes, p.sizes), load_record(HeadMatrices, p.matrices)
    cos, sin = _angles(load_record(LayerView, p.layer_view), load_int(p.position), s.rope)
    dim, one, c = s.nope + s.rope, np.float32(1), p.c + thread * p.c_stride
    r = floats(p.kv + s.kv_lora * 4, s.rope)
    first, last = _head_share(s.heads, dim, p.multiple, thread, threads)
    for head in range(first, last):
        q, k, v = p.q + head * dim * 4, p.k + head * dim * 4, p.v + head * s.dim_v * 4
        keys, values = matrices.keys + head * matrices.key_bytes, matrices.values + head * matrices.value_bytes
        if matrices.keys_transposed != 0:
            call6(p.key_product, keys, s.nope, s.kv_lora, c, k, p.scratch + thread * p.private_stride)
        else:
            call6(p.key_product, keys, s.kv_lora, 0, s.nope, c, k)
        call6(p.value_product, values, s.kv_lora, 0, s.dim_v, c, v)
        b = floats(q + s.nope * 4, s.rope)
        apply_rope(b, b, s.rope, cos, sin, s.rope, s.pair_step, s.pair_stride, one)
        y = floats(k + s.nope * 4, s.rope)
        apply_rope(r, y, s.rope, cos, sin, s.rope, s.pair_step, s.pair_stride, one)


# ----------------------------------------------------------------------------------------------- one token: attention


@simd_intrinsic("void")
def block_scores(
    ir: IrBuilder, queries: Value, heads: Value, keys: Value, count: Value, dim: Value, scores: Value, row: Value
) -> None:
    """scores[h, i] = q[h] . key i, of queries float32[heads, dim] and keys float32[count, dim].

    Up to three more keys are read and multiplied, where `count` is no multiple of four. `row`: bytes from the scores of
    a head to those of the next.
    """

    def tile(i: Value, h: Value, heads_at_once: int) -> None:
        query = queries + h * dim * 4
        sums = {(g, r): ir.variable(ir.zero(_FLOATS16)) for g in range(heads_at_once) for r in range(4)}
        with ir.loop(0, dim, 16) as c:
            rows = [ir.load(_FLOATS16, keys + ((i + r) * dim + c) * 4) for r in range(4)]
            for g in range(heads_at_once):
                x = ir.load(_FLOATS16, query + (dim * g + c) * 4)
                for r, key in enumerate(rows):
                    sums[g, r].set(ir.fma(x, key, sums[g, r].get()))
        for g in range(heads_at_once):
            ir.store(ir.sum4(*(sums[g, r].get() for r in range(4))), scores + i * 4 + row * (h + g))

    whole = count & -8
    with ir.loop(0, whole, 8) as first:  # eight keys stay in the L1 cache for all heads

        def two_tiles(h: Value, heads_at_once: int) -> None:
            with ir.loop(first, first + 8, 4) as i:
                tile(i, h, heads_at_once)

        _for_each_heads(ir, heads, two_tiles)
    with ir.loop(whole, count, 4) as i:
        _for_each_heads(ir, heads, functools.partial(tile, i))


@simd_intrinsic("void")
def block_values(
    ir: IrBuilder, weights: Value, row: Value, heads: Value, values: Value, stride: Value, count: Value, dim: Value,
    out: Value, out_stride: Value,
) -> None:  # fmt: skip
    """out[h] += sum over i of weights[h, i] * value i; `dim` is a multiple of 32, rows are `stride` bytes apart."""

    def tile(c: Value, vectors: int, h: Value, heads_at_once: int) -> None:
        places = [(g, v) for g in range(heads_at_once) for v in range(vectors)]
        targets = {(g, v): out + out_stride * (h + g) + (c + 16 * v) * 4 for g, v in places}
        sums = {place: ir.variable(ir.load(_FLOATS16, target)) for place, target in targets.items()}
        with ir.loop(0, count) as i:
            value = [ir.load(_FLOATS16, values + stride * i + (c + 16 * v) * 4) for v in range(vectors)]
            for g in range(heads_at_once):
                weight = ir.splat(ir.load(F32, weights + row * (h + g) + i * 4), 16)
                for v in range(vectors):
                    sums[g, v].set(ir.fma(weight, value[v], sums[g, v].get()))
        for place, target in targets.items():
            ir.store(sums[place].get(), target)

    whole = dim & -64  # these columns of a block stay in the L1 cache for all heads
    with ir.loop(0, whole, 64) as c:
        _for_each_heads(ir, heads, functools.partial(tile, c, 4))
    with ir.loop(whole, dim, 32) as c:
        _for_each_heads(ir, heads, functools.partial(tile, c, 2))


def _for_each_heads(ir: IrBuilder, heads: Value, tile: Callable[[Value, int], None]) -> None:
    """Call `tile(head, count)` for as many heads at a time as sums of four vectors each fit the CPU's registers."""
    together = 4 if ir.isa.startswith("avx512") else 1
    whole = heads & -together
    with ir.loop(0, whole, together) as h:
        tile(h, together)
    if together > 1:
        with ir.loop(whole, heads) as h:
            tile(h, 1)


class AttentionParameters(NamedTuple):
    """Parameters of `attention`."""

    position: int  # address of an int64
    sizes: int  # address of a Sizes
    queries: int  # float32[heads, kv_lora + rope], of `absorbed_queries`
    kv: int  # float32[kv_lora + rope]: the latent before its norm, and r before RoPE; overwritten
    weight: int  # float32[kv_lora], of the norm
    eps: int  # address of a float32
    layer_view: int  # address of a LayerView of one cache
    span: int  # positions per online-softmax step, a multiple of 16
    partial: int  # float32[threads, heads, kv_lora + 2]
    scratch: int  # kernel_sizes.latent_decode_bytes per thread
    private_stride: int
    selection: int = 0  # record of selection.py; 0: all positions


@functools.cache
def attention(rows: LatentRows) -> Callback:
    """The operation that appends a token's latent to the cache and writes the thread's share of attention to `partial`.

    As in decode_attention.py, the last thread's share ends with the token itself.
    """
    dim, dim_v, ggml_type, rotation = rows
    nbytes, width = rows.nbytes, dim_v + 2

    @kernel
    def decode(latents, chosen, first, count, out):
        if chosen == 0:
            decode_keys(ggml_type, latents + first * nbytes, nbytes, count, dim, out, dim * 4)
            return
        for i in range(count):
            row = latents + load_int(chosen + (first + i) * 8) * nbytes
            decode_keys(ggml_type, row, nbytes, 1, dim, out + i * dim * 4, dim * 4)

    @callback(OPERATION)
    def run(parameters, thread, threads):
        p = load_record(AttentionParameters, parameters)
        s, view, position, span = (
            load_record(Sizes, p.sizes),
            load_record(LayerView, p.layer_view),
            load_int(p.position),
            p.span,
        )
        latents, heads = load_record(LayerCache, view.caches).k, s.heads
        if thread == threads - 1:
            rms_norm_into(p.kv, p.weight, dim_v, load_float(p.eps), p.kv)
            cos, sin = _angles(view, position, s.rope)
            r = floats(p.kv + dim_v * 4, s.rope)
            apply_rope(r, r, s.rope, cos, sin, s.rope, s.pair_step, s.pair_stride, np.float32(1))
            rotate(p.kv, dim, rotation)
            store_row(ggml_type, p.kv, dim, latents + position * nbytes)
        decoded = p.scratch + thread * p.private_stride
        scores = decoded + LATENT_BLOCK * dim * 4
        partial = p.partial + thread * heads * width * 4
        out = floats(partial, heads * width)
        out[:] = 0
        for head in range(heads):
            out[head * width + dim_v] = _MASKED
        count, chosen = selected_positions(p.selection, position + 1)
        end = count * (thread + 1) // threads
        for start in range(count * thread // threads, end, span):
            stop = min(end, start + span)
            for block in range(start, stop, LATENT_BLOCK):
                positions = min(LATENT_BLOCK, stop - block)
                decode(latents, chosen, block, positions, decoded)
                block_scores(p.queries, heads, decoded, positions, dim, scores + (block - start) * 4, span * 4)
            for head in range(heads):
                span_softmax(scores + head * span * 4, 0, stop - start, 1, dim_v, partial + head * width * 4)
            for block in range(start, stop, LATENT_BLOCK):
                positions = min(LATENT_BLOCK, stop - block)
                if stop - start > LATENT_BLOCK:
                    decode(latents, chosen, block, positions, decoded)
                weights = scores + (block - start) * 4
                block_values(weights, span * 4, heads, decoded, dim * 4, positions, dim_v, partial, width * 4)

    return run


class MergeParameters(NamedTuple):
    """Parameters of `merge_values`."""

    partial: int  # float32[threads, heads, kv_lora + 2], of `attention`
    sizes: int  # address of a Sizes
    matrices: int  # address of a HeadMatrices
    product: int  # function of matvec.py for v_b
    rotate: int  # `rotator`, or 0
    out: int  # activation buffer of heads * dim_v columns
    scratch: int  # kernel_sizes.latent_scratch_bytes per thread
    private_stride: int


@kernel
def _merge_head(partial, threads, heads, head, dim, out):
    """out float32[dim] of one head, from all threads' partial results."""
    width = dim + 2
    parts, y = floats(partial, threads * heads * width), floats(out, dim)
    maximum = np.float32(_MASKED)
    for t in range(threads):
        maximum = max(maximum, parts[(t * heads + head) * width + dim])
    denominator = np.float32(0)
    y[:] = np.float32(0)
    for t in range(threads):
        part = parts[(t * heads + head) * width : (t * heads + head + 1) * width]
        rescale = exp(part[dim] - maximum)
        denominator += rescale * part[dim + 1]
        for i in range(dim):
            y[i] += rescale * part[i]
    _scale(out, dim, np.float32(1) / denominator)


@callback(OPERATION)
def merge_values(parameters, thread, threads):
    """out[h] = v_h times the merged result of head h, quantized, for the thread's share of the heads."""
    p = load_record(MergeParameters, parameters)
    s, matrices = load_record(Sizes, p.sizes), load_record(HeadMatrices, p.matrices)
    buffer = p.scratch + thread * p.private_stride
    first, last = row_share(s.heads, 1, thread, threads)
    for head in range(first, last):
        _merge_head(p.partial, threads, s.heads, head, s.kv_lora, buffer)
        if p.rotate != 0:
            call6(p.rotate, buffer, s.kv_lora, 0, 0, 0, 0)
        quantize(buffer, s.kv_lora)
        values = matrices.values + head * matrices.value_bytes
        call6(p.product, values, s.kv_lora, 0, s.dim_v, buffer, p.out + head * s.dim_v * 4)
    quantize_range(p.out, s.heads * s.dim_v, first * s.dim_v, last * s.dim_v)


# ---------------------------------------------------------------------------------------------------- a batch: latents


class LatentsParameters(NamedTuple):
    """Parameters of `latents`."""

    state: int
    sizes: int  # address of a Sizes
    q: int  # float32[tokens, heads, nope + rope], overwritten
    kv: int  # float32[tokens, kv_lora + rope], overwritten
    weight: int  # float32[kv_lora], of the norm
    eps: int  # address of a float32
    scale: int  # address of a float32: q is multiplied by it
    layer_view: int  # address of a LayerView
    write: int  # `latent_writer`; 0: latents are not cached, and q is not multiplied by the factors of positions
    row_bytes: int  # of the cache
    head_scale: int = 0  # of blocks.HeadScaling
    head_bias: int = 0


@callback(OPERATION)
def latents(parameters, thread, threads):
    """Norm of c, RoPE of r and of q in place; with `write`, latents are appended to the caches."""
    p = load_record(LatentsParameters, parameters)
    s, view, batch = load_record(Sizes, p.sizes), load_record(LayerView, p.layer_view), load_record(BatchState, p.state)
    scale, eps, one = load_float(p.scale), load_float(p.eps), np.float32(1)
    dim, latent = s.nope + s.rope, s.kv_lora + s.rope
    first, last = token_share(batch.tokens, thread, threads)
    for i in range(batch.spans):
        span = load_record(SpanState, p.state + STATE_BYTES + i * SPAN_BYTES)
        cache = load_record(LayerCache, view.caches + i * CACHE_BYTES)
        for token in range(max(first, span.start), min(last, span.start + span.tokens)):
            position = span.position + token - span.start
            cos, sin = _angles(view, position, s.rope)
            for head in range(s.heads):
                q, factor = p.q + (token * s.heads + head) * dim * 4, scale
                if p.write != 0:
                    factor = query_scale(scale, view, position, head, p.head_scale, p.head_bias)
                _scale(q, s.nope, factor)
                b = floats(q + s.nope * 4, s.rope)
                apply_rope(b, b, s.rope, cos, sin, s.rope, s.pair_step, s.pair_stride, factor)
            kv = p.kv + token * latent * 4
            rms_norm_into(kv, p.weight, s.kv_lora, eps, kv)
            r = floats(kv + s.kv_lora * 4, s.rope)
            apply_rope(r, r, s.rope, cos, sin, s.rope, s.pair_step, s.pair_stride, one)
            if p.write != 0:
                call6(p.write, kv, cache.k + position * p.row_bytes, 0, 0, 0, 0)
    if thread == 0:
        store_int(0, p.state + NEXT_PIECE)


class BatchHeadsParameters(NamedTuple):
    """Parameters of `full_batch_heads`."""

    state: int
    sizes: int  # address of a Sizes
    matrices: int  # address of a HeadMatrices
    read_keys: int  # `matrix_reader` to [kv_lora, nope]
    read_values: int  # `matrix_reader` to [kv_lora, dim_v]
    kv: int  # float32[tokens, kv_lora + rope], of `latents`; whole tiles
    k: int  # float32[tokens, heads, nope + rope]; whole tiles
    v: int  # float32[tokens, heads, dim_v]; whole tiles
    scratch: int  # two matrices of a head, float32, per thread
    private_stride: int


@callback(OPERATION)
def full_batch_heads(parameters, thread, threads):
    """k[t, h] = [k_h c, r] and v[t, h] = v_h c of all tokens, for the thread's share of the heads."""
    p = load_record(BatchHeadsParameters, parameters)
    s, m, count = (
        load_record(Sizes, p.sizes),
        load_record(HeadMatrices, p.matrices),
        load_record(BatchState, p.state).tokens,
    )
    dim, latent = s.nope + s.rope, (s.kv_lora + s.rope) * 4
    matrix = p.scratch + thread * p.private_stride
    decoded = matrix + max(s.nope, s.dim_v) * s.kv_lora * 4
    rows = -(-count // FLOAT_TILE_TOKENS) * FLOAT_TILE_TOKENS
    first, last = row_share(s.heads, 1, thread, threads)
    for head in range(first, last):
        k, v = p.k + head * dim * 4, p.v + head * s.dim_v * 4
        _read_matrix(p.read_keys, m.keys + head * m.key_bytes, s.nope, s.kv_lora, m.keys_transposed, matrix, decoded)
        matmul(p.kv, latent, matrix, s.nope * 4, s.kv_lora, k, s.heads * dim * 4, rows, s.nope, False)
        _read_matrix(p.read_values, m.values + head * m.value_bytes, s.dim_v, s.kv_lora, 0, matrix, decoded)
        matmul(p.kv, latent, matrix, s.dim_v * 4, s.kv_lora, v, s.heads * s.dim_v * 4, rows, s.dim_v, False)
        for token in range(count):
            r, y = p.kv + token * latent + s.kv_lora * 4, k + (token * s.heads * dim + s.nope) * 4
            copy_floats(y, r, s.rope)


@kernel
def _read_matrix(read, address, rows, n, transposed, out, scratch):
    """Decode a matrix [rows, n], stored as [n, rows] if `transposed`."""
    if transposed != 0:
        call6(read, address, n, rows, out, scratch, 0)
    else:
        call6(read, address, rows, n, out, scratch, 0)


# -------------------------------------------------------------------------------------------------- a batch: attention


class ReadMatrices(NamedTuple):
    """The matrices of heads for one form, and how they are decoded."""

    matrices: int  # address of a HeadMatrices
    read_keys: int  # `matrix_reader` to [nope, kv_lora]
    read_values: int  # `matrix_reader` to [kv_lora, dim_v]


class BatchAttentionParameters(NamedTuple):
    """Parameters of `batch_attention`."""

    state: int
    sizes: int  # address of a Sizes
    absorbed: int  # address of a ReadMatrices
    expanded: int
    read_latents: int  # `latent_reader`
    rotate: int  # `rotator`, or 0
    row_bytes: int  # of the cache
    q: int  # float32[tokens, heads, nope + rope], of `latents`; whole tiles
    layer_view: int  # address of a LayerView
    form: int  # ABSORBED, FROM_TOKENS or BY_COST
    rows: int  # query rows of an absorbed piece, at most: whole tiles
    step: int  # positions per online-softmax step of an absorbed piece, a multiple of KEY_BLOCK
    out: int  # float32[tokens, heads, dim_v]
    latents_floats: int  # kernel_sizes.latent_prefill_floats
    matrices_floats: int
    scratch: int  # their sum, per thread
    private_stride: int
    selection: int = 0  # a record of selection.py for each token; 0: all positions
    selection_bytes: int = 0


class _Piece(NamedTuple):
    """A thread's unit of work: heads `head` … of some tokens of one sequence."""

    span: int
    is_expanded: int
    head: int
    heads: int
    token: int  # of the batch
    tokens: int
    position: int  # of the first token


@kernel
def _is_expanded(s, form, tokens, position):
    """Which form costs fewer multiply-adds per head, with BY_COST."""
    if form != BY_COST:
        return form == FROM_TOKENS and tokens >= EXPAND
    pairs, project = tokens * (position + (tokens + 1) // 2), s.kv_lora * (s.nope + s.dim_v)
    positions = -(-(position + tokens) // KEY_BLOCK) * KEY_BLOCK
    expanded = positions * project + pairs * (s.nope + s.rope + s.dim_v)
    return expanded < tokens * project + pairs * (2 * s.kv_lora + s.rope)


@kernel
def _find_piece(p, s, number, threads):
    """The piece of a number; after the last one, its `span` is the number of sequences."""
    batch = load_record(BatchState, p.state)
    for i in range(batch.spans):
        span = load_record(SpanState, p.state + STATE_BYTES + i * SPAN_BYTES)
        is_expanded = _is_expanded(s, p.form, span.tokens, span.position)
        if is_expanded:
            chunks = max(1, min(2 * threads // s.heads, span.tokens // KEY_BLOCK))
            tokens, heads = -(-span.tokens // chunks), 1
        else:
            tokens = min(span.tokens, p.rows)
            rows = -(-tokens // FLOAT_TILE_TOKENS) * FLOAT_TILE_TOKENS
            heads = max(1, min(p.rows // rows, -(-s.heads // threads)))
        groups, chunks = -(-s.heads // heads), -(-span.tokens // tokens)
        if number < groups * chunks:
            head, first = number % groups * heads, (chunks - 1 - number // groups) * tokens  # the most keys first
            count = min(tokens, span.tokens - first)
            heads = min(heads, s.heads - head)
            return _Piece(i, int(is_expanded), head, heads, span.start + first, count, span.position + first)
        number -= groups * chunks
    return _Piece(batch.spans, 0, 0, 0, 0, 0, 0)


@callback(OPERATION)
def batch_attention(parameters, thread, threads):
    """out[t, h] = v_h softmax(q k^T) c for all tokens and heads. Threads take pieces until none is left."""
    p = load_record(BatchAttentionParameters, parameters)
    s, view = load_record(Sizes, p.sizes), load_record(LayerView, p.layer_view)
    spans = load_record(BatchState, p.state).spans
    scratch = p.scratch + thread * p.private_stride
    while True:
        piece = _find_piece(p, s, atomic_add(1, p.state + NEXT_PIECE), threads)
        if piece.span == spans:
            break
        rows = load_record(LayerCache, view.caches + piece.span * CACHE_BYTES).k
        if piece.is_expanded != 0:
            _expanded_piece(p, s, piece, rows, scratch)
        else:
            _absorbed_piece(p, s, piece, rows, scratch)


@kernel
def _read_block(p, s, rows, start, count, back, decoded, transposed):
    """Decode `count` latents and transpose them to [kv_lora + rope, KEY_BLOCK]; missing ones are 0."""
    dim = s.kv_lora + s.rope
    call6(p.read_latents, rows + start * p.row_bytes, count, decoded, back, 0, 0)
    floats(decoded, KEY_BLOCK * dim)[count * dim :] = 0
    for i in range(0, KEY_BLOCK, 16):
        for j in range(0, dim, 16):
            transpose_block(decoded + (i * dim + j) * 4, dim * 4, transposed + (j * KEY_BLOCK + i) * 4, KEY_BLOCK * 4)


@kernel
def _start(results, size, softmax_states, rows):
    """Clear results and softmax states."""
    floats(results, size)[:] = 0
    states = floats(softmax_states, rows * 2)
    for row in range(rows):
        states[2 * row], states[2 * row + 1] = _MASKED, 0


@kernel
def _project_queries(p, s, piece, matrices, decoded, queries):
    """queries[token, head] = [k_h^T a, b], rotated; keys of each head are decoded to `matrices`."""
    source, dim, latent = load_record(ReadMatrices, p.absorbed), s.nope + s.rope, s.kv_lora + s.rope
    m = load_record(HeadMatrices, source.matrices)
    stride, rows = piece.heads * latent * 4, -(-piece.tokens // FLOAT_TILE_TOKENS) * FLOAT_TILE_TOKENS
    for head in range(piece.heads):
        q, y = p.q + (piece.token * s.heads + piece.head + head) * dim * 4, queries + head * latent * 4
        keys = m.keys + (piece.head + head) * m.key_bytes
        _read_matrix(source.read_keys, keys, s.nope, s.kv_lora, m.keys_transposed, matrices, decoded)
        matmul(q, s.heads * dim * 4, matrices, s.kv_lora * 4, s.nope, y, stride, rows, s.kv_lora, False)
        for token in range(piece.tokens):
            r = q + (token * s.heads * dim + s.nope) * 4
            copy_floats(y + token * stride + s.kv_lora * 4, r, s.rope)
    if p.rotate != 0:
        call6(p.rotate, queries, piece.tokens * piece.heads * latent, 0, 0, 0, 0)


@kernel
def _project_values(p, s, piece, matrices, decoded, results, projected):
    """out[token, head] = v_h result; `projected` float32[tokens, dim_v], whole tiles."""
    source, rows = load_record(ReadMatrices, p.absorbed), -(-piece.tokens // FLOAT_TILE_TOKENS) * FLOAT_TILE_TOKENS
    m = load_record(HeadMatrices, source.matrices)
    for head in range(piece.heads):
        values = m.values + (piece.head + head) * m.value_bytes
        _read_matrix(source.read_values, values, s.dim_v, s.kv_lora, 0, matrices, decoded)
        x, stride = results + head * s.kv_lora * 4, piece.heads * s.kv_lora * 4
        matmul(x, stride, matrices, s.dim_v * 4, s.kv_lora, projected, s.dim_v * 4, rows, s.dim_v, False)
        out = p.out + (piece.token * s.heads + piece.head + head) * s.dim_v * 4
        copy_tile(projected, s.dim_v, out, s.heads * s.dim_v, piece.tokens, s.dim_v, 0)


@kernel
def _absorbed_piece(p, s, piece, rows, scratch):
    """Attention over latent rows; a query row is a token and a head."""
    latent, heads, step = s.kv_lora + s.rope, piece.heads, p.step
    decoded = scratch
    transposed = decoded + -(-KEY_BLOCK // FLOAT_TILE_TOKENS) * FLOAT_TILE_TOKENS * latent * 4
    matrices = scratch + p.latents_floats * 4
    queries = matrices + p.matrices_floats * 4
    results = queries + p.rows * max(latent, s.dim_v) * 4
    softmax_states = results + p.rows * s.kv_lora * 4
    scores = softmax_states + p.rows * 2 * 4
    count = piece.tokens * heads
    used = -(-count // FLOAT_TILE_TOKENS) * FLOAT_TILE_TOKENS
    _project_queries(p, s, piece, matrices, decoded, queries)
    _start(results, used * s.kv_lora, softmax_states, used)
    end = piece.position + piece.tokens
    for start in range(0, end, step):
        stop = min(start + step, end)
        for block in range(start, stop, KEY_BLOCK):
            keys, block_scores = min(KEY_BLOCK, stop - block), scores + (block - start) * 4
            _read_block(p, s, rows, block, keys, 0, decoded, transposed)
            columns = -(-keys // 32) * 32
            matmul(queries, latent * 4, transposed, KEY_BLOCK * 4, latent, block_scores, step * 4, used, columns, False)
        for row in range(count):
            visible, columns = piece.position + row // heads + 1 - start, -(-(stop - start) // 32) * 32
            if p.selection != 0:
                record = p.selection + (piece.token + row // heads) * p.selection_bytes
                hide_others(record, start, stop, scores + row * step * 4)
            softmax_update(
                scores + row * step * 4, columns, 0, visible, s.kv_lora, results + row * s.kv_lora * 4,
                softmax_states + row * 8,
            )  # fmt: skip
        for block in range(start, stop, KEY_BLOCK):
            keys, weights = min(KEY_BLOCK, stop - block), scores + (block - start) * 4
            if stop - start > KEY_BLOCK:
                _read_block(p, s, rows, block, keys, 0, decoded, transposed)
            columns = -(-keys // 32) * 32
            matmul(weights, step * 4, decoded, latent * 4, columns, results, s.kv_lora * 4, used, s.kv_lora, True)
    for row in range(count):
        result = results + row * s.kv_lora * 4
        divide(result, s.kv_lora, softmax_states + row * 8, 0, 0, result)
    if p.rotate != 0:
        call6(p.rotate, results, count * s.kv_lora, 0, 0, 0, 0)
    _project_values(p, s, piece, matrices, decoded, results, queries)


@kernel
def _expand_block(s, keys_of, values_of, decoded, transposed, keys, values):
    """keys float32[nope + rope, KEY_BLOCK] and values float32[KEY_BLOCK, dim_v] of a block of latents."""
    latent, rows = (s.kv_lora + s.rope) * 4, -(-KEY_BLOCK // FLOAT_TILE_TOKENS) * FLOAT_TILE_TOKENS
    padded = -(-s.nope // FLOAT_TILE_TOKENS) * FLOAT_TILE_TOKENS
    width = KEY_BLOCK * 4
    matmul(keys_of, s.kv_lora * 4, transposed, width, s.kv_lora, keys, width, padded, KEY_BLOCK, False)
    copy_floats(keys + s.nope * width, transposed + s.kv_lora * width, s.rope * KEY_BLOCK)
    matmul(decoded, latent, values_of, s.dim_v * 4, s.kv_lora, values, s.dim_v * 4, rows, s.dim_v, False)


@kernel
def _expanded_piece(p, s, piece, rows, scratch):
    """Attention of one head: keys and values of a block of latents at a time, for all tokens of the piece."""
    source, dim, latent = load_record(ReadMatrices, p.expanded), s.nope + s.rope, s.kv_lora + s.rope
    m = load_record(HeadMatrices, source.matrices)
    block_rows = -(-KEY_BLOCK // FLOAT_TILE_TOKENS) * FLOAT_TILE_TOKENS
    decoded = scratch
    transposed = decoded + block_rows * latent * 4
    keys_of = scratch + p.latents_floats * 4
    values_of = keys_of + s.nope * s.kv_lora * 4
    keys = keys_of + p.matrices_floats * 4
    values = keys + (dim + FLOAT_TILE_TOKENS) * KEY_BLOCK * 4
    scores = values + block_rows * s.dim_v * 4
    softmax_states = scores + LATENT_QUERIES * KEY_BLOCK * 4
    count = -(-piece.tokens // FLOAT_TILE_TOKENS) * FLOAT_TILE_TOKENS
    results = softmax_states + count * 2 * 4
    _read_matrix(
        source.read_keys, m.keys + piece.head * m.key_bytes, s.nope, s.kv_lora, m.keys_transposed, keys_of, decoded
    )
    _read_matrix(source.read_values, m.values + piece.head * m.value_bytes, s.dim_v, s.kv_lora, 0, values_of, decoded)
    _start(results, count * s.dim_v, softmax_states, count)
    q, stride = p.q + (piece.token * s.heads + piece.head) * dim * 4, s.heads * dim * 4
    end = piece.position + piece.tokens
    for start in range(0, end, KEY_BLOCK):
        block_keys = min(KEY_BLOCK, end - start)
        columns = -(-block_keys // 32) * 32
        _read_block(p, s, rows, start, block_keys, p.rotate, decoded, transposed)
        _expand_block(s, keys_of, values_of, decoded, transposed, keys, values)
        unseeing = max(0, start - piece.position) // FLOAT_TILE_TOKENS * FLOAT_TILE_TOKENS  # tokens before all keys
        for first in range(unseeing, piece.tokens, LATENT_QUERIES):
            tokens = min(LATENT_QUERIES, piece.tokens - first)
            used = -(-tokens // FLOAT_TILE_TOKENS) * FLOAT_TILE_TOKENS
            matmul(q + first * stride, stride, keys, KEY_BLOCK * 4, dim, scores, KEY_BLOCK * 4, used, columns, False)
            for row in range(tokens):
                visible, result = piece.position + first + row + 1 - start, results + (first + row) * s.dim_v * 4
                state = softmax_states + (first + row) * 8
                if p.selection != 0:
                    record = p.selection + (piece.token + first + row) * p.selection_bytes
                    hide_others(record, start, start + block_keys, scores + row * KEY_BLOCK * 4)
                softmax_update(scores + row * KEY_BLOCK * 4, columns, 0, visible, s.dim_v, result, state)
            result = results + first * s.dim_v * 4
            matmul(scores, KEY_BLOCK * 4, values, s.dim_v * 4, columns, result, s.dim_v * 4, used, s.dim_v, True)
    for token in range(piece.tokens):
        out = p.out + ((piece.token + token) * s.heads + piece.head) * s.dim_v * 4
        divide(results + token * s.dim_v * 4, s.dim_v, softmax_states + token * 8, 0, 0, out)
