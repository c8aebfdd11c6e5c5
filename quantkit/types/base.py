"""`QuantType`, the base class of tensor types: sizes, checked and threaded encoding and decoding, the registry.

A type's file holds one subclass of `QuantType`: the numbers of the format as class attributes and two kernels,

    encode_rows(x, importance, effort, out)   x float32[rows, n], importance float32[n] or float32[0] for none,
                                              effort FAST, NORMAL or BEST, out uint8[rows, row_bytes(n)]
    decode_rows(data, out)                    data uint8[rows, row_bytes(n)], out float32[rows, n]

each sequential over rows. This module checks arguments, divides rows among threads, and registers the types. The file
of a type is imported when the type is first used, so that one type does not cost the import of all.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np

from quantkit.codegen import jit, thread_pool
from quantkit.errors import DataError, UnknownNameError, UnsupportedError
from quantkit.inputs import arguments

if TYPE_CHECKING:
    from quantkit.types.refine import Moments
    from quantkit.types.refine.vector_codes import VectorCodes

_by_id: dict[int, QuantType] = {}
ids: dict[str, int] = {}  # of names in lower case, with and without codec
codec_modules: dict[int, str] = {}  # of this package, by id: `layouts` fills it, `by_id` imports them
_readers: dict[int, tuple[str, ...]] = {}

IK, LLAMA_CPP = DIALECTS = ("ik", "llama.cpp")  # ik_llama.cpp and llama.cpp: the same format, other types

EFFORTS = ("fast", "normal", "best")  # of an encoder; a kernel gets the index
FAST, NORMAL, BEST = range(3)

_MIN_PARALLEL_ELEMENTS = 1 << 18  # from here on threads pay even for the fastest encoder
_CHUNK_BYTES = 1 << 18  # of float32: checked, then encoded while it is still in the CPU's cache
_MIN_ROWS_WITH_MOMENTS = 128  # in a chunk: each chunk reads all second moments


def effort_level(name: str) -> int:
    """FAST, NORMAL or BEST by name; UnknownNameError otherwise."""
    if name not in EFFORTS:
        raise UnknownNameError("effort", name, EFFORTS)
    return EFFORTS.index(name)


class EncodeRows(Protocol):
    """Encode float32[rows, n] into out uint8[rows, row_bytes(n)], sequentially: `quantize` calls it from its threads.

    importance float32[n], or float32[0] where there is none; effort FAST, NORMAL or BEST. Inputs are finite. A type
    that `reports_largest` returns the bits of the largest magnitude as an integer, and its inputs may be anything.
    """

    def __call__(
        self, x: np.ndarray, importance: np.ndarray, effort: int, out: np.ndarray, /
    ) -> int | np.int32 | np.uint32 | None: ...


class DecodeRows(Protocol):
    """Decode uint8[rows, row_bytes(n)] into out float32[rows, n], sequentially; bytes may be anything."""

    def __call__(self, data: np.ndarray, out: np.ndarray, /) -> None: ...


class QuantType:
    """A tensor type of GGUF. The one instance of each is found with `quantkit.types.get`.

    A bare instance of this class describes the layout of an id that files may hold but quantkit has no codec for.
    """

    name: str = ""  # as ik_llama.cpp spells it: "q4_K", "iq4_k_r4"
    ggml_type: int = -1  # id in tensor infos
    file_type: int | None = None  # general.file_type of a file made mainly of it
    block_size: int = 1  # elements
    block_bytes: int = 0
    row_meta_bytes: int = 0  # header of each row, before its blocks
    interleave: int = 1  # rows that share a group
    base: str | None = None  # the row-by-row type of an interleaved one
    requires_imatrix: bool = False
    uses_imatrix: bool = False
    unwritten_code: int | None = None  # of an element: it decodes, but kernels in use do not take it
    moments_effort: int = FAST  # below it `quantize` does not use second moments
    overflow: float = np.inf  # finite magnitudes from here on would be stored as Inf: quantize refuses them
    activation: bool = False  # a format of right-hand sides of products, which files never hold
    whole_tensor: bool = False  # a tensor is stored as one row of all its elements
    reports_largest: bool = False  # encode_rows returns the bits of the largest magnitude: saves a pass over the input

    encode_rows: EncodeRows | None = None
    decode_rows: DecodeRows | None = None
    # Decodes the values that matrix products use, where they are not those of decode_rows.
    product_rows: DecodeRows | None = None
    remark: str = ""  # what docs/types.md says below the table

    _fields: ClassVar[tuple[str, ...]] = ("name", "ggml_type", "block_size", "block_bytes", "row_meta_bytes")

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Define a type: check its numbers against its line in `layouts` and enter it in the registry."""
        super().__init_subclass__(**kwargs)
        if not cls.name:  # an abstract family
            return
        layout = _by_id[cls.ggml_type]
        mismatched = [f for f in cls._fields if getattr(layout, f) != getattr(cls, f)]
        if mismatched or layout.has_codec:
            raise TypeError(f"{cls.name}: {mismatched or 'id'} already registered differently for id {cls.ggml_type}")
        _by_id[cls.ggml_type] = cls()

    @property
    def has_codec(self) -> bool:
        """Whether quantkit can decode this type."""
        return self.decode_rows is not None

    @property
    def readers(self) -> tuple[str, ...]:
        """Those of DIALECTS whose program reads the type; none for formats that files never hold."""
        return _readers[self.ggml_type]

    def __repr__(self) -> str:
        return f"<type {self.name}>"

    def __reduce__(self) -> Any:
        return by_id, (self.ggml_type,)

    # ------------------------------------------------------------------------------------------------------- sizes

    def row_bytes(self, n: int) -> int:
        """Bytes of a row of `n` elements."""
        n = arguments.integer(n, f"{self.name}: the number of a row's elements")
        if n < 0 or n % self.block_size:
            raise DataError(f"{self.name}: rows of {n} elements are not a multiple of its block of {self.block_size}")
        return self.row_meta_bytes + n // self.block_size * self.block_bytes

    def tensor_bytes(self, shape: Sequence[int]) -> int:
        """Bytes of a tensor (shape in numpy's order, rows last but one)."""
        sizes = [arguments.integer(size, f"{self.name}: a dimension of shape {tuple(shape)}", 0) for size in shape]
        if not sizes:
            raise DataError(f"{self.name}: a tensor has at least one dimension, not shape ()")
        if self.whole_tensor:
            return self.row_bytes(math.prod(sizes))
        return math.prod(sizes[:-1]) * self.row_bytes(sizes[-1])

    def rows_of(self, stored: np.ndarray, n: int, start: int, stop: int) -> np.ndarray:
        """uint8[stop - start, row_bytes(n)]: some rows of a tensor as files store it; a view where that is possible."""
        size = self.row_bytes(n)
        return stored[start * size : stop * size].reshape(-1, size)

    def bits_per_weight(self, n: int | None = None) -> float:
        """Bits per weight; with `n`, of rows that long, header included."""
        if n is None:
            return 8 * self.block_bytes / self.block_size
        if arguments.integer(n, f"{self.name}: the number of a row's elements") < 1:
            raise DataError(f"{self.name}: rows of {n} elements have no bits per weight")
        return 8 * self.row_bytes(n) / n

    # ------------------------------------------------------------------------------------------------------ codecs

    def quantize(
        self,
        x: Any,
        importance: Any = None,
        *,
        second_moments: Any = None,
        effort: str = "normal",
        threads: int | None = None,
    ) -> np.ndarray:
        """Encode float32[rows, n] as uint8[rows, row_bytes(n)].

        `importance` float32[n] weighs the squared error of each column; types without `uses_imatrix` only check it.
        `second_moments` float32[n, n], H = E[x x^T] of the inputs of the matrix (or `types.refine.prepare` of it, for
        several calls): codes are then chosen so that the error e^T H e of each row is low. Without `importance`, its
        diagonal is the importance. Types without `uses_second_moments` only check it; types of 8 bits, whose encoding
        takes 14 to 50 times as long with it, use it at effort "best" only.
        `effort` trades time for error: "fast", "normal" or "best"; types without a search ignore it.
        The bytes do not depend on `threads`. DataError, with row, column and value, for NaN, Inf or a value that is too
        large for the type in `x`, and for a negative or non-finite importance.
        """
        if self.encode_rows is None:
            raise UnsupportedError(f"{self.name}: quantkit cannot encode this type")
        encode, level, threads = self.encode_rows, effort_level(effort), arguments.threads(threads)
        x = arguments.real_numbers(x, self.name)
        if x.ndim != 2:
            raise DataError(f"{self.name}: expected float32[rows, n], got shape {x.shape}")
        rows, n = x.shape
        out = np.empty((rows, self.row_bytes(n)), np.uint8)
        self._check_rows(rows)
        moments = None
        if second_moments is not None:
            from quantkit.types.refine import prepare  # not loaded without: it needs numba

            moments = prepare(second_moments, n)
            importance = moments.importance if importance is None else importance
        if self.requires_imatrix and importance is None:
            raise DataError(f"{self.name}: this type needs an importance matrix; pass importance=")
        weights = _scale_importance(check_importance(importance, n))
        x, weights = jit.readonly(x), jit.readonly(weights if self.uses_imatrix else weights[:0])
        if moments is not None and not self.uses_second_moments_at(effort):
            moments = None
        chunk_bytes = _CHUNK_BYTES if moments is None else max(_CHUNK_BYTES, 4 * n * _MIN_ROWS_WITH_MOMENTS)
        step = max(1, chunk_bytes // (4 * n * self.interleave)) * self.interleave if n else rows

        limit = int(np.float32(self.overflow).view(np.uint32)) if self.reports_largest else 0

        def task(start: int, stop: int) -> None:
            for a in range(start, stop, step):
                b = min(a + step, stop)
                if not limit:
                    check_finite(x[a:b], a, self.overflow, self.name)
                    encode(x[a:b], weights, level, out[a:b])
                elif (largest := encode(x[a:b], weights, level, out[a:b])) is None or largest >= limit:
                    check_finite(x[a:b], a, self.overflow, self.name)
                if moments is not None:
                    self.refine_rows(x[a:b], out[a:b], moments, level)

        if rows:
            thread_pool.over_rows(
                task, rows, multiple=self.interleave, threads=threads, is_long=x.size >= _MIN_PARALLEL_ELEMENTS
            )
        return out

    @property
    def vector_codes(self) -> VectorCodes | None:
        """Where a block keeps its codes, for a type whose codes stand for groups of elements; None for other types."""
        return None

    @property
    def uses_second_moments(self) -> bool:
        """Whether `quantize` gives other bytes with second moments, at effort "best" at least."""
        if self.encode_rows is None or self.activation:
            return False
        from quantkit.types.refine import applies_to

        return applies_to(self)

    def uses_second_moments_at(self, effort: str) -> bool:
        """Whether `quantize` at this effort gives other bytes with second moments."""
        return effort_level(effort) >= self.moments_effort and self.uses_second_moments

    def refine_rows(self, x: np.ndarray, data: np.ndarray, moments: Moments, effort: int) -> None:
        """Lower the error of data uint8[rows, row bytes] by second moments, in place (`types.refine`)."""
        from quantkit.types.refine import refine

        refine(self, x, data, moments, effort)

    def dequantize(
        self,
        data: Any,
        n: int,
        *,
        out: np.ndarray | None = None,
        threads: int | None = None,
        products: bool = False,
    ) -> np.ndarray:
        """Decode uint8[rows, row_bytes(n)] to float32[rows, n]; bit for bit the values the format defines.

        `out`, a float32[rows, n] to fill, is returned where given. `products` asks for the values that matrix products
        use: they differ for iq6_k. DataError on shapes that do not fit.
        """
        if self.decode_rows is None:
            raise UnsupportedError(f"{self.name}: quantkit cannot decode this type yet")
        data, threads = arguments.encoded(data, self.name), arguments.threads(threads)
        if data.ndim != 2 or data.shape[1] != self.row_bytes(n):
            raise DataError(f"{self.name}: expected uint8[rows, {self.row_bytes(n)}] for n={n}, got {data.shape}")
        rows = data.shape[0]
        self._check_rows(rows)
        if out is None:
            out = np.empty((rows, n), np.float32)
        else:
            out = arguments.output(out, (rows, n), np.float32, data, self.name)
        data = jit.readonly(data)
        if rows:
            decode = (products and self.product_rows) or self.decode_rows
            thread_pool.over_rows(lambda a, b: decode(data[a:b], out[a:b]), rows, multiple=self.interleave,
                          threads=threads if rows * n > 1 << 16 else 1, pieces=1)  # fmt: skip
        return out

    def _check_rows(self, rows: int) -> None:
        if rows % self.interleave:
            raise DataError(f"{self.name}: {rows} rows are not a multiple of the {self.interleave} it interleaves")


@jit.kernel
def _largest_bits(x: np.ndarray) -> np.uint32:
    """The bits of the largest magnitude in float32[n]. Compared as integers, numbers < Inf < NaN."""
    bits = x.view(np.uint32)
    max_bits = np.uint32(0)
    for i in range(bits.size):
        # Without np.uint32 numba computes in uint64, at half the speed.
        max_bits = np.uint32(max(max_bits, np.uint32(bits[i] & np.uint32(0x7FFFFFFF))))
    return max_bits


_MAX_NUMPY_ELEMENTS = 1 << 14  # up to here numpy checks, so that copying a checkpoint does not load numba


def check_finite(x: np.ndarray, first_row: int = 0, overflow: float = np.inf, name: str = "") -> None:
    """Raise DataError naming row, column and value of the first NaN, Inf or too large magnitude in float32[rows, n].

    `name` is the type that cannot hold finite magnitudes from `overflow` on.
    """
    limit = np.float32(overflow).view(np.uint32)
    if x.size <= _MAX_NUMPY_ELEMENTS and bool((np.abs(x) < overflow).all()):
        return
    if _largest_bits(jit.readonly(x.reshape(-1))) < limit:
        return
    bad = np.argwhere(~(np.abs(x) < overflow))
    row, column = (int(v) for v in bad[0])
    location = f"row {first_row + row}, column {column} is {x[row, column]}"
    if not np.isfinite(x).all():
        raise DataError(f"{location}; {len(bad)} value(s) are not finite")
    raise DataError(f"{location}; {len(bad)} value(s) do not fit {name}, which ends below {overflow:g}; use f32")


def check_importance(importance: Any, n: int) -> np.ndarray:
    """Importance as contiguous float32[n]; float32[0] for None. DataError on wrong length, NaN, Inf or negatives."""
    if importance is None:
        return np.empty(0, np.float32)
    weights = arguments.real_numbers(importance, "importance")
    if weights.shape != (n,):
        raise DataError(f"importance has shape {weights.shape}, the rows have {n} columns")
    bad = np.flatnonzero(~(np.isfinite(weights) & (weights >= 0)))
    if len(bad):
        raise DataError(f"importance of column {bad[0]} is {weights[bad[0]]}; it must be finite and not negative")
    return weights


def _scale_importance(weights: np.ndarray) -> np.ndarray:
    """Importance, times a power of two where products with it could over- or underflow. Only its ratios matter."""
    largest = float(weights.max(initial=0))
    if not largest or 2.0**-40 < largest < 2.0**40:
        return weights
    result: np.ndarray = np.ldexp(weights, -math.frexp(largest)[1])
    return result


def by_id(ggml_type: int) -> QuantType:
    """The type (with or without codec) of one of `ids`. The first use imports its module, which registers it."""
    if ggml_type in codec_modules and not _by_id[ggml_type].has_codec:
        _import_codec(ggml_type)
    return _by_id[ggml_type]


def _import_codec(ggml_type: int) -> None:
    """Import the module that the table in `layouts` names for an id. Other threads wait for the import."""
    module = f"{__package__}.{codec_modules[ggml_type]}"
    importlib.import_module(module)
    if not _by_id[ggml_type].has_codec:
        raise TypeError(
            f"{module} defines no QuantType with ggml_type = {ggml_type}; the table in types/layouts.py names it"
        )


def names() -> list[str]:
    """The names of all types, with and without codec."""
    return [t.name for t in _by_id.values()]


def layouts() -> list[QuantType]:
    """All types, with and without codec, by id."""
    return [by_id(ggml_type) for ggml_type in sorted(_by_id)]


def define_layout(
    module: str,
    readers: tuple[str, ...],
    ggml_type: int,
    name: str,
    block_size: int,
    block_bytes: int,
    row_meta_bytes: int = 0,
) -> None:
    """Register an id that files may hold. `module`, of this package, has its codec; "" where there is none."""
    layout = QuantType()
    layout.ggml_type, layout.name = ggml_type, name
    layout.block_size, layout.block_bytes, layout.row_meta_bytes = block_size, block_bytes, row_meta_bytes
    _by_id[ggml_type], ids[name.lower()], _readers[ggml_type] = layout, ggml_type, readers
    if module:
        codec_modules[ggml_type] = module
