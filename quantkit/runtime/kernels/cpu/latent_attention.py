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

What depends on a type is a C function of six int64 (latent_rows.py), whose address is a parameter; the rest is compiled
once. This file has the operations of one token, latent_batch.py those of a batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from quantkit.codegen.callbacks import Callback, callback
from quantkit.codegen.jit import kernel
from quantkit.codegen.simd import (
    F32,
    IrBuilder,
    Value,
    call6,
    copy_floats,
    floats,
    load_float,
    load_int,
    simd_intrinsic,
    vector,
)
from quantkit.placement.kernel_sizes import LATENT_BLOCK
from quantkit.runtime.kernels.cpu.activations import quantize, quantize_range
from quantkit.runtime.kernels.cpu.decode_attention import apply_rope, span_softmax
from quantkit.runtime.kernels.cpu.decode_ops import rms_norm_into
from quantkit.runtime.kernels.cpu.kv_rows import LayerCache, LayerView, rotate, store_row
from quantkit.runtime.kernels.cpu.latent_rows import HeadMatrices, LatentRows, Sizes
from quantkit.runtime.kernels.cpu.operation import OPERATION, load_record, row_share
from quantkit.runtime.kernels.cpu.prefill_attention import decode_keys
from quantkit.runtime.kernels.cpu.selection import selected_positions
from quantkit.runtime.kernels.reference import exp

_FLOATS8, _FLOATS16 = vector(8, F32), vector(16, F32)
_MASKED = -1e30  # below any score


# ------------------------------------------------------------------------------------------------------------ queries


@kernel
def angles(view, position, rope):
    """cos and sin of a position, float32[rope / 2]."""
    return floats(view.cos + position * rope * 2, rope // 2), floats(view.sin + position * rope * 2, rope // 2)


@kernel
def scale_floats(x, n, factor):
    """float32[n] at an address, times a number."""
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
    cos, sin = angles(view, position, s.rope)
    dim, latent = s.nope + s.rope, s.kv_lora + s.rope
    buffer = p.scratch + thread * p.private_stride
    first, last = _head_share(s.heads, dim, p.multiple, thread, threads)
    for head in range(first, last):
        q, out, keys = p.q + head * dim * 4, p.out + head * latent * 4, matrices.keys + head * matrices.key_bytes
        scale = query_scale(load_float(p.scale), view, position, head, p.head_scale, p.head_bias)
        scale_floats(q, s.nope, scale)
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
    cos, sin = angles(load_record(LayerView, p.layer_view), load_int(p.position), s.rope)
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


# ---------------------------------------------------------------------------------------------------------- attention


@simd_intrinsic("void")
def block_scores(
    ir: IrBuilder, queries: Value, heads: Value, keys: Value, count: Value, dim: Value, scores: Value, row: Value
) -> None:
    """scores[h, i] = q[h] . key i, of queries float32[heads, dim] and keys float32[count, dim].

    Up to three more keys are read and multiplied, where `count` is no multiple of four. `row`: bytes from the scores of
    a head to those of the next.
    """

    together = 3 if ir.isa == "avx2" else 4 if ir.isa.startswith("avx512") else 1

    def tile(first: Value, n: int, h: Value, together: int) -> None:
        """`n` keys, a multiple of four, by `together` heads."""
        query, target = queries + h * dim * 4, scores + row * h
        if together == 3:
            with ir.loop(first, first + n, 2) as i:
                _scores_of_two_keys(ir, query, keys + i * dim * 4, dim, target + i * 4, row)
        else:
            with ir.loop(first, first + n, 4) as i:
                _scores_of_four_keys(ir, query, together, keys + i * dim * 4, dim, target + i * 4, row)

    whole = count & -8
    with ir.loop(0, whole, 8) as i:  # eight keys stay in the L1 cache for all heads
        _for_each_heads(ir, heads, together, functools.partial(tile, i, 8))
    with ir.loop(whole, count, 4) as i:
        _for_each_heads(ir, heads, together, functools.partial(tile, i, 4))


def _scores_of_four_keys(
    ir: IrBuilder, query: Value, together: int, keys: Value, dim: Value, scores: Value, row: Value
) -> None:
    """Scores of `together` heads."""
    sums = {(g, r): ir.variable(ir.zero(_FLOATS16)) for g in range(together) for r in range(4)}
    with ir.loop(0, dim, 16) as c:
        rows = [ir.load(_FLOATS16, keys + (dim * r + c) * 4) for r in range(4)]
        for g in range(together):
            x = ir.load(_FLOATS16, query + (dim * g + c) * 4)
            for r, key in enumerate(rows):
                sums[g, r].set(ir.fma(x, key, sums[g, r].get()))
    for g in range(together):
        ir.store(ir.sum4(*(sums[g, r].get() for r in range(4))), scores + row * g)


def _scores_of_two_keys(ir: IrBuilder, query: Value, keys: Value, dim: Value, scores: Value, row: Value) -> None:
    """Scores of three heads: twelve sums of eight lanes and what they take are in 16 registers.

    The bits are those of sums of 16 lanes: lanes 0 to 7 and 8 to 15 are apart until the end.
    """
    sums = {(g, r, half): ir.variable(ir.zero(_FLOATS8)) for g in range(3) for r in range(2) for half in (0, 8)}
    with ir.loop(0, dim, 16) as c:
        for half in (0, 8):
            rows = [ir.load(_FLOATS8, keys + (dim * r + c + half) * 4) for r in range(2)]
            for g in range(3):
                x = ir.load(_FLOATS8, query + (dim * g + c + half) * 4)
                for r, key in enumerate(rows):
                    sums[g, r, half].set(ir.fma(x, key, sums[g, r, half].get()))
    both = [ir.join(*(sums[g, r, 0].get() + sums[g, r, 8].get() for r in range(2))) for g in range(3)]
    first, last = ir.sums_of_halves(both[0], both[1]), ir.sums_of_halves(both[2], both[2])
    for g, pair in enumerate((ir.part(first, 0, 2), ir.part(first, 2, 2), ir.part(last, 0, 2))):
        ir.store(pair, scores + row * g)


@simd_intrinsic("void")
def block_values(
    ir: IrBuilder, weights: Value, row: Value, heads: Value, values: Value, stride: Value, count: Value, dim: Value,
    out: Value, out_stride: Value,
) -> None:  # fmt: skip
    """out[h] += sum over i of weights[h, i] * value i; `dim` is a multiple of 32, rows are `stride` bytes apart."""

    is_avx2 = ir.isa == "avx2"  # 16 registers of eight lanes: four heads by 16 columns; others: 64 columns at a time

    def tile(first: Value, columns: int, h: Value, together: int) -> None:
        """`columns` columns of `together` heads, a multiple of 16."""
        kind, width = (_FLOATS8, 16) if is_avx2 else (_FLOATS16, columns)
        for c in range(0, columns, width):
            _add_values(kind, width // kind.count, first + c, h, together)

    def _add_values(kind: Any, vectors: int, c: Value, h: Value, together: int) -> None:
        lanes = kind.count
        places = [(g, v) for g in range(together) for v in range(vectors)]
        targets = {(g, v): out + out_stride * (h + g) + (c + lanes * v) * 4 for g, v in places}
        sums = {place: ir.variable(ir.load(kind, target)) for place, target in targets.items()}
        with ir.loop(0, count) as i:
            value = [ir.load(kind, values + stride * i + (c + lanes * v) * 4) for v in range(vectors)]
            for g in range(together):
                weight = ir.splat(ir.load(F32, weights + row * (h + g) + i * 4), lanes)
                for v in range(vectors):
                    sums[g, v].set(ir.fma(weight, value[v], sums[g, v].get()))
        for place, target in targets.items():
            ir.store(sums[place].get(), target)

    together = 4 if is_avx2 or ir.isa.startswith("avx512") else 1
    whole = dim & -64  # these columns of a block stay in the L1 cache for all heads
    with ir.loop(0, whole, 64) as c:
        _for_each_heads(ir, heads, together, functools.partial(tile, c, 64))
    with ir.loop(whole, dim, 32) as c:
        _for_each_heads(ir, heads, together, functools.partial(tile, c, 32))


def _for_each_heads(ir: IrBuilder, heads: Value, together: int, tile: Callable[[Value, int], None]) -> None:
    """Call `tile(head, count)` for `together` heads at a time, whose sums are in registers, then for single ones."""
    whole = heads / together * together
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
            cos, sin = angles(view, position, s.rope)
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
    scale_floats(out, dim, np.float32(1) / denominator)


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
