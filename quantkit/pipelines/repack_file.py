"""Repacking whole files: rows interleaved for the CPU, and back, every bit kept.

    job = plan_repack(open("model.gguf"), ["ffn_.*_exps"])     what becomes of each tensor, and why; writes nothing
    job = plan_unpack(open("model-r4.gguf"))
    write(job, "out.gguf", keep_split=True)

Tensors keep their order, names and shapes; those that are not repacked are copied. Metadata is kept but for
general.file_type (`recipe.interleaving`) and for the keys of shards, which are those of the output. Unpacking a
repacked file gives the file there was.

Rows of Q8_KV_R8 take 4 + n bytes, as readers expect and as direct quantization writes them. What the reference repacks
from Q8_KV keeps the 8 + n of the base type, and every reader is lost after the first group (spec/repack.md 11.1).

The loop goes at the speed of memory: the input is mapped, the output written. Each thread takes a piece, and a C
function interleaves it slice by slice into a buffer and writes that: it is still in the cache, no memory is cleared for
it, and threads do not wait for each other's Python. Pages of the input are let go of behind: the peak of memory does
not grow with the file.

The output is not synced to the disk before it gets its name, which would take as long as all the rest: it can be made
again from its input, and `cp` does not do it either (formats/stream.py says what that means).
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from quantkit.formats.atomic import refuse_inputs
from quantkit.formats.gguf import GGUF, Metadata, Tensor, TensorSpec, Writer
from quantkit.formats.mapping import release
from quantkit.formats.pipeline import row_ranges, spread
from quantkit.recipe.interleaving import Selection, rename_repacked, rename_unpacked
from quantkit.repack import row_form, to_rows, why_not
from quantkit.types import QuantType
from quantkit.types.families.interleave import Interleaved

if TYPE_CHECKING:
    from quantkit.placement.rules import Placement

_INTERLEAVED_NAMES = ("_r4", "_r8", "_r16")
_PIECE_BYTES = 8 << 20  # enough that threads seldom wait for each other or for the interpreter, little for memory

_own = threading.local()  # .buffer of each thread, for what it makes


class Change(NamedTuple):
    """What becomes of a tensor: its new type (the old one where it is copied) and the reason if it is copied."""

    tensor: Tensor
    type: QuantType
    reason: str = ""

    @property
    def changed(self) -> bool:
        return self.type is not self.tensor.type

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec(self.tensor.name, self.tensor.shape, self.type)

    def tasks(self, writer: Writer) -> Iterator[Callable[[], int]]:
        """What makes the new bytes and puts them in their place, in pieces; each returns how many there were."""
        for start, stop in _ranges(self.tensor, max(self.type.interleave, self.tensor.type.interleave)):
            yield functools.partial(self._move, start, stop, writer)

    def _move(self, start: int, stop: int, writer: Writer) -> int:
        data = self.tensor.rows(start, stop)
        nbytes = self._send(data, start, writer)
        if not nbytes:
            made = self._changed(data) if self.changed else data
            writer.put(self.tensor.name, start * made.shape[-1], made)
            nbytes = made.nbytes
        release(data)
        return nbytes

    def _send(self, data: np.ndarray, start: int, writer: Writer) -> int:
        """The bytes that a C function wrote while it made them; 0 where it did not."""
        forward = isinstance(self.type, Interleaved)
        group = self.type if forward else self.tensor.type
        width = self.type.row_bytes(self.tensor.shape[-1])
        if not self.changed or not isinstance(group, Interleaved) or width != data.shape[-1]:
            return 0
        send = functools.partial(group.send_rows, data, forward)
        return data.nbytes if writer.straight(self.tensor.name, start * width, data.nbytes, send) else 0

    def _changed(self, data: np.ndarray) -> np.ndarray:
        """Rows in the new type, in this thread's buffer."""
        n = self.tensor.shape[-1]
        out = _buffer(len(data) * self.type.row_bytes(n)).reshape(len(data), -1)
        if isinstance(self.type, Interleaved):
            return self.type.interleave_rows(data, threads=1, out=out)
        return to_rows(self.tensor.type, data, n, threads=1, out=out)


def _buffer(nbytes: int) -> np.ndarray:
    if not hasattr(_own, "buffer") or _own.buffer.size < nbytes:
        _own.buffer = np.empty(nbytes, np.uint8)
    return _own.buffer[:nbytes]


class Repacking(NamedTuple):
    """A file, what becomes of each of its tensors, and the metadata of the result."""

    source: GGUF
    changes: list[Change]
    metadata: Metadata

    @property
    def changed(self) -> list[Change]:
        return [change for change in self.changes if change.changed]

    @property
    def nbytes(self) -> int:
        """Bytes of tensor data of the result; the input's differ only by types that drop or add scales."""
        return sum(change.spec.nbytes for change in self.changes)


def plan_repack(source: GGUF, patterns: Sequence[str] = (), placement: Placement | None = None) -> Repacking:
    """Interleave every tensor that can be, or of those the ones in whose name some pattern (ECMAScript) is found.

    With a placement, tensors that it puts on a GPU are left alone: few interleaved types have kernels there.
    Raises QuantkitError for a pattern that is found in no tensor's name.
    """
    selection = Selection(patterns, source.tensors.keys(), str(source.path))
    changes = []
    for tensor in source.tensors.values():
        form, reason = selection.form(tensor.name, tensor.shape, tensor.type)
        if form and placement and not placement.on_cpu(tensor.name):
            form, reason = None, f"on {placement[tensor.name].name} in this placement"
        changes.append(Change(tensor, form or tensor.type, reason))
    metadata = Metadata(source.metadata)
    rename_repacked(metadata, _became(changes))
    return Repacking(source, changes, metadata)


def plan_unpack(source: GGUF) -> Repacking:
    """Give every interleaved tensor the rows of its base type back.

    Tensors of IQ1_M_R4 are read to see whether IQ1_M can hold them; the first row that it cannot is the reason to keep
    one.
    """
    changes = []
    for tensor in source.tensors.values():
        form = row_form(tensor.type)
        reason = _obstacle(tensor) if form else ""
        if form and not reason:
            changes.append(Change(tensor, form))
            continue
        if not form:
            foreign = tensor.type.name.endswith(_INTERLEAVED_NAMES)
            reason = f"quantkit cannot unpack {tensor.type.name}" if foreign else "not interleaved"
        changes.append(Change(tensor, tensor.type, reason))
    metadata = Metadata(source.metadata)
    rename_unpacked(metadata, _became(changes))
    return Repacking(source, changes, metadata)


def write(
    job: Repacking,
    out: str | os.PathLike[str],
    *,
    split_max_bytes: int | None = None,
    split_max_tensors: int | None = None,
    keep_split: bool = False,
    threads: int | None = None,
    progress: bool = False,
) -> list[Path]:
    """Write the file that `job` describes; it appears under its name when it is complete. Returns the paths.

    With a limit, or with `keep_split` and an input of several shards, these are PREFIX-00001-of-0000N.gguf.
    """
    shards = job.source.shards if keep_split else None
    specs = [change.spec for change in job.changes]
    with Writer(out, job.metadata, specs, split_max_bytes, split_max_tensors, shards, durable=False) as writer:
        refuse_inputs(writer.paths, job.source.paths)
        tasks = (task for change in job.changes for task in change.tasks(writer))
        spread(tasks, job.nbytes, threads=threads, progress=progress)
        return list(writer.paths)


def _ranges(tensor: Tensor, step: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows. A group never straddles two experts: each has whole groups of rows."""
    if len(tensor.shape) == 1:
        return iter([(0, 1)])
    return row_ranges(tensor.shape, step, _PIECE_BYTES * tensor.shape[-1] // tensor.row_bytes)


def _obstacle(tensor: Tensor) -> str:
    """Why a tensor cannot be unpacked, "" where it can."""
    for start, stop in _ranges(tensor, tensor.type.interleave):
        data = tensor.rows(start, stop)
        reason = why_not(tensor.type, data, tensor.shape[-1], start)
        release(data)
        if reason:
            return reason
    return ""


def _became(changes: Sequence[Change]) -> list[tuple[str, QuantType, QuantType, int]]:
    return [(c.tensor.name, c.tensor.type, c.type, c.tensor.nbytes) for c in changes]
