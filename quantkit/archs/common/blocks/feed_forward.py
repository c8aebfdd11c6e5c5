"""Feed-forwards and mixtures of experts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quantkit.archs.common.blocks.linear import Linear, Norm


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
