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
once into moves of masked, rotated 32-bit words (most fields keep four neighbouring bytes together), and
`types/native/permute.py` carries them out for sixteen blocks at a time; the same moves backwards are the inverse.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np

from quantkit.codegen import jit
from quantkit.errors import DataError
from quantkit.inputs import arguments
from quantkit.types import base as registry
from quantkit.types.base import QuantType

# What `types/native/permute.py` goes by.
UNIT = 16  # bytes of a block that are read and written together
LANES = 16  # blocks that are moved at a time

_MANY = 14  # moves of a word: so many and fewer are best made in one pass

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


class Slots(NamedTuple):
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


class Lines(NamedTuple):
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


class EvenOdd(NamedTuple):
    """One-bit flags: element j of row k in bit j // 2 of byte k (even j) or R + k (odd j)."""

    at: int

    def addresses(self, rows: int, width: int, count: int) -> np.ndarray:
        j = np.arange(count)
        return 8 * (self.at + rows * (j % 2) + np.arange(rows)[:, None]) + j // 2


class Field(NamedTuple):
    """Elements of `width` bits at the bit addresses `base` of a base block, laid out in the group by `group`."""

    width: int
    base: Sequence[int] | np.ndarray
    group: Placement


class Signs(NamedTuple):
    """Seven-bit indices of signs, kept in the group as the running exclusive-or of their bits.

    With bits s0 … s6 an index stands for these signs and their parity; the group has t_j = s0 ^ … ^ s_j instead, and
    s_j = t_j ^ t_(j-1) gives them back. Per block the 32-bit words at bytes `words` hold them, each at bits `first`.
    """

    words: Sequence[int]
    first: Sequence[int]

    def mask(self, skip: int) -> int:
        """All bits of the indices in a word but the lowest `skip` of each."""
        return sum((0x7F >> skip << skip) << at for at in self.first)


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


def units(nbytes: int, phase: int = 0) -> np.ndarray:
    """Offsets of the 16-byte units in which a block is read and written, in the order of writing.

    They follow each other from byte `phase` on; ones at the block's ends, which may overlap, come before them.
    """
    whole = range(min(phase, nbytes - UNIT), nbytes - UNIT + 1, UNIT)
    ends = [0] * (whole[0] > 0) + [nbytes - UNIT] * (whole[-1] + UNIT < nbytes)
    return np.array([*ends, *whole], np.int64)


def places(offsets: np.ndarray, nbytes: int) -> np.ndarray:
    """int64[8 * nbytes]: where each bit of a block is in its units' bits end to end; of two places the later one."""
    found = np.full(8 * nbytes, -1, np.int64)
    for unit, at in enumerate(offsets):
        found[8 * at : 8 * (at + UNIT)] = 8 * UNIT * unit + np.arange(8 * UNIT)
    return found


def _starts(ordered: np.ndarray) -> np.ndarray:
    """Where runs of equal numbers begin. (np.unique loads numpy.ma, which takes longer than all that is done here.)"""
    return np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))


def _one_pass(source: np.ndarray, target: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(table, classes) of `native.interleave._move` to copy each bit source[i] to bit target[i].

    Bits are counted through words of 32. Neighbours that stay neighbours move together.
    """
    key = np.sort((target // 32 << 42) | (source // 32 << 10) | ((target - source) % 32 << 5) | target % 32)
    at = _starts(key >> 5)
    masks = np.bitwise_or.reduceat(np.uint32(1) << (key & 31).astype(np.uint32), at)
    move = key[at]
    first = _starts(move >> 42)
    per_word = np.diff(first, append=len(move))
    table, classes = [], []
    for count in sorted(set(per_word.tolist())):
        chosen = first[per_word == count, None] + np.arange(count)
        each = np.stack([move[chosen] >> 10 & 0xFFFFFFFF, move[chosen] >> 5 & 31, masks[chosen]], axis=-1)
        word = move[chosen[:, :1]] >> 42
        table.append(np.hstack([word, each.reshape(len(chosen), -1)]).astype(np.uint32).ravel())
        classes.append((count, len(chosen)))
    return np.concatenate(table).view(np.int32), np.array(classes, np.int64)


def _rotations(turns: np.ndarray) -> np.ndarray:
    """How many different numbers, each modulo 32, are in each row of int64[..., 32]."""
    return (turns[..., None] % 32 == np.arange(32)).any(axis=-2).sum(axis=-1)


def _halfway(origin: np.ndarray) -> np.ndarray:
    """Where to put bit origin[i], on its way to bit i of a word, so that it takes few moves to there and from there.

    Tried are the orders of 32 bits that permute the binary digits of their numbers: transpositions of matrices of bits,
    which is what the two layouts of a field of bits differ by.
    """
    digits = np.array(list(itertools.permutations(range(5))))
    orders = ((origin[None, :, None] >> np.arange(5) & 1) << digits[:, None, :]).sum(axis=-1)
    return orders[np.argmin(_rotations(orders - origin) + _rotations(np.arange(32) - orders))]


def moves(source: np.ndarray, target: np.ndarray, words: tuple[int, int]) -> tuple[np.ndarray, np.ndarray, int]:
    """(table, classes, words between) of `native.interleave._move` to copy each bit source[i] to bit target[i].

    Bits are counted through words of 32, of which source and target have `words`. A word that takes very many moves
    from one other takes fewer by way of a word between the two: these stand behind the target's.
    """
    origin = np.full(32 * words[1], -1, np.int64)  # of each bit of the target
    origin[target] = source
    of_word = origin.reshape(-1, 32)
    from_one = (of_word >= 0).all(axis=1) & (of_word // 32 == of_word[:, :1] // 32).all(axis=1)
    through = np.flatnonzero(from_one & (_rotations(np.arange(32) - of_word) > _MANY))
    if not len(through):
        return *_one_pass(source, target), 0
    bits = [tuple(word) for word in (of_word[through] % 32).tolist()]
    halfway = {each: _halfway(np.array(each)) for each in set(bits)}
    between = np.ravel([32 * (words[1] + i) + halfway[each] for i, each in enumerate(bits)])
    there = _one_pass(of_word[through].ravel(), between)
    ends = np.ravel(32 * through[:, None] + np.arange(32))
    rest = ~np.isin(target // 32, through)
    source = np.concatenate([source[rest], 32 * words[0] + between])
    from_there = _one_pass(source, np.concatenate([target[rest], ends]))
    table, classes = (np.concatenate(both) for both in zip(there, from_there))
    return table, classes, len(through)


# ------------------------------------------------------------------------------------------------------------ the type


class _Way:
    """How to go from blocks to a group, or back."""

    def __init__(
        self, source: np.ndarray, target: np.ndarray, words: tuple[int, int], signs: np.ndarray, masks: Sequence[int],
        before: bool,
    ):  # fmt: skip
        self.table, self.classes, self.between = moves(source, target, words)
        self.signs, self.before = signs, before
        self.told = (self.classes.ctypes.data, len(self.classes), self.table.ctypes.data, signs.ctypes.data, len(signs),
                     *masks, before)  # fmt: skip


def _with_stretches(units: np.ndarray, rows: int = 1, pitch: int = 0) -> np.ndarray:
    """int64[2, rows * units]: offsets of a block's units in `rows` blocks, `pitch` bytes from one to the next; the
    offset of the stretch of sixteen neighbouring blocks that `permute` asks for ahead with each.
    """
    first = pitch * np.arange(rows)[:, None]
    return np.stack([np.ravel(first + units), np.ravel(first + LANES * units)])


class Permutation:
    """A description compiled for R rows: `forward` from base blocks to the group, `backward` the other way.

    Several small blocks, `fold`, go as one.
    """

    def __init__(self, fields: Sequence[Field], rows: int, block_bytes: int, head: int = 0, signs: Signs | None = None):
        self.rows, self.block_bytes, self.head, self.fold = rows, block_bytes, head, -(-UNIT // block_bytes)
        nbytes, largest = self.fold * block_bytes, max(fields, key=lambda field: field.width * len(field.base))
        self._base = units(nbytes, phase=int(min(largest.base)) // 8 % 4)  # so that its words move whole
        in_group = units(rows * nbytes)
        self._group = _with_stretches(in_group)
        of_block, row_bits = places(self._base, nbytes), 8 * UNIT * len(self._base)
        row, bit = np.divmod(bit_map(fields, rows, block_bytes), 8 * block_bytes)
        base = np.concatenate([row_bits * row + of_block[8 * block_bytes * i + bit] for i in range(self.fold)])
        group = places(in_group, rows * nbytes)
        at = of_block[8 * np.array(signs.words)] if signs else np.empty(0, np.int64)
        if (at % 32).any():
            raise TypeError("the words with indices of signs are not in step with those of the largest field")
        words = (np.arange(rows)[:, None] * row_bits + at).ravel() // 32
        one, two, four = (signs.mask(skip) for skip in (1, 2, 4)) if signs else (0, 0, 0)
        count = rows * len(self._base) * UNIT // 4, len(in_group) * UNIT // 4
        self._forward = _Way(base, group, count, words, (one, two, four), True)
        self._backward = _Way(group, base, count[::-1], words, (one, 0, 0), False)
        self._in_rows: dict[int, np.ndarray] = {}  # by bytes of a row

    def _units_in_rows(self, row_bytes: int) -> np.ndarray:
        """`_with_stretches` of R base blocks under each other, from the first one's start."""
        if row_bytes not in self._in_rows:
            made = _with_stretches(self._base, self.rows, row_bytes)
            self._in_rows.setdefault(row_bytes, made)  # another thread's stays: a function may be using its address
        return self._in_rows[row_bytes]

    def forward(self, data: np.ndarray, out: np.ndarray) -> None:
        """Interleave: uint8[groups * rows, row bytes] -> uint8 of the same shape, both contiguous."""
        self._check(data, out)
        self._run(self._forward, data, self._groups(out))

    def backward(self, data: np.ndarray, out: np.ndarray) -> None:
        """Undo `forward`."""
        self._check(data, out)
        self._run(self._backward, out, self._groups(data))

    def send(self, data: np.ndarray, forward: bool, descriptor: int, offset: int) -> bool:
        """Write what `forward`, or else `backward`, makes of contiguous data to a file, slice by slice.

        False where it was not, as for rows that have heads or are short.
        """
        from quantkit.types.native.writing import SLICE_BYTES, pwrite_address

        blocks, groups = data.shape[1] // self.block_bytes, len(data) // self.rows
        if self.head or blocks < self.fold or not groups or not (pwrite := pwrite_address()):
            return False
        self._check(data, data)
        from quantkit.types.native.permute import permute_to_file

        nbytes, missed = self.rows * data.shape[1], np.empty(1, np.int64)
        slices = min(groups, -(-data.nbytes // SLICE_BYTES))
        made = np.empty(-(-groups // slices) * nbytes, np.uint8)
        way = self._forward if forward else self._backward
        in_rows, in_groups = (data, made) if forward else (made, data)
        told, space = self._told(way, in_rows.ctypes.data, in_groups.ctypes.data, data.shape[1], groups)
        permute_to_file(pwrite, descriptor, offset, slices, missed.ctypes.data, *told, space.ctypes.data)
        return not missed[0]

    def _check(self, data: np.ndarray, out: np.ndarray) -> None:
        """TypeError unless the arrays are what a kernel that is told addresses may have."""
        whole = len(data) % self.rows == 0 and (data.shape[1] - self.head) % self.block_bytes == 0
        if data.shape != out.shape or not whole or not (data.flags.c_contiguous and out.flags.c_contiguous):
            raise TypeError(
                f"uint8{data.shape} and uint8{out.shape} are not both contiguous and groups of {self.rows} rows, each "
                f"of {self.head} + a multiple of {self.block_bytes} bytes"
            )

    def _groups(self, data: np.ndarray) -> np.ndarray:
        return data.reshape(len(data) // self.rows, self.rows * data.shape[1])

    def _run(self, way: _Way, rows: np.ndarray, groups: np.ndarray) -> None:
        """From rows uint8[groups * R, row bytes] to groups uint8[groups, R * row bytes], or from these to those."""
        head, woven = self.head, self.rows * self.head
        blocks = (rows.shape[1] - head) // self.block_bytes
        if 0 < blocks < self.fold:
            self._run_padded(way, rows, groups, (self.fold - blocks) * self.block_bytes)
            return
        if head:
            heads = rows.reshape(len(groups), self.rows, -1)[..., :head], groups[:, :woven].reshape(-1, self.rows, head)
            heads[way.before][...] = heads[not way.before]
        from quantkit.types.native.permute import permute  # loads llvmlite

        starts = rows.ctypes.data + head, groups.ctypes.data + woven
        told, space = self._told(way, *starts, rows.shape[1], len(groups))
        permute(*told, space.ctypes.data)

    def _told(
        self, way: _Way, rows: int, groups: int, row_bytes: int, count: int
    ) -> tuple[tuple[int, ...], np.ndarray]:
        """What `permute` is told of `count` groups whose first blocks are at two addresses, and the space it needs."""
        from quantkit.types.native.permute import work_space

        in_rows, blocks = self._units_in_rows(row_bytes), (row_bytes - self.head) // self.block_bytes
        group_bytes = self.rows * row_bytes
        sides = (
            (rows, group_bytes, self.block_bytes, in_rows.ctypes.data, in_rows.shape[1]),
            (groups, group_bytes, self.rows * self.block_bytes, self._group.ctypes.data, self._group.shape[1]),
        )
        source, target = sides if way.before else sides[::-1]
        space = np.empty(work_space(in_rows.shape[1] + self._group.shape[1], way.between), np.uint8)
        return (*source, *target, count, blocks, self.fold, *way.told), space

    def _run_padded(self, way: _Way, rows: np.ndarray, groups: np.ndarray, missing: int) -> None:
        """The same for rows shorter than `fold` blocks, which lack `missing` bytes."""
        long_rows = np.pad(rows, ((0, 0), (0, missing)))
        long_groups = np.pad(groups, ((0, 0), (0, self.rows * missing)))
        self._run(way, long_rows, long_groups)
        if way.before:
            groups[...] = long_groups[:, : groups.shape[1]]
        else:
            rows[...] = long_rows[:, : rows.shape[1]]


class Interleaved(QuantType):
    """A type that is another one with the rows of each group of `interleave` woven into each other.

    A subclass states name, ids, `of` (the base type's class), `interleave` and `fields`; sizes follow from the base.
    Its arrays hold whole groups, laid out exactly as in a file: uint8[rows, row bytes], rows a multiple of R.
    Encoding gives the bytes of encoding to the base type and interleaving.
    """

    of: ClassVar[type[QuantType]]
    fields: ClassVar[Sequence[Field]] = ()
    signs: ClassVar[Signs | None] = None

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

    def interleave_rows(self, data: Any, *, threads: int | None = None, out: np.ndarray | None = None) -> np.ndarray:
        """Rows of the base type, uint8[rows, row bytes], as groups of this one; in `out` if that is given."""
        return self._moved(data, self.base_type, self, self.permutation.forward, threads, out)

    def deinterleave_rows(self, data: Any, *, threads: int | None = None, out: np.ndarray | None = None) -> np.ndarray:
        """Groups of this type, uint8[rows, row bytes], as rows of the base type; undoes `interleave_rows`."""
        return self._moved(data, self, self.base_type, self.permutation.backward, threads, out)

    def send_rows(self, data: np.ndarray, forward: bool, descriptor: int, offset: int) -> bool:
        """Write what `interleave_rows`, or else `deinterleave_rows`, makes of data to a file. False where it was not,
        or cannot be while it is made: then the one or the other has to make it.
        """
        p = self.permutation  # others do more than to permute
        return type(p) is Permutation and p.send(data, forward, descriptor, offset)

    def _moved(
        self, data: Any, source: QuantType, target: QuantType, move: Any, threads: int | None, out: np.ndarray | None
    ) -> np.ndarray:
        data, threads = arguments.encoded(data, source.name), arguments.threads(threads)
        if data.ndim != 2 or (data.shape[1] - source.row_meta_bytes) % source.block_bytes:
            raise DataError(
                f"{source.name}: shape {data.shape} is not uint8[rows, row bytes] with rows of "
                f"{source.row_meta_bytes} + a multiple of {source.block_bytes} bytes"
            )
        self._check_rows(len(data))
        n = (data.shape[1] - source.row_meta_bytes) // source.block_bytes * source.block_size
        shape = len(data), target.row_bytes(n)
        if out is None:
            out = np.empty(shape, np.uint8)
        else:
            out = arguments.output(out, shape, np.uint8, data, target.name)
        if threads == 1 or data.nbytes <= 1 << 16:
            move(data, out)
            return out
        jit.over_rows(lambda a, b: move(data[a:b], out[a:b]), len(data), multiple=self.interleave, threads=threads)
        return out

    def encode_rows(self, x: np.ndarray, importance: np.ndarray, effort: int, out: np.ndarray) -> None:
        data = np.empty((len(x), self.base_type.row_bytes(x.shape[1])), np.uint8)
        self.base_type.encode_rows(x, importance, effort, data)
        self.permutation.forward(data, out)

    def decode_rows(self, data: np.ndarray, out: np.ndarray) -> None:
        rows = np.empty((len(data), self.base_type.row_bytes(out.shape[1])), np.uint8)
        self.permutation.backward(data, rows)
        self.base_type.decode_rows(jit.readonly(rows), out)
