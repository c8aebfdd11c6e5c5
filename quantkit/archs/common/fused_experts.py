"""Gate and up of routed experts in one tensor, as llama.cpp's converter writes them with --fuse-gate-up-exps.

    separate   blk.N.ffn_gate_exps.weight [experts, ff, n]   blk.N.ffn_up_exps.weight [experts, ff, n]
    fused      blk.N.ffn_gate_up_exps.weight [experts, 2 ff, n]: of each expert the rows of gate, then those of up
    biases     [experts, ff] twice, or [experts, 2 ff] in the same order

Both forms hold the same bytes, expert by expert, so one is made of the other without decoding a weight. ik_llama.cpp
and llama.cpp read both (ik_llama.cpp pull request 1408).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from quantkit.archs.common.tensors import Piece, ReadRows, Shape, Stack, Transform
from quantkit.errors import FormatError

STEM = "ffn_gate_up_exps"
_SEPARATE = ("ffn_gate_exps", "ffn_up_exps")
_NAME = re.compile(rf"(blk\.\d+)\.({STEM}|{'|'.join(_SEPARATE)})\.(weight|bias)")


def fused_name(name: str) -> str | None:
    """The fused tensor that holds gate or up of this name; None for other names."""
    found = _NAME.fullmatch(name)
    return f"{found[1]}.{STEM}.{found[3]}" if found and found[2] in _SEPARATE else None


def separate_names(name: str) -> tuple[str, str] | None:
    """The names of gate and up that a fused tensor of this name holds; None for other names."""
    found = _NAME.fullmatch(name)
    if not found or found[2] != STEM:
        return None
    gate, up = (f"{found[1]}.{part}.{found[3]}" for part in _SEPARATE)
    return gate, up


def fused_shape(gate: Shape) -> Shape:
    """The shape of a fused weight or bias, from that of gate."""
    return (gate[0], 2 * gate[1], *gate[2:])


def half_shape(fused: Shape) -> Shape:
    """The shape of gate or up, from that of the fused weight or bias."""
    return (fused[0], fused[1] // 2, *fused[2:])


# ------------------------------------------------------------------------------------------------ from a checkpoint


class _FusedStacks(Stack):
    """Sources gate 0, up 0, gate 1, up 1 … [rows, n], stacked to [experts, 2 rows, n]."""

    def shape(self, *sources: Shape) -> Shape:
        return (len(sources) // 2, 2 * self.source_rows, sources[0][-1])


class _Fused(Transform):
    """The results of two transforms, [experts, ff, n] each, expert by expert. `count` sources are the first one's."""

    def __init__(self, gate: Transform, up: Transform, count: int, ff: int):
        self._parts, self._count, self._ff = (gate, up), count, ff
        self.copies_rows = gate.copies_rows and up.copies_rows

    def _sources(self, half: int, sources: Sequence[ReadRows]) -> Sequence[ReadRows]:
        chosen = range(self._count) if half == 0 else range(self._count, len(sources))
        return [sources[i] for i in chosen]

    def shape(self, *sources: Shape) -> Shape:
        return fused_shape(self._parts[0].shape(*sources[: self._count]))

    def rows(self, sources: Sequence[ReadRows], start: int, stop: int) -> np.ndarray:
        parts = []
        while start < stop:
            half, first, count = self._place(start, stop)
            parts.append(self._parts[half].rows(self._sources(half, sources), first, first + count))
            start += count
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def locate(self, start: int, stop: int) -> tuple[int, int] | None:
        half, first, count = self._place(start, stop)
        found = self._parts[half].locate(first, first + count) if count == stop - start else None
        return found and (found[0] + half * self._count, found[1])

    def _place(self, start: int, stop: int) -> tuple[int, int, int]:
        """The half that row `start` is of, its row there, and how many of the rows up to `stop` follow there."""
        number, first = divmod(start, self._ff)
        return number % 2, number // 2 * self._ff + first, min(self._ff - first, stop - start)


class _FusedBiases(Transform):
    """The results of two transforms, [experts, ff] each, side by side. `count` sources are the first one's."""

    copies_rows = False

    def __init__(self, gate: Transform, up: Transform, count: int):
        self._gate, self._up, self._count = gate, up, count

    def shape(self, *sources: Shape) -> Shape:
        return fused_shape(self._gate.shape(*sources[: self._count]))

    def rows(self, sources: Sequence[ReadRows], start: int, stop: int) -> np.ndarray:
        every = [sources[i] for i in range(len(sources))]
        gate, up = every[: self._count], every[self._count :]
        return np.concatenate([self._gate.rows(gate, start, stop), self._up.rows(up, start, stop)], axis=1)


def fuse_pieces(pieces: Sequence[Piece]) -> list[Piece]:
    """The tensors of a conversion with gate and up of experts fused, in the place of gate or up, whichever is first."""
    by_name = {piece.name: piece for piece in pieces}
    made: dict[str, Piece] = {}
    for piece in pieces:
        name = fused_name(piece.name) or piece.name
        names = separate_names(name)
        if names is None or piece.name == name:  # of no experts, or fused in the checkpoint
            made[name] = piece
        elif name not in made:
            if absent := [part for part in names if part not in by_name]:
                raise FormatError(f"{absent[0]} is missing, so {piece.name} cannot be fused with it")
            made[name] = _fused_piece(name, *(by_name[part] for part in names))
    return list(made.values())


def _fused_piece(name: str, gate: Piece, up: Piece) -> Piece:
    if gate.shape != up.shape:
        raise FormatError(f"{gate.name} has shape {gate.shape}, {up.name} {up.shape}; fused they must be of one shape")
    sources, transform = gate.sources + up.sources, Transform()
    if len(gate.shape) == 2:
        transform = _FusedBiases(gate.transform, up.transform, len(gate.sources))
    elif type(gate.transform) is type(up.transform) is Stack:
        sources = tuple(source for pair in zip(gate.sources, up.sources) for source in pair)
        transform = _FusedStacks(gate.shape[1])
    else:
        transform = _Fused(gate.transform, up.transform, len(gate.sources), gate.shape[1])
    return Piece(name, fused_shape(gate.shape), sources, transform, gate.f32)


# -------------------------------------------------------------------------------------------------- to a checkpoint


class _OfHalves(Transform):
    """A transform of gate or up, applied to the tensors that hold them: `places` has the half of each source, or None,
    and the length of a half."""

    def __init__(self, inner: Transform, places: Sequence[tuple[int, int, bool] | None]):
        self._inner, self._places = inner, places
        self.copies_rows = inner.copies_rows and not any(place and place[2] for place in places)
        self.row_multiple = inner.row_multiple

    def shape(self, *sources: Shape) -> Shape:
        halves = (half_shape(shape) if place else shape for shape, place in zip(sources, self._places))
        return self._inner.shape(*halves)

    def rows(self, sources: Sequence[ReadRows], start: int, stop: int) -> np.ndarray:
        readers = [_half_of(read, place) if place else read for read, place in zip(sources, self._places)]
        return self._inner.rows(readers, start, stop)


def _half_of(read: ReadRows, place: tuple[int, int, bool]) -> ReadRows:
    """A reader of gate's or up's rows, given one of the fused tensor's."""
    half, length, is_bias = place

    def rows(start: int, stop: int) -> np.ndarray:
        if is_bias:
            return read(start, stop)[:, half * length : (half + 1) * length]
        parts = []
        while start < stop:
            expert, first = divmod(start, length)
            count = min(length - first, stop - start)
            begin = (2 * expert + half) * length + first
            parts.append(read(begin, begin + count))
            start += count
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    return rows


def separate_shapes(shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """Names and shapes of a GGUF's tensors as they are with gate and up apart."""
    found: dict[str, Shape] = {}
    for name, shape in shapes.items():
        names = separate_names(name)
        found |= dict.fromkeys(names, half_shape(shape)) if names else {name: shape}
    return found


def read_fused(pieces: Iterable[Piece], shapes: Mapping[str, Shape]) -> list[Piece]:
    """Pieces that read gate and up apart, made to read the fused tensors that `shapes` has instead."""
    made = []
    for piece in pieces:
        places: list[tuple[int, int, bool] | None] = []
        sources = []
        for source in piece.sources:
            name = fused_name(source)
            if source in shapes or name is None or name not in shapes:
                places.append(None)
                sources.append(source)
                continue
            shape = shapes[name]
            places.append((int(_SEPARATE[1] in source), shape[1] // 2, len(shape) == 2))
            sources.append(name)
        if any(places):
            piece = replace(piece, sources=tuple(sources), transform=_OfHalves(piece.transform, places))
        made.append(piece)
    return made
