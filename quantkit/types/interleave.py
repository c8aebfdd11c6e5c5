"""Row-interleaved types, each given by a short table that says where the bits go.

An interleaved tensor holds groups of R rows; block b of a group holds block b of each of its R rows, bit for bit,
in another order. A type is the list of its fields:

    Field(width, base, group)    elements of `width` bits; base[j] is the bit address of element j in a base block,
                                 `group` says that of element j of row k in an interleaved block

From this one list come interleaving, its inverse, decoding (undo, then decode the base type), encoding (encode the
base type, then interleave) and the check that no bit is lost or written twice. Row headers stay in row order in
front of the group. Address helpers, all of them in bits with byte offsets `at`:

    packed(width, count, at)          base: one after the other
    planes(width, run, count, at)     base: element j of a span in byte j % run, bit field j // run
    Slots(size, at, pitch, bit)       group: element s = R j + k in byte s % size, bit field s // size
    Lines(pattern, at)                group: runs of four columns in the order of QUAD, NIB, CRUMB, PLANE_A …
    EvenOdd(at)                       group: one-bit flags, those of even elements first

Three types also re-code indices of signs on the way (`Signs`); that loses nothing either.

The formula is `move_bits` in the tests: for every field, row and element, copy `width` bits. Here the list is compiled
once into moves of masked, rotated 32-bit words (most fields keep four neighbouring bytes together), and a kernel walks
them; the same moves backwards are the inverse.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import numpy as np

from quantkit import jit
from quantkit.errors import DataError
from quantkit.jit import kernel
from quantkit.types import base as registry
from quantkit.types.base import QuantType

# ------------------------------------------------------------------------------------------------------- descriptions


def packed(width: int, count: int, at: int = 0) -> np.ndarray:
    """Bit addresses of `count` elements of `width` bits, one after the other from byte `at`."""
    return 8 * at + width * np.arange(count)


def planes(width: int, run: int, count: int, at: int = 0) -> np.ndarray:
    """Bit addresses of `count` elements in spans of `run` bytes: element j is field j // run of byte j % run."""
    span, j = np.divmod(np.arange(count), run * 8 // width)
    return 8 * (at + span * run + j % run) + width * (j // run)


class Placement(Protocol):
    """Where an interleaved block keeps the elements of a field."""

    def addresses(self, rows: int, width: int, count: int) -> np.ndarray:
        """int64[rows, count]: the bit address of element j of row k."""


@dataclasses.dataclass(frozen=True)
class Slots:
    """Element j of row k is slot s = R j + k, in byte s % size, field s // size; with size 0, slots follow each other.

    A field is `pitch` bits, by default those of an element, which begins `bit` bits into it.
    """

    size: int
    at: int
    pitch: int = 0
    bit: int = 0

    def addresses(self, rows: int, width: int, count: int) -> np.ndarray:
        pitch = self.pitch or width
        s = rows * np.arange(count) + np.arange(rows)[:, None]
        if not self.size:
            return 8 * self.at + pitch * s + self.bit
        return 8 * (self.at + s % self.size) + pitch * (s // self.size) + self.bit


@dataclasses.dataclass(frozen=True)
class Lines:
    """Four neighbouring columns stay neighbours: a line is 4 R bytes, four of each row in turn.

    Bit field t of line l holds the columns pattern[l][t] .. + 3 of a span of columns; spans follow each other.
    """

    pattern: tuple[tuple[int, ...], ...]
    at: int

    def addresses(self, rows: int, width: int, count: int) -> np.ndarray:
        place = {first: (line, t) for line, fields in enumerate(self.pattern) for t, first in enumerate(fields)}
        span, column = np.divmod(np.arange(count), 4 * len(place))
        line, t = np.array([place[int(c) - int(c) % 4] for c in column]).T
        byte = 4 * rows * (span * len(self.pattern) + line) + column % 4
        return 8 * (self.at + byte + 4 * np.arange(rows)[:, None]) + width * t


QUAD = ((0,),)
NIB = ((0, 8), (16, 24), (4, 12), (20, 28))
CRUMB = ((0, 4, 8, 12),)
PLANE_A = ((0, 4, 8, 12, 16, 20, 24, 28),)
PLANE_B = ((0, 16, 4, 20, 8, 24, 12, 28),)
PLANE_C = ((0, 8, 4, 12, 16, 24, 20, 28),)
PLANE_D = ((0, 8, 16, 24, 4, 12, 20, 28),)


@dataclasses.dataclass(frozen=True)
class EvenOdd:
    """One-bit flags: element j of row k in bit j // 2 of byte k (even j) or R + k (odd j)."""

    at: int

    def addresses(self, rows: int, width: int, count: int) -> np.ndarray:
        j = np.arange(count)
        return 8 * (self.at + rows * (j % 2) + np.arange(rows)[:, None]) + j // 2


@dataclasses.dataclass(frozen=True)
class Field:
    """Elements of `width` bits at the bit addresses `base` of a base block, laid out in the group by `group`."""

    width: int
    base: Sequence[int] | np.ndarray
    group: Placement


@dataclasses.dataclass(frozen=True)
class Signs:
    """Seven-bit indices of signs, kept in the group as the running exclusive-or of their bits.

    With bits s0 … s6 an index stands for these signs and their parity; the group has t_j = s0 ^ … ^ s_j instead, and
    s_j = t_j ^ t_(j-1) gives them back. Per block the 32-bit words at bytes `words` hold them, each at bits `first`.
    """

    words: Sequence[int]
    first: Sequence[int]

    def mask(self, skip: int) -> np.uint32:
        """All bits of the indices in a word but the lowest `skip` of each."""
        return np.uint32(sum((0x7F >> skip << skip) << at for at in self.first))


# ------------------------------------------------------------------------------------------------------------ compiling


def bit_map(fields: Sequence[Field], rows: int, block_bytes: int) -> np.ndarray:
    """int64[8 * rows * block_bytes]: for each bit of an interleaved block its place in the R base blocks end to end.

    TypeError unless the fields name every bit of both sides exactly once.
    """
    bits = 8 * rows * block_bytes
    source = np.full(bits, -1, np.int64)
    for field in fields:
        base = np.asarray(field.base, np.int64)
        group = field.group.addresses(rows, field.width, len(base))
        for bit in range(field.width):
            source[group + bit] = 8 * block_bytes * np.arange(rows)[:, None] + base + bit
    if not np.array_equal(np.sort(source), np.arange(bits)):
        raise TypeError("the fields do not name every bit of the base block and of the group exactly once")
    return source


def word_starts(fields: Sequence[Field], block_bytes: int) -> np.ndarray:
    """Bytes of a base block at which 32-bit words are read and written.

    They cover the block and may overlap at its ends; in between they are aligned with the largest field, so that its
    words move whole.
    """
    largest = max(fields, key=lambda field: field.width * len(field.base))
    phase = int(min(largest.base)) // 8 % 4
    return np.unique([0, *range(phase, block_bytes - 3, 4), block_bytes - 4])


def moves(target: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Where the 32 bits of each target word come from: int64[moves, 4] of (source word, target word, rotation, mask).

    `target[word, bit]` is a source bit, `starts[word]` the first source bit of a source word.
        target word |= rotate_left(source word, rotation) & mask
    """
    found = []
    for word, wanted in enumerate(target):
        left = np.ones(32, bool)
        while left.any():
            bit = int(left.argmax())
            candidates = []  # the source words that hold this bit, with the bits that the same rotation brings along
            for source in range(*np.searchsorted(starts, [wanted[bit] - 31, wanted[bit] + 1])):
                inside = wanted - starts[source]
                rotation = (np.arange(32) - inside) % 32
                taken = left & (inside >= 0) & (inside < 32) & (rotation == rotation[bit])
                candidates.append((int(taken.sum()), source, int(rotation[bit]), taken))
            _, source, turn, taken = max(candidates, key=lambda c: c[0])
            found.append((source, word, turn, int((taken.astype(np.int64) << np.arange(32)).sum())))
            left &= ~taken
    return np.array(found, np.int64)


# -------------------------------------------------------------------------------------------------------------- kernels

LANES = 16  # blocks that go through the table together


@kernel(inline="always")
def _load(data, at):
    """Four bytes as a little-endian word, wherever they stand. Unsigned indices let this become one load."""
    a = np.uint64(at)
    low = np.uint32(data[a]) | np.uint32(data[a + np.uint64(1)]) << np.uint32(8)
    return low | np.uint32(data[a + np.uint64(2)]) << np.uint32(16) | np.uint32(data[a + np.uint64(3)]) << np.uint32(24)


@kernel(inline="always")
def _store(data, at, word):
    a = np.uint64(at)
    data[a] = np.uint8(word)
    data[a + np.uint64(1)] = np.uint8(word >> np.uint32(8))
    data[a + np.uint64(2)] = np.uint8(word >> np.uint32(16))
    data[a + np.uint64(3)] = np.uint8(word >> np.uint32(24))


@kernel
def _move(table, source, target, lanes):
    """Carry out the moves in all lanes: source uint32[words, lanes] -> target uint32[words, lanes].

    `lanes` is an argument, not a constant, so that the inner loop is vectorised instead of unrolled.
    """
    target[:] = np.uint32(0)
    for m in range(table.shape[0]):
        s, t = source[np.uint64(table[m, 0])], target[np.uint64(table[m, 1])]
        left, right = np.uint32(table[m, 2]) & np.uint32(31), np.uint32(32 - table[m, 2]) & np.uint32(31)
        mask = np.uint32(table[m, 3])
        for lane in range(lanes):
            t[lane] |= (np.uint32(s[lane] << left) | np.uint32(s[lane] >> right)) & mask


@kernel
def _sum_signs(data, starts, head, block_bytes, by_one, by_two, by_four):
    """Replace the indices in every block of uint8[rows, …] by their running exclusive-or; with by_two and by_four 0
    the other way."""
    for row in range(data.shape[0]):
        for b in range((data.shape[1] - head) // block_bytes):
            block = data[row, head + b * block_bytes : head + (b + 1) * block_bytes]
            for start in starts:
                t = _load(block, start)
                t ^= np.uint32(t << np.uint32(1)) & by_one
                t ^= np.uint32(t << np.uint32(2)) & by_two
                t ^= np.uint32(t << np.uint32(4)) & by_four
                _store(block, start, t)


@kernel
def _interleave(data, words, starts, table, rows, head, block_bytes):
    """data uint8[groups * rows, head + blocks * block_bytes] -> words uint32[groups, rows * row bytes / 4]."""
    blocks = (data.shape[1] - head) // block_bytes
    total, per_row, block_words = words.shape[0] * blocks, len(starts), rows * block_bytes // 4
    source = np.empty((rows * per_row, LANES), np.uint32)
    target = np.empty((block_words, LANES), np.uint32)
    for row in range(data.shape[0]):
        for i in range(head // 4):
            words[row // rows, row % rows * (head // 4) + i] = _load(data[row], 4 * i)
    for first in range(0, total, LANES):
        lanes = min(LANES, total - first)
        for lane in range(lanes):
            group, b = divmod(first + lane, blocks)
            for k in range(rows):
                block = data[group * rows + k, head + b * block_bytes :]
                for i in range(per_row):
                    source[np.uint64(k * per_row + i), lane] = _load(block, starts[i])
        _move(table, source, target, LANES)
        for lane in range(lanes):
            group, b = divmod(first + lane, blocks)
            block_out = words[group, rows * head // 4 + b * block_words :]
            for i in range(block_words):
                block_out[i] = target[i, lane]


@kernel
def _deinterleave(words, data, starts, table, rows, head, block_bytes):
    """The inverse: words uint32[groups, rows * row bytes / 4] -> data uint8[groups * rows, …]."""
    blocks = (data.shape[1] - head) // block_bytes
    total, per_row, block_words = words.shape[0] * blocks, len(starts), rows * block_bytes // 4
    source = np.empty((block_words, LANES), np.uint32)
    target = np.empty((rows * per_row, LANES), np.uint32)
    for row in range(data.shape[0]):
        for i in range(head // 4):
            _store(data[row], 4 * i, words[row // rows, row % rows * (head // 4) + i])
    for first in range(0, total, LANES):
        lanes = min(LANES, total - first)
        for lane in range(lanes):
            group, b = divmod(first + lane, blocks)
            block_in = words[group, rows * head // 4 + b * block_words :]
            for i in range(block_words):
                source[i, lane] = block_in[i]
        _move(table, source, target, LANES)
        for lane in range(lanes):
            group, b = divmod(first + lane, blocks)
            for k in range(rows):
                block = data[group * rows + k, head + b * block_bytes :]
                for i in range(per_row):
                    _store(block, starts[i], target[np.uint64(k * per_row + i), lane])


# ------------------------------------------------------------------------------------------------------------ the type


class Permutation:
    """A description compiled for R rows: `forward` from base blocks to the group, `backward` the other way."""

    def __init__(self, fields: Sequence[Field], rows: int, block_bytes: int, head: int = 0, signs: Signs | None = None):
        if head % 4 or rows * block_bytes % 4 or block_bytes < 4:
            raise TypeError(f"blocks of {block_bytes} bytes and headers of {head} cannot be moved by 32-bit words")
        source = bit_map(fields, rows, block_bytes)
        starts = word_starts(fields, block_bytes)
        words = (8 * (block_bytes * np.arange(rows)[:, None] + starts)).ravel()  # first bit of every base word
        inverse = np.argsort(source)
        self.rows, self.block_bytes, self.head, self.signs = rows, block_bytes, head, signs
        self.starts = jit.readonly(starts)
        self.forward_table = jit.readonly(moves(source.reshape(-1, 32), words))
        self.backward_table = jit.readonly(
            moves(inverse[words[:, None] + np.arange(32)], 32 * np.arange(len(source) // 32))
        )

    def forward(self, data: np.ndarray, out: np.ndarray) -> None:
        """Interleave: uint8[groups * rows, row bytes] -> uint8 of the same shape."""
        if self.signs:
            data = np.array(data)
            self._sum_signs(data, self.signs.mask(2), self.signs.mask(4))
        words = self._words(out)
        _interleave(jit.readonly(data), words, self.starts, self.forward_table, self.rows, self.head, self.block_bytes)

    def backward(self, data: np.ndarray, out: np.ndarray) -> None:
        """Undo `forward`."""
        words = jit.readonly(self._words(data))
        _deinterleave(words, out, self.starts, self.backward_table, self.rows, self.head, self.block_bytes)
        if self.signs:
            self._sum_signs(out, np.uint32(0), np.uint32(0))

    def _sum_signs(self, data: np.ndarray, by_two: np.uint32, by_four: np.uint32) -> None:
        assert self.signs
        starts = jit.readonly(np.array(self.signs.words, np.int64))
        _sum_signs(data, starts, self.head, self.block_bytes, self.signs.mask(1), by_two, by_four)

    def _words(self, groups: np.ndarray) -> np.ndarray:
        """uint8[rows, row bytes] as uint32[groups, words]."""
        return groups.reshape(len(groups) // self.rows, self.rows * groups.shape[1]).view("<u4")


class Interleaved(QuantType):
    """A type that is another one with the rows of each group of `interleave` woven into each other.

    A subclass states name, ids, `of` (the base type's class), `interleave` and `fields`; sizes follow from the base.
    Its arrays hold whole groups, laid out exactly as in a file: uint8[rows, row bytes], rows a multiple of R.
    Encoding gives the bytes of encoding to the base type and interleaving.
    """

    of: ClassVar[type[QuantType]]
    fields: ClassVar[Sequence[Field]] = ()
    signs: ClassVar[Signs | None] = None

    legacy: ClassVar[bool] = False  # read and undone, but never what rows are repacked to

    def __init_subclass__(cls, **kwargs: Any) -> None:
        cls.base = cls.of.name
        for name in ("block_size", "block_bytes", "row_meta_bytes", "overflow", "requires_imatrix", "uses_imatrix"):
            if name not in cls.__dict__:
                setattr(cls, name, getattr(cls.of, name))
        super().__init_subclass__(**kwargs)

    @property
    def base_type(self) -> QuantType:
        return registry.by_id(self.of.ggml_type)

    @functools.cached_property
    def permutation(self) -> Any:
        """What has `forward(data, out)` and `backward(data, out)`, from rows to groups and back."""
        return Permutation(self.fields, self.interleave, self.block_bytes, self.row_meta_bytes, self.signs)

    def interleave_rows(self, data: Any, *, threads: int | None = None) -> np.ndarray:
        """Rows of the base type, uint8[rows, row bytes], as groups of this one."""
        return self._moved(data, self.base_type, self, self.permutation.forward, threads)

    def deinterleave_rows(self, data: Any, *, threads: int | None = None) -> np.ndarray:
        """Groups of this type, uint8[rows, row bytes], as rows of the base type; undoes `interleave_rows`."""
        return self._moved(data, self, self.base_type, self.permutation.backward, threads)

    def _moved(self, data: Any, source: QuantType, target: QuantType, move: Any, threads: int | None) -> np.ndarray:
        data = np.ascontiguousarray(data, np.uint8)
        if data.ndim != 2 or (data.shape[1] - source.row_meta_bytes) % source.block_bytes:
            raise DataError(
                f"{source.name}: shape {data.shape} is not uint8[rows, row bytes] with rows of "
                f"{source.row_meta_bytes} + a multiple of {source.block_bytes} bytes"
            )
        self._check_rows(len(data))
        n = (data.shape[1] - source.row_meta_bytes) // source.block_bytes * source.block_size
        out = np.empty((len(data), target.row_bytes(n)), np.uint8)
        jit.over_rows(lambda a, b: move(data[a:b], out[a:b]), len(data), multiple=self.interleave,
                      threads=threads if data.nbytes > 1 << 16 else 1)  # fmt: skip
        return out

    def encode_rows(self, x: np.ndarray, importance: np.ndarray, effort: int, out: np.ndarray) -> None:
        data = np.empty((len(x), self.base_type.row_bytes(x.shape[1])), np.uint8)
        self.base_type.encode_rows(x, importance, effort, data)
        self.permutation.forward(data, out)

    def decode_rows(self, data: np.ndarray, out: np.ndarray) -> None:
        rows = np.empty((len(data), self.base_type.row_bytes(out.shape[1])), np.uint8)
        self.permutation.backward(data, rows)
        self.base_type.decode_rows(jit.readonly(rows), out)
