"""The tensors that a model's blocks name, and the shapes they must have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from quantkit.archs import blocks
from quantkit.errors import UnsupportedError
from quantkit.files.gguf import Tensor
from quantkit.runtime import latent, layers, recurrent

Shapes = Iterator[tuple[str, tuple[int, ...]]]


def needed(
    hp: blocks.HParams, parts: Sequence[blocks.Block], head: blocks.Head, weights: Mapping[str, Tensor]
) -> Shapes:
    """(name, shape) of every tensor that the blocks and what stands around them name."""
    yield head.embedding, (hp.n_vocab, hp.n_embd)
    yield head.norm.weight, (hp.n_embd,)
    yield from _linear_shapes(head.output, hp.n_vocab, hp.n_embd)
    for part in (part for block in parts for part in block.parts):
        yield part.norm.weight, (hp.n_embd,)
        if isinstance(part, blocks.Attention):
            for norm, heads in ((part.q_norm, part.heads), (part.k_norm, part.kv_heads)):
                if norm is not None:
                    yield norm.weight, ((heads if part.norms_together else 1) * part.head_dim_k,)
            if part.sinks:
                yield part.sinks, (part.heads,)
            if part.post_norm is not None:
                yield part.post_norm.weight, (hp.n_embd,)
            if part.sub_norm is not None:
                yield part.sub_norm.weight, (part.heads * part.head_dim_v,)
            if part.rope.factors:
                yield part.rope.factors, (part.rope.dim // 2,)
            yield from _linear_shapes(part.q, part.heads * part.head_dim_k * (2 if part.gated else 1), hp.n_embd)
            yield from _linear_shapes(part.k, part.kv_heads * part.head_dim_k, hp.n_embd)
            yield from _linear_shapes(part.v, part.kv_heads * part.head_dim_v, hp.n_embd)
            yield from _linear_shapes(part.out, hp.n_embd, part.heads * part.head_dim_v)
        elif isinstance(part, blocks.LatentAttention):
            yield from latent.shapes(part, weights, hp.n_embd)
        elif isinstance(part, blocks.DeltaNet):
            yield from recurrent.shapes(part, hp.n_embd)
        elif isinstance(part, blocks.Experts):
            yield from _expert_shapes(part, hp)
        else:
            yield from _gated_shapes(part, hp)


def _expert_shapes(part: blocks.Experts, hp: blocks.HParams) -> Shapes:
    _require_activation(part)
    yield from _linear_shapes(part.router, part.count, hp.n_embd)
    if part.choice_bias:
        yield part.choice_bias, (part.count,)
    for linear, rows, columns in (
        (part.gate, part.ff, hp.n_embd),
        (part.up, part.ff, hp.n_embd),
        (part.down, hp.n_embd, part.ff),
    ):
        if linear.bias:
            yield linear.bias, (part.count, rows)
        yield linear.weight, (part.count, rows, columns)
    if part.shared_gate is not None:
        yield part.shared_gate, (hp.n_embd,)
    if part.shared is not None:
        yield from _gated_shapes(part.shared, hp)


def _gated_shapes(part: blocks.FeedForward, hp: blocks.HParams) -> Shapes:
    _require_activation(part)
    ff = part.ff or hp.n_ff
    if part.post_norm is not None:
        yield part.post_norm.weight, (hp.n_embd,)
    if part.sub_norm is not None:
        yield part.sub_norm.weight, (ff,)
    yield from _linear_shapes(part.gate, ff, hp.n_embd)
    yield from _linear_shapes(part.up, ff, hp.n_embd)
    yield from _linear_shapes(part.down, hp.n_embd, ff)


def _require_activation(part: blocks.FeedForward | blocks.Experts) -> None:
    if part.activation not in layers.ACTIVATIONS:
        raise UnsupportedError(f"{part.up.weight}: the runtime has no activation '{part.activation}'")


def _linear_shapes(linear: blocks.Linear, rows: int, columns: int) -> Shapes:
    yield linear.weight, (rows, columns)
    if linear.bias:
        yield linear.bias, (rows,)
    if linear.scale:
        yield linear.scale, (1,)
