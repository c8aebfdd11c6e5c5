"""Importance matrices as GGUF files, llama.cpp's current format: reading and writing them.

Keys:      general.type = "imatrix"; imatrix.datasets str[]; imatrix.chunk_count u32; imatrix.chunk_size u32, tokens
Tensors:   two f32 tensors a weight: NAME.in_sum2 with dims [columns, matrices], sums of squares of the activations that
           entered each column, and NAME.counts with dims [1, matrices], numbers of vectors. A single matrix has sums
           with dims [columns].

Readers divide sums by counts and use ones where a count is 0. So a matrix that saw nothing is written as zeros if its
values are ones. Otherwise (`fill_missing`, layer-mean) its values are written with a count of one, so that all readers
use them. Two more keys say so: quantkit.imatrix.missing_experts, the policy, and quantkit.imatrix.filled, a str[] of
"NAME:3,17", the matrices whose count is not real.

Second moments (`second_moments`), which other readers skip: NAME.correlations, f16 with dims [values, matrices], of the
first weight of each input, or NAME.factors, f16 with dims [rank, columns, matrices]; quantkit.imatrix.second_moments, a
str[] of "NAME BLOCK TOKENS,…" or "NAME rank:N TOKENS,…" and, for weights with the same input, "NAME = FIRST".

quantkit.imatrix.token_weights, if it is there, says what weighed the tokens (`matrix.TOKEN_WEIGHTS`).

Older files call the sums NAME.sums. Files that were converted from legacy files hold all matrices of a weight as one
row with one count. Their vectors were not counted: each call is written as a chunk of 512, and
quantkit.imatrix.counted = false says that the counts are not real.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from quantkit import types
from quantkit.errors import DataError, FormatError
from quantkit.formats import gguf
from quantkit.formats.gguf import GGUF, Metadata, Tensor, TensorSpec, Writer
from quantkit.formats.imatrix.matrix import POLICIES, TOKEN_WEIGHTS, Entry, Imatrix
from quantkit.formats.imatrix.second_moments import SecondMoments

DEFAULT_CHUNK = 512  # tokens a call, assumed for legacy files, which have no counts
_MOST_SEEN = 2.0**53  # vectors of a matrix; float32 counts beyond are no counts
_SUMS = (".in_sum2", ".sums")
_COUNTS = ".counts"
_CORRELATIONS, _FACTORS = ".correlations", ".factors"
_RANK = "rank:"
_MOMENTS = "quantkit.imatrix.second_moments"
_WEIGHTS = "quantkit.imatrix.token_weights"


def read(path: str | os.PathLike[str]) -> Imatrix:
    """Read an importance matrix; FormatError for other GGUF files and for impossible numbers."""
    file = gguf.open(path)
    kind = file.metadata.get("general.type")
    if kind != "imatrix":
        raise FormatError(f"{path}: not an importance matrix: general.type is {kind!r}, of one it is 'imatrix'")
    chunks, chunk_size = (_count(file, f"imatrix.chunk_{what}") for what in ("count", "size"))
    filled = _filled(file)
    entries = {}
    for name, sums in _sums(file):
        entries[name] = _entry(file, name, sums, chunks, chunk_size, filled.get(name, []))
    if not entries:
        raise FormatError(f"{path}: no tensor NAME.in_sum2, so there is no entry")
    chunk_size = chunk_size or DEFAULT_CHUNK
    if file.metadata.get("quantkit.imatrix.counted") is False:
        entries = {n: Entry(e.values, np.full(len(e.counts), e.calls, np.int64), e.calls) for n, e in entries.items()}
        chunk_size = 0
    datasets = file.metadata.get("imatrix.datasets", [])
    dataset = "+".join(map(str, datasets)) if isinstance(datasets, list) else str(datasets)
    policy = file.metadata.get("quantkit.imatrix.missing_experts", "")
    token_weights = file.metadata.get(_WEIGHTS, "none")
    if token_weights not in TOKEN_WEIGHTS:
        raise FormatError(f"{path}: {_WEIGHTS} is {token_weights!r:.60}; known are {', '.join(TOKEN_WEIGHTS)}")
    made = Imatrix(entries, chunks, dataset, chunk_size, policy if policy in POLICIES else "")
    return replace(made, second_moments=_read_moments(file, entries), token_weights=str(token_weights))


def _read_moments(file: GGUF, entries: dict[str, Entry]) -> dict[str, SecondMoments]:
    """Second moments by weight. Correlations stay in the file: they are checked when they are used."""
    listed = file.metadata.get(_MOMENTS, [])
    found: dict[str, SecondMoments] = {}
    for line in listed if isinstance(listed, list) else [listed]:
        name, _, rest = str(line).partition(" ")
        try:
            if rest.startswith("= "):
                found[name] = found[rest[2:]]
                continue
            form, _, counts = rest.partition(" ")
            tokens = np.array([int(count) for count in counts.split(",")], np.int64)
            if not 0 <= tokens.min() <= tokens.max() <= _MOST_SEEN:
                raise ValueError
            columns, has_rank = entries[name].values.shape[1], form.startswith(_RANK)
            size = int(form.removeprefix(_RANK))  # a rank, or columns of a block
            stored = file.tensors[name + (_FACTORS if has_rank else _CORRELATIONS)]
            if stored.type.name != "f16" or not 0 < size <= columns:
                raise ValueError
            if has_rank and stored.shape != (len(tokens), columns, size):
                raise ValueError
            packed = stored.stored.view("<f2").reshape(len(tokens), -1)
        except (KeyError, ValueError, OverflowError):
            raise FormatError(
                f"{file.path}: {_MOMENTS} says {str(line)!r:.80}, which does not fit the file's tensors; it is corrupt"
            ) from None
        block, rank = (columns, size) if has_rank else (size, 0)
        found[name] = SecondMoments(columns, block, packed, tokens, f"{file.path}: {stored.name}", rank)
    for name, moments in found.items():
        shape = entries[name].values.shape if name in entries else (0, 0)
        if moments.columns != shape[1] or len(moments.tokens) not in (1, shape[0]):
            raise FormatError(
                f"{file.path}: {name} has {shape[0]} matrices of {shape[1]} columns, its second moments are of "
                f"{len(moments.tokens)} of {moments.columns}; the file is corrupt"
            )
    return found


def _count(file: GGUF, key: str) -> int:
    value = file.metadata.get(key, 0)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 31:
        raise FormatError(f"{file.path}: {key} is {value!r}; it must be a number below 2^31")
    return value


def _sums(file: GGUF) -> Iterator[tuple[str, Tensor]]:
    """Names of weights with their sums; other tensors are skipped."""
    for tensor in file.tensors.values():
        for ending in _SUMS:
            if tensor.name.endswith(ending) and len(tensor.name) > len(ending):
                yield tensor.name[: -len(ending)], tensor


def _entry(file: GGUF, name: str, sums: Tensor, chunks: int, chunk_size: int, filled: list[int]) -> Entry:
    counts = file.tensors.get(name + _COUNTS)
    if counts is None:
        raise FormatError(f"{file.path}: {sums.name} is there, {name}{_COUNTS} is missing; the file is incomplete")
    seen = _values(file, counts).reshape(-1)
    total = _values(file, sums).astype(np.float64)
    if total.size % seen.size:
        raise FormatError(
            f"{file.path}: {sums.name} has {total.size} values, {counts.name} {seen.size} counts; they should be "
            "columns x matrices, and matrices"
        )
    total = total.reshape(seen.size, -1) if seen.size > 1 else total.reshape(-1, total.shape[-1])
    if seen.max() > _MOST_SEEN:
        raise FormatError(
            f"{file.path}: {counts.name} has a count of {seen.max():g}; quantkit reads counts of up to {_MOST_SEEN:g}"
        )
    numbers = np.rint(seen).astype(np.int64)
    scale = np.where(seen > 0, seen, 1)[:, None]
    with np.errstate(over="ignore"):
        values = np.where(seen[:, None] > 0, total / scale, 1.0).astype(np.float32)
    if not np.isfinite(values).all():
        row = int(np.argmin(np.isfinite(values).all(axis=1)))
        raise FormatError(
            f"{file.path}: {sums.name}: matrix {row} has sums up to {total[row].max():g} and a count of {seen[row]:g}, "
            "whose quotient float32 does not hold; the file is corrupt"
        )
    if any(not 0 <= i < numbers.size for i in filled):
        raise FormatError(f"{file.path}: quantkit.imatrix.filled names matrices {filled} of {name}, of {numbers.size}")
    numbers[filled] = 0
    counted = file.metadata.get("quantkit.imatrix.counted") is not False
    calls = (
        chunks if len(values) > 1 and chunks and counted else round(int(numbers.max()) / (chunk_size or DEFAULT_CHUNK))
    )
    return Entry(values, numbers, max(1, calls))


def _values(file: GGUF, tensor: Tensor) -> np.ndarray:
    if tensor.type.name != "f32":
        raise FormatError(f"{file.path}: {tensor.name} is {tensor.type.name}; sums and counts are f32")
    values = tensor.stored.view("<f4").reshape(tensor.shape)
    bad = np.argwhere(~(np.isfinite(values) & (values >= 0)))
    if len(bad):
        place = tuple(bad[0])
        raise FormatError(
            f"{file.path}: {tensor.name} at {tuple(map(int, place))} is {values[place]}; {len(bad)} value(s) are "
            "negative or not finite"
        )
    return values


def _filled(file: GGUF) -> dict[str, list[int]]:
    listed = file.metadata.get("quantkit.imatrix.filled", [])
    try:
        parts = [text.rpartition(":") for text in listed]
        return {name: [int(number) for number in numbers.split(",")] for name, _, numbers in parts}
    except (AttributeError, TypeError, ValueError):
        raise FormatError(f"{file.path}: quantkit.imatrix.filled is {listed!r:.60}; it should list NAME:3,17") from None


def write(path: str | os.PathLike[str], imatrix: Imatrix) -> None:
    """Write an importance matrix atomically; the same matrix gives the same bytes."""
    path = Path(path)
    metadata = Metadata()
    metadata.set("general.type", "imatrix", "str")
    metadata.set("imatrix.datasets", imatrix.dataset.split("+") if imatrix.dataset else [], "str")
    metadata.set("imatrix.chunk_count", imatrix.chunks, "u32")
    metadata.set("imatrix.chunk_size", imatrix.chunk_size or DEFAULT_CHUNK, "u32")
    if not imatrix.chunk_size:
        metadata.set("quantkit.imatrix.counted", False, "bool")
    if imatrix.policy:
        metadata.set("quantkit.imatrix.missing_experts", imatrix.policy, "str")
    filled = [f"{n}:{','.join(map(str, shown))}" for n, e in imatrix.entries.items() if (shown := _not_ones(e))]
    if filled:
        metadata.set("quantkit.imatrix.filled", filled, "str")
    if imatrix.token_weights != "none":
        metadata.set(_WEIGHTS, imatrix.token_weights, "str")
    owners = _owners(imatrix)
    if owners:
        metadata.set(_MOMENTS, _lines(imatrix, owners), "str")
    specs, f32 = [], types.layout("f32")
    for name, entry in imatrix.entries.items():
        matrices, columns = entry.values.shape
        many = len(entry.counts) > 1
        if many and len(entry.counts) != matrices:
            raise DataError(f"{path}: entry {name!r} has {matrices} matrices and {len(entry.counts)} counts")
        specs.append(TensorSpec(name + _SUMS[0], (matrices, columns) if matrices > 1 else (columns,), f32))
        specs.append(TensorSpec(name + _COUNTS, (matrices, 1) if many else (1,), f32))
        if owners.get(name) == name:
            specs.append(TensorSpec(*_place(name, imatrix.second_moments[name]), types.layout("f16")))
    with Writer(path, metadata, specs) as writer:
        for name, entry in imatrix.entries.items():
            sums, counts = _stored(imatrix, entry)
            writer.write(name + _SUMS[0], sums.astype("<f4").view(np.uint8))
            writer.write(name + _COUNTS, counts.astype("<f4").view(np.uint8))
            if owners.get(name) == name:
                moments = imatrix.second_moments[name]
                packed = np.ascontiguousarray(moments.correlations, "<f2").reshape(_place(name, moments)[1])
                writer.write(_place(name, moments)[0], packed.view(np.uint8))


def _place(name: str, moments: SecondMoments) -> tuple[str, tuple[int, ...]]:
    """Name and shape of the tensor of second moments whose first weight is `name`."""
    if moments.rank:
        return name + _FACTORS, (len(moments.tokens), moments.columns, moments.rank)
    return name + _CORRELATIONS, moments.correlations.shape


def _owners(imatrix: Imatrix) -> dict[str, str]:
    """For each weight with second moments the first weight with the same ones."""
    first: dict[int, str] = {}
    names = [name for name in imatrix.entries if name in imatrix.second_moments]
    return {name: first.setdefault(id(imatrix.second_moments[name]), name) for name in names}


def _lines(imatrix: Imatrix, owners: dict[str, str]) -> list[str]:
    """What `_read_moments` reads."""
    lines = []
    for name, owner in owners.items():
        moments = imatrix.second_moments[name]
        tokens = ",".join(map(str, moments.tokens.tolist()))
        form = f"{_RANK}{moments.rank}" if moments.rank else moments.block
        lines.append(f"{name} {form} {tokens}" if owner == name else f"{name} = {owner}")
    return lines


def _not_ones(entry: Entry) -> list[int]:
    """Numbers of the matrices that saw nothing and whose values are not the ones that readers assume."""
    return [i for i in entry.missing if not (entry.values[i] == 1).all()]


def _stored(imatrix: Imatrix, entry: Entry) -> tuple[np.ndarray, np.ndarray]:
    """Sums and counts as they are stored, float64[matrices, n] and float64[matrices]."""
    counts = entry.counts.astype(np.float64) * (1 if imatrix.chunk_size else DEFAULT_CHUNK)
    if not imatrix.chunk_size and not counts.any():  # a legacy entry of no calls: its values are as they are
        counts[:] = DEFAULT_CHUNK
    counts[_not_ones(entry)] = 1
    return entry.values.astype(np.float64) * counts[:, None], counts
