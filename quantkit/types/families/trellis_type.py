"""`TrellisType`, the base class of IQ1_KT, IQ2_KT, IQ3_KT and IQ4_KT.

`trellis_code` has the generator, the formula of y and the weights. The search (`types/native/trellis_search.py`) is
imported when it first runs; its index of the points is built then, cached on disk and kept in memory. `_pack` of each
type stores the fields that it finds.
"""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from quantkit.codegen.array_cache import disk_cached
from quantkit.codegen.jit import readonly
from quantkit.types.base import BEST, QuantType
from quantkit.types.families.trellis_code import BOOK, OFFSET, SearchParameters, code_values

if TYPE_CHECKING:
    from quantkit.types.refine import Moments
    from quantkit.types.refine.vector_codes import VectorCodes


class TrellisSearch(NamedTuple):
    """The search of one effort; `types/native/trellis_search.py` explains the steps."""

    scales: int  # of each sub-block's profile, a multiple of 8
    rank: int  # clusters or boxes searched for each; 0: an average profile is assumed
    finalists: int  # multipliers of a sub-block whose groups are matched again,
    final_rank: int  # with this rank
    row_scales: int  # d that are tried so
    tables: int = 2  # at most


class TrellisType(QuantType):
    """A trellis type: rows of a float32 d, blocks of 256, a multiplier for each 32 elements."""

    block_size, row_meta_bytes = 256, 4
    uses_imatrix = True
    group: ClassVar[int] = 8
    index_bits: ClassVar[int] = 16
    offsets: ClassVar[tuple[int, ...]] = (OFFSET,)  # of the tables a sub-block may choose from
    folded: ClassVar[bool] = False  # points are magnitudes; signs are stored apart
    symmetric: ClassVar[bool] = False  # each of `steps` exists with either sign
    has_zero: ClassVar[bool] = False  # there is a multiplier 0
    steps: ClassVar[np.ndarray] = BOOK[np.argsort(np.abs(BOOK))]  # multipliers by magnitude
    clusters: ClassVar[int] = 1024  # parts of the index where groups have 8 elements
    largest: ClassVar[tuple[float, float]] = (90, 90)  # a sub-block's, in units of its own scale, without and with
    plans: ClassVar[tuple[TrellisSearch, TrellisSearch, TrellisSearch]]  # importance; plans of fast, normal, best
    _pack: ClassVar[Any] = None

    def refine_rows(self, x: np.ndarray, data: np.ndarray, moments: Moments, effort: int) -> None:
        """As the other types, with the sweeps of the next effort: encoding takes longer than all of them."""
        super().refine_rows(x, data, moments, min(effort + 1, BEST))

    @functools.cached_property
    def vector_codes(self) -> VectorCodes:
        """Where indices, signs and tables are in a block: what changes in it when one bit of one of them does."""
        from quantkit.types.refine.vector_codes import find_bits, make_codes

        groups, bits = 256 // self.group, self.index_bits
        values = np.stack([code_values(bits, self.group, offset) for offset in self.offsets])
        signs, tables = 256 if self.folded else 0, 8 if len(self.offsets) > 1 else 0
        blocks = self._blocks(1 + groups * bits, signs, tables)
        bit_addresses = find_bits(blocks[0], blocks[1:])
        of_points, of_signs, of_tables = np.split(bit_addresses, [groups * bits, groups * bits + signs])
        values = np.abs(values) if self.folded else values
        return make_codes(4, self.block_bytes, values, of_points.reshape(groups, bits), of_signs, of_tables)

    def _blocks(self, points: int, signs: int, tables: int) -> np.ndarray:
        """uint8[points + signs + tables, block bytes]: first all zeros, then each with one bit of a field set."""
        rows, groups = points + signs + tables, 256 // self.group
        x, d, numbers = (
            np.zeros((rows, 256), np.float32),
            np.zeros(rows, np.float32),
            np.zeros((rows, groups), np.uint16),
        )
        multipliers, table = np.zeros((rows, 8), np.int16), np.zeros((rows, 8), np.uint8)
        bit = np.arange(points - 1)
        numbers[1 + bit, bit // self.index_bits] = 1 << bit % self.index_bits
        x[points + np.arange(signs), np.arange(signs)] = -1
        table[points + signs + np.arange(tables), np.arange(tables)] = 1
        out = np.zeros((rows, self.row_meta_bytes + self.block_bytes), np.uint8)
        self._pack(x, d, numbers, multipliers, table, out)
        return out[:, self.row_meta_bytes :]

    @classmethod
    def encode_rows(cls, x: np.ndarray, importance: np.ndarray, effort: int, out: np.ndarray) -> None:
        """Encode rows with the search of `types/native/trellis_search.py`; see `QuantType.encode_rows`."""
        from quantkit.types.native import trellis_search as search

        fields, largest = cls._fields_of(*x.shape), np.array(cls.largest, np.float32)
        search.search(x, importance, cls._search_parameters(effort), largest, cls.steps, _index(cls), *fields)
        cls._pack(x, *fields, out)

    @classmethod
    def _search_parameters(cls, effort: int) -> SearchParameters:
        *plan, tables_tried = cls.plans[effort]
        flags = (int(cls.folded), int(cls.symmetric), int(cls.has_zero))
        return SearchParameters(*(cls.group, *flags, min(len(cls.offsets), tables_tried), cls.clusters, *plan))

    @classmethod
    def _fields_of(cls, rows: int, n: int) -> tuple[np.ndarray, ...]:
        """Room for d, numbers, multipliers and tables."""
        d, numbers = np.empty(rows, np.float32), np.empty((rows, n // cls.group), np.uint16)
        return d, numbers, np.empty((rows, n // 32), np.int16), np.empty((rows, n // 32), np.uint8)


_building = threading.Lock()
_indices: dict[str, tuple[np.ndarray, ...]] = {}


def _index(cls: type[TrellisType]) -> tuple[np.ndarray, ...]:
    """The index of a type's points, built by the first thread that needs it, or read from the cache on disk."""
    with _building:
        if cls.name not in _indices:
            from quantkit.types.native import trellis_index

            values = np.stack([code_values(cls.index_bits, cls.group, offset) for offset in cls.offsets])
            built = disk_cached(trellis_index.build, np.abs(values) if cls.folded else values, cls.clusters)
            _indices[cls.name] = tuple(readonly(a) for a in built)
    return _indices[cls.name]
