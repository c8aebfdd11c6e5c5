"""Attention with keys and values of heads, and what it has beside: scaled queries, indexers that select positions."""

from __future__ import annotations

from dataclasses import dataclass

from quantkit.archs.common.blocks.linear import Linear, Norm
from quantkit.archs.common.blocks.rope import Rope


@dataclass(frozen=True)
class Temperature:
    """Position-dependent query scaling: a query at position p is times 1 + beta ln(1 + floor((p + offset) / n))."""

    beta: float
    length: int  # n
    offset: int = 0


@dataclass(frozen=True)
class HeadScaling:
    """Query scaling by position and head: a query of head h at position p is times scale[h] ln(p + 1) + bias[h]."""

    scale: str  # tensor float32[heads]
    bias: str  # tensor float32[heads]


@dataclass(frozen=True)
class BlockIndexer:
    """Selects whole blocks of `rate` positions for each KV head, the `top_blocks` ones with the largest scores.

    With y the normed input: q = q_norm(q(y)) split into heads, one for each KV head, k = k_norm(k(y)). RoPE is that of
    the attention; the cache holds k after it. The score of a block for head h is

        max over its positions t, up to the token's own, of q_h . k_t

    The last `local_blocks` blocks, of which the token's own is one, come before all others. Of equal scores the earlier
    block comes first. Of a selected block a token sees the positions up to its own.
    """

    q: Linear  # [heads * dim, n_embd]
    k: Linear  # [dim, n_embd]
    q_norm: Norm  # of each head; weight float32[dim]
    k_norm: Norm  # weight float32[dim]
    heads: int
    dim: int
    rate: int
    top_blocks: int
    local_blocks: int


@dataclass(frozen=True)
class PooledIndexer:
    """Selects whole blocks of `rate` positions that a token attends to, the `top_blocks` ones with the largest scores.

    With y the normed input: q = q_norm(q(y)) split into heads, k = k(y), which the cache holds. The key of a block is
    k_norm(mean of its k). RoPE is that of the attention: of queries at the token's position, of a key at its block's
    first one. The score of a block is

        sum over h of max(0, q_h . key)

    A token sees the blocks that end at it or before, and selects among them. It attends to all positions after the last
    of these too. Of equal scores the earlier block comes first.
    """

    q: Linear  # [heads * dim, n_embd]
    k: Linear  # [dim, n_embd]
    q_norm: Norm  # of each head; weight float32[dim]
    k_norm: Norm  # weight float32[dim]
    rope: Rope
    heads: int
    dim: int
    rate: int
    top_blocks: int


@dataclass(frozen=True)
class Attention:
    """x + out(attention(q, k, v of norm(x))); causal, query head i reads key/value head i * kv_heads // heads.

    Without a norm, q, k and v are of x itself. Where `v` is `k`, the values are the keys before norm and RoPE, with a
    norm of their own.

    With `gated`, the output of q holds, for each head, the query and then a gate, both float32[head_dim_k]; the output
    of the head is multiplied by sigmoid(gate).

    With `source`, keys and values are those that the layer of this number has cached: k, v, k_norm and v_norm are that
    layer's, and are not computed again.
    """

    norm: Norm | None
    q: Linear
    k: Linear
    v: Linear
    out: Linear
    heads: int
    kv_heads: int
    head_dim_k: int
    head_dim_v: int
    scale: float  # of the scores, before softmax
    rope: Rope
    window: int | None = None  # sliding window: a token attends to itself and to the window - 1 tokens before it
    q_norm: Norm | None = None  # of each head, before rope; weight float32[head_dim_k]
    k_norm: Norm | None = None
    v_norm: Norm | None = None  # of each head's value
    sinks: str | None = None  # tensor float32[heads]: an extra score per head in the softmax, whose value is 0
    norms_across_heads: bool = False  # q_norm and k_norm norm all heads as one vector of heads * head_dim_k
    norms_after_rope: bool = False  # q_norm and k_norm are applied after RoPE
    post_norm: Norm | None = None  # of the output of `out`, before the residual addition
    gated: bool = False
    head_gate: Linear | None = None  # [heads, n_embd]: the output of head h is multiplied by sigmoid(head_gate(y)[h])
    sub_norm: Norm | None = None  # of the output of the heads, before `out`; weight float32[heads * head_dim_v]
    indexer: BlockIndexer | PooledIndexer | None = None
    temperature: Temperature | None = None
    softcap: float | None = None  # c: scores s become c tanh(s / c) before softmax
    chunk: int | None = None  # a token attends to those before it in its own chunk of so many positions
    source: int | None = None  # a layer before this one
