"""What all blocks are made of: norms and products with matrices."""

from __future__ import annotations

from dataclasses import dataclass


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
