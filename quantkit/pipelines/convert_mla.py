"""The tensors between latent and heads of a file with latent attention (MLA), in another of their three layouts.

    kv_b        attn_kv_b; head_count_kv, key_length and value_length are those of the heads
    k_b+v_b     attn_k_b and attn_v_b of three dimensions, as upstream's converter writes; the keys are those of the
                latent, those of the heads are key_length_mla and value_length_mla
    both        attn_kv_b, and attn_k_b and attn_v_b of two dimensions, as ik_llama.cpp's converter writes

archs/deepseek2.py says what they hold. What a layout keeps is copied bit for bit. Of what it adds, attn_v_b is rows of
attn_kv_b, copied as they are, of any type. attn_k_b is its other rows transposed, which float types do without loss;
of other types these values are quantized again, to Q8_0 unless another type is asked for, and so are they the other way
round. The error of that is measured over what is quantized again: the root of the mean squared difference, divided by
that of the values.

    job = plan(open("model.gguf"), "k_b+v_b")      what becomes of each tensor; writes nothing
    write(job, "out.gguf"); job.errors             {tensor: relative error}
"""

from __future__ import annotations

import functools
import math
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from quantkit import types
from quantkit.archs.common import validate
from quantkit.archs.deepseek2 import LatentHParams
from quantkit.errors import FormatError, UnknownNameError, UnsupportedError
from quantkit.formats import provenance
from quantkit.formats.atomic import refuse_inputs
from quantkit.formats.gguf import GGUF, Metadata, Tensor, TensorSpec, Writer
from quantkit.formats.pipeline import Job, pump, row_ranges
from quantkit.types import QuantType

LAYOUTS = {"kv_b": ("kv",), "k_b+v_b": ("k", "v"), "both": ("kv", "k", "v")}
COPIED, ROWS, TRANSPOSED, AGAIN = "copied", "rows, bit for bit", "transposed, exact", "quantized again"

_NAME = re.compile(r"blk\.(\d+)\.attn_(kv|k|v)_b\.weight")
_FLOATS = ("f32", "f16", "bf16")
_USUAL = "q8_0"


@dataclass(frozen=True)
class Sizes:
    """Heads; elements of a head's key that come of the latent, and of its value; elements of the latent."""

    heads: int
    nope: int
    v: int
    latent: int
    turned: int  # elements of a key that rope turns

    def rows(self, kind: str) -> int:
        """Rows of a head in "kv", "k" or "v"."""
        return {"kv": self.nope + self.v, "k": self.latent, "v": self.v}[kind]

    def columns(self, kind: str) -> int:
        return self.nope if kind == "k" else self.latent

    def shape(self, kind: str, stacked: bool) -> tuple[int, ...]:
        rows, columns = self.rows(kind), self.columns(kind)
        return (self.heads, rows, columns) if stacked else (self.heads * rows, columns)


@dataclass(frozen=True)
class Change:
    """A tensor of the result, of which shard, what it is made of, and how: COPIED, ROWS, TRANSPOSED or AGAIN."""

    spec: TensorSpec
    sources: dict[str, Tensor]  # "kv", or "k" and "v"; or of what is copied ""
    how: str
    shard: int


@dataclass(frozen=True)
class Relayout:
    """A file, the tensors of the result and its metadata. `errors` are known after `write`."""

    source: GGUF
    layout: str
    sizes: Sizes
    changes: list[Change]
    metadata: Metadata
    errors: dict[str, float] = field(default_factory=dict)

    @property
    def changed(self) -> bool:
        before = [(t.name, t.shape) for t in self.source.tensors.values()]
        return before != [(c.spec.name, c.spec.shape) for c in self.changes]

    @property
    def made(self) -> list[Change]:
        return [change for change in self.changes if change.how != COPIED]

    @property
    def dropped(self) -> list[str]:
        kept = {change.spec.name for change in self.changes}
        return [name for name in self.source.tensors if name not in kept]

    @property
    def nbytes(self) -> int:
        return sum(change.spec.nbytes for change in self.changes)


# ---------------------------------------------------------------------------------------------------------- what to do


def plan(source: GGUF, layout: str, kind: str | None = None) -> Relayout:
    """What becomes of each tensor of a file in one of LAYOUTS; `kind` is the type of what is quantized again.

    UnsupportedError for a file without latent attention, and for types that cannot be had.
    """
    if layout not in LAYOUTS:
        raise UnknownNameError("layout", layout, LAYOUTS)
    sizes = _sizes(source)
    chosen = types.get(kind) if kind is not None else None
    _refuse(chosen)
    of_layer: dict[str, dict[str, Tensor]] = {}
    for name, tensor in source.tensors.items():
        if match := _NAME.fullmatch(name):
            of_layer.setdefault(match[1], {})[match[2]] = tensor
    changes: list[Change] = []
    done = set()
    for shard, tensor in _by_shard(source):
        match = _NAME.fullmatch(tensor.name)
        if not match:
            changes.append(Change(TensorSpec(tensor.name, tensor.shape, tensor.type), {"": tensor}, COPIED, shard))
        elif match[1] not in done:
            done.add(match[1])
            made = _layer(f"blk.{match[1]}", of_layer[match[1]], layout, sizes, chosen)
            changes += [Change(*parts, shard) for parts in made]
    return Relayout(source, layout, sizes, changes, _metadata(source, layout, sizes, changes))


def _sizes(source: GGUF) -> Sizes:
    hp = validate.described(source.metadata, source.tensors, source.path).hparams
    if not isinstance(hp, LatentHParams):
        raise UnsupportedError(f"{source.path}: {hp.arch} has no latent attention, whose layout could be changed")
    return Sizes(hp.n_head, hp.nope, hp.head_dim_v, hp.kv_lora, hp.rope.dim)


def _refuse(kind: QuantType | None) -> None:
    if kind is not None and (kind.interleave > 1 or kind.requires_imatrix or kind.whole_tensor):
        raise UnsupportedError(
            f"--type {kind.name}: heads are quantized one by one, without importance; choose a type that takes none "
            "and is not interleaved (`quantkit repack` interleaves a file)"
        )


def _by_shard(source: GGUF) -> Iterator[tuple[int, Tensor]]:
    tensors = iter(source.tensors.values())
    for number, count in enumerate(source.shards):
        for _ in range(count):
            yield number, next(tensors)


def _layer(
    block: str, have: Mapping[str, Tensor], layout: str, sizes: Sizes, chosen: QuantType | None
) -> Iterator[tuple[TensorSpec, dict[str, Tensor], str]]:
    """Spec, sources and manner of each tensor that a layer has in a layout."""
    stacked = layout == "k_b+v_b"
    for kind in LAYOUTS[layout]:
        name, shape = f"{block}.attn_{kind}_b.weight", sizes.shape(kind, stacked)
        if kind in have:
            yield TensorSpec(name, shape, have[kind].type), {"": have[kind]}, COPIED
            continue
        needed = ("k", "v") if kind == "kv" else ("kv",)
        if any(part not in have for part in needed):
            there = ", ".join(f"attn_{part}_b" for part in have)
            raise FormatError(f"layer {block} has {there} only; it needs attn_kv_b, or attn_k_b and attn_v_b")
        sources = {part: have[part] for part in needed}
        type_, how = _type(kind, sources, sizes, chosen)
        yield TensorSpec(name, shape, type_), sources, how


def _type(kind: str, sources: Mapping[str, Tensor], sizes: Sizes, chosen: QuantType | None) -> tuple[QuantType, str]:
    """The type of a tensor that is made, and how it is."""
    for tensor in sources.values():
        group, step = tensor.type.interleave, math.gcd(sizes.nope, sizes.v, sizes.latent)
        if not tensor.type.has_codec or tensor.type.whole_tensor or step % group:
            raise UnsupportedError(
                f"{tensor.path}: tensor {tensor.name} is {tensor.type.name}, whose rows cannot be taken apart by heads"
                f"{'; `quantkit unpack` the file first' if group > 1 else ''}"
            )
    if kind == "v":
        return sources["kv"].type, ROWS
    found = {tensor.type.name for tensor in sources.values()}
    if found <= set(_FLOATS):
        return types.get(found.pop() if len(found) == 1 else "f32"), TRANSPOSED
    wanted = chosen or types.get(_USUAL)
    if sizes.columns(kind) % wanted.block_size:
        raise UnsupportedError(
            f"rows of {sizes.columns(kind)} elements of attn_{kind}_b are not a multiple of the {wanted.block_size} in "
            f"a block of {wanted.name}; choose another --type, as bf16"
        )
    return wanted, AGAIN


def _metadata(source: GGUF, layout: str, sizes: Sizes, changes: list[Change]) -> Metadata:
    """The keys of heads as the layout has them; hashes only of tensors that stay as they were."""
    made, name = source.metadata.copy(), source.metadata["general.architecture"]
    key, latent = sizes.nope + sizes.turned, layout == "k_b+v_b"
    numbers = {
        "head_count_kv": 1 if latent else sizes.heads,
        "key_length": sizes.latent + sizes.turned if latent else key,
        "value_length": sizes.latent if latent else sizes.v,
    }
    numbers |= {"key_length_mla": key, "value_length_mla": sizes.v} if latent else {}
    for part in ("key_length_mla", "value_length_mla"):
        made.pop(f"{name}.attention.{part}", None)
    for part, number in numbers.items():
        made.set(f"{name}.attention.{part}", number, "u32")
    if recorded := provenance.records(made):
        stay = {change.spec.name for change in changes if change.how == COPIED}
        made.set(provenance.TENSORS, [str(r) for r in recorded.values() if r.name in stay], "str")
    return made


# ----------------------------------------------------------------------------------------------------------- the bytes


def write(
    job: Relayout,
    out: str | os.PathLike[str],
    *,
    split_max_bytes: int | None = None,
    split_max_tensors: int | None = None,
    keep_split: bool = False,
    threads: int | None = None,
    progress: bool = False,
) -> list[Path]:
    """Write the file that `job` describes; it appears under its name when it is complete. Returns the paths."""
    counts = [sum(change.shard == i for change in job.changes) for i in range(len(job.source.shards))]
    specs = [change.spec for change in job.changes]
    errors = _Errors()
    with Writer(out, job.metadata, specs, split_max_bytes, split_max_tensors, counts if keep_split else None) as writer:
        refuse_inputs(writer.paths, job.source.paths)
        jobs = (task for change in job.changes for task in _jobs(change, job.sizes, errors))
        pump(jobs, writer.write, job.nbytes, threads=threads, progress=progress)
        job.errors.update(errors.relative())
        return list(writer.paths)


class _Errors:
    """Sums of squares by tensor, of differences and of values; several threads add to them."""

    def __init__(self) -> None:
        self._sums: dict[str, np.ndarray] = {}
        self._lock = threading.Lock()

    def add(self, name: str, x: np.ndarray, made: np.ndarray) -> None:
        parts = np.array([np.square(x - made, dtype=np.float64).sum(), np.square(x, dtype=np.float64).sum()])
        with self._lock:
            self._sums[name] = self._sums.get(name, np.zeros(2)) + parts

    def relative(self) -> dict[str, float]:
        return {name: math.sqrt(error / (whole or 1.0)) for name, (error, whole) in self._sums.items()}


def _jobs(change: Change, sizes: Sizes, errors: _Errors) -> Iterator[Job]:
    """What makes a tensor's bytes: in pieces of rows, or a head at a time."""
    if change.how == COPIED:
        tensor = change.sources[""]
        ranges = row_ranges(tensor.shape, tensor.type.interleave) if len(tensor.shape) > 1 else [(0, 1)]
        yield from ((tensor.name, functools.partial(tensor.rows, start, stop)) for start, stop in ranges)
        return
    kind = "k" if ".attn_k_b." in change.spec.name else "v" if ".attn_v_b." in change.spec.name else "kv"
    make: Callable[[int], np.ndarray] = {
        "k": functools.partial(_keys, change, sizes, errors),
        "v": functools.partial(_values, change, sizes),
        "kv": functools.partial(_both, change, sizes, errors),
    }[kind]
    yield from ((change.spec.name, functools.partial(make, head)) for head in range(sizes.heads))


def _keys(change: Change, sizes: Sizes, errors: _Errors, head: int) -> np.ndarray:
    """attn_k_b of a head: the rows of its key in attn_kv_b, transposed."""
    first = head * sizes.rows("kv")
    x = change.sources["kv"].decode_rows(first, first + sizes.nope)
    return _encoded(change, np.ascontiguousarray(x.T), errors)


def _values(change: Change, sizes: Sizes, head: int) -> np.ndarray:
    """attn_v_b of a head: the rows of its value in attn_kv_b."""
    first = head * sizes.rows("kv") + sizes.nope
    return change.sources["kv"].rows(first, first + sizes.v)


def _both(change: Change, sizes: Sizes, errors: _Errors, head: int) -> np.ndarray:
    """attn_kv_b of a head."""
    keys, values = change.sources["k"], change.sources["v"]
    k = keys.decode_rows(head * sizes.latent, (head + 1) * sizes.latent)
    made = _encoded(change, np.ascontiguousarray(k.T), errors)
    first, last = head * sizes.v, (head + 1) * sizes.v
    if values.type is change.spec.type:
        return np.concatenate([made, values.rows(first, last)])
    return np.concatenate([made, _encoded(change, values.decode_rows(first, last), errors)])


def _encoded(change: Change, x: np.ndarray, errors: _Errors) -> np.ndarray:
    made = change.spec.type.quantize(x, threads=1)
    if change.how == AGAIN:
        errors.add(change.spec.name, x, change.spec.type.dequantize(made, x.shape[1], threads=1))
    return made
