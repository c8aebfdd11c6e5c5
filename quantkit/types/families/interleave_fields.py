"""Where the bits of a row-interleaved block go: the classes and patterns by which interleaved types are described.

A type is a list of fields. Each says where a base block keeps the elements of one width, and where the group of R
interleaved rows keeps them:

    Field(width, base, group)    elements of `width` bits; base[j] is the bit address of element j in a base block,
                                 `group` gives the address of element j of row k in an interleaved block

Addresses count bits; `at` is an offset in bytes.

    packed(width, count, at)          base: one after the other
    planes(width, run, count, at)     base: element j of a span in byte j % run, bit field j // run
    Slots(size, at, pitch, bit)       group: element s = R j + k in byte s % size, bit field s // size
    Lines(pattern, at)                group: runs of four columns in the order of QUAD, NIB, CRUMB, PLANE_A …
    EvenOdd(at)                       group: one-bit flags, those of even elements first

Three types also re-encode indices of signs while they are interleaved (`Signs`); that is lossless too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np


def packed(width: int, count: int, at: int = 0) -> np.ndarray:
    """Bit addresses of `count` elements of `width` bits, one after the other from byte `at`."""
    return 8 * at + width * np.arange(count)


def planes(width: int, run: int, count: int, at: int = 0) -> np.ndarray:
    """Bit addresses of `count` elements in spans of `run` bytes: element j is field j // run of byte j % run."""
    span, j = np.divmod(np.arange(count), run * 8 // width)
    result: np.ndarray = 8 * (at + span * run + j % run) + width * (j // run)
    return result


class FieldPlacement(Protocol):
    """Where an interleaved block keeps the elements of a field."""

    def addresses(self, rows: int, width: int, count: int) -> np.ndarray:
        """int64[rows, count]: the bit address of element j of row k."""


class Slots(NamedTuple):
    """Element j of row k is slot s = R j + k, in byte s % size, field s // size; with size 0, slots follow each other.

    A field is `pitch` bits, by default those of an element, which begins `bit` bits into it.
    """

    size: int
    at: int
    pitch: int = 0
    bit: int = 0

    def addresses(self, rows: int, width: int, count: int) -> np.ndarray:
        """As `FieldPlacement.addresses`."""
        pitch = self.pitch or width
        s = rows * np.arange(count) + np.arange(rows)[:, None]
        if not self.size:
            return 8 * self.at + pitch * s + self.bit
        return 8 * (self.at + s % self.size) + pitch * (s // self.size) + self.bit


class Lines(NamedTuple):
    """Runs of four columns stay together: a line is 4 R bytes, four of each row in turn.

    Bit field t of line l holds the columns pattern[l][t] .. + 3 of a span of columns; spans follow each other.
    """

    pattern: tuple[tuple[int, ...], ...]
    at: int

    def addresses(self, rows: int, width: int, count: int) -> np.ndarray:
        """As `Placement.addresses`."""
        line_of = {first: (line, t) for line, fields in enumerate(self.pattern) for t, first in enumerate(fields)}
        span, column = np.divmod(np.arange(count), 4 * len(line_of))
        line, t = np.array([line_of[int(c) - int(c) % 4] for c in column]).T
        byte = 4 * rows * (span * len(self.pattern) + line) + column % 4
        result: np.ndarray = 8 * (self.at + byte + 4 * np.arange(rows)[:, None]) + width * t
        return result


QUAD = ((0,),)  # bytes
NIB = ((0, 8), (16, 24), (4, 12), (20, 28))  # 4-bit codes
CRUMB = ((0, 4, 8, 12),)  # 2-bit codes
PLANE_A = ((0, 4, 8, 12, 16, 20, 24, 28),)  # single bits, in four orders
PLANE_B = ((0, 16, 4, 20, 8, 24, 12, 28),)
PLANE_C = ((0, 8, 4, 12, 16, 24, 20, 28),)
PLANE_D = ((0, 8, 16, 24, 4, 12, 20, 28),)


class EvenOdd(NamedTuple):
    """One-bit flags: element j of row k in bit j // 2 of byte k (even j) or R + k (odd j)."""

    at: int

    def addresses(self, rows: int, width: int, count: int) -> np.ndarray:
        """As `FieldPlacement.addresses`."""
        j = np.arange(count)
        return 8 * (self.at + rows * (j % 2) + np.arange(rows)[:, None]) + j // 2


class Field(NamedTuple):
    """Elements of `width` bits: at the bit addresses `base` in a base block, at `group.addresses()` in the group."""

    width: int
    base: Sequence[int] | np.ndarray
    group: FieldPlacement


class Signs(NamedTuple):
    """Seven-bit indices of signs, stored in the group as the running exclusive-or of their bits.

    With bits s0 … s6 an index stands for these signs and their parity; the group has t_j = s0 ^ … ^ s_j instead, and
    s_j = t_j ^ t_(j-1) gives them back. Per block the 32-bit words at bytes `words` hold them, each at bits `first`.
    """

    words: Sequence[int]
    first: Sequence[int]

    def mask(self, skip: int) -> int:
        """All bits of the indices in a word but the lowest `skip` of each."""
        return sum((0x7F >> skip << skip) << bit for bit in self.first)
