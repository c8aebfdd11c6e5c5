"""Repack whole files: interleave rows for the CPU, or undo that, without losing a bit.

    job = plan_repack(open("model.gguf"), ["ffn_.*_exps"])     plans each tensor with a reason; writes nothing
    job = plan_unpack(open("model-r4.gguf"))
    write_repacked(job, "out.gguf", keep_split=True)

Tensors keep their order, names and shapes. Tensors that are not repacked are copied. The metadata stay the same except
for the shard keys, which describe the output, and `general.file_type` (`recipe.planning.interleaving`). Unpacking a
repacked file restores the original file.

A row of Q8_KV_R8 takes 4 + n bytes, as readers expect and as direct quantization writes it. When ik_llama.cpp repacks
from Q8_KV, it keeps the 8 + n bytes of the base type, and readers misread all rows after the first group.

Repacking runs at memory speed. The input is memory-mapped. Each thread takes a piece; a native function interleaves it
slice by slice into a buffer and writes the buffer. The data are still in the CPU cache, the buffer is reused without
clearing, and no thread waits for another's Python code. Pages of the input are released after use, so peak memory does
not grow with the file.

`output.py` has the loop that writes the file.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from quantkit.formats.gguf import GGUF, Metadata, Tensor, TensorSpec, Writer
from quantkit.formats.mapping import release
from quantkit.formats.pipeline import Progress, row_ranges
from quantkit.pipelines.output import WriteTask, filled_name, write_gguf
from quantkit.recipe.planning.interleaving import Selection, rename_repacked, rename_unpacked
from quantkit.repack import row_form, to_rows, why_not
from quantkit.types import QuantType
from quantkit.types.families.interleave import Interleaved

if TYPE_CHECKING:
    from quantkit.placement.rules import Placement

_INTERLEAVED_NAMES = ("_r4", "_r8", "_r16")
_PIECE_BYTES = 8 << 20  # large enough that threads rarely wait for each other or the interpreter, small in memory

_thread = threading.local()  # .buffer: the output buffer of each thread


class RepackedTensor(NamedTuple):
    """A tensor of the output: its new type (the old one if it is copied) and the reason if it is copied."""

    tensor: Tensor
    type: QuantType
    reason: str = ""

    @property
    def changed(self) -> bool:
        """Whether the type changes."""
        return self.type is not self.tensor.type

    @property
    def spec(self) -> TensorSpec:
        """Name, shape and type in the output."""
        return TensorSpec(self.tensor.name, self.tensor.shape, self.type)

    def tasks(self, writer: Writer) -> Iterator[WriteTask]:
        """Tasks that make the new bytes piece by piece and write them at their offsets; each returns its byte count."""
        for start, stop in _ranges(self.tensor, max(self.type.interleave, self.tensor.type.interleave)):
            yield functools.partial(self._move, start, stop, writer)

    def _move(self, start: int, stop: int, writer: Writer) -> int:
        data = self.tensor.rows(start, stop)
        nbytes = self._send(data, start, writer)
        if not nbytes:
            converted = self._converted(data) if self.changed else data
            writer.put(self.tensor.name, start * converted.shape[-1], converted)
            nbytes = converted.nbytes
        release(data)
        return nbytes

    def _send(self, data: np.ndarray, start: int, writer: Writer) -> int:
        """Convert and write rows in one native function; the byte count, 0 if there is none for this case."""
        forward = isinstance(self.type, Interleaved)
        group = self.type if forward else self.tensor.type
        width = self.type.row_bytes(self.tensor.shape[-1])
        if not self.changed or not isinstance(group, Interleaved) or width != data.shape[-1]:
            return 0
        send = functools.partial(group.write_rows, data, forward)
        return data.nbytes if writer.put_direct(self.tensor.name, start * width, data.nbytes, send) else 0

    def _converted(self, data: np.ndarray) -> np.ndarray:
        """Rows in the new type, in this thread's buffer."""
        n = self.tensor.shape[-1]
        out = _buffer(len(data) * self.type.row_bytes(n)).reshape(len(data), -1)
        if isinstance(self.type, Interleaved):
            return self.type.interleave_rows(data, threads=1, out=out)
        return to_rows(self.tensor.type, data, n, threads=1, out=out)


def _buffer(nbytes: int) -> np.ndarray:
    if not hasattr(_thread, "buffer") or _thread.buffer.size < nbytes:
        _thread.buffer = np.empty(nbytes, np.uint8)
    buffer: np.ndarray = _thread.buffer
    return buffer[:nbytes]


class Repacking(NamedTuple):
    """A planned repacking: the source file, the tensors of the output, its metadata, the placement if one was given."""

    source: GGUF
    changes: list[RepackedTensor]
    metadata: Metadata
    placement: Placement | None = None

    @property
    def changed(self) -> list[RepackedTensor]:
        """The tensors whose type changes."""
        return [change for change in self.changes if change.changed]

    @property
    def nbytes(self) -> int:
        """Bytes of tensor data in the output. They differ from the input's only for types that drop or add scales."""
        return sum(change.spec.nbytes for change in self.changes)


def plan_repack(source: GGUF, patterns: Sequence[str] = (), placement: Placement | None = None) -> Repacking:
    """Plan to interleave every tensor that can be; with patterns (ECMAScript) only those whose name one matches.

    With a placement, tensors that it puts on a GPU are copied: GPUs have kernels for few interleaved types.
    Raises QuantkitError for a pattern that matches no tensor's name.
    """
    selection = Selection(patterns, source.tensors.keys(), str(source.path))
    changes = []
    for tensor in source.tensors.values():
        form, reason = selection.form(tensor.name, tensor.shape, tensor.type)
        if form and placement and not placement.on_cpu(tensor.name):
            form, reason = None, f"on {placement[tensor.name].name} in this placement"
        changes.append(RepackedTensor(tensor, form or tensor.type, reason))
    metadata = Metadata(source.metadata)
    rename_repacked(metadata, _type_changes(changes))
    return Repacking(source, changes, metadata, placement)


def plan_unpack(source: GGUF) -> Repacking:
    """Plan to convert every interleaved tensor back to its base type.

    Tensors of IQ1_M_R4 are read to check that IQ1_M can hold every row. A tensor with a row that does not fit is
    copied, and the reason names the first such row.
    """
    changes = []
    for tensor in source.tensors.values():
        form = row_form(tensor.type)
        reason = _why_not_unpacked(tensor) if form else ""
        if form and not reason:
            changes.append(RepackedTensor(tensor, form))
            continue
        if not form:
            foreign = tensor.type.name.endswith(_INTERLEAVED_NAMES)
            reason = f"quantkit cannot unpack {tensor.type.name}" if foreign else "not interleaved"
        changes.append(RepackedTensor(tensor, tensor.type, reason))
    metadata = Metadata(source.metadata)
    rename_unpacked(metadata, _type_changes(changes))
    return Repacking(source, changes, metadata)


def write_repacked(
    job: Repacking,
    out: str | os.PathLike[str],
    *,
    split_max_bytes: int | None = None,
    split_max_tensors: int | None = None,
    keep_split: bool = False,
    threads: int | None = None,
    progress: Progress | bool = False,
) -> list[Path]:
    """Write the planned file and return its paths. It appears under its name when it is complete.

    In `out`, {name} stands for the name of the source. With a limit, or with `keep_split` and an input of several
    shards, the paths are `PREFIX-00001-of-0000N.gguf`.
    """
    return write_gguf(
        filled_name(out, job.source.path),
        job.metadata,
        [change.spec for change in job.changes],
        lambda writer: (task for change in job.changes for task in change.tasks(writer)),
        inputs=job.source.paths,
        split_max_bytes=split_max_bytes,
        split_max_tensors=split_max_tensors,
        shards=job.source.shards if keep_split else None,
        threads=threads,
        progress=progress,
    )


def _ranges(tensor: Tensor, step: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows. Each expert has whole groups of rows, so no group spans two experts."""
    if len(tensor.shape) == 1:
        return iter([(0, 1)])
    return row_ranges(tensor.shape, step, _PIECE_BYTES * tensor.shape[-1] // tensor.row_bytes)


def _why_not_unpacked(tensor: Tensor) -> str:
    """Why a tensor cannot be unpacked; "" if it can."""
    for start, stop in _ranges(tensor, tensor.type.interleave):
        data = tensor.rows(start, stop)
        reason = why_not(tensor.type, data, tensor.shape[-1], start)
        release(data)
        if reason:
            return reason
    return ""


def _type_changes(changes: Sequence[RepackedTensor]) -> list[tuple[str, QuantType, QuantType, int]]:
    return [(c.tensor.name, c.tensor.type, c.type, c.tensor.nbytes) for c in changes]
