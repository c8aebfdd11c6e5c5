"""Parts shared by the trellis types IQ1_KT, IQ2_KT, IQ3_KT and IQ4_KT.

A group of 8 (or 4) elements is named by one integer. Its values are what a multiplicative congruential generator gives
from there: x_0 = index + offset, x_k = MULTIPLIER x_(k-1) modulo 2^32,

    v_k = (sum of the four bytes of x_k & 0x3F3F3F3F) - 126           k = 1 .. 8

so x_k = POWERS[k - 1] x_0, and a group is decoded in SIMD lanes. The values are nearly Gaussian, root mean square 36.9.

    y = (d * m) * v          d: float32, the row's header;  m: integer, of each 32 elements

Both products are rounded to float32. `TrellisType` is the family: what its members say of themselves, and how an
encoder's fields reach their `_pack`. The search (`emitted/trellis.py`) is imported when
it first runs, its index of the points is built then and kept in memory.

Encode: minimise sum w (x - y)^2. `weigh` says what w is.
"""

from __future__ import annotations

import threading
from typing import Any, ClassVar, NamedTuple

import numpy as np

from quantkit.jit import kept, kernel, readonly
from quantkit.types.base import QuantType
from quantkit.types.superblock import LEAST_WEIGHT

MULTIPLIER = 3417055213
OFFSET = 4096
POWERS = np.array([pow(MULTIPLIER, k, 1 << 32) for k in range(1, 9)], np.uint32)

BOOK = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)  # m of 4 bits
CODES = np.zeros(256, np.uint8)  # the code of m at m + 128
CODES[BOOK.astype(np.int64) + 128] = np.arange(16)

_SIXES = np.uint32(0x3F3F3F3F)  # what each byte contributes
_BYTES = np.uint32(0x01010101)  # the product with it has the sum of four bytes, which is below 256, on top
_TOP = np.uint32(24)
_MIDDLE = np.int32(126)


@kernel(inline="always")
def code_value(seed, k):
    """Value k of the group of a seed (index + offset), int32."""
    x = np.uint32(seed * POWERS[k]) & _SIXES
    return np.int32(np.uint32(x * _BYTES) >> _TOP) - _MIDDLE


@kernel
def row_scale(data):
    """The float32 that four bytes are."""
    bits = np.uint32(data[0]) | np.uint32(data[1]) << np.uint32(8)
    bits |= np.uint32(data[2]) << np.uint32(16) | np.uint32(data[3]) << np.uint32(24)
    return np.uint32(bits).view(np.float32)


@kernel
def put_row_scale(out, d):
    bits = np.float32(d).view(np.uint32)
    for i in range(4):
        out[i] = np.uint8(bits >> np.uint32(8 * i))


@kernel
def weigh(x, importance, w):
    """Weights of a row, whose unit makes its largest magnitude 1 to 2. Returns whether there is importance.

    An importance counts relative to the row's largest. Without one w = v / 2 + x^2, as the reference has it, v being
    the mean of x^2 over 256 elements.
    """
    n = len(x)
    largest = np.float32(0)
    for i in range(len(importance)):
        largest = max(largest, importance[i])
    if largest > np.float32(0):
        for i in range(n):
            w[i] = max(importance[i] / largest, np.float32(LEAST_WEIGHT))
        return True
    for first in range(0, n, 256):
        squares = np.float32(0)
        for i in range(first, first + 256):
            squares += x[i] * x[i]
        v = squares / np.float32(256)
        for i in range(first, first + 256):
            w[i] = np.float32(0.5) * v + x[i] * x[i]
    return False


def code_values(bits: int, group: int, offset: int) -> np.ndarray:
    """int8[2^bits, group]: the values of every index."""
    seeds = np.arange(1 << bits, dtype=np.uint32) + np.uint32(offset)
    each = (seeds[:, None] * POWERS[:group]) & _SIXES
    return (((each * _BYTES) >> _TOP).astype(np.int32) - _MIDDLE).astype(np.int8)


class Plan(NamedTuple):
    """How thoroughly an effort searches; `emitted/trellis.py` explains the words."""

    scales: int  # of each sub-block's profile, a multiple of 8
    rank: int  # of clusters or boxes looked into there; 0: the profile is assumed
    finalists: int  # multipliers matched again,
    final_rank: int  # in so many
    ds: int
    tables: int = 2  # at most


class Kind(NamedTuple):
    """What the search must know of a type and an effort; flags are 0 or 1."""

    group: int
    folded: int
    both: int
    zero: int
    tables: int
    clusters: int
    scales: int
    rank: int
    finalists: int
    final_rank: int
    ds: int


class TrellisType(QuantType):
    """A trellis type: rows of a float32 d, blocks of 256, a multiplier for each 32 elements."""

    block_size, row_meta_bytes = 256, 4
    uses_imatrix = True
    group: ClassVar[int] = 8
    index_bits: ClassVar[int] = 16
    offsets: ClassVar[tuple[int, ...]] = (OFFSET,)  # of the tables a sub-block may choose from
    folded: ClassVar[bool] = False  # magnitudes of values, signs beside
    both: ClassVar[bool] = False  # each of `steps` exists with either sign
    zero: ClassVar[bool] = False  # there is a multiplier 0
    steps: ClassVar[np.ndarray] = BOOK[np.argsort(np.abs(BOOK))]  # multipliers by magnitude
    clusters: ClassVar[int] = 1024  # parts of the index where groups have 8 elements
    largest: ClassVar[tuple[float, float]] = (90, 90)  # a sub-block's, in units of its own scale, without and with
    plans: ClassVar[tuple[Plan, Plan, Plan]]  # importance; plans of fast, normal, best
    _pack: ClassVar[Any] = None

    @classmethod
    def encode_rows(cls, x: np.ndarray, importance: np.ndarray, effort: int, out: np.ndarray) -> None:
        from quantkit.types.emitted import trellis as search

        fields, largest = cls._fields_of(*x.shape), np.array(cls.largest, np.float32)
        search.search(x, importance, cls._kind(effort), largest, cls.steps, _index(cls), *fields)
        cls._pack(x, *fields, out)

    @classmethod
    def _kind(cls, effort: int) -> Kind:
        *plan, tables_tried = cls.plans[effort]
        flags = (int(cls.folded), int(cls.both), int(cls.zero))
        return Kind(*(cls.group, *flags, min(len(cls.offsets), tables_tried), cls.clusters, *plan))

    @classmethod
    def _fields_of(cls, rows: int, n: int) -> tuple[np.ndarray, ...]:
        """Room for d, numbers, multipliers and tables."""
        d, numbers = np.empty(rows, np.float32), np.empty((rows, n // cls.group), np.uint16)
        return d, numbers, np.empty((rows, n // 32), np.int16), np.empty((rows, n // 32), np.uint8)


_building = threading.Lock()
_indices: dict[str, tuple[np.ndarray, ...]] = {}


def _index(cls: type[TrellisType]) -> tuple[np.ndarray, ...]:
    """The index of a type's points; made by the first thread that needs it, or found on disk."""
    with _building:
        if cls.name not in _indices:
            from quantkit.types.emitted import trellis as search

            values = np.stack([code_values(cls.index_bits, cls.group, offset) for offset in cls.offsets])
            built = kept(search.build, np.abs(values) if cls.folded else values, cls.clusters)
            _indices[cls.name] = tuple(readonly(a) for a in built)
    return _indices[cls.name]
