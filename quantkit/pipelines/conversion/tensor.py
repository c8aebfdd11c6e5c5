"""One tensor of a converted file: computes ranges of its rows from the checkpoint, and writes them.

    rows of the sources -> transform (`archs`: reorder, stack, …) -> rows in the GGUF type

The sources give rows in one of two forms, and the transform works on either:

- Bytes in the output type, if every source stores that type or has a direct conversion to it, and the transform only
  moves whole rows. The values are checked to be finite. NVFP4 has one number more for each matrix, which is a tensor of
  its own in GGUF (`ScaleTensor`); matrices that are joined to one have to have the same.
- float32, in all other cases. The result is encoded in the output type.

A native function converts and writes a range of rows if the range lies unchanged in one source (`Transform.locate`)
and is of a float type. Any other range is computed as an array (`ConvertedTensor.rows`) and then written.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quantkit.archs.common.tensors import Piece, ReadRows
from quantkit.errors import DataError
from quantkit.formats.gguf import TensorSpec, Writer, scales
from quantkit.formats.mapping import is_mapped, release
from quantkit.formats.pipeline import row_ranges
from quantkit.formats.safetensors import CheckpointTensor
from quantkit.formats.safetensors.quantized import ScaledTensor
from quantkit.formats.safetensors.quantized.fp8 import FP8Tensor
from quantkit.formats.safetensors.quantized.mxfp4 import MXFP4Tensor
from quantkit.formats.safetensors.quantized.nvfp4 import GGUF_BLOCK, NVFP4Tensor
from quantkit.pipelines.output import WriteTask
from quantkit.types import QuantType, check_finite
from quantkit.types.floats import FLOATS, is_finite

SourceTensor = CheckpointTensor | ScaledTensor

INTEGERS = {"I32": "<i4", "I64": "<i8"}  # dtypes of whole numbers that a checkpoint may have
_NATIVE_ELEMENTS = 1 << 23  # of a range that is converted and written natively


@dataclass(frozen=True)
class OutputTensor:
    """A tensor of the converted file. Its attributes match those of `formats.gguf.Tensor`.

    spec  name, shape and type in the GGUF file
    path  the checkpoint's file, for messages
    """

    spec: TensorSpec
    path: Path

    @property
    def name(self) -> str:
        """Name in the GGUF file."""
        return self.spec.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape with rows first."""
        return self.spec.shape

    @property
    def type(self) -> QuantType:
        """Type in the GGUF file."""
        return self.spec.type

    @property
    def nbytes(self) -> int:
        """Bytes in the GGUF file."""
        return self.spec.nbytes

    @property
    def n_rows(self) -> int:
        """Rows of all its matrices."""
        return self.spec.n_rows

    @property
    def inputs(self) -> list[CheckpointTensor]:
        """The tensors of the checkpoint that its rows are read from."""
        return []

    @property
    def scales(self) -> np.ndarray | None:
        """As `formats.gguf.Tensor.scales`."""
        return None

    def rows(self, start: int, stop: int) -> np.ndarray:
        """Rows in the GGUF type as uint8[stop - start, row_bytes]."""
        raise NotImplementedError

    def tasks(self, writer: Writer) -> Iterator[WriteTask]:
        """Tasks that compute the tensor in pieces of bounded size and write them at their offsets."""
        yield functools.partial(self._write, 0, self.n_rows, writer)

    def _write(self, start: int, stop: int, writer: Writer) -> int:
        data = self.rows(start, stop)
        writer.put(self.name, start * self.spec.row_bytes if len(self.shape) > 1 else 0, data)
        release(data)  # a copied tensor is a view of the mapped input
        return data.nbytes


@dataclass(frozen=True)
class GeneratedTensor(OutputTensor):
    """A tensor that is computed from `config.json`, such as RoPE factors: its `values` in float32."""

    values: np.ndarray

    def rows(self, start: int, stop: int) -> np.ndarray:
        return self.type.quantize(self.values.reshape(-1, self.shape[-1])[start:stop], threads=1)


@dataclass(frozen=True)
class IntegerTensor(OutputTensor):
    """A tensor of whole numbers, I32 of int64 or int32; DataError for one that does not fit."""

    source: CheckpointTensor

    @property
    def inputs(self) -> list[CheckpointTensor]:
        return [self.source]

    def rows(self, start: int, stop: int) -> np.ndarray:
        columns = self.shape[-1]
        values = self.source.raw().view(INTEGERS[self.source.dtype])[start * columns : stop * columns]
        found = values.astype("<i4")
        if not np.array_equal(found, values):
            raise DataError(f"{self.path}: tensor {self.source.name} has a number beyond 32 bits")
        return found.view(np.uint8).reshape(stop - start, -1)


@dataclass(frozen=True)
class ConvertedTensor(OutputTensor):
    """A tensor that the transform of `piece` makes from `sources`, tensors of the checkpoint."""

    piece: Piece
    sources: Sequence[SourceTensor]

    @property
    def inputs(self) -> list[CheckpointTensor]:
        return [part for t in self.sources for part in (t.inputs if isinstance(t, ScaledTensor) else [t])]

    @functools.cached_property
    def scales(self) -> np.ndarray | None:
        """As `formats.gguf.Tensor.scales`, of a tensor that keeps the codes of NVFP4."""
        if self.type.name != scales.SCALED:
            return None
        sources = [tensor for tensor in self.sources if isinstance(tensor, NVFP4Tensor)]
        owners = owners_of_matrices(self.piece, [tensor.shape for tensor in sources])
        assert owners is not None
        factors = np.concatenate([tensor.factors() for tensor in sources])
        return np.ascontiguousarray(factors[owners], np.float32)

    def tasks(self, writer: Writer) -> Iterator[WriteTask]:
        for start, stop in self._ranges():
            yield functools.partial(self._write, start, stop, writer)

    def _ranges(self) -> Iterator[tuple[int, int]]:
        """Ranges of rows, one per task. No range spans two stacked sources, so that an error names the right one."""
        each, elements = self.piece.transform.source_rows, _NATIVE_ELEMENTS if self._is_native else 0
        if each is None:
            yield from row_ranges(self.shape, self.piece.transform.row_multiple, elements)
            return
        for first in range(0, each * len(self.sources), each):
            for start, stop in row_ranges((each, self.shape[-1]), 1, elements):
                yield first + start, first + stop

    def _write(self, start: int, stop: int, writer: Writer) -> int:
        """Write a range: natively where the source supports it and all values are finite, else through numpy."""
        if self._is_native and (nbytes := self._write_native(start, stop, writer)):
            return nbytes
        return super()._write(start, stop, writer)

    # ------------------------------------------------------------------------------------------------- in native code

    @functools.cached_property
    def _is_native(self) -> bool:
        """Whether the sources can write rows directly: floats, unchanged or converted to another float type."""
        if self.type.name not in FLOATS or len(self.shape) < 2 or not self._moves_bytes:
            return False
        return self.piece.transform.locate(0, 1) is not None

    def _write_native(self, start: int, stop: int, writer: Writer) -> int:
        """Let the source convert and write rows, without Python between its slices; bytes written, 0 if it did not."""
        if (place := self.piece.transform.locate(start, stop)) is None:
            return 0
        (number, first), width = place, self.spec.row_bytes
        source, last = self.sources[number], first + stop - start
        assert isinstance(source, (CheckpointTensor, FP8Tensor))

        def send(descriptor: int, offset: int) -> bool:
            return source.send(self.type.name, first, last, descriptor, offset)

        nbytes = (stop - start) * width
        if not writer.put_direct(self.name, start * width, nbytes, send):
            return 0
        source.forget(first, last)
        return nbytes

    # ------------------------------------------------------------------------------------------------------ with numpy

    @functools.cached_property
    def _moves_bytes(self) -> bool:
        """Whether the sources give rows in the output type, so that the transform only moves bytes."""
        return self.piece.transform.copies_rows and all(_gives_rows_of(t, self.type.name) for t in self.sources)

    def rows(self, start: int, stop: int) -> np.ndarray:
        """Rows in the GGUF type as uint8[stop - start, row_bytes].

        Raises DataError that names the checkpoint's tensor if the type cannot hold a value.
        """
        if len(self.shape) == 1:  # transforms treat each element of a vector as a row
            start, stop = 0, self.shape[0]
        readers = [_SourceReaders(self.sources, self.type.name)] if self._moves_bytes else []
        try:
            data = self._moved(readers[0], start, stop) if readers else None
            if data is None:
                readers.append(_SourceReaders(self.sources, None))
                x = self.piece.transform.rows(readers[-1], start, stop)
                data = self.type.quantize(x.reshape(-1, self.shape[-1]), threads=1)
        except DataError as error:
            each = self.piece.transform.source_rows
            number, begin = divmod(start, each) if each else (0, start)
            source, first = self.sources[number], f" (rows counted from row {begin})" if begin else ""
            raise DataError(f"{source.path}: tensor {source.name}: {error}{first}") from None
        if not is_mapped(data):
            for tensor, first_row, last_row in (part for reader in readers for part in reader.parts):
                tensor.forget(first_row, last_row)
        return data.reshape(-1, self.spec.row_bytes)

    def _moved(self, readers: _SourceReaders, start: int, stop: int) -> np.ndarray | None:
        """Rows as bytes of the sources. None if a float is not finite: encoding then raises the error that says where.

        Raises DataError for MXFP4 and NVFP4 scales that are not numbers.
        """
        data, n = self.piece.transform.rows(readers, start, stop), self.shape[-1]
        if self.type.name not in FLOATS:
            check_finite(self.type.dequantize(data.reshape(-1, self.spec.row_bytes), n, threads=1))
            return data
        finite = readers.all_finite and (not readers.any_unchecked or is_finite(self.type, data))
        return data if finite else None


@dataclass(frozen=True)
class ScaleTensor(OutputTensor):
    """NAME.scale of `weight`, a tensor of NVFP4 codes."""

    weight: ConvertedTensor

    @property
    def inputs(self) -> list[CheckpointTensor]:
        return [tensor.whole for tensor in self.weight.sources if isinstance(tensor, NVFP4Tensor)]

    def rows(self, start: int, stop: int) -> np.ndarray:
        assert self.weight.scales is not None
        return self.weight.scales.view(np.uint8).reshape(1, -1)[start:stop]


def why_not_packed(piece: Piece, sources: Sequence[SourceTensor]) -> str:
    """Why a tensor of the GGUF cannot have the codes of its NVFP4 sources; "" if it can."""
    if not piece.transform.copies_rows:
        return "its rows are computed, not copied"
    if piece.shape[-1] % GGUF_BLOCK:
        return f"{piece.shape[-1]} columns are no multiple of {GGUF_BLOCK}"
    if owners_of_matrices(piece, [tensor.shape for tensor in sources]) is None:
        return "a matrix of it is made of several, each with a number of its own"
    return ""


def owners_of_matrices(piece: Piece, shapes: Sequence[tuple[int, ...]]) -> np.ndarray | None:
    """int[matrices]: the matrix of the sources, counted through all of them, that a matrix of a tensor is made of.

    None if one is made of several. Sources have the given shapes; the tensor's rows are copied from theirs.
    """
    counts = [scales.matrices(shape) for shape in shapes]
    firsts = np.cumsum([0, *counts])

    def reader(number: int) -> ReadRows:
        rows = shapes[number][-2]
        return lambda start, stop: (firsts[number] + np.arange(start, stop) // rows)[:, None]

    found = piece.transform.rows([reader(i) for i in range(len(shapes))], 0, math.prod(piece.shape[:-1]))
    by_matrix = found.reshape(scales.matrices(piece.shape), -1)
    owners: np.ndarray = by_matrix[:, 0]
    return owners if (by_matrix == owners[:, None]).all() else None


# ------------------------------------------------------------------------------------------------- rows of the sources


class _SourceReaders(Sequence[ReadRows]):
    """A reader of each source's rows, for one range of the output: rows of the GGUF type `kind`, or float32 for None.

    Readers are made on access, because a range reads one of hundreds of experts.

    parts          (tensor, start, stop) of each range that was read
    all_finite     all values that were converted to `kind` are finite
    any_unchecked  some rows are unchanged bytes of the file
    """

    def __init__(self, sources: Sequence[SourceTensor], kind: str | None):
        self._sources, self._kind = sources, kind
        self.parts: list[tuple[SourceTensor, int, int]] = []
        self.all_finite, self.any_unchecked = True, False

    def __len__(self) -> int:
        return len(self._sources)

    def __getitem__(self, number: Any) -> Any:
        tensor = self._sources[number]
        if len(tensor.shape) > 1:
            return functools.partial(self._read, tensor)
        count = math.prod(tensor.shape)  # the rows of a vector are its elements
        whole = self._read(tensor, 0, 1)
        return lambda start, stop: whole.reshape(count, -1)[start:stop]

    def _read(self, tensor: SourceTensor, start: int, stop: int) -> np.ndarray:
        self.parts.append((tensor, start, stop))
        return tensor.rows(start, stop) if self._kind is None else self._read_bytes(tensor, self._kind, start, stop)

    def _read_bytes(self, tensor: SourceTensor, kind: str, start: int, stop: int) -> np.ndarray:
        """Rows as uint8[stop - start, bytes]: a view of the mapped file if it stores that type, else converted."""
        if isinstance(tensor, (MXFP4Tensor, NVFP4Tensor)):
            return tensor.packed(start, stop)
        if isinstance(tensor, FP8Tensor):
            encoded, finite = tensor.encoded(kind, start, stop)
        else:
            assert isinstance(tensor, CheckpointTensor)
            data = tensor.raw().reshape(tensor.n_rows, -1)[start:stop]
            if tensor.dtype.lower() == kind:
                self.any_unchecked = True
                return data
            from quantkit.types.native.recode import recode

            encoded, finite = recode(tensor.dtype.lower(), kind, data)
        self.all_finite &= finite
        return encoded


def _gives_rows_of(tensor: SourceTensor, kind: str) -> bool:
    """Whether a source gives rows of the GGUF type `kind` as bytes.

    A vector is never converted that way: it is small, and loading compiled code would take longer.
    """
    if tensor.dtype.lower() == kind:
        return True
    if kind not in FLOATS or len(tensor.shape) < 2:
        return False
    if isinstance(tensor, FP8Tensor):
        return tensor.encodes(kind)
    from quantkit.types.native import recode

    return tensor.dtype.lower() in FLOATS and tensor.shape[-1] % recode.LANES == 0
