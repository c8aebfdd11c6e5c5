"""The description of a model that the runtime executes: a list of blocks, each a list of parts that name their tensors.

    Model = embedding, Block(Attention, FeedForward or Experts) x n_layer, output norm, output

Every name is a GGUF tensor name; a name that is None is a tensor the file does not have. Shapes follow from HParams.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np


@dataclass(frozen=True)
class Yarn:
    """YaRN (rope scaling): high frequencies stay, low ones are interpolated, and a ramp blends the two in between."""

    original_context: int
    ext_factor: float = 1.0
    attn_factor: float = 1.0  # beyond the usual 1 + 0.1 ln(1 / scale), which multiplies cos and sin
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True  # round the bounds of the ramp to whole pairs


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding of the first `dim` elements of each head.

    Pair j is rotated by the angle position * scale * base^(-2j/dim) / factors[j]. The tensor of factors may have more
    elements, `factor_count`, than pairs.
    """

    style: str  # pair j is elements (2j, 2j + 1) in "norm", (j, j + dim/2) in "neox"
    dim: int
    base: float
    scale: float = 1.0  # 1/factor of linear scaling, and of YaRN's interpolated part
    factors: str | None = None  # tensor float32[dim/2]
    yarn: Yarn | None = None
    magnitude: float = 1.0  # of cos and sin, without YaRN
    long_factors: str | None = None  # stands for `factors` where the context has more than `short_context` positions
    short_context: int = 0
    factor_count: int | None = None

    def of_context(self, n_ctx: int) -> Rope:
        """The RoPE of a context of so many positions."""
        if self.long_factors is None:
            return self
        factors = self.long_factors if n_ctx > self.short_context else self.factors
        return replace(self, factors=factors, long_factors=None)

    def without_rotation(self) -> Rope:
        """What layers without RoPE have: no element is rotated."""
        return replace(self, dim=0, yarn=None, factors=None)


@dataclass(frozen=True)
class Norm:
    """y = x / sqrt(mean(x^2) + eps) * weight. With `centred`, x - mean(x) stands for x, as in LayerNorm.

    Only norms of queries and keys may have no weight: "", which stands for ones.
    """

    weight: str
    eps: float
    centred: bool = False
    bias: str | None = None  # tensor float32[n] that is added
    factor: float = 1.0  # of the weight


@dataclass(frozen=True)
class Linear:
    """y = factor (scale x W^T + bias).

    With `half`, W is the first (0) or second (1) half of the rows of each matrix of `weight`, and of its bias: gate or
    up of experts that are fused in one tensor. With `rows`, W and bias are these rows, first to last + 1, of larger
    tensors. With `number`, W is this matrix of a stack [matrices, rows, columns].
    """

    weight: str
    bias: str | None = None
    scale: str | None = None  # tensor float32[1]; of experts float32[experts]
    factor: float = 1.0
    half: int | None = None
    rows: tuple[int, int] | None = None
    number: int | None = None

    @property
    def is_scaled(self) -> bool:
        """Whether the product is multiplied by a number."""
        return self.scale is not None or self.factor != 1


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
    """Selects the blocks of `block` keys that a token attends to, `top_blocks` for each KV head, the last ones always.

    Up to `max_positions` positions all blocks are selected. The runtime does not select: it refuses longer sequences.
    """

    q: Linear
    k: Linear
    q_norm: Norm
    k_norm: Norm
    heads: int
    dim: int
    block: int
    top_blocks: int
    local_blocks: int

    @property
    def max_positions(self) -> int:
        """Positions up to which a token attends to all of them."""
        return self.block * self.top_blocks


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


class StateShapes(NamedTuple):
    """The shapes of a state (runtime/kv/saved_state.py): of the last inputs of a convolution, and of the heads."""

    inputs: tuple[int, int]
    heads: tuple[int, int, int]


@dataclass(frozen=True)
class Recurrence:
    """The dimensions of recurrent layers: of a gated delta rule, of Mamba-2, or of a short convolution only.

    kernel   width of the causal convolution, in positions; the last one is that of the token itself
    """

    kernel: int
    key_heads: int
    value_heads: int
    head_dim_k: int
    head_dim_v: int

    @property
    def keys(self) -> int:
        """Elements of a token's keys, all heads together."""
        return self.key_heads * self.head_dim_k

    @property
    def inner(self) -> int:
        """Elements of a token's values."""
        return self.value_heads * self.head_dim_v

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values; of Mamba-2 x, B and C."""
        return 2 * self.keys + self.inner

    @property
    def state_shapes(self) -> StateShapes:
        """The shapes of a layer's state."""
        return StateShapes((self.kernel - 1, self.channels), (self.value_heads, self.head_dim_k, self.head_dim_v))

    @classmethod
    def of_convolution(cls, kernel: int, channels: int) -> Recurrence:
        """Of layers whose state is that of the convolution alone: without keys, no head has a state."""
        return cls(kernel, key_heads=0, value_heads=1, head_dim_k=0, head_dim_v=channels)


@dataclass(frozen=True)
class DeltaNet:
    """Linear attention by a gated delta rule: x + out(o), causal. A value head has a state S [head_dim_k, head_dim_v].

    With y = norm(x), for each position t:

        q, k, v   silu(sum over j of conv[:, j] * qkv(y)[t - kernel + 1 + j]), split into heads
        q, k      each head divided by its norm, sqrt(sum(q^2) + 1e-6); q also by sqrt(head_dim_k)
        b, g      sigmoid(beta(y)), a * softplus(alpha(y) + dt): one of each per value head, a < 0
        S         S e^g; then S + k (b (v - S^T k))^T
        o         S^T q; then out_norm(o) * silu(gate(y)) per head, or sigmoid for silu

    Value head h reads key head h * key_heads // value_heads, or h % key_heads with `tiled`. `ba` is beta and alpha in
    one matrix: for each key head, the betas of its value heads and then their alphas. If `gate` is None, the output of
    qkv holds, for each key head, query, key, the values and the gates of its value heads.
    """

    norm: Norm | None
    qkv: Linear
    gate: Linear | None
    ba: Linear | None
    beta: Linear | None
    alpha: Linear | None
    conv: str  # tensor float32[channels, kernel]
    a: str  # tensor float32[value_heads]
    dt: str  # tensor float32[value_heads]
    out_norm: Norm  # weight float32[head_dim_v]
    out: Linear
    sizes: Recurrence
    tiled: bool
    gating: str = "swiglu"  # silu(gate(y)) * …; "sigmoid"


@dataclass(frozen=True)
class Mamba2:
    """A Mamba-2 mixer, a selective state space: x + out(o), causal. A head has a state S [head_dim_k, head_dim_v].

    With y = norm(x), for each position t:

        u, B, C   silu(conv_bias + sum over j of conv[:, j] * entering(y)[t - kernel + 1 + j])
        dt        softplus(rate(y) + dt): one for each head; a < 0
        S         e^(a dt) S + dt B u^T
        o         S^T C + skip u; then times silu(gate(y)), then an RMS norm of the heads of each group together

    In `sizes` the keys are B and C, and values are u: `value_heads` heads of u float32[head_dim_v], in `key_heads`
    groups of adjacent heads with one B and one C float32[head_dim_k]. u comes first in the convolution, then B, then C.
    gate, entering and rate are rows of one matrix.
    """

    norm: Norm
    gate: Linear
    entering: Linear
    rate: Linear
    conv: str  # tensor float32[channels, kernel]
    conv_bias: str  # tensor float32[channels]
    a: str  # tensor float32[value_heads]
    dt: str  # tensor float32[value_heads]
    skip: str  # tensor float32[value_heads]
    out_norm: Norm  # weight float32[inner]
    out: Linear
    sizes: Recurrence

    @property
    def group(self) -> int:
        """Elements of o that are normed together."""
        return self.sizes.inner // self.sizes.key_heads


@dataclass(frozen=True)
class KimiDelta:
    """Kimi Delta Attention: x + out(o), causal. A head has a state S [dim, dim], each row of which decays by itself.

    With y = norm(x), for each position t, per head:

        q, k, v   silu(sum over j of conv[:, j] * product(y)[t - kernel + 1 + j]), each with its own matrix and taps
        q, k      divided by their norm, sqrt(sum(q^2) + 1e-6); q also by sqrt(dim)
        b, g      sigmoid(beta(y)), a number; a * softplus(f_b(f_a(y)) + dt), float32[dim]; a < 0
        S         e^g S, row by row; then S + k (b (v - S^T k))^T
        o         S^T q; then out_norm(o) * sigmoid(g_b(g_a(y)))
    """

    norm: Norm
    q: Linear
    k: Linear
    v: Linear
    convs: tuple[str, str, str]  # tensors float32[inner, 1, kernel] of q, k and v
    f_a: Linear  # [dim, n_embd]
    f_b: Linear  # [inner, dim]
    beta: Linear  # [heads, n_embd]
    a: str  # tensor float32[heads, 1]
    dt: str  # tensor float32[inner]
    g_a: Linear  # [dim, n_embd]
    g_b: Linear  # [inner, dim]
    out_norm: Norm  # weight float32[dim]
    out: Linear
    sizes: Recurrence

    @property
    def matrices(self) -> tuple[Linear, ...]:
        """All of them."""
        return self.q, self.k, self.v, self.f_a, self.f_b, self.beta, self.g_a, self.g_b, self.out


@dataclass(frozen=True)
class ShortConv:
    """A gated short convolution: x + out(c * f), causal.

    With y = norm(x), [b, c, z] = in_proj(y), each float32[n_embd], for each position t:

        f         sum over j of conv[:, j] * (b * z)[t - kernel + 1 + j]
    """

    norm: Norm
    in_proj: Linear  # [3 n_embd, n_embd]
    conv: str  # tensor float32[n_embd, kernel]
    out: Linear
    sizes: Recurrence


RECURRENT = (DeltaNet, KimiDelta, Mamba2, ShortConv)  # the parts with a state


@dataclass(frozen=True)
class Indexer:
    """Lightning indexer: the positions that a token attends to, the `top_k` ones with the largest scores.

    With y = norm(x) and u the queries' latent, after q_a_norm, or y without a latent: q = q_b(u) split into heads,
    k = k_norm(k(y)), which the cache holds, w = weights(y). With `q_norm`, q_b gets q_norm(u). RoPE is applied to the
    first rope.dim elements of q and k. The score of position t is

        sum over h of w_h * max(0, q_h . k_t) * (heads * dim)^-0.5

    k_norm is a LayerNorm: its mean is taken away, `bias` is added. Of equal scores the earlier position comes first.
    """

    q_b: Linear
    k: Linear
    k_norm: Norm
    bias: str  # tensor float32[dim], of k_norm
    weights: Linear
    heads: int
    dim: int
    top_k: int
    rope: Rope
    q_norm: Norm | None = None
    scaling: HeadScaling | None = None  # of q


class EntrySizes(NamedTuple):
    """The sizes of the entries of a layer with compressed attention.

    rate        tokens of an entry; 0 without entries
    dim         elements of an entry
    index_dim   elements of a key of the indexer; 0 without one
    """

    rate: int
    dim: int
    index_dim: int


@dataclass(frozen=True)
class Compressor:
    """Entries that stand for windows of `rate` tokens each: those of a layer's cache, or the keys of its indexer.

    With y the normed input, c = kv(y) and z = gate(y) + ape[position % rate], of each element by itself, entry w is

        norm(sum over its tokens of softmax(z) c)

    and gets the RoPE of position w rate. Its tokens are those of window w. With `overlapping`, kv and gate have twice
    as many elements as an entry: the second half is that of window w, the first half that of window w - 1, and the
    softmax is over the tokens of both. Window 0 has none before it.
    """

    kv: Linear
    gate: Linear
    ape: str  # tensor float32[rate, columns]
    norm: Norm  # weight float32[dim]
    dim: int
    rate: int
    overlapping: bool

    @property
    def columns(self) -> int:
        """Elements of kv(y), and of gate(y)."""
        return self.dim * (2 if self.overlapping else 1)


@dataclass(frozen=True)
class EntryIndexer:
    """Lightning indexer over entries: the `top_k` ones with the largest scores, of those that a token may see.

    With y the normed input and u the queries' latent: q = q_b(u) split into heads, keys k_w are the entries of
    `compressor`, w = weights(y). RoPE is that of the attention. Scores are those of `Indexer`.
    """

    q_b: Linear
    weights: Linear
    compressor: Compressor
    heads: int
    top_k: int

    @property
    def dim(self) -> int:
        """Elements of a query and of a key."""
        return self.compressor.dim


@dataclass(frozen=True)
class CompressedAttention:
    """x + out(attention) over the last `window` tokens and over entries for windows of tokens; one key for all heads.

    With y = norm(x): u = q_a_norm(q_a(y)), q = q_b(u), each head divided by its root mean square; the key, which is the
    value too, is kv_norm(kv(y)). The last rope.dim elements of a head are rotated; those of what a head gets are
    rotated back by the token's position. A token at position p attends to the entries w with (w + 1) rate <= p + 1, of
    which `indexer` selects some. `sinks` is an extra score per head, as in Attention.

    The heads are in `groups` of adjacent ones; out_a [groups * rank, heads * dim / groups] has a matrix for each group,
    and out_b [n_embd, groups * rank] reads what they give.
    """

    norm: Norm
    q_a: Linear
    q_a_norm: Norm
    q_b: Linear
    q_norm: Norm  # of each head, without a weight
    kv: Linear
    kv_norm: Norm
    sinks: str
    out_a: Linear
    out_b: Linear
    compressor: Compressor | None
    indexer: EntryIndexer | None
    heads: int
    dim: int
    q_lora: int
    window: int
    groups: int
    rank: int
    scale: float
    rope: Rope

    @property
    def group_matrices(self) -> tuple[Linear, ...]:
        """The matrix of each group in out_a."""
        return tuple(replace(self.out_a, rows=(i * self.rank, (i + 1) * self.rank)) for i in range(self.groups))

    @property
    def compressors(self) -> tuple[Compressor, ...]:
        """That of the entries and that of the indexer's keys."""
        found = (self.compressor, self.indexer.compressor if self.indexer else None)
        return tuple(part for part in found if part is not None)

    @property
    def widest(self) -> int:
        """Elements of the longest entry or key of the indexer."""
        return max((part.dim for part in self.compressors), default=0)

    @property
    def kept(self) -> int:
        """Elements that the cache holds of a token where values would be: kv(y) and gate(y) of each compressor."""
        return sum(2 * part.columns for part in self.compressors)


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


@dataclass(frozen=True)
class Xielu:
    """The activation xIELU, which takes the place of act(z) z.

    positive z^2 + linear z for z > 0, else negative (e^min(z, limit) - 1 - z) + linear z
    """

    positive: float
    negative: float
    linear: float
    limit: float

    @property
    def numbers(self) -> np.ndarray:
        """float32[4], in the order of the fields, as kernels take them."""
        return np.array([self.positive, self.negative, self.linear, self.limit], np.float32)


Activation = str | Xielu  # a name, or an activation with numbers of its own


@dataclass(frozen=True)
class FeedForward:
    """x + down(act(gate(y)) * up(y)) with y = norm(x), or y = x without a norm.

    Where gate and up are one matrix, the feed-forward has no gate, and its activation is act(z) z with z = up(y), or
    `Xielu` of z, which is never gated.

    With a `cutoff` c (activation sparsity), max(0, gate(y) - mean - c std) stands for gate(y), with the mean and the
    standard deviation of all elements of gate(y).
    """

    norm: Norm | None
    gate: Linear
    up: Linear
    down: Linear
    activation: Activation = "swiglu"  # act is x * sigmoid(x); "geglu": GELU in its tanh form
    # "reglu": max(x, 0)
    # "relu2": max(x, 0)^2
    # "swiglu_clamped": x * sigmoid(x), gate(y) at most `limit`, up(y) within -limit … limit
    # "swiglu_oai": (1 + up) * gate * sigmoid(1.702 gate), gate clamped to at most 7, up to -7 … 7
    post_norm: Norm | None = None  # of the output of `down`, before the residual addition
    ff: int | None = None  # rows of gate and up; None: the model's n_ff
    sub_norm: Norm | None = None  # of the input of `down`
    limit: float | None = None  # L, of "swiglu": act(gate(y)) is at most L, up(y) within -L … L
    cutoff: float | None = None


@dataclass(frozen=True)
class Experts:
    """Mixture of experts: x + sum over e of w_e * down_e(act(gate_e(y)) * up_e(y)) with y = norm(x), or y = x.

    Of `count` experts the router selects the `used` ones with the largest p = gating(router(y)), which is a softmax
    over all or the sigmoid of each. Their weights are w_e = p_e * scale; with `normalise`, p_e is first divided by the
    sum over the selected experts.

    choice_bias   tensor float32[count] that is added to p for the selection, not in w
    groups        the experts are split into this many groups of consecutive ones, and selected from the `groups_used`
                  groups with the highest scores: the largest p of a group, with choice_bias the sum of the largest two
    weighs_inputs the outputs are not weighted: gate_e and up_e get w_e y
    shared        shared experts: a feed-forward that is applied to every token, to the same y or to a norm of its own
    router_norm   the router gets router_norm(x) in place of y
    routed_norm   of the sum over e, before the output of `shared` is added
    post_norm     of both together, before the residual addition. The three norms come together
    shared_gate   tensor float32[n_embd]: the output of `shared` is multiplied by sigmoid(shared_gate . y)
    latent_down   [latent, n_embd]: gate_e and up_e get latent_down(y), while the router and `shared` get y
    latent_up     [n_embd, latent]: of the sum over e, before the output of `shared` is added. The two come together,
                  without the three norms
    identity      the last so many of `count` experts have no matrices (zero-computation experts): they give y
    deferred      what the experts add is added at the end of the block, so that the parts in between do not see it

    Where gate and up are one matrix, an expert has no gate, as a FeedForward.
    gate, up: weights [count, ff, n_embd], or both halves of one [count, 2 ff, n_embd]; down: [count, n_embd, ff], with
    `stacked` for count. With latents they have `latent` for n_embd.

    gating "sqrtsoftplus": p = sqrt(ln(1 + e^router(y))), of each expert by itself
    table         tensor int32[n_vocab, used]: the experts of a token follow from its number, their weights from p
    """

    norm: Norm | None
    router: Linear
    gate: Linear
    up: Linear
    down: Linear
    count: int
    used: int
    ff: int
    normalise: bool
    scale: float = 1.0
    activation: Activation = "swiglu"
    limit: float | None = None  # as in FeedForward
    gating: str = "softmax"
    choice_bias: str | None = None
    groups: int = 1
    groups_used: int = 1
    weighs_inputs: bool = False
    shared: FeedForward | None = None
    shared_gate: str | None = None
    router_norm: Norm | None = None
    routed_norm: Norm | None = None
    post_norm: Norm | None = None
    latent_down: Linear | None = None
    latent_up: Linear | None = None
    latent: int = 0  # elements of a token's latent; 0 without latents
    table: str | None = None
    identity: int = 0
    deferred: bool = False

    @property
    def stacked(self) -> int:
        """The experts with matrices."""
        return self.count - self.identity

    @property
    def fused(self) -> bool:
        """Whether gate and up are halves of one tensor."""
        return self.gate.half is not None

    @property
    def ungated(self) -> bool:
        """Whether gate and up are one matrix, as in a FeedForward without a gate."""
        return self.gate == self.up

    @property
    def matrices(self) -> tuple[Linear, ...]:
        """One Linear for each tensor of the experts: gate, up and down, or gate (for both) and down."""
        return (self.gate, self.down) if self.fused or self.ungated else (self.gate, self.up, self.down)


@dataclass(frozen=True)
class LayerInput:
    """A per-layer embedding: x + post_norm(out(act(gate(x)) * u)), with GELU in its tanh form as act.

    u float32[width] is what the layer has of a token. With e the token's row of the model's embedding, scaled, and t
    columns first ... first + width - 1 of its row of `table`:

        u         2^-1/2 (project_norm(project(e)) + table_scale t)

    The table holds the vectors of all layers side by side, as rows of the matrix of `project` do one below the other.
    """

    gate: Linear  # [width, n_embd]
    out: Linear  # [n_embd, width]
    post_norm: Norm
    table: str  # tensor [vocabulary, layers * width]
    first: int
    table_scale: float
    project: Linear  # rows first ... first + width of [layers * width, n_embd]
    project_norm: Norm  # weight float32[width]
    width: int
    embedding: str
    embedding_scale: float
    embedding_factor: str | None = None  # as in Head
    norm: Norm | None = None  # the gate reads x itself


@dataclass(frozen=True)
class Laurel:
    """A learned augmented residual of low rank (LAuReL): x + y + post_norm(right(left(y))) with y = norm(x)."""

    norm: Norm
    left: Linear  # [rank, n_embd]
    right: Linear  # [n_embd, rank]
    post_norm: Norm
    rank: int


TABLE_MULTIPLE = 128  # rows of a table of n-grams; files have no key for it


@dataclass(frozen=True)
class NGrams:
    """Embeddings of n-grams, added to all residual streams: x + v + silu(f), x float32[streams * n_embd].

    A hash of a token's n-gram is (t_0 m_0 xor … xor t_(n-1) m_(n-1)) mod size, where t_j is the token j places before
    and m are the `multipliers`. Where there is none, or one of t_1 … t_j is `end`, t_j is `end` itself. The hashes are
    of n = 2 to `longest` tokens, as many of each. With e the rows of the table at hash + offset, one after another:

        g    for each stream, s = key_norm(key(e)) . query_norm(x) / sqrt(n_embd); sigmoid(sign(s) sqrt(max(|s|, 1e-6)))
        v    g value(e), of each stream
        f    sum over j of conv[:, j] * conv_norm(v)[t - (kernel - 1 - j) longest]

    The three norms are RMS norms of each stream, with a weight float32[streams * n_embd].
    """

    table: str  # tensor [rows, width]
    width: int
    key: Linear  # [streams * n_embd, hashes * width]
    value: Linear  # [n_embd, hashes * width]
    key_norm: Norm
    query_norm: Norm
    conv_norm: Norm
    conv: str  # tensor float32[streams * n_embd, kernel]
    kernel: int
    streams: int
    multipliers: tuple[int, ...]  # of each place in an n-gram
    sizes: tuple[int, ...]  # of each hash
    offsets: tuple[int, ...]
    end: int
    norm: Norm | None = None  # the streams have norms of their own

    @property
    def longest(self) -> int:
        """Tokens of the longest n-gram."""
        return len(self.multipliers)

    @property
    def past(self) -> int:
        """Tokens before the current one that the convolution reads, not all of them."""
        return (self.kernel - 1) * self.longest

    @property
    def rows(self) -> int:
        """Rows of the table that hashes name."""
        return max(offset + size for offset, size in zip(self.offsets, self.sizes))


Part = (
    Attention
    | LatentAttention
    | CompressedAttention
    | DeltaNet
    | KimiDelta
    | Mamba2
    | ShortConv
    | FeedForward
    | Experts
    | LayerInput
    | Laurel
    | NGrams
)


@dataclass(frozen=True)
class HyperConnection:
    """What a part of a block reads of `streams` residual streams x_i, and what it writes (mHC, Xie et al. 2026).

    With m = fn(norm(all streams as one vector)), split into pre [n], post [n] and comb [n, n], each times its number in
    `scale` plus its part of `base`:

        the part gets   sum over i of (sigmoid(pre_i) + eps) x_i
        x_k becomes     2 sigmoid(post_k) * what the part makes of it + sum over j of C_jk x_j

    C is softmax(comb) by rows, plus eps, made doubly stochastic: its columns are divided by their sums plus eps, then
    `iterations` - 1 times its rows and its columns.
    """

    fn: Linear  # [(2 + n) n, n * n_embd]
    base: str  # tensor float32[(2 + n) n]
    scale: str  # tensor float32[3]: of pre, post and comb
    norm: Norm  # without a weight
    streams: int
    iterations: int
    eps: float

    @property
    def matrices(self) -> tuple[Linear, ...]:
        """All of them."""
        return (self.fn,)


@dataclass(frozen=True)
class StreamMixer:
    """What a part of a block reads of n residual streams x_i, and what it writes, by a gate of low rank.

    With y_i = x_i / sqrt(mean(x_i^2) + eps) times the weight's part of stream i, and y all of them as one vector:

        the part gets   1/n sum over i of sigmoid(up(silu(down(y)))_i) y_i
        x_k becomes     x_k + 2 sigmoid(inject(y)_k) * what the part makes of it

    Without `inject` it is what the output matrix gets of the streams. down and inject have the factor 1/n.
    """

    norm: Norm  # weight float32[n * n_embd]
    down: Linear  # [rank, n * n_embd]
    up: Linear  # [n * n_embd, rank]
    inject: Linear | None  # [n, n * n_embd]
    streams: int
    rank: int

    @property
    def matrices(self) -> tuple[Linear, ...]:
        """All of them."""
        return (self.down, self.up) if self.inject is None else (self.down, self.up, self.inject)


@dataclass(frozen=True)
class StreamHead:
    """What the last norm gets of the streams: sum over i of (sigmoid(scale fn(norm(streams)) + base)_i + eps) x_i."""

    fn: Linear  # [n, n * n_embd]
    base: str  # tensor float32[n]
    scale: str  # tensor float32[1]
    norm: Norm
    streams: int
    eps: float

    @property
    def matrices(self) -> tuple[Linear, ...]:
        """All of them."""
        return (self.fn,)


Connection = HyperConnection | StreamHead | StreamMixer  # what reads residual streams


@dataclass(frozen=True)
class AltUp:
    """Alternating updates of `streams` residual streams x_i, float32[n_embd] each, of which a block computes the first.

    The parts of the block are Laurel, Attention, FeedForward and LayerInput. With m(x) = tanh(router(router_norm(x))),
    float32[n]:

        p_i     x_i + sum over j of P_ij x_j with P = predict m(x_0), n rows of n
        z       2^-1/2 (p_0 + what Laurel and attention make of p_0); then z + what the feed-forward makes of it
        x_i     becomes p_i + (1 + correct m(z))_i (z - p_0)
        x_i     for i > 0: and what the LayerInput makes of correct_scale x_0, added
    """

    router: Linear  # [n, n_embd]
    router_norm: Norm
    predict: str  # tensor float32[n * n, n]
    correct: str  # tensor float32[n, n]
    correct_scale: str  # tensor float32[n_embd]
    streams: int


@dataclass(frozen=True)
class AltUpHead:
    """The streams of AltUp before the first block and after the last. With r(x) = sqrt(mean(x^2)), at least `least`:

        before  x_0 is the embedding, x_i = p r(x_0) / r(p) with p = project_i(x_0)
        after   the mean of x_0 and of u r(x_0) / r(u), with u = merge_i(x_i), enters the last norm

    r(x_0) has no bound.
    """

    project: tuple[Linear, ...]  # [n_embd, n_embd], of all streams but the first
    merge: tuple[Linear, ...]
    streams: int
    least: float

    @property
    def matrices(self) -> tuple[Linear, ...]:
        """All of them."""
        return (*self.project, *self.merge)


@dataclass(frozen=True)
class Block:
    """One layer: its number and its parts, in the order in which they are computed.

    With `parallel` the parts have the same norm, and what each makes of the layer's input is added to it. All that
    leaves the block is multiplied by `out_scale`, a tensor float32[1].

    With `hyper`, one for each part, the block gets and gives streams float32[tokens, streams * n_embd], and what a part
    adds to the stream that it reads is given to all of them instead; None: the part reads and adds to all streams. With
    `altup` it gets and gives streams too.
    """

    layer: int
    parts: tuple[Part, ...]
    parallel: bool = False
    out_scale: str | None = None
    hyper: tuple[HyperConnection | StreamMixer | None, ...] = ()
    altup: AltUp | None = None
    layers: tuple[int, ...] = ()  # of each part, whose cache or state it uses; () where all are `layer`

    @property
    def numbered_parts(self) -> tuple[tuple[int, Part], ...]:
        """The layer of each part, and the part."""
        return tuple(zip(self.layers or (self.layer,) * len(self.parts), self.parts, strict=True))


@dataclass(frozen=True)
class Head:
    """Embedding, final norm and output matrix. If the two matrices are tied, `output` names the embedding.

    With a StreamHead or a StreamMixer, each stream of the first block is the embedding. Without a norm, the output
    matrix gets what the streams become.
    """

    embedding: str
    norm: Norm | None
    output: Linear
    embedding_scale: float = 1.0  # factor of the rows of the embedding
    embedding_factor: str | None = None  # tensor float32[1], another one: the scale of an NVFP4 embedding
    softcap: float | None = None  # c: logits x become c tanh(x / c)
    streams: StreamHead | StreamMixer | AltUpHead | None = None


@dataclass(frozen=True)
class MtpLayer:
    """A layer that predicts one token more: of the hidden state of a token and the token after it, the next but one.

    With h the trunk's state after its last norm, and e the row of `embedding` of the token after it:

        x       projection([enorm(e), hnorm(h)]), the embedding first
        g       norm(block(x)), causal over the x of all tokens before
        logits  output(g)

    A further step takes g in place of h, with the layer after this one, or with the last one again. llama.cpp,
    ik_llama.cpp (`build_mtp_input`) and SGLang (`deepseek_nextn`) do so; vLLM's `deepseek_mtp` passes block(x) on.
    """

    embedding: str
    enorm: Norm
    hnorm: Norm
    projection: Linear  # [n_embd, 2 n_embd]
    block: Block
    norm: Norm | None
    output: Linear
    embedding_scale: float = 1.0
    embedding_factor: str | None = None  # as in Head


@dataclass(frozen=True, kw_only=True)
class HParams:
    """Hyperparameters of a model, from its metadata. Architectures that need more of them derive a class."""

    arch: str
    n_layer: int
    n_ctx_train: int
    n_embd: int
    n_ff: int
    n_head: int
    n_head_kv: int
    head_dim_k: int
    head_dim_v: int
    n_vocab: int
    norm_eps: float
    centred_norms: bool = False  # norms are LayerNorms
    rope: Rope
    window: int | None = None
    n_expert: int = 0
    n_expert_used: int = 0
    n_ff_expert: int = 0
    normalises: bool = True  # weights of the selected experts are divided by their sum
    n_ff_shared: int = 0  # of all shared experts together
    n_leading_dense: int = 0  # layers before the first one with experts
    n_expert_groups: int = 1
    n_expert_groups_used: int = 1
    expert_scale: float = 1.0
    gating: str = "softmax"  # or "sigmoid"
    has_choice_bias: bool = False  # see Experts
    n_moe_latent: int = 0  # elements that the experts of a token get and give, where that is not n_embd
    recurrence: Recurrence | None = None
    recurrent: frozenset[int] = frozenset()  # the layers with a recurrence instead of attention
    n_mtp_layers: int = 0  # the last ones of n_layer, which are no part of the trunk
    kv_heads_of: tuple[int, ...] = ()  # of each layer, where they differ; n_head_kv is then the most
    head_dims_of: tuple[int, ...] = ()  # of keys and of values of each layer, where they differ; head_dim_k: the most
    kv_sources: tuple[int, ...] = ()  # the layer whose keys and values each layer attends to, where some share them
    unread: frozenset[str] = frozenset()  # tensors that a file may have and that no layer reads
    cached_dims_of: tuple[
        tuple[int, int], ...
    ] = ()  # of latents and of indexers' keys of each layer, where they differ
    tensors: frozenset[str] = frozenset()  # names in the file, which decide the optional parts

    @property
    def kv_shared(self) -> frozenset[int]:
        """Layers without keys and values of their own."""
        return frozenset(i for i, source in enumerate(self.kv_sources) if source != i)

    def head_dims(self, layer: int) -> tuple[int, int]:
        """Elements of a head's key and of its value in a layer."""
        if self.cached_dims_of:
            return self.cached_dims_of[layer]
        dim = self.head_dims_of[layer] if self.head_dims_of else 0
        return (dim, dim) if dim else (self.head_dim_k, self.head_dim_v)

    def entry_sizes(self, layer: int) -> EntrySizes | None:
        """The sizes of a layer's entries; None without compressed attention, and without blocks that it selects."""
        return None

    def block_index_dim(self, layer: int) -> int:
        """Elements of a token's key for the indexer of a layer, beside its keys and values; 0 without one."""
        return 0

    def further_states(self) -> dict[int, StateShapes]:
        """States beside those of recurrent layers, by their number in caches, from `n_layer` on."""
        return {}

    @property
    def has_own_head_dim(self) -> bool:
        """Whether n_head * head_dim differs from n_embd."""
        return self.head_dim_k * self.n_head != self.n_embd

    @property
    def n_main(self) -> int:
        """Layers without the MTP layers."""
        return self.n_layer - self.n_mtp_layers

    @property
    def rope_dim(self) -> int:
        """Elements of a head that get RoPE."""
        return self.rope.dim

    @property
    def rope_base(self) -> float:
        """The base of the RoPE frequencies (theta)."""
        return self.rope.base

    @property
    def rope_freq_factors(self) -> str | None:
        """The name of the tensor of frequency divisors, if there is one."""
        return self.rope.factors

    @property
    def tied(self) -> bool:
        """Whether the embedding is also the output matrix."""
        return "output.weight" not in self.tensors

    def linear(self, stem: str) -> Linear:
        """`stem`.weight, with `stem`.bias and `stem`.scale where the file has them."""
        bias, scale = (name if name in self.tensors else None for name in (f"{stem}.bias", f"{stem}.scale"))
        return Linear(f"{stem}.weight", bias, scale)

    def halves(self, stem: str) -> tuple[Linear, Linear]:
        """The two Linears whose rows are fused in the tensor `stem`."""
        whole = self.linear(stem)
        return replace(whole, half=0), replace(whole, half=1)

    def norm(self, stem: str) -> Norm:
        """The norm with weight `stem`.weight and the model's epsilon."""
        bias = f"{stem}.bias" if f"{stem}.bias" in self.tensors else None
        return Norm(f"{stem}.weight", self.norm_eps, self.centred_norms, bias)

    def feed_forward(self, i: int, norm: str = "ffn_norm", suffix: str = "", ff: int | None = None) -> FeedForward:
        """The feed-forward of layer `i`; `suffix` selects that of its shared experts."""
        gate, up, down = (self.linear(f"blk.{i}.ffn_{name}{suffix}") for name in ("gate", "up", "down"))
        return FeedForward(self.norm(f"blk.{i}.{norm}"), gate, up, down, ff=ff)
