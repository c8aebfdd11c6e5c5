"""Latent attention, and the indexer that selects positions for it."""

from __future__ import annotations

from dataclasses import dataclass

from quantkit.archs.common.blocks.attention import HeadScaling, Temperature
from quantkit.archs.common.blocks.linear import Linear, Norm
from quantkit.archs.common.blocks.rope import Rope


@dataclass(frozen=True)
class Indexer:
    """Lightning indexer: the positions that a token attends to, the `top_k` ones with the largest scores.

    With y = norm(x) and u the queries' latent, after q_a_norm, or y without a latent: q = q_b(u) split into heads,
    k = k_norm(k(y)), which the cache holds, w = weights(y). With `q_norm`, q_b gets q_norm(u). RoPE is applied to the
    first rope.dim elements of q and k. The score of position t is

        sum over h of w_h * max(0, q_h . k_t) * (heads * dim)^-0.5

    k_norm is a LayerNorm. Of equal scores the earlier position comes first.
    """

    q_b: Linear
    k: Linear
    k_norm: Norm
    weights: Linear
    heads: int
    dim: int
    top_k: int
    rope: Rope
    q_norm: Norm | None = None
    scaling: HeadScaling | None = None  # of q


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention: x + out(attention) where all heads share one latent of a token's key and value.

    With y = norm(x): q = q(q_a_norm(q_a(y))), or q(y) without q_a. Each head has `nope` elements without RoPE, then
    rope.dim with RoPE. [c, r] = kv_a(y); kv_a_norm is applied to c float32[kv_lora], RoPE to r float32[rope.dim]. The
    keys of head h are [k_h c, r], its values v_h c. k_h [nope, kv_lora] and v_h [head_dim_v, kv_lora] are rows of kv_b
    [heads * (nope + head_dim_v), kv_lora]; k_b [heads * kv_lora, nope] (k_h transposed) and v_b
    [heads * head_dim_v, kv_lora] hold them separately, and may have three dimensions. A model has kv_b, or k_b and
    v_b, or all three.

    With `sparse`, a token attends only to positions that its indexer selects, or, where the block has none, to those
    that the last block before it with an indexer has selected.
    """

    norm: Norm
    q_a: Linear | None
    q_a_norm: Norm | None
    q: Linear
    kv_a: Linear
    kv_a_norm: Norm
    kv_b: Linear | None
    k_b: Linear | None
    v_b: Linear | None
    out: Linear
    heads: int
    q_lora: int
    kv_lora: int
    nope: int
    head_dim_v: int
    scale: float  # of the scores, before softmax
    rope: Rope
    temperature: Temperature | None = None
    scaling: HeadScaling | None = None  # in place of a temperature
    sparse: bool = False
    indexer: Indexer | None = None

    @property
    def head_dim_k(self) -> int:
        """Elements of a head's query and key, with and without RoPE."""
        return self.nope + self.rope.dim

    @property
    def latent(self) -> int:
        """Elements of a token's c and r: the row that the KV cache holds."""
        return self.kv_lora + self.rope.dim
