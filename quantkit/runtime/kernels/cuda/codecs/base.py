"""`codecs`, the decorator that makes codecs of a function that reads a sub-block, and helpers of several families."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from quantkit.runtime.kernels.cuda.fields import LinearAddresses, linear_addresses
from quantkit.runtime.kernels.cuda.reader import Codec, Reader, SubBlock
from quantkit.types import get

Fields = Sequence[LinearAddresses]


def base_field(width: int, addresses: np.ndarray | Sequence[int]) -> LinearAddresses:
    """A field of a type without interleaved form, by its bit addresses in a block (`interleave_fields.packed`, …)."""
    return linear_addresses(width, addresses)


def codecs(
    fields: Mapping[str, Fields], group: int = 32, has_min: bool = False, has_shift: bool = False, tail: int = 0
) -> Callable[[Callable[[Reader], SubBlock]], list[Codec]]:
    """Decorator: make the codecs of several types from one function that reads their sub-blocks.

    fields   by name of type, the fields of its blocks
    group    columns that share a scale
    has_shift, has_min   whether its sub-blocks have shifts and mins
    tail     bytes after the blocks of a row
    """

    def make(read: Callable[[Reader], SubBlock]) -> list[Codec]:
        made = []
        for name, addresses in fields.items():
            kind = get(name)
            rows, head = kind.interleave, kind.interleave * kind.row_meta_bytes - tail
            sizes = kind.block_size, rows * kind.block_bytes
            made.append(Codec(kind.name, read, tuple(addresses), *sizes, group, has_min, has_shift, rows, head, tail))
        return made

    return make


def as_words(values: np.ndarray | Sequence[float]) -> list[int]:
    """Integers as the bytes of words."""
    words: list[int] = np.asarray(values).astype(np.int64).astype(np.int8).view("<u4").tolist()
    return words


def minus_offset(r: Reader, word: Any, zero: int) -> Any:
    """float32 of a small word minus `zero`."""
    return r.ir.real(word - zero)
