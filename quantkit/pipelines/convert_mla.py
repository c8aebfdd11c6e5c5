"""Convert the `attn_kv_b`, `attn_k_b` and `attn_v_b` tensors of latent attention (MLA) between their three layouts.

    kv_b        attn_kv_b; the keys head_count_kv, key_length and value_length describe the heads
    k_b+v_b     attn_k_b and attn_v_b with three dimensions, as llama.cpp's converter writes them; those keys describe
                the latent, and key_length_mla and value_length_mla describe the heads
    both        attn_kv_b, and attn_k_b and attn_v_b with two dimensions, as ik_llama.cpp's converter writes them

`archs/deepseek2.py` describes the tensors. Tensors that both layouts have are copied bit for bit. A new attn_v_b copies
rows of attn_kv_b unchanged, in any type. A new attn_k_b has the other rows transposed: lossless for float types, while
other types are requantized, to Q8_0 unless another type is given. The same holds for the opposite direction. The
relative error of requantized values is measured: the root mean square of the difference, divided by that of the values.

    job = plan_relayout(open("model.gguf"), "k_b+v_b")      plans each tensor; writes nothing
    write_relayout(job, "out.gguf"); job.errors             {tensor: relative error}
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
from quantkit.formats.gguf import GGUF, Metadata, Tensor, TensorSpec, Writer, scales
from quantkit.formats.mapping import release
from quantkit.formats.pipeline import Progress, row_ranges
from quantkit.pipelines.output import WriteTask, write_gguf
from quantkit.types import QuantType

LAYOUTS = {"kv_b": ("kv",), "k_b+v_b": ("k", "v"), "both": ("kv", "k", "v")}
COPIED, ROWS, TRANSPOSED, REQUANTIZED = "copied", "rows, bit for bit", "transposed, exact", "requantized"

_NAME = re.compile(r"blk\.(\d+)\.attn_(kv|k|v)_b\.weight")
_FLOATS = ("f32", "f16", "bf16")
_DEFAULT_TYPE = "q8_0"


@dataclass(frozen=True)
class HeadSizes:
    """Dimensions of latent attention, in elements.

    heads   number of heads
    nope    elements of a head's key that are computed from the latent, without RoPE
    v       elements of a head's value
    latent  elements of the latent
    rope    elements of a key with RoPE
    """

    heads: int
    nope: int
    v: int
    latent: int
    rope: int

    def rows(self, kind: str) -> int:
        """Rows of a head in "kv", "k" or "v"."""
        return {"kv": self.nope + self.v, "k": self.latent, "v": self.v}[kind]

    def columns(self, kind: str) -> int:
        """Elements of a row in "kv", "k" or "v"."""
        return self.nope if kind == "k" else self.latent

    def shape(self, kind: str, stacked: bool) -> tuple[int, ...]:
        """Shape of attn_KIND_b; `stacked` has the heads as its first of three dimensions."""
        rows, columns = self.rows(kind), self.columns(kind)
        return (self.heads, rows, columns) if stacked else (self.heads * rows, columns)


@dataclass(frozen=True)
class RelayoutTensor:
    """A tensor of the output: its shard, its sources, and how it is made (COPIED, ROWS, TRANSPOSED, REQUANTIZED)."""

    spec: TensorSpec
    sources: dict[str, Tensor]  # "kv", or "k" and "v"; "" for a copied tensor
    how: str
    shard: int


@dataclass(frozen=True)
class Relayout:
    """A planned change of layout: the source file, the output's tensors and its metadata.

    `errors` has the relative error of each requantized tensor by name; `write_relayout` sets it.
    """

    source: GGUF
    layout: str
    sizes: HeadSizes
    changes: list[RelayoutTensor]
    metadata: Metadata
    errors: dict[str, float] = field(default_factory=dict)

    @property
    def changed(self) -> bool:
        """Whether names or shapes of tensors change."""
        before = [(t.name, t.shape) for t in self.source.tensors.values()]
        return before != [(c.spec.name, c.spec.shape) for c in self.changes]

    @property
    def new_tensors(self) -> list[RelayoutTensor]:
        """The tensors that are not copied."""
        return [change for change in self.changes if change.how != COPIED]

    @property
    def dropped(self) -> list[str]:
        """Names of the source's tensors that the output lacks."""
        names = {change.spec.name for change in self.changes}
        return [name for name in self.source.tensors if name not in names]

    @property
    def nbytes(self) -> int:
        """Bytes of tensor data in the output."""
        return sum(change.spec.nbytes for change in self.changes)


# ------------------------------------------------------------------------------------------------------------ the plan


def plan_relayout(source: GGUF, layout: str, kind: str | None = None) -> Relayout:
    """Plan the conversion of a file to one of LAYOUTS; `kind` is the type of requantized tensors.

    Raises UnsupportedError for a file without latent attention, and for a type that is not possible here.
    """
    if layout not in LAYOUTS:
        raise UnknownNameError("layout", layout, LAYOUTS)
    sizes = _sizes(source)
    chosen = types.get(kind) if kind is not None else None
    _check_type(chosen)
    of_layer: dict[str, dict[str, Tensor]] = {}
    for name, tensor in source.tensors.items():
        if match := _NAME.fullmatch(name):
            of_layer.setdefault(match[1], {})[match[2]] = tensor
    changes: list[RelayoutTensor] = []
    done = set()
    for shard, tensor in _by_shard(source):
        match = _NAME.fullmatch(tensor.name)
        if not match:
            spec = TensorSpec(tensor.name, tensor.shape, tensor.type)
            changes.append(RelayoutTensor(spec, {"": tensor}, COPIED, shard))
        elif match[1] not in done:
            done.add(match[1])
            new_tensors = _layer(f"blk.{match[1]}", of_layer[match[1]], layout, sizes, chosen)
            changes += [RelayoutTensor(*parts, shard) for parts in new_tensors]
    names = {change.spec.name for change in changes}
    scales_left_out = {scale for name in source.tensors.keys() - names for scale in scales.companions(name)}
    changes = [change for change in changes if change.spec.name not in scales_left_out]
    return Relayout(source, layout, sizes, changes, _metadata(source, layout, sizes, changes))


def _sizes(source: GGUF) -> HeadSizes:
    hp = validate.describe(source.metadata, source.tensors, source.path).hparams
    if not isinstance(hp, LatentHParams):
        raise UnsupportedError(f"{source.path}: {hp.arch} has no latent attention; convert-mla has nothing to change")
    if other := next((i for i in range(hp.n_layer) if hp.of_layer(i).nope != hp.nope), None):
        raise UnsupportedError(
            f"{source.path}: heads of blk.{other} have {hp.of_layer(other).nope} elements without RoPE, others "
            f"{hp.nope}; convert-mla takes files whose layers have one number of them"
        )
    return HeadSizes(hp.n_head, hp.nope, hp.head_dim_v, hp.kv_lora, hp.rope.dim)


def _check_type(kind: QuantType | None) -> None:
    if kind is not None and (kind.interleave > 1 or kind.requires_imatrix or kind.whole_tensor):
        raise UnsupportedError(
            f"--type {kind.name}: heads are quantized one by one, without an importance matrix; choose a type that "
            "needs none and is not interleaved (`quantkit repack` interleaves a file)"
        )


def _by_shard(source: GGUF) -> Iterator[tuple[int, Tensor]]:
    tensors = iter(source.tensors.values())
    for number, count in enumerate(source.shards):
        for _ in range(count):
            yield number, next(tensors)


def _layer(
    block: str, have: Mapping[str, Tensor], layout: str, sizes: HeadSizes, chosen: QuantType | None
) -> Iterator[tuple[TensorSpec, dict[str, Tensor], str]]:
    """Spec, sources and method (COPIED, …) of each tensor of a layer in a layout."""
    stacked = layout == "k_b+v_b"
    for kind in LAYOUTS[layout]:
        name, shape = f"{block}.attn_{kind}_b.weight", sizes.shape(kind, stacked)
        if kind in have:
            yield TensorSpec(name, shape, have[kind].type), {"": have[kind]}, COPIED
            continue
        needed = ("k", "v") if kind == "kv" else ("kv",)
        if any(part not in have for part in needed):
            present = ", ".join(f"attn_{part}_b" for part in have)
            raise FormatError(f"layer {block} has only {present}; it needs attn_kv_b, or attn_k_b and attn_v_b")
        sources = {part: have[part] for part in needed}
        type_, how = _type(kind, sources, sizes, chosen)
        yield TensorSpec(name, shape, type_), sources, how


def _type(
    kind: str, sources: Mapping[str, Tensor], sizes: HeadSizes, chosen: QuantType | None
) -> tuple[QuantType, str]:
    """The type of a new tensor, and its method."""
    for tensor in sources.values():
        group, step = tensor.type.interleave, math.gcd(sizes.nope, sizes.v, sizes.latent)
        if tensor.scale is not None:
            raise UnsupportedError(
                f"{tensor.path}: tensor {tensor.name} is scaled by {tensor.scale.name}, which other tensors could not "
                "name; quantize it to another type first, for example --custom-q attn_=q8_0"
            )
        if not tensor.type.has_codec or tensor.type.whole_tensor or step % group:
            raise UnsupportedError(
                f"{tensor.path}: tensor {tensor.name} is {tensor.type.name}, whose rows cannot be split by heads"
                f"{'; `quantkit unpack` the file first' if group > 1 else ''}"
            )
    if kind == "v":
        return sources["kv"].type, ROWS
    found = {tensor.type.name for tensor in sources.values()}
    if found <= set(_FLOATS):
        return types.get(found.pop() if len(found) == 1 else "f32"), TRANSPOSED
    target = chosen or types.get(_DEFAULT_TYPE)
    if sizes.columns(kind) % target.block_size:
        raise UnsupportedError(
            f"rows of attn_{kind}_b have {sizes.columns(kind)} elements, which is not a multiple of {target.name}'s "
            f"block size of {target.block_size}; choose another --type, for example bf16"
        )
    return target, REQUANTIZED


def _metadata(source: GGUF, layout: str, sizes: HeadSizes, changes: list[RelayoutTensor]) -> Metadata:
    """The metadata with the layout's head keys, and provenance records only of the copied tensors.

    Where head_count_kv is a list, other layers have 0, and llama.cpp needs the keys of the heads in every layout.
    """
    metadata, name = source.metadata.copy(), source.metadata["general.architecture"]
    listed = metadata.get(f"{name}.attention.head_count_kv")
    key, latent = sizes.nope + sizes.rope, layout == "k_b+v_b"
    kv_heads = 1 if latent else sizes.heads
    numbers = {
        "head_count_kv": [kv_heads if n else 0 for n in listed] if isinstance(listed, list) else kv_heads,
        "key_length": sizes.latent + sizes.rope if latent else key,
        "value_length": sizes.latent if latent else sizes.v,
    }
    if latent or isinstance(listed, list):
        numbers |= {"key_length_mla": key, "value_length_mla": sizes.v}
    for part in ("key_length_mla", "value_length_mla"):
        metadata.pop(f"{name}.attention.{part}", None)
    for part, number in numbers.items():
        metadata.set(f"{name}.attention.{part}", number, "u32")
    if recorded := provenance.records(metadata):
        copied = {change.spec.name for change in changes if change.how == COPIED}
        metadata.set(provenance.TENSORS, [str(r) for r in recorded.values() if r.name in copied], "str")
    return metadata


# ----------------------------------------------------------------------------------------------------------- the bytes


def write_relayout(
    job: Relayout,
    out: str | os.PathLike[str],
    *,
    split_max_bytes: int | None = None,
    split_max_tensors: int | None = None,
    keep_split: bool = False,
    threads: int | None = None,
    progress: Progress | bool = False,
) -> list[Path]:
    """Write the planned file, set `job.errors`, and return the paths. The file appears when it is complete."""
    counts = [sum(change.shard == i for change in job.changes) for i in range(len(job.source.shards))]
    errors = _Errors()
    paths = write_gguf(
        out,
        job.metadata,
        [change.spec for change in job.changes],
        lambda writer: (task for change in job.changes for task in _tasks(change, job.sizes, errors, writer)),
        inputs=job.source.paths,
        split_max_bytes=split_max_bytes,
        split_max_tensors=split_max_tensors,
        shards=counts if keep_split else None,
        threads=threads,
        progress=progress,
    )
    job.errors.update(errors.relative())
    return paths


class _Errors:
    """Sums of squared differences and of squared values by tensor. Thread-safe."""

    def __init__(self) -> None:
        self._sums: dict[str, np.ndarray] = {}
        self._lock = threading.Lock()

    def add(self, name: str, x: np.ndarray, made: np.ndarray) -> None:
        parts = np.array([np.square(x - made, dtype=np.float64).sum(), np.square(x, dtype=np.float64).sum()])
        with self._lock:
            self._sums[name] = self._sums.get(name, np.zeros(2)) + parts

    def relative(self) -> dict[str, float]:
        return {name: math.sqrt(error / (whole or 1.0)) for name, (error, whole) in self._sums.items()}


def _tasks(change: RelayoutTensor, sizes: HeadSizes, errors: _Errors, writer: Writer) -> Iterator[WriteTask]:
    """Tasks that compute and write a tensor's bytes: one per range of rows, or one per head."""
    if change.how == COPIED:
        tensor = change.sources[""]
        ranges = row_ranges(tensor.shape, tensor.type.interleave) if len(tensor.shape) > 1 else [(0, 1)]
        for start, stop in ranges:
            rows = functools.partial(tensor.rows, start, stop)
            yield functools.partial(_write, writer, tensor.name, start * tensor.row_bytes, rows)
        return
    kind = "k" if ".attn_k_b." in change.spec.name else "v" if ".attn_v_b." in change.spec.name else "kv"
    compute: Callable[[int], np.ndarray] = {
        "k": functools.partial(_keys, change, sizes, errors),
        "v": functools.partial(_values, change, sizes),
        "kv": functools.partial(_keys_and_values, change, sizes, errors),
    }[kind]
    nbytes = change.spec.nbytes // sizes.heads
    for head in range(sizes.heads):
        yield functools.partial(_write, writer, change.spec.name, head * nbytes, functools.partial(compute, head))


def _write(writer: Writer, name: str, offset: int, compute: Callable[[], np.ndarray]) -> int:
    data = compute()
    writer.put(name, offset, data)
    release(data)  # copied rows are a view of the mapped input
    return data.nbytes


def _keys(change: RelayoutTensor, sizes: HeadSizes, errors: _Errors, head: int) -> np.ndarray:
    """attn_k_b of a head: the key rows of attn_kv_b, transposed."""
    first = head * sizes.rows("kv")
    x = change.sources["kv"].decode_rows(first, first + sizes.nope)
    return _encoded(change, np.ascontiguousarray(x.T), errors)


def _values(change: RelayoutTensor, sizes: HeadSizes, head: int) -> np.ndarray:
    """attn_v_b of a head: the value rows of attn_kv_b."""
    first = head * sizes.rows("kv") + sizes.nope
    return change.sources["kv"].rows(first, first + sizes.v)


def _keys_and_values(change: RelayoutTensor, sizes: HeadSizes, errors: _Errors, head: int) -> np.ndarray:
    """attn_kv_b of a head: attn_k_b transposed, then attn_v_b."""
    keys, values = change.sources["k"], change.sources["v"]
    k = keys.decode_rows(head * sizes.latent, (head + 1) * sizes.latent)
    made = _encoded(change, np.ascontiguousarray(k.T), errors)
    first, last = head * sizes.v, (head + 1) * sizes.v
    if values.type is change.spec.type:
        return np.concatenate([made, values.rows(first, last)])
    return np.concatenate([made, _encoded(change, values.decode_rows(first, last), errors)])


def _encoded(change: RelayoutTensor, x: np.ndarray, errors: _Errors) -> np.ndarray:
    made = change.spec.type.quantize(x, threads=1)
    if change.how == REQUANTIZED:
        errors.add(change.spec.name, x, change.spec.type.dequantize(made, x.shape[1], threads=1))
    return made
