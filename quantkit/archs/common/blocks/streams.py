"""Residuals of several streams: how parts read and merge them."""

from __future__ import annotations

from dataclasses import dataclass

from quantkit.archs.common.blocks.linear import Linear, Norm


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
