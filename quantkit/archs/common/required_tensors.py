"""The tensors that a model's blocks name, and the shapes they must have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from quantkit.archs.common import blocks

Shapes = Iterator[tuple[str, tuple[int, ...]]]


class Shaped(Protocol):
    """What is asked of a tensor."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in numpy's order."""


def required(
    hp: blocks.HParams, parts: Sequence[blocks.Block], head: blocks.Head, tensors: Mapping[str, Shaped]
) -> Shapes:
    """(name, shape) of every tensor that the blocks, embedding, final norm and output name."""
    yield head.embedding, (hp.n_vocab, hp.n_embd)
    if head.embedding_factor:
        yield head.embedding_factor, (1,)
    yield from _norm(head.norm, hp.n_embd)
    yield from _linear(head.output, hp.n_vocab, hp.n_embd)
    for name in (block.out_scale for block in parts):
        if name:
            yield name, (1,)
    if isinstance(streams := head.streams, blocks.AltUpHead):
        for linear in streams.matrices:
            yield linear.weight, (streams.streams - 1, hp.n_embd, hp.n_embd)
    elif isinstance(streams, blocks.StreamMixer):
        yield from _mixer(streams, hp.n_embd)
    elif streams is not None:
        yield from _linear(streams.fn, streams.streams, streams.streams * hp.n_embd)
        yield streams.base, (streams.streams,)
        yield streams.scale, (1,)
    for connection in (connection for block in parts for connection in block.hyper):
        if connection is None:
            continue
        if isinstance(connection, blocks.StreamMixer):
            yield from _mixer(connection, hp.n_embd)
            continue
        n = connection.streams
        yield from _linear(connection.fn, (2 + n) * n, n * hp.n_embd)
        yield connection.base, ((2 + n) * n,)
        yield connection.scale, (3,)
    for altup in (block.altup for block in parts):
        yield from _altup(altup, hp.n_embd)
    for part in (part for block in parts for part in block.parts):
        yield from _norm(part.norm, hp.n_embd)
        if isinstance(part, blocks.Attention):
            yield from _attention(part, hp.n_embd)
        elif isinstance(part, blocks.LatentAttention):
            yield from _latent(part, hp.n_embd, tensors)
        elif isinstance(part, blocks.CompressedAttention):
            yield from _compressed(part, hp.n_embd)
        elif isinstance(part, blocks.DeltaNet):
            yield from _delta_net(part, hp.n_embd)
        elif isinstance(part, blocks.KimiDelta):
            yield from _kimi_delta(part, hp.n_embd, tensors)
        elif isinstance(part, blocks.Mamba2):
            yield from _mamba2(part, hp.n_embd)
        elif isinstance(part, blocks.ShortConv):
            yield from _short_conv(part, hp.n_embd)
        elif isinstance(part, blocks.LayerInput):
            yield from _layer_input(part, hp, parts)
        elif isinstance(part, blocks.Laurel):
            yield from _laurel(part, hp)
        elif isinstance(part, blocks.NGrams):
            yield from _ngrams(part, hp.n_embd)
        elif isinstance(part, blocks.Experts):
            yield from _experts(part, hp)
        else:
            yield from _gated(part, hp)


def required_of_mtp(hp: blocks.HParams, layers: Sequence[blocks.MtpLayer], tensors: Mapping[str, Shaped]) -> Shapes:
    """(name, shape) of every tensor that MTP layers name."""
    n = hp.n_embd
    for layer in layers:
        for norm in (layer.enorm, layer.hnorm):
            yield from _norm(norm, n)
        yield from _linear(layer.projection, n, 2 * n)
        yield from required(hp, [layer.block], blocks.Head(layer.embedding, layer.norm, layer.output), tensors)


def _attention(part: blocks.Attention, n_embd: int) -> Shapes:
    for norm, heads in ((part.q_norm, part.heads), (part.k_norm, part.kv_heads)):
        yield from _norm(norm, (heads if part.norms_across_heads else 1) * part.head_dim_k)
    if part.sinks:
        yield part.sinks, (part.heads,)
    yield from _norm(part.post_norm, n_embd)
    yield from _norm(part.sub_norm, part.heads * part.head_dim_v)
    if (indexer := part.indexer) is not None:
        yield from _linear(indexer.q, indexer.heads * indexer.dim, n_embd)
        yield from _linear(indexer.k, indexer.dim, n_embd)
        yield indexer.q_norm.weight, (indexer.dim,)
        yield indexer.k_norm.weight, (indexer.dim,)
    if part.head_gate is not None:
        yield from _linear(part.head_gate, part.heads, n_embd)
    yield from _factors(part.rope)
    yield from _linear(part.q, part.heads * part.head_dim_k * (2 if part.gated else 1), n_embd)
    yield from _linear(part.k, part.kv_heads * part.head_dim_k, n_embd)
    yield from _linear(part.v, part.kv_heads * part.head_dim_v, n_embd)
    yield from _linear(part.out, n_embd, part.heads * part.head_dim_v)


def _latent(part: blocks.LatentAttention, n_embd: int, tensors: Mapping[str, Shaped]) -> Shapes:
    rows, nope, lora = part.heads * part.head_dim_k, part.nope, part.kv_lora
    for linear, count, columns in (
        (part.q_a, part.q_lora, n_embd),
        (part.q, rows, part.q_lora or n_embd),
        (part.kv_a, part.latent, n_embd),
        (part.kv_b, part.heads * (nope + part.head_dim_v), lora),
        (part.out, n_embd, part.heads * part.head_dim_v),
    ):
        if linear is not None:
            yield from _linear(linear, count, columns)
    for linear, count, columns in ((part.k_b, lora, nope), (part.v_b, part.head_dim_v, lora)):
        if linear is not None:
            stacked = linear.weight in tensors and len(tensors[linear.weight].shape) == 3
            yield linear.weight, (part.heads, count, columns) if stacked else (part.heads * count, columns)
            if linear.scale:
                yield linear.scale, (1,)
    yield from _norm(part.q_a_norm, part.q_lora)
    yield from _norm(part.kv_a_norm, lora)
    yield from _scaling(part.scaling, part.heads)
    yield from _factors(part.rope)
    if (indexer := part.indexer) is not None:
        yield from _linear(indexer.q_b, indexer.heads * indexer.dim, part.q_lora or n_embd)
        yield from _norm(indexer.q_norm, part.q_lora or n_embd)
        yield from _scaling(indexer.scaling, indexer.heads)
        yield from _linear(indexer.k, indexer.dim, n_embd)
        yield from _linear(indexer.weights, indexer.heads, n_embd)
        yield from _norm(indexer.k_norm, indexer.dim)


def _compressed(part: blocks.CompressedAttention, n_embd: int) -> Shapes:
    width = part.heads * part.dim
    for linear, rows, columns in (
        (part.q_a, part.q_lora, n_embd),
        (part.q_b, width, part.q_lora),
        (part.kv, part.dim, n_embd),
        (part.out_a, part.groups * part.rank, width // part.groups),
        (part.out_b, n_embd, part.groups * part.rank),
    ):
        yield from _linear(linear, rows, columns)
    yield from _norm(part.q_a_norm, part.q_lora)
    yield from _norm(part.kv_norm, part.dim)
    yield part.sinks, (part.heads,)
    for compressor in part.compressors:
        for linear in (compressor.kv, compressor.gate):
            yield from _linear(linear, compressor.columns, n_embd)
        yield compressor.ape, (compressor.rate, compressor.columns)
        yield from _norm(compressor.norm, compressor.dim)
    if (indexer := part.indexer) is not None:
        yield from _linear(indexer.q_b, indexer.heads * indexer.dim, part.q_lora)
        yield from _linear(indexer.weights, indexer.heads, n_embd)


def _delta_net(part: blocks.DeltaNet, n_embd: int) -> Shapes:
    sizes = part.sizes
    for linear, rows in (
        (part.qkv, sizes.channels + (sizes.inner if part.gate is None else 0)),
        (part.gate, sizes.inner),
        (part.ba, 2 * sizes.value_heads),
        (part.beta, sizes.value_heads),
        (part.alpha, sizes.value_heads),
    ):
        if linear is not None:
            yield from _linear(linear, rows, n_embd)
    yield part.conv, (sizes.channels, sizes.kernel)
    yield part.a, (sizes.value_heads,)
    yield part.dt, (sizes.value_heads,)
    yield from _norm(part.out_norm, sizes.head_dim_v)
    yield from _linear(part.out, n_embd, sizes.inner)


def _kimi_delta(part: blocks.KimiDelta, n_embd: int, tensors: Mapping[str, Shaped]) -> Shapes:
    sizes, inner = part.sizes, part.sizes.inner
    for linear in (part.q, part.k, part.v):
        yield from _linear(linear, inner, n_embd)
    for down, up in ((part.f_a, part.f_b), (part.g_a, part.g_b)):
        yield from _linear(down, sizes.head_dim_k, n_embd)
        yield from _linear(up, inner, sizes.head_dim_k)
    yield from _linear(part.beta, sizes.value_heads, n_embd)
    for name, shape in (*((conv, (inner, 1, sizes.kernel)) for conv in part.convs), (part.a, (sizes.value_heads, 1))):
        # llama.cpp's converter writes four dimensions, of which the first are 1; its quantizer leaves those out
        whole = name in tensors and len(tensors[name].shape) == 4
        yield name, (1,) * (4 - len(shape)) + shape if whole else shape
    yield part.dt, (inner,)
    yield from _norm(part.out_norm, sizes.head_dim_v)
    yield from _linear(part.out, n_embd, inner)


def _mamba2(part: blocks.Mamba2, n_embd: int) -> Shapes:
    sizes = part.sizes
    for linear in (part.gate, part.entering, part.rate):
        yield from _linear(linear, 0, n_embd)
    yield part.conv, (sizes.channels, sizes.kernel)
    yield part.conv_bias, (sizes.channels,)
    for name in (part.a, part.skip):
        yield name, (sizes.value_heads, 1)
    yield part.dt, (sizes.value_heads,)
    yield part.out_norm.weight, (sizes.key_heads, part.group)
    yield from _linear(part.out, n_embd, sizes.inner)


def _short_conv(part: blocks.ShortConv, n_embd: int) -> Shapes:
    yield from _linear(part.in_proj, 3 * n_embd, n_embd)
    yield part.conv, (n_embd, part.sizes.kernel)
    yield from _linear(part.out, n_embd, n_embd)


def _layer_input(part: blocks.LayerInput, hp: blocks.HParams, parts: Sequence[blocks.Block]) -> Shapes:
    yield part.table, (hp.n_vocab, len(parts) * part.width)
    yield from _linear(part.project, 0, hp.n_embd)
    yield from _norm(part.project_norm, part.width)
    yield from _linear(part.gate, part.width, hp.n_embd)
    yield from _linear(part.out, hp.n_embd, part.width)
    yield from _norm(part.post_norm, hp.n_embd)


def _laurel(part: blocks.Laurel, hp: blocks.HParams) -> Shapes:
    yield from _linear(part.left, part.rank, hp.n_embd)
    yield from _linear(part.right, hp.n_embd, part.rank)
    yield from _norm(part.post_norm, hp.n_embd)


def _altup(part: blocks.AltUp | None, n_embd: int) -> Shapes:
    if part is None:
        return
    n = part.streams
    yield from _linear(part.router, n, n_embd)
    yield from _norm(part.router_norm, n_embd)
    yield part.predict, (n * n, n)
    yield part.correct, (n, n)
    yield part.correct_scale, (n_embd,)


def _mixer(part: blocks.StreamMixer, n_embd: int) -> Shapes:
    wide = part.streams * n_embd
    yield from _norm(part.norm, wide)
    yield from _linear(part.down, part.rank, wide)
    yield from _linear(part.up, wide, part.rank)
    if part.inject is not None:
        yield from _linear(part.inject, part.streams, wide)


def _ngrams(part: blocks.NGrams, n_embd: int) -> Shapes:
    wide, embedded = part.streams * n_embd, len(part.sizes) * part.width
    yield part.table, (-(-part.rows // blocks.TABLE_MULTIPLE) * blocks.TABLE_MULTIPLE, part.width)
    yield from _linear(part.key, wide, embedded)
    yield from _linear(part.value, n_embd, embedded)
    for norm in (part.key_norm, part.query_norm, part.conv_norm):
        yield from _norm(norm, wide)
    yield part.conv, (wide, part.kernel)


def _experts(part: blocks.Experts, hp: blocks.HParams) -> Shapes:
    yield from _linear(part.router, part.count, hp.n_embd)
    for norm in (part.router_norm, part.routed_norm, part.post_norm):
        yield from _norm(norm, hp.n_embd)
    if part.choice_bias:
        yield part.choice_bias, (part.count,)
    if part.table:
        yield part.table, (hp.n_vocab, part.used)
    gate_rows, width = 2 * part.ff if part.fused else part.ff, part.latent or hp.n_embd
    if part.latent_down is not None and part.latent_up is not None:
        yield from _linear(part.latent_down, width, hp.n_embd)
        yield from _linear(part.latent_up, hp.n_embd, width)
    for linear in part.matrices:
        rows, columns = (width, part.ff) if linear is part.down else (gate_rows, width)
        if linear.bias:
            yield linear.bias, (part.stacked, rows)
        if linear.scale:
            yield linear.scale, (part.stacked,)
        yield linear.weight, (part.stacked, rows, columns)
    if part.shared_gate is not None:
        yield part.shared_gate, (hp.n_embd,)
    if part.shared is not None:
        yield from _norm(part.shared.norm, hp.n_embd)
        yield from _gated(part.shared, hp)


def _gated(part: blocks.FeedForward, hp: blocks.HParams) -> Shapes:
    ff = part.ff or hp.n_ff
    yield from _norm(part.post_norm, hp.n_embd)
    yield from _norm(part.sub_norm, ff)
    yield from _linear(part.gate, ff, hp.n_embd)
    yield from _linear(part.up, ff, hp.n_embd)
    yield from _linear(part.down, hp.n_embd, ff)


def _factors(rope: blocks.Rope) -> Shapes:
    for name in (rope.factors, rope.long_factors):
        if name:
            yield name, (rope.factor_count or rope.dim // 2,)


def _scaling(scaling: blocks.HeadScaling | None, heads: int) -> Shapes:
    for name in (scaling.scale, scaling.bias) if scaling is not None else ():
        yield name, (heads,)


def _norm(norm: blocks.Norm | None, n: int) -> Shapes:
    for name in (norm.weight, norm.bias) if norm is not None else ():
        if name:
            yield name, (n,)


def _linear(linear: blocks.Linear, rows: int, columns: int) -> Shapes:
    if linear.rows is not None:  # the last of the matrices in a tensor says how many rows it has
        rows = linear.rows[1]
    yield linear.weight, (rows, columns)
    if linear.bias:
        yield linear.bias, (rows,)
    if linear.scale:
        yield linear.scale, (1,)
