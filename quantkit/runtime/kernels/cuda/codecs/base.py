"""How a codec is made of the function that reads a unit, and fields that several families state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from quantkit.runtime.kernels.cuda.fields import Place, place
from quantkit.runtime.kernels.cuda.reader import Codec, Reader, Unit
from quantkit.types import get

Fields = Sequence[Place]


def own(width: int, addresses: np.ndarray | Sequence[int]) -> Place:
    """A field of a type that no other interleaves, by its bit addresses in a block (`types/interleave.packed` …)."""
    return place(width, addresses)


def codecs(
    fields: Mapping[str, Fields], group: int = 32, floor: bool = False, tail: int = 0
) -> Callable[[Callable[[Reader], Unit]], list[Codec]]:
    """Decorator: the codecs of these types, whose units one function reads. Sizes are those of the types' records."""

    def make(read: Callable[[Reader], Unit]) -> list[Codec]:
        made = []
        for name, places in fields.items():
            kind = get(name)
            rows, head = kind.interleave, kind.interleave * kind.row_meta_bytes - tail
            sizes = kind.block_size, rows * kind.block_bytes
            made.append(Codec(kind.name, read, tuple(places), *sizes, group, floor, rows, head, tail))
        return made

    return make


def by_bytes(values: np.ndarray | Sequence[float]) -> list[int]:
    """Integers as the bytes of words."""
    return np.asarray(values).astype(np.int64).astype(np.int8).view("<u4").tolist()


def centred(r: Reader, word: Any, zero: int) -> Any:
    """float32 of a small word minus `zero`."""
    return r.ir.real(word - zero)
