"""How a codec is made of the function that reads a sub-block, and fields that several families state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from quantkit.runtime.kernels.cuda.fields import Place, place
from quantkit.runtime.kernels.cuda.reader import Codec, Reader, SubBlock
from quantkit.types import get

Fields = Sequence[Place]


def own(width: int, addresses: np.ndarray | Sequence[int]) -> Place:
    """A field of a type that no other interleaves, by its bit addresses in a block (`types/interleave.packed` …)."""
    return place(width, addresses)


def codecs(
    fields: Mapping[str, Fields], group: int = 32, has_min: bool = False, tail: int = 0
) -> Callable[[Callable[[Reader], SubBlock]], list[Codec]]:
    """Decorator: the codecs of these types, whose sub-blocks one function reads. The types give the sizes."""

    def make(read: Callable[[Reader], SubBlock]) -> list[Codec]:
        made = []
        for name, places in fields.items():
            kind = get(name)
            rows, head = kind.interleave, kind.interleave * kind.row_meta_bytes - tail
            sizes = kind.block_size, rows * kind.block_bytes
            made.append(Codec(kind.name, read, tuple(places), *sizes, group, has_min, rows, head, tail))
        return made

    return make


def as_words(values: np.ndarray | Sequence[float]) -> list[int]:
    """Integers as the bytes of words."""
    words: list[int] = np.asarray(values).astype(np.int64).astype(np.int8).view("<u4").tolist()
    return words


def minus_offset(r: Reader, word: Any, zero: int) -> Any:
    """float32 of a small word minus `zero`."""
    return r.ir.real(word - zero)
