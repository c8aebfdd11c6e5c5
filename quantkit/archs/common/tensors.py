"""How tensors of a checkpoint become tensors of a GGUF, and back: names, order of rows, all of it streamable.

A `Rule` pairs two names. From the rules, `plan` makes a list of `Piece`, one for each tensor to write: which tensors
it reads and the `Transform` that makes any range of its rows from rows of theirs. No piece ever needs a whole tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from quantkit.errors import FormatError

_DIGITS = 10  # a part of a name with so many is no number of a layer or an expert
Shape = tuple[int, ...]
ReadRows = Callable[[int, int], np.ndarray]  # (start, stop) -> rows, as numbers or as raw bytes


class LazyTensor(Protocol):
    """What `Arch.config` asks of a file's tensor: its values, when they are needed."""

    def dequantize(self) -> np.ndarray: ...


class Transform:
    """Rows of a result from rows of its sources. This one copies (COPY); others derive from it.

    A tensor of any shape counts as rows of its last axis; one of one axis as rows of a single element.
    """

    keeps_bits = True  # moves rows whole, so that they may be raw bytes of any type
    step = 1  # ranges that start and stop at multiples of it read nothing twice
    each: int | None = None  # rows of each source, where the result is one source after another

    def shape(self, *sources: Shape) -> Shape:
        return sources[0]

    def rows(self, sources: Sequence[ReadRows], start: int, stop: int) -> np.ndarray:
        return sources[0](start, stop)

    def place(self, start: int, stop: int) -> tuple[int, int] | None:
        """(number of a source, first row) where rows of the result are known to lie in it as they are; else None."""
        return (0, start) if self is COPY else None

    def inverse(self) -> Transform:
        return self


COPY = Transform()


class ShuffleRows(Transform):
    """Row b * step + i of the result is row b * step + order[i] of the source, for every block b of `step` rows."""

    def __init__(self, order: Iterable[int]):
        self.order = np.array(list(order), np.intp)
        self.step = len(self.order)

    def rows(self, sources: Sequence[ReadRows], start: int, stop: int) -> np.ndarray:
        first = start // self.step * self.step
        last = -(-stop // self.step) * self.step
        wanted = np.arange(start, stop)
        index = wanted // self.step * self.step + self.order[wanted % self.step] - first
        found: np.ndarray = sources[0](first, last)[index]
        return found

    def inverse(self) -> Transform:
        return ShuffleRows(np.argsort(self.order))


class Stack(Transform):
    """Sources [rows, n] one after another on a new first axis: the experts of a layer become [experts, rows, n]."""

    each: int

    def __init__(self, rows: int):
        self.each = rows

    def shape(self, *sources: Shape) -> Shape:
        return (len(sources), *sources[0])

    def rows(self, sources: Sequence[ReadRows], start: int, stop: int) -> np.ndarray:
        parts = []
        while start < stop:
            source, first = divmod(start, self.each)
            last = min(self.each, first + stop - start)
            parts.append(sources[source](first, last))
            start += last - first
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def place(self, start: int, stop: int) -> tuple[int, int] | None:
        source, first = divmod(start, self.each)
        return (source, first) if first + stop - start <= self.each else None


class Unstack(Transform):
    """Expert `number` of a source [experts, rows, n]; undoes Stack."""

    def __init__(self, number: int, rows: int):
        self.first = number * rows

    def shape(self, *sources: Shape) -> Shape:
        return sources[0][1:]

    def rows(self, sources: Sequence[ReadRows], start: int, stop: int) -> np.ndarray:
        return sources[0](self.first + start, self.first + stop)

    def place(self, start: int, stop: int) -> tuple[int, int] | None:
        return 0, self.first + start


def interleave_halves(head_dim: int) -> ShuffleRows:
    """Rows of each head from checkpoint order to that of "norm" rope: pairs (j, j + D/2) become (2j, 2j + 1)."""
    return ShuffleRows(s * head_dim // 2 + j for j in range(head_dim // 2) for s in (0, 1))


@dataclass(frozen=True)
class Rule:
    """`gguf` is `hf` under another name; N stands for the layer. Names are without .weight and .bias, or `whole`.

    `transform(hparams)` turns checkpoint rows into GGUF rows; it gets the HParams of the model. Where `hf` has an E,
    for the expert, the matrices of all experts of a layer are stacked as one GGUF tensor; there is no transform then.
    """

    gguf: str
    hf: str
    transform: Callable[[Any], Transform] | None = None
    required: bool = True
    bias: bool = False  # a bias may come with it
    f32: bool = False  # always stored in float32
    layers: Callable[[Any, int], bool] | None = None  # (hparams, layer): where it is required; None: everywhere
    whole: bool = False  # the names are complete
    one_way: bool = False  # a GGUF tensor that nothing of a checkpoint is made of: another one has the same numbers

    def names(self, side: str) -> tuple[str, ...]:
        """The names, N and E in them, that the rule knows on a side, "gguf" or "hf"."""
        stem = getattr(self, side)
        return (stem,) if self.whole else (f"{stem}.weight", f"{stem}.bias")[: 2 if self.bias else 1]

    def is_needed(self, hparams: Any, layer: int) -> bool:
        return self.required and (self.layers is None or self.layers(hparams, layer))


@dataclass(frozen=True)
class Piece:
    """One tensor to write: `transform` applied to `sources`, all of them names on the reading side."""

    name: str
    shape: Shape
    sources: tuple[str, ...]
    transform: Transform
    f32: bool


def split_name(name: str) -> tuple[str, int | None, str]:
    """ "blk.3.attn_q.weight" -> ("blk.N.attn_q", 3, "weight"). The layer is the first part made of digits."""
    stem, _, suffix = name.rpartition(".")
    stem, layer = _numbered(stem, "N")
    return stem, layer, suffix


def _numbered(stem: str, letter: str) -> tuple[str, int | None]:
    """The stem with its first part made of digits replaced, and the number."""
    parts = stem.split(".")
    for i, part in enumerate(parts):
        if part.isascii() and part.isdigit() and len(part) < _DIGITS:
            return ".".join([*parts[:i], letter, *parts[i + 1 :]]), int(part)
    return stem, None


def join_name(stem: str, layer: int | None, suffix: str, expert: int | None = None) -> str:
    return fill_name(f"{stem}.{suffix}", layer, expert)


def fill_name(name: str, layer: int | None, expert: int | None = None) -> str:
    """A name of a rule with its numbers in place of N and E."""
    numbers = {"N": layer, "E": expert}
    return ".".join(str(numbers[part]) if numbers.get(part) is not None else part for part in name.split("."))


def pieces(rules: Sequence[Rule], shapes: Mapping[str, Shape], hparams: Any, *, to_gguf: bool) -> list[Piece]:
    """A piece for every name in `shapes` that a rule knows, in the order of use: input, layers by number, output.

    Names that no rule knows are left out; the caller decides what they mean. The experts of a layer are one piece of a
    GGUF, `hparams.n_expert` pieces of a checkpoint.
    """
    ours, theirs = ("hf", "gguf") if to_gguf else ("gguf", "hf")
    by_name: dict[str, list[tuple[int, Rule, str]]] = {}
    for place, rule in enumerate(rules):
        if to_gguf or not rule.one_way:
            for known, target in zip(rule.names(ours), rule.names(theirs)):
                by_name.setdefault(known, []).append((place, rule, target))
    first_layer = next((i for i, rule in enumerate(rules) if ".N." in rule.gguf), len(rules))
    found: list[tuple[tuple[int, ...], Piece]] = []
    stacks: dict[str, tuple[tuple[int, ...], Rule, dict[int, str]]] = {}
    for name, shape in shapes.items():
        known, layer = _numbered(name, "N")
        known, expert = _numbered(known, "E") if to_gguf else (known, None)
        for place, rule, target in by_name.get(known, ()):
            group = 1 if layer is not None else (0 if place < first_layer else 2)
            order = (group, layer or 0, place, int(target.endswith(".bias")))
            made_of = fill_name(target, layer)
            if expert is not None:
                if expert < hparams.n_expert:
                    stacks.setdefault(made_of, (order, rule, {}))[2][expert] = name
            elif ".E." in rule.hf:
                found += [((*order, piece), made) for piece, made in enumerate(_unstacked(rule, name, shape, hparams))]
            else:
                found.append((order, _renamed(rule, name, made_of, shape, hparams, to_gguf)))
    found += [(order, _stacked(rule, target, each, shapes)) for target, (order, rule, each) in stacks.items()]
    return [piece for _, piece in sorted(found, key=lambda pair: pair[0])]


def numbered_experts(rules: Sequence[Rule], names: Iterable[str]) -> set[int]:
    """Numbers of the experts that names of a checkpoint have, of any layer."""
    stems = {name for rule in rules if ".E." in rule.hf for name in rule.names("hf")}
    found = set()
    for name in names:
        known, expert = _numbered(_numbered(name, "N")[0], "E")
        if expert is not None and known in stems:
            found.add(expert)
    return found


def _renamed(rule: Rule, name: str, target: str, shape: Shape, hparams: Any, to_gguf: bool) -> Piece:
    transform = rule.transform(hparams) if rule.transform else COPY
    if not to_gguf:
        transform = transform.inverse()
    made = transform.shape(shape)
    if made and math.prod(made[:-1] or made) % transform.step:
        rows = math.prod(shape[:-1] or shape)
        raise FormatError(f"tensor {name}: {rows} rows are not a multiple of the {transform.step} of a head")
    return Piece(target, made, (name,), transform, rule.f32 or len(shape) <= 1)


def _stacked(rule: Rule, target: str, experts: Mapping[int, str], shapes: Mapping[str, Shape]) -> Piece:
    """All experts that there are, by number; whether one is missing the caller finds out."""
    names = tuple(name for _, name in sorted(experts.items()))
    first = shapes[names[0]]
    for name in names:
        if shapes[name] != first or len(first) != 2:
            raise FormatError(f"tensor {name} is {shapes[name]}, {names[0]} {first}; experts must be matrices alike")
    transform = Stack(first[0])
    return Piece(target, transform.shape(*(shapes[name] for name in names)), names, transform, rule.f32)


def _unstacked(rule: Rule, name: str, shape: Shape, hparams: Any) -> list[Piece]:
    if len(shape) != 3 or shape[0] != hparams.n_expert:
        raise FormatError(f"tensor {name} has shape {shape}; the metadata say {hparams.n_expert} experts")
    _, layer, suffix = split_name(name)
    made = [(join_name(rule.hf, layer, suffix, i), Unstack(i, shape[1])) for i in range(shape[0])]
    return [Piece(target, transform.shape(shape), (name,), transform, rule.f32) for target, transform in made]


def missing(rules: Sequence[Rule], names: Iterable[str], hparams: Any, *, to_gguf: bool) -> list[str]:
    """Weights that the rules require and `names` lacks, named as the reading side names them."""
    have = set(names)
    wanted = []
    for rule in rules:
        if rule.required and (to_gguf or not rule.one_way):
            name = rule.names("hf" if to_gguf else "gguf")[0]
            layers: Iterable[int | None] = (
                [i for i in range(hparams.n_layer) if rule.is_needed(hparams, i)] if ".N." in name else [None]
            )
            experts: Iterable[int | None] = range(hparams.n_expert) if ".E." in name else [None]
            wanted += [fill_name(name, layer, expert) for layer in layers for expert in experts]
    return [name for name in dict.fromkeys(wanted) if name not in have]
