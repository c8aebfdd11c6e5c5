"""`Interleaved`, the base class of row-interleaved types (…_r4, …_r8, …_r16).

An interleaved tensor holds groups of R rows. Block b of a group holds block b of each of its R rows, bit for bit, in
another order; row headers stand in row order before the group. A type says where each bit goes by a list of fields
(`interleave_fields`, re-exported here). From this list follow interleaving and its inverse (`permutation`), decoding
(undo, then decode the base type), encoding (encode the base type, then interleave) and the check that no bit is lost or
written twice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
from numpy.typing import ArrayLike

from quantkit.codegen import jit, thread_pool
from quantkit.errors import DataError
from quantkit.inputs import arguments
from quantkit.types import base as registry
from quantkit.types.base import QuantType
from quantkit.types.families.interleave_fields import (
    CRUMB,
    NIB,
    PLANE_A,
    PLANE_B,
    PLANE_C,
    PLANE_D,
    QUAD,
    EvenOdd,
    Field,
    FieldPlacement,
    Lines,
    Signs,
    Slots,
    packed,
    planes,
)  # fmt: skip
from quantkit.types.families.permutation import Permutation

if TYPE_CHECKING:
    from quantkit.types.refine import Moments

__all__ = [
    "CRUMB",
    "NIB",
    "PLANE_A",
    "PLANE_B",
    "PLANE_C",
    "PLANE_D",
    "QUAD",
    "EvenOdd",
    "Field",
    "FieldPlacement",
    "Interleaved",
    "Lines",
    "Permutation",
    "Signs",
    "Slots",
    "packed",
    "planes",
]  # fmt: skip


class Interleaving(Protocol):
    """Two functions of contiguous uint8[rows, row bytes], whole groups: into the group's order, and back."""

    def forward(self, data: np.ndarray, out: np.ndarray) -> None:
        """Write whole groups of the base type's rows to `out` in the group's order."""

    def backward(self, data: np.ndarray, out: np.ndarray) -> None:
        """Write groups to `out` as the base type's rows."""


class Interleaved(QuantType):
    """A type that stores the rows of another type interleaved, `interleave` of them in a group.

    A subclass states name, ids, `base_class` (the class of the base type), `interleave` and `fields`. Sizes follow from
    the base. Its arrays hold whole groups, byte for byte as in a file: uint8[rows, row bytes], rows a multiple of R.
    Encoding gives the bytes of encoding to the base type and interleaving.
    """

    base_class: ClassVar[type[QuantType]]
    fields: ClassVar[Sequence[Field]] = ()
    signs: ClassVar[Signs | None] = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        cls.base = cls.base_class.name
        for name in ("block_size", "block_bytes", "row_meta_bytes", "overflow", "requires_imatrix", "uses_imatrix",
                     "moments_effort"):  # fmt: skip
            if name not in cls.__dict__:
                setattr(cls, name, getattr(cls.base_class, name))
        super().__init_subclass__(**kwargs)

    @property
    def base_type(self) -> QuantType:
        return registry.by_id(self.base_class.ggml_type)

    @functools.cached_property
    def permutation(self) -> Interleaving:
        """The interleaving and its inverse; `Permutation` unless a type changes more than the order of bits."""
        return Permutation(self.fields, self.interleave, self.block_bytes, self.row_meta_bytes, self.signs)

    def interleave_rows(
        self, data: ArrayLike, *, threads: int | None = None, out: np.ndarray | None = None
    ) -> np.ndarray:
        """Rows of the base type, uint8[rows, row bytes], as groups of this one; in `out` if that is given."""
        return self._moved(data, self.base_type, self, self.permutation.forward, threads, out)

    def deinterleave_rows(
        self, data: ArrayLike, *, threads: int | None = None, out: np.ndarray | None = None
    ) -> np.ndarray:
        """Groups of this type, uint8[rows, row bytes], as rows of the base type; undoes `interleave_rows`."""
        return self._moved(data, self, self.base_type, self.permutation.backward, threads, out)

    def write_rows(self, data: np.ndarray, forward: bool, descriptor: int, offset: int) -> bool:
        """Interleave (`forward`) or deinterleave rows and write them to a file descriptor at `offset`, without a copy.

        Returns False where that is not possible or failed: then call `interleave_rows` or `deinterleave_rows`.
        """
        p = self.permutation
        return type(p) is Permutation and p.write_to(data, forward, descriptor, offset)

    def _moved(
        self,
        data: ArrayLike,
        source: QuantType,
        target: QuantType,
        move: Callable[[np.ndarray, np.ndarray], None],
        threads: int | None,
        out: np.ndarray | None,
    ) -> np.ndarray:
        data, threads = arguments.encoded(data, source.name), arguments.threads(threads)
        if data.ndim != 2 or (data.shape[1] - source.row_meta_bytes) % source.block_bytes:
            raise DataError(
                f"{source.name}: shape {data.shape} is not uint8[rows, row bytes] with rows of "
                f"{source.row_meta_bytes} + a multiple of {source.block_bytes} bytes"
            )
        self._check_rows(len(data))
        n = (data.shape[1] - source.row_meta_bytes) // source.block_bytes * source.block_size
        shape = len(data), target.row_bytes(n)
        if out is None:
            out = np.empty(shape, np.uint8)
        else:
            out = arguments.output(out, shape, np.uint8, data, target.name)
        if threads == 1 or data.nbytes <= 1 << 16:
            move(data, out)
            return out
        thread_pool.over_rows(
            lambda a, b: move(data[a:b], out[a:b]), len(data), multiple=self.interleave, threads=threads
        )
        return out

    def encode_rows(self, x: np.ndarray, importance: np.ndarray, effort: int, out: np.ndarray) -> None:
        """Encode to the base type and interleave; arguments as those of `QuantType.encode_rows`."""
        data = np.empty((len(x), self.base_type.row_bytes(x.shape[1])), np.uint8)
        encode = self.base_type.encode_rows
        assert encode is not None  # interleaved types have base types with codecs
        encode(x, importance, effort, data)
        self.permutation.forward(data, out)

    @property
    def uses_second_moments(self) -> bool:
        return self.base_type.uses_second_moments

    def refine_rows(self, x: np.ndarray, data: np.ndarray, moments: Moments, effort: int) -> None:
        """`refine_rows` of the base type, on deinterleaved rows."""
        rows = self.deinterleave_rows(data, threads=1)
        self.base_type.refine_rows(x, rows, moments, effort)
        self.interleave_rows(rows, threads=1, out=data)

    def decode_rows(self, data: np.ndarray, out: np.ndarray) -> None:
        """Undo the interleaving and decode the base type; arguments as those of `QuantType.decode_rows`."""
        rows = np.empty((len(data), self.base_type.row_bytes(out.shape[1])), np.uint8)
        self.permutation.backward(data, rows)
        decode = self.base_type.decode_rows
        assert decode is not None
        decode(jit.readonly(rows), out)
