"""Write a GGUF whose tensors are runs of bytes of other files' tensors: nothing is decoded, every code is kept.

    job = Rewrite([open("model.gguf")], [copied(tensor) …], metadata)
    job.write("out.gguf")

A run is a part of a tensor as it is stored, for example one expert of a stack. Fusing experts, leaving out experts or
layers, and taking MTP layers apart are lists of runs. The file is written as `output.py` says, in pieces of
bounded size.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from quantkit.errors import UnsupportedError
from quantkit.formats import provenance
from quantkit.formats.gguf import GGUF, Metadata, Tensor, TensorSpec, Writer
from quantkit.formats.mapping import release
from quantkit.formats.pipeline import Progress
from quantkit.pipelines.output import WriteTask, write_gguf

_PIECE_BYTES = 8 << 20
_NOT_OF_LAYERS = ("ple.", "rope.dimension_sections")  # keys whose lists have no entry for each layer


class Run(NamedTuple):
    """Bytes `start` to `start + nbytes` of a tensor as it is stored."""

    tensor: Tensor
    start: int
    nbytes: int


@dataclass(frozen=True)
class RewrittenTensor:
    """A tensor of the output and the runs that make it up, in order. `shard` is that of the source file."""

    spec: TensorSpec
    runs: tuple[Run, ...]
    shard: int = 0

    @property
    def is_copy(self) -> bool:
        """Whether it is a whole tensor under its own name."""
        tensor, start, nbytes = self.runs[0]
        return len(self.runs) == 1 and not start and nbytes == tensor.nbytes and self.spec.name == tensor.name


def copied(tensor: Tensor, shard: int = 0, name: str | None = None) -> RewrittenTensor:
    """A whole tensor, under its own name or another."""
    spec = TensorSpec(name or tensor.name, tensor.shape, tensor.type)
    return RewrittenTensor(spec, (Run(tensor, 0, tensor.nbytes),), shard)


def selected(tensor: Tensor, numbers: Sequence[int], shard: int = 0, name: str | None = None) -> RewrittenTensor:
    """The elements `numbers` of a tensor's first axis: matrices of a stack, rows of a matrix, elements of a vector.

    UnsupportedError for a type that cannot be cut there.
    """
    shape = (len(numbers), *tensor.shape[1:])
    require_cuttable(tensor, 1 if len(tensor.shape) < 3 else tensor.shape[1])
    each = tensor.nbytes // tensor.shape[0]
    spec = TensorSpec(name or tensor.name, shape, tensor.type)
    return RewrittenTensor(spec, tuple(Run(tensor, number * each, each) for number in numbers), shard)


def require_cuttable(tensor: Tensor, rows: int) -> None:
    """UnsupportedError unless a tensor's bytes can be cut at multiples of `rows` rows."""
    kind = tensor.type
    if kind.whole_tensor or (len(tensor.shape) == 1 and kind.block_size > 1):
        raise UnsupportedError(f"{tensor.path}: tensor {tensor.name} is {kind.name}, whose rows cannot be taken apart")
    if rows % kind.interleave:
        raise UnsupportedError(
            f"{tensor.path}: tensor {tensor.name}: {kind.name} interleaves {kind.interleave} rows, and it would be cut "
            f"at multiples of {rows}; `quantkit unpack` the file first"
        )


def is_of_layers(key: str, value: object, arch: str, layers: int) -> bool:
    """Whether the value of a key of an architecture is a list with an entry for each of so many layers."""
    own = key.startswith(f"{arch}.") and not key.removeprefix(f"{arch}.").startswith(_NOT_OF_LAYERS)
    return own and isinstance(value, list) and len(value) == layers


def by_shard(source: GGUF) -> Iterator[tuple[int, Tensor]]:
    """The tensors of a file with the numbers of their shards."""
    tensors = iter(source.tensors.values())
    for number, count in enumerate(source.shards):
        for _ in range(count):
            yield number, next(tensors)


@dataclass(frozen=True)
class Rewrite:
    """A planned file: the files that it is made from, its tensors and its metadata.

    `metadata` loses the provenance records of tensors that are not copies.
    """

    sources: list[GGUF]
    tensors: list[RewrittenTensor]
    metadata: Metadata
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if recorded := provenance.records(self.metadata):
            same = {tensor.spec.name for tensor in self.tensors if tensor.is_copy}
            self.metadata.set(provenance.TENSORS, [str(r) for r in recorded.values() if r.name in same], "str")

    @property
    def changed(self) -> list[RewrittenTensor]:
        """The tensors that are not copies."""
        return [tensor for tensor in self.tensors if not tensor.is_copy]

    @property
    def nbytes(self) -> int:
        """Bytes of tensor data in the output."""
        return sum(tensor.spec.nbytes for tensor in self.tensors)

    def write(
        self,
        out: str | os.PathLike[str],
        *,
        split_max_bytes: int | None = None,
        split_max_tensors: int | None = None,
        keep_split: bool = False,
        threads: int | None = None,
        progress: Progress | bool = False,
    ) -> list[Path]:
        """Write the file and return its paths. It appears when it is complete."""
        counts = [sum(tensor.shard == i for tensor in self.tensors) for i in range(len(self.sources[0].shards))]
        return write_gguf(
            out,
            self.metadata,
            [tensor.spec for tensor in self.tensors],
            lambda writer: (task for tensor in self.tensors for task in _tasks(tensor, writer)),
            inputs=[path for source in self.sources for path in source.paths],
            split_max_bytes=split_max_bytes,
            split_max_tensors=split_max_tensors,
            shards=[count for count in counts if count] if keep_split else None,
            threads=threads,
            progress=progress,
        )


def _tasks(tensor: RewrittenTensor, writer: Writer) -> Iterable[WriteTask]:
    offset = 0
    for run in tensor.runs:
        for start in range(0, run.nbytes, _PIECE_BYTES):
            piece = Run(run.tensor, run.start + start, min(_PIECE_BYTES, run.nbytes - start))
            yield functools.partial(_write, writer, tensor.spec.name, offset + start, piece)
        offset += run.nbytes


def _write(writer: Writer, name: str, offset: int, run: Run) -> int:
    data = run.tensor.stored[run.start : run.start + run.nbytes]
    writer.put(name, offset, data)
    release(data)
    return run.nbytes
