"""Map checkpoint tensors to GGUF tensors and back: names and the order of rows.

A `TensorRule` pairs a GGUF name with a checkpoint name. `pieces` turns the rules into one `Piece` for each tensor to
write: the tensors that it reads, and the `Transform` that computes any range of its rows from their rows. So tensors
stream in ranges of rows, and no whole tensor has to be in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from quantkit.archs.common.blocks import HParams
from quantkit.errors import FormatError

_DIGITS = 10  # a part of a name with this many digits or more is not the number of a layer or an expert
Shape = tuple[int, ...]
ReadRows = Callable[[int, int], np.ndarray]  # (start, stop) -> rows, as numbers or as raw bytes


class LazyTensor(Protocol):
    """A tensor of a file whose values are decoded only when they are needed."""

    @property
    def shape(self) -> Shape:
        """The shape in numpy's order."""
        ...

    def dequantize(self) -> np.ndarray:
        """The values, float32, in the tensor's shape."""
        ...


class Transform:
    """Compute rows of a result from rows of its sources. The base class copies its one source (`COPY`).

    Rows run along the last axis; the other axes count as one. A vector has rows of one element.
    """

    copies_rows = True  # rows are moved unchanged, so they may be raw bytes of any type
    row_multiple = 1  # ranges that start and stop at its multiples read no source row twice
    source_rows: int | None = None  # rows of each source, if the result is the sources one after another

    def shape(self, *sources: Shape) -> Shape:
        """The result's shape, given the shapes of the sources. FormatError if they do not fit."""
        return sources[0]

    def rows(self, sources: Sequence[ReadRows], start: int, stop: int) -> np.ndarray:
        """Rows `start` to `stop` of the result."""
        return sources[0](start, stop)

    def locate(self, start: int, stop: int) -> tuple[int, int] | None:
        """(index of a source, first row) if rows `start` to `stop` of the result lie in it unchanged; else None."""
        return (0, start) if self is COPY else None

    def inverse(self) -> Transform:
        """The transform that undoes this one."""
        return self


COPY = Transform()


class ShuffleRows(Transform):
    """Permute the rows of every block b of n = len(order) rows: result row b*n + i is source row b*n + order[i]."""

    def __init__(self, order: Iterable[int]):
        self.order = np.array(list(order), np.intp)
        self.row_multiple = len(self.order)

    def rows(self, sources: Sequence[ReadRows], start: int, stop: int) -> np.ndarray:
        first = start // self.row_multiple * self.row_multiple
        last = -(-stop // self.row_multiple) * self.row_multiple
        wanted = np.arange(start, stop)
        index = wanted // self.row_multiple * self.row_multiple + self.order[wanted % self.row_multiple] - first
        found: np.ndarray = sources[0](first, last)[index]
        return found

    def inverse(self) -> Transform:
        return ShuffleRows(np.argsort(self.order))


class Stack(Transform):
    """Stack sources [rows, n] on a new first axis: the experts of a layer become [experts, rows, n]."""

    source_rows: int

    def __init__(self, rows: int):
        self.source_rows = rows

    def shape(self, *sources: Shape) -> Shape:
        return (len(sources), *sources[0])

    def rows(self, sources: Sequence[ReadRows], start: int, stop: int) -> np.ndarray:
        parts = []
        while start < stop:
            source, first = divmod(start, self.source_rows)
            last = min(self.source_rows, first + stop - start)
            parts.append(sources[source](first, last))
            start += last - first
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def locate(self, start: int, stop: int) -> tuple[int, int] | None:
        source, first = divmod(start, self.source_rows)
        return (source, first) if first + stop - start <= self.source_rows else None


class Unstack(Transform):
    """Expert `number` of a source [experts, rows, n]: one part of the inverse of `Stack`."""

    def __init__(self, number: int, rows: int):
        self.first = number * rows

    def shape(self, *sources: Shape) -> Shape:
        return sources[0][1:]

    def rows(self, sources: Sequence[ReadRows], start: int, stop: int) -> np.ndarray:
        return sources[0](self.first + start, self.first + stop)

    def locate(self, start: int, stop: int) -> tuple[int, int] | None:
        return 0, self.first + start


def interleave_halves(head_dim: int) -> ShuffleRows:
    """Reorder the rows of each head from checkpoint order to "norm" RoPE: pairs (j, j + D/2) become (2j, 2j + 1)."""
    if head_dim < 2 or head_dim % 2:
        raise FormatError(f"heads of {head_dim} elements have no pairs that RoPE could rotate")
    return ShuffleRows(s * head_dim // 2 + j for j in range(head_dim // 2) for s in (0, 1))


@dataclass(frozen=True)
class TensorRule:
    """GGUF tensor `gguf` is checkpoint tensor `hf`. `N` stands for the layer, `E` for the expert.

    Names leave out `.weight` and `.bias` unless `full_names` is set. `transform(hparams)` makes the transform from
    checkpoint rows to GGUF rows for a model's HParams. If `hf` has an `E`, the matrices of all experts of a layer are
    stacked as one GGUF tensor; such a rule has no transform.
    """

    gguf: str
    hf: str
    transform: Callable[[Any], Transform] | None = None
    required: bool = True
    bias: bool = False  # the tensor may have a bias
    f32: bool = False  # always stored in float32
    layers: Callable[[Any, int], bool] | None = None  # (hparams, layer) -> whether it is required; None: in all layers
    full_names: bool = False  # the names are complete
    often_shared: bool = False  # a checkpoint may leave it out, because it shares another one; config.json does not say
    integers: bool = False  # whole numbers: int64 in checkpoints, I32 in GGUF; such a rule has no transform
    to_gguf_only: bool = False  # export does not use the rule: it makes the checkpoint tensor from other GGUF tensors
    transform_of: Callable[[Any, int], Transform] | None = None  # `transform` of (hparams, layer), where layers differ

    def names(self, side: str) -> tuple[str, ...]:
        """The complete names, with `N` and `E`, on one side, "gguf" or "hf": the weight's and, if any, the bias's."""
        stem = getattr(self, side)
        return (stem,) if self.full_names else (f"{stem}.weight", f"{stem}.bias")[: 2 if self.bias else 1]

    def is_needed(self, hparams: HParams, layer: int) -> bool:
        """Whether a model with these hyperparameters must have the tensor in this layer."""
        return self.required and (self.layers is None or self.layers(hparams, layer))


@dataclass(frozen=True)
class Piece:
    """One tensor to write: `transform` applied to `sources`, names of tensors to read."""

    name: str
    shape: Shape
    sources: tuple[str, ...]
    transform: Transform
    f32: bool
    integers: bool = False  # int64 in checkpoints, I32 in GGUF


def split_name(name: str) -> tuple[str, int | None, str]:
    """ "blk.3.attn_q.weight" -> ("blk.N.attn_q", 3, "weight"). The layer is the first part that is digits only."""
    stem, _, suffix = name.rpartition(".")
    stem, layer = _numbered(stem, "N")
    return stem, layer, suffix


def _numbered(stem: str, letter: str) -> tuple[str, int | None]:
    """The stem with `letter` in place of its first part that is digits only, and that number."""
    parts = stem.split(".")
    for i, part in enumerate(parts):
        if part.isascii() and part.isdigit() and len(part) < _DIGITS:
            return ".".join([*parts[:i], letter, *parts[i + 1 :]]), int(part)
    return stem, None


def join_name(stem: str, layer: int | None, suffix: str, expert: int | None = None) -> str:
    """The inverse of `split_name`."""
    return fill_name(f"{stem}.{suffix}", layer, expert)


def fill_name(name: str, layer: int | None, expert: int | None = None) -> str:
    """A rule's name with the numbers in place of `N` and `E`."""
    numbers = {"N": layer, "E": expert}
    return ".".join(str(numbers[part]) if numbers.get(part) is not None else part for part in name.split("."))


def pieces(rules: Sequence[TensorRule], shapes: Mapping[str, Shape], hparams: HParams, *, to_gguf: bool) -> list[Piece]:
    """The tensors to write, given the names and shapes of those to read.

    They come in the order of use: input, layers by number, output. Names that no rule knows are left out, and the
    caller decides what that means. The experts of a layer are one piece of a GGUF and `hparams.n_expert` pieces of a
    checkpoint.
    """
    source_side, target_side = ("hf", "gguf") if to_gguf else ("gguf", "hf")
    by_name: dict[str, list[tuple[int, TensorRule, str]]] = {}
    for place, rule in enumerate(rules):
        if to_gguf or not rule.to_gguf_only:
            for known, target in zip(rule.names(source_side), rule.names(target_side)):
                by_name.setdefault(known, []).append((place, rule, target))
    first_layer = next((i for i, rule in enumerate(rules) if ".N." in rule.gguf), len(rules))
    found: list[tuple[tuple[int, ...], Piece]] = []
    stacks: dict[str, tuple[tuple[int, ...], TensorRule, dict[int, str]]] = {}
    for name, shape in shapes.items():
        known, layer = _numbered(name, "N")
        known, expert = _numbered(known, "E") if to_gguf else (known, None)
        for place, rule, target in by_name.get(known, ()):
            group = 1 if layer is not None else (0 if place < first_layer else 2)
            order = (group, layer or 0, place, int(target.endswith(".bias")))
            filled = fill_name(target, layer)
            if expert is not None:
                if expert < hparams.n_expert:
                    stacks.setdefault(filled, (order, rule, {}))[2][expert] = name
            elif ".E." in rule.hf:
                found += [((*order, piece), part) for piece, part in enumerate(_unstacked(rule, name, shape, hparams))]
            else:
                found.append((order, _renamed(rule, name, layer, filled, shape, hparams, to_gguf)))
    found += [(order, _stacked(rule, target, each, shapes)) for target, (order, rule, each) in stacks.items()]
    return [piece for _, piece in sorted(found, key=lambda pair: pair[0])]


def numbered_experts(rules: Sequence[TensorRule], names: Iterable[str]) -> set[int]:
    """The expert numbers that occur in checkpoint names, in any layer."""
    stems = {name for rule in rules if ".E." in rule.hf for name in rule.names("hf")}
    found = set()
    for name in names:
        known, expert = _numbered(_numbered(name, "N")[0], "E")
        if expert is not None and known in stems:
            found.add(expert)
    return found


def shape_of(transform: Transform, name: str, shape: Shape) -> Shape:
    """The shape that a transform gives a tensor. FormatError, which names the tensor, where it does not fit."""
    if not shape and transform is not COPY:
        raise FormatError(f"tensor {name} is one number without dimensions; a vector or a matrix was expected")
    try:
        return transform.shape(shape)
    except FormatError as error:
        raise FormatError(f"tensor {name}: {error}") from None


def _renamed(
    rule: TensorRule, name: str, layer: int | None, target: str, shape: Shape, hparams: HParams, to_gguf: bool
) -> Piece:
    transform = rule.transform(hparams) if rule.transform else COPY
    if rule.transform_of is not None and layer is not None:
        transform = rule.transform_of(hparams, layer)
    if not to_gguf:
        transform = transform.inverse()
    new_shape = shape_of(transform, name, shape)
    if new_shape and math.prod(new_shape[:-1] or new_shape) % transform.row_multiple:
        rows = math.prod(shape[:-1] or shape)
        raise FormatError(
            f"tensor {name}: {rows} rows are not a multiple of the {transform.row_multiple} rows of a head"
        )
    return Piece(target, new_shape, (name,), transform, rule.f32 or len(shape) <= 1, rule.integers)


def _stacked(rule: TensorRule, target: str, experts: Mapping[int, str], shapes: Mapping[str, Shape]) -> Piece:
    """Stack the experts present, by number. The caller checks that none is missing."""
    names = tuple(name for _, name in sorted(experts.items()))
    first = shapes[names[0]]
    for name in names:
        if shapes[name] != first or len(first) != 2:
            raise FormatError(
                f"tensor {name} is {shapes[name]}, {names[0]} {first}; experts must be matrices of one shape"
            )
    transform = Stack(first[0])
    return Piece(target, transform.shape(*(shapes[name] for name in names)), names, transform, rule.f32)


def _unstacked(rule: TensorRule, name: str, shape: Shape, hparams: HParams) -> list[Piece]:
    if len(shape) != 3 or shape[0] != hparams.n_expert:
        raise FormatError(f"tensor {name} has shape {shape}; the metadata say {hparams.n_expert} experts")
    _, layer, suffix = split_name(name)
    matrices = [(join_name(rule.hf, layer, suffix, i), Unstack(i, shape[1])) for i in range(shape[0])]
    return [Piece(target, transform.shape(shape), (name,), transform, rule.f32) for target, transform in matrices]


def missing(rules: Sequence[TensorRule], names: Iterable[str], hparams: HParams, *, to_gguf: bool) -> list[str]:
    """Weights that the rules require and `names` lacks, as the side that is read names them."""
    have = set(names)
    wanted = []
    for rule in rules:
        if rule.required and not rule.often_shared and (to_gguf or not rule.to_gguf_only):
            name = rule.names("hf" if to_gguf else "gguf")[0]
            layers: Iterable[int | None] = (
                [i for i in range(hparams.n_layer) if rule.is_needed(hparams, i)] if ".N." in name else [None]
            )
            experts: Iterable[int | None] = range(hparams.n_expert) if ".E." in name else [None]
            wanted += [fill_name(name, layer, expert) for layer in layers for expert in experts]
    return [name for name in dict.fromkeys(wanted) if name not in have]
