"""`split` and `merge`: a GGUF file to shards and back. Bytes of tensors are copied, whatever their types.

    split(open("model.gguf"), "out.gguf", split_counts(file, max_bytes=50 * 10**9))   # out-00001-of-0000N.gguf, …
    merge(open("model-00001-of-00003.gguf"), "model.gguf")

Shards hold tensors in the file's order. The first holds all metadata, each holds the keys split.no, split.count and
split.tensors.count, as those of llama.cpp's gguf-split. Outputs have the alignment 32 that all readers take. Splitting
and merging a file that quantkit wrote gives its bytes again.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from quantkit.errors import DataError, FormatError
from quantkit.formats.gguf.metadata import Metadata
from quantkit.formats.gguf.reader import GGUF, Tensor, TensorSpec, Writer
from quantkit.formats.gguf.writer import ALIGNMENT, refuse_outputs
from quantkit.formats.mapping import release
from quantkit.formats.pipeline import Progress, spread

_PIECE_BYTES = 4 << 20
_NUMBERED = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)


def split_counts(
    file: GGUF, max_bytes: int | None = None, max_tensors: int | None = None, bare_first: bool = False
) -> list[int]:
    """The number of tensors of each shard, as gguf-split chooses it: a shard is filled up to the limit.

    Sizes are those of tensors padded to 32 bytes, without headers. A tensor above the limit gets its own shard.
    `bare_first` starts with a shard of metadata alone.
    """
    for name, limit in (("bytes", max_bytes), ("tensors", max_tensors)):
        if limit is not None and limit < 1:
            raise DataError(f"{file.path}: a shard's limit must be at least one, not {limit} {name}")
    counts, filled = [0], 0
    for tensor in file.tensors.values():
        size = -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        over = counts[-1] == max_tensors or (max_bytes is not None and filled + size > max_bytes)
        if counts[-1] and over:
            counts.append(0)
            filled = 0
        counts[-1] += 1
        filled += size
    return [0, *counts] if bare_first else counts


def split(
    file: GGUF,
    out: str | os.PathLike[str],
    counts: Sequence[int],
    *,
    threads: int | None = None,
    progress: bool = False,
) -> list[Path]:
    """Write shards with `counts` tensors each; they appear when all are complete. Returns their paths."""
    return _copy(file, Path(out), counts, True, threads, progress)


def merge(
    file: GGUF,
    out: str | os.PathLike[str],
    *,
    dry_run: bool = False,
    threads: int | None = None,
    progress: bool = False,
) -> Path:
    """Write the tensors of all shards of `file` into one file; returns its path. `dry_run`: only check them.

    `gguf.open` has checked that the set is complete and consistent. FormatError if the norms in a shard do not have the
    width that the first shard's metadata give: then it belongs to another model.
    """
    _check_one_model(file)
    if dry_run:
        return Path(out)
    return _copy(file, Path(out), [len(file.tensors)], False, threads, progress)[0]


def copy_to(
    out: str | os.PathLike[str],
    metadata: Metadata,
    tensors: Sequence[Tensor],
    inputs: Sequence[Path],
    *,
    threads: int | None = None,
    progress: Progress | bool = False,
) -> Path:
    """Copy tensors of any files, whose paths are `inputs`, into the one file `out`; returns its path."""
    return _copy_tensors(metadata, tensors, inputs, Path(out), [len(tensors)], False, threads, progress)[0]


def set_paths(path: Path, count: int) -> list[Path]:
    """The paths of all shards of the set of `count` that `path` is of, whether they exist or not.

    FormatError if its name is not that of a shard of such a set.
    """
    match = _NUMBERED.fullmatch(path.name)
    if match is None or int(match[3]) != count:
        raise FormatError(f"{path}: split.count is {count}; a shard's name ends in -NNNNN-of-{count:05d}.gguf")
    return [path.with_name(f"{match[1]}-{number:05d}-of-{match[3]}.gguf") for number in range(1, count + 1)]


def number_of(path: Path) -> tuple[int, int]:
    """(number from 1, number of all) of a shard, by its name. FormatError for another name."""
    match = _NUMBERED.fullmatch(path.name)
    if match is None:
        raise FormatError(f"{path}: a shard's name ends in -NNNNN-of-NNNNN.gguf")
    return int(match[2]), int(match[3])


def _copy(
    file: GGUF, out: Path, counts: Sequence[int], numbered: bool, threads: int | None, progress: Progress | bool
) -> list[Path]:
    tensors = list(file.tensors.values())
    return _copy_tensors(file.metadata, tensors, file.paths, out, counts, numbered, threads, progress)


def _copy_tensors(
    metadata: Metadata,
    tensors: Sequence[Tensor],
    inputs: Sequence[Path],
    out: Path,
    counts: Sequence[int],
    numbered: bool,
    threads: int | None,
    progress: Progress | bool,
) -> list[Path]:
    specs = [TensorSpec(t.name, t.shape, t.type) for t in tensors]
    with Writer(out, metadata, specs, shards=counts, numbered=numbered) as writer:
        refuse_outputs(writer.paths, inputs)
        tasks = (task for tensor in tensors for task in _tasks(tensor, writer))
        spread(tasks, sum(t.nbytes for t in tensors), threads=threads, progress=progress)
        return list(writer.paths)


def _tasks(tensor: Tensor, writer: Writer) -> Iterator[Callable[[], int]]:
    """Tasks that copy a tensor in pieces."""
    for start in range(0, tensor.nbytes, _PIECE_BYTES):
        yield functools.partial(_move, tensor, start, writer)


def _move(tensor: Tensor, start: int, writer: Writer) -> int:
    data = tensor.stored[start : start + _PIECE_BYTES]
    writer.put(tensor.name, start, data)
    release(data)
    return data.nbytes


def _check_one_model(file: GGUF) -> None:
    """FormatError unless all shards are of one model: attn_norm of each layer must have embedding_length elements."""
    width = file.metadata.get(f"{file.metadata.get('general.architecture')}.embedding_length")
    norms = [t for t in file.tensors.values() if re.fullmatch(r"blk\.\d+\.attn_norm\.weight", t.name)]
    for tensor in norms:
        if isinstance(width, int) and tensor.shape != (width,):
            raise FormatError(
                f"{tensor.path}: {tensor.name} has shape {tensor.shape}, {file.paths[0].name} is of a model with "
                f"embedding_length {width}; these shards are not of one file"
            )
