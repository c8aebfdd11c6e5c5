"""Recurrent layers: gated delta rules, Mamba-2, short convolutions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from quantkit.archs.common.blocks.linear import Linear, Norm


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
