"""Parts of a model: write some tensors of a plan, and join such files.

    quantize IN PART.gguf TYPE --only REGEX                  a file with the tensors that match
    quantize IN OUT.gguf TYPE --keep-split --individual-tensors 2,3      shards 2 and 3 of IN's set, and the first one
    merge PART.gguf OTHER.gguf … OUT.gguf                    parts to the whole file

Types are decided for the whole model first, so a part holds what a run over everything would have written. A part has
all metadata, and two keys more: the number of the whole's tensors, and the places of its own among them. Joining checks
that the parts are of one plan and complete, and gives the bytes of a run over everything.

Shards need no such keys: a set whose shards were written one by one is a set like any other. With them, the input's
other shards may be missing; then only options that decide each tensor by its name and shape give the types of a whole
run, which is why --pure is required.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from quantkit.errors import FormatError, OptionError
from quantkit.formats import gguf, provenance
from quantkit.formats.gguf import dialects, difference, shards
from quantkit.formats.gguf.reader import MAX_TENSORS, PART
from quantkit.formats.gguf.writer import ShardsOfSet
from quantkit.pipelines.options import QuantizeOptions, comma_separated, texts
from quantkit.recipe.rules.ecmascript import compile_pattern

if TYPE_CHECKING:
    from quantkit.formats.gguf import GGUF, Metadata, Tensor
    from quantkit.formats.pipeline import Progress
    from quantkit.recipe import Plan

TENSORS = PART  # u32: tensors of the whole file
NUMBERS = "quantkit.part.numbers"  # u32[]: places of the part's tensors among them, from 0
_PER_TENSOR = (TENSORS, NUMBERS, provenance.TENSORS, provenance.SOURCE)  # keys that differ between parts
_SHOWN = 5


@dataclass(frozen=True)
class Part:
    """Some tensors of a plan, to be written.

    names   the tensors
    shards  the shards that hold them, of a split output; None if they go into one file
    counts  tensors of each of these shards
    """

    names: frozenset[str]
    shards: ShardsOfSet | None = None
    counts: tuple[int, ...] = ()

    def of(self, plan: Plan) -> Plan:
        """The plan of the part's tensors."""
        return replace(plan, tensors=tuple(t for t in plan.tensors if t.name in self.names))

    def set_keys(self, metadata: Metadata, plan: Plan) -> None:
        """Say in a part's metadata which tensors of `plan` it holds.

        Shards of a set have no such keys, and no records of their sources either: their first shard has the same bytes
        whichever others are written with it.
        """
        if self.shards is not None:
            for key in (provenance.TENSORS, provenance.SOURCE):
                metadata.pop(key, None)
        else:
            numbers = [i for i, t in enumerate(plan.tensors) if t.name in self.names]
            metadata.set(TENSORS, len(plan.tensors), "u32")
            metadata.set(NUMBERS, numbers, "u32")


def open_source(path: Path, options: QuantizeOptions) -> GGUF | None:
    """The shards of `options.individual_tensors` and the first one, if other shards of the set `path` are missing.

    None for a complete set, a single file or a directory: they are opened as always.
    """
    if not options.individual_tensors or not path.is_file():
        return None
    first = gguf.Shard(path)
    if (count := first.split_key("split.count", default=0)) <= 1:
        return None
    paths = shards.set_paths(first.path, count)
    if all(other.exists() for other in paths):
        return None
    if not options.pure:
        raise OptionError(
            f"{path}: other shards of the set are missing, so the mix of a file type cannot be decided; add --pure"
        )
    wanted = sorted({1, *_numbers(options, len(paths), path)})
    return gguf.open_parts([paths[number - 1] for number in wanted])


def choose(plan: Plan, source: object, options: QuantizeOptions) -> Part | None:
    """The part of a plan that `options` select; None if they select all.

    OptionError for options that contradict each other, for shard numbers that the input does not have, and for a
    pattern that matches no tensor.
    """
    if not options.only and not options.individual_tensors:
        if options.skip_first_shard:
            raise OptionError("--skip-first-shard goes with --individual-tensors")
        return None
    if options.only and options.individual_tensors:
        raise OptionError("--only and --individual-tensors both select tensors: pass one of them")
    if options.individual_tensors:
        return _by_shards(plan, source, options)
    if options.keep_split or options.split_max_size or options.split_max_tensors or options.skip_first_shard:
        raise OptionError("--only writes one file; to write some shards of a set use --individual-tensors N,…")
    names = set[str]()
    for text in texts(options.only):
        pattern = compile_pattern(text, "--only")
        matched = {t.name for t in plan.tensors if pattern.search(t.name)}
        if not matched:
            raise OptionError(f"--only '{text}' is found in none of {len(plan.tensors)} tensor names")
        names |= matched
    return Part(frozenset(names))


def _by_shards(plan: Plan, source: object, options: QuantizeOptions) -> Part:
    """The part that --individual-tensors selects."""
    if not options.keep_split or not isinstance(source, gguf.GGUF) or len(source.paths) < 2:
        raise OptionError(
            "--individual-tensors N,… are numbers of shards: IN must be a split GGUF file, and --keep-split be given"
        )
    found = [shards.number_of(path) for path in source.paths]
    count, total = found[0][1], gguf.Shard(source.paths[0]).split_key("split.tensors.count")
    wanted = set(_numbers(options, count, source.path))
    if not options.skip_first_shard:
        wanted.add(1)
    names, numbers, counts = set[str](), list[int](), list[int]()
    tensors, planned = iter(source.tensors), {t.name for t in plan.tensors}
    if len(planned) < len(source.tensors):
        raise OptionError(
            f"{source.path}: the scales of {len(source.tensors) - len(planned)} NVFP4 tensors become part of other "
            "tensors, so that shards cannot be written one by one; leave out --individual-tensors"
        )
    for (number, _), held in zip(found, source.shards):
        own = [next(tensors) for _ in range(held)]
        if number in wanted:
            names.update(own)
            numbers.append(number - 1)
            counts.append(held)
    return Part(frozenset(names), ShardsOfSet(tuple(numbers), count, total), tuple(counts))


def _numbers(options: QuantizeOptions, count: int, path: Path) -> list[int]:
    """The shard numbers of --individual-tensors, from 1."""
    found = []
    for text in comma_separated([str(number) for number in options.individual_tensors]):
        if not text.strip().isdecimal() or not 1 <= int(text) <= count:
            raise OptionError(f"--individual-tensors {text}: {path} is of a set of {count} shards; write 1 to {count}")
        found.append(int(text))
    return found


# ----------------------------------------------------------------------------------------------------------------- join


def join(
    paths: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    dialect: str | None = None,
    dry_run: bool = False,
    threads: int | None = None,
    progress: Progress | bool = False,
) -> tuple[Path, int]:
    """Join the parts `paths` to the file `out`; returns its path and the number of its tensors.

    `dry_run`: only check that they are parts of one file, and complete.

    `dialect` is stated as the program that the file is for; UnsupportedError for types that it does not read.
    FormatError for a file that is no part, for parts of different plans, and where tensors are missing.
    """
    files = [gguf.open(path) for path in paths]
    metadata = files[0].metadata.copy()
    total = _total(files[0])
    placed: dict[int, Tensor] = {}
    for file in files:
        _require_same(files[0], file)
        for number, tensor in zip(_places(file, total), file.tensors.values(), strict=True):
            if number in placed:
                raise FormatError(f"{file.path}: tensor {tensor.name} is also in {placed[number].path}")
            placed[number] = tensor
    missing = [number for number in range(total) if number not in placed]
    if missing:
        shown = ", ".join(map(str, missing[:_SHOWN])) + (", …" if missing[_SHOWN:] else "")
        raise FormatError(
            f"{files[0].path}: the parts hold {len(placed)} of {total} tensors; missing are those at {shown}; "
            "write them with quantize --only"
        )
    tensors = [placed[number] for number in range(total)]
    _set_whole(metadata, files, tensors)
    if dialect is not None:
        dialects.state(metadata, {tensor.name: tensor for tensor in tensors}, dialect, files[0].path)
    if dry_run:
        return Path(out), total
    inputs = [path for file in files for path in file.paths]
    return shards.copy_to(out, metadata, tensors, inputs, threads=threads, progress=progress), total


def _total(file: GGUF) -> int:
    """The number of tensors of the whole file that a part is of."""
    total = file.metadata.get(TENSORS)
    if not isinstance(total, int) or not 0 < total <= MAX_TENSORS:
        raise FormatError(
            f"{file.path}: not a part: {TENSORS} is {total!r}; parts are written by `quantize --only`, and the shards "
            "of a set are merged by naming one of them"
        )
    return total


def _places(file: GGUF, total: int) -> list[int]:
    """The places of a part's tensors in the whole file."""
    numbers = file.metadata.get(NUMBERS)
    found = numbers if isinstance(numbers, list) else []
    if len(found) != len(file.tensors) or not all(isinstance(n, int) and 0 <= n < total for n in found):
        raise FormatError(f"{file.path}: {NUMBERS} must list the places of {len(file.tensors)} tensors among {total}")
    return found


def _require_same(first: GGUF, other: GGUF) -> None:
    """FormatError unless two parts have the same metadata, except for what describes their own tensors."""
    _total(other)
    for found in difference.of_metadata(first.metadata, other.metadata):
        if found.key not in _PER_TENSOR or found.key == TENSORS:
            raise FormatError(
                f"{other.path}: {found.key} is {_short(found.b)}, in {first.path} it is {_short(found.a)}; these parts "
                "are not of one plan"
            )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "…"


def _set_whole(metadata: Metadata, files: Sequence[GGUF], tensors: Sequence[Tensor]) -> None:
    """Make a part's metadata those of the whole file."""
    for key in (TENSORS, NUMBERS):
        metadata.pop(key, None)
    if provenance.TENSORS not in metadata:
        return
    known = {name: record for file in files for name, record in provenance.records(file.metadata).items()}
    records = [known[tensor.name] for tensor in tensors if tensor.name in known]
    metadata.set(provenance.SOURCE, provenance.of_sources(records), "str")
    metadata.set(provenance.TENSORS, [str(record) for record in records], "str")
