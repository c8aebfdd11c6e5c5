"""`LayerState`, the state of a recurrent layer, and `State`, the copy of a sequence that `Cache.save` makes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from quantkit.archs.common.blocks import StateShapes
from quantkit.runtime.kv.cache_type import CacheType

Zeros = Callable[[tuple[int, ...], str], Any]  # of a shape and the name of a type of numbers, an array of a device
INCOMPLETE = -1  # position of a state that is being written: if an interrupt leaves it behind, it is of no sequence


@dataclass
class LayerState:
    """The state of a recurrent layer after the first `position` tokens of a sequence.

    inputs   float32[kernel - 1, channels]: inputs of the convolution for the last tokens, zero before the first
    heads    float32[value_heads, head_dim_k, head_dim_v]; of n-grams float32[1, 1, n - 1]: the last tokens, each
             plus 1, and 0 before the first
    """

    inputs: np.ndarray
    heads: np.ndarray
    position: int = 0

    @classmethod
    def zero(cls, shapes: StateShapes, zeros: Zeros = np.zeros) -> LayerState:
        """The state before the first token; `zeros` makes its arrays."""
        return cls(zeros(shapes.inputs, "float32"), zeros(shapes.heads, "float32"))

    @property
    def shapes(self) -> StateShapes:
        """The shapes of both arrays."""
        rows, channels = self.inputs.shape
        heads, dim_k, dim_v = self.heads.shape
        return StateShapes((rows, channels), (heads, dim_k, dim_v))

    @property
    def nbytes(self) -> int:
        """Bytes of both arrays."""
        return self.inputs.nbytes + self.heads.nbytes

    def take(self, other: LayerState) -> None:
        """Become a copy of another of the same sizes."""
        self.position = INCOMPLETE
        self.inputs[:], self.heads[:] = other.inputs, other.heads
        self.position = other.position


@dataclass(frozen=True)
class State:
    """A copy of the sequence in a cache: `Cache.save` makes it, `Cache.restore` copies it back.

    k, v     of each layer that attends uint8[n_head_kv, length, row bytes]
    states   of each recurrent layer, and of n-grams
    index    of each layer, where some have indexers of blocks, uint8[1, length, row bytes]
    """

    type: CacheType
    length: int
    k: list[np.ndarray]
    v: list[np.ndarray]
    states: dict[int, LayerState]
    index: list[np.ndarray] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        rows = sum(x.nbytes for x in (*self.k, *self.v, *self.index))
        return rows + sum(state.nbytes for state in self.states.values())
