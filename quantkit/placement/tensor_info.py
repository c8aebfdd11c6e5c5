"""What placement asks of a tensor."""

from __future__ import annotations

from typing import Protocol

from quantkit.types.base import QuantType


class TensorInfo(Protocol):
    """Type and shape of a tensor: a tensor of a file, a TensorSpec and a PlannedTensor have them."""

    @property
    def type(self) -> QuantType:
        """The type that the tensor is stored in."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in numpy's order: rows last but one."""
