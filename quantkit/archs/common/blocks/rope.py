"""Rotary position embeddings."""

from __future__ import annotations

from dataclasses import dataclass, replace


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
