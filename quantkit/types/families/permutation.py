"""Row interleaving as a permutation of bits, compiled from a list of fields and run on whole tensors.

`bit_map` is the definition: for every field, row and element, copy `width` bits. Copying bit by bit would be slow, so
`Permutation` compiles the map once into moves of masked, rotated 32-bit words (most fields keep four neighbouring bytes
together). `types/native/permute.py` carries the moves out for LANES blocks at a time; the same moves backwards are the
inverse.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from quantkit.types.families.interleave_fields import Field, Signs

# What `types/native/permute.py` assumes.
CHUNK = 16  # bytes of a block that are read and written together
LANES = 16  # blocks that are moved at a time

_MAX_MOVES = 14  # of a word in one pass; a word that needs more may need fewer in two passes

# ------------------------------------------------------------------------------------------------------------ compiling


def bit_map(fields: Sequence[Field], rows: int, block_bytes: int) -> np.ndarray:
    """int64[8 * rows * block_bytes]: for each bit of an interleaved block its position in the R base blocks.

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


def chunks(nbytes: int, phase: int = 0) -> np.ndarray:
    """Offsets of the 16-byte chunks in which a block is read and written, in the order of writing.

    They follow each other from byte `phase` on; ones at the block's ends, which may overlap, come before them.
    """
    inner = range(min(phase, nbytes - CHUNK), nbytes - CHUNK + 1, CHUNK)
    ends = [0] * (inner[0] > 0) + [nbytes - CHUNK] * (inner[-1] + CHUNK < nbytes)
    return np.array([*ends, *inner], np.int64)


def bit_positions(offsets: np.ndarray, nbytes: int) -> np.ndarray:
    """int64[8 * nbytes]: the position of each bit of a block in its concatenated chunks; the last one of several."""
    positions = np.full(8 * nbytes, -1, np.int64)
    for chunk, offset in enumerate(offsets):
        positions[8 * offset : 8 * (offset + CHUNK)] = 8 * CHUNK * chunk + np.arange(8 * CHUNK)
    return positions


def _run_starts(ordered: np.ndarray) -> np.ndarray:
    """Where runs of equal numbers begin. (np.unique would import numpy.ma, which takes longer than this module.)"""
    return np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))


def _one_pass(source: np.ndarray, target: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(table, classes) of `native.permute` that copies each bit source[i] to bit target[i].

    Bits are numbered through words of 32. Neighbours that stay neighbours move together.
    """
    key = np.sort((target // 32 << 42) | (source // 32 << 10) | ((target - source) % 32 << 5) | target % 32)
    run_starts = _run_starts(key >> 5)
    masks = np.bitwise_or.reduceat(np.uint32(1) << (key & 31).astype(np.uint32), run_starts)
    move = key[run_starts]
    first = _run_starts(move >> 42)
    per_word = np.diff(first, append=len(move))
    table, classes = [], []
    for count in sorted(set(per_word.tolist())):
        chosen = first[per_word == count, None] + np.arange(count)
        each = np.stack([move[chosen] >> 10 & 0xFFFFFFFF, move[chosen] >> 5 & 31, masks[chosen]], axis=-1)
        word = move[chosen[:, :1]] >> 42
        table.append(np.hstack([word, each.reshape(len(chosen), -1)]).astype(np.uint32).ravel())
        classes.append((count, len(chosen)))
    return np.concatenate(table).view(np.int32), np.array(classes, np.int64)


def _rotations(shifts: np.ndarray) -> np.ndarray:
    """How many different numbers, each modulo 32, are in each row of int64[..., 32]."""
    result: np.ndarray = (shifts[..., None] % 32 == np.arange(32)).any(axis=-2).sum(axis=-1)
    return result


def _intermediate(origin: np.ndarray) -> np.ndarray:
    """An intermediate position for each bit origin[i], on its way to bit i of a word, that takes few moves in and out.

    Candidates are the orders of 32 bits that permute the binary digits of their numbers: transpositions of bit
    matrices, by which the two layouts of a field differ.
    """
    digits = np.array(list(itertools.permutations(range(5))))
    orders = ((origin[None, :, None] >> np.arange(5) & 1) << digits[:, None, :]).sum(axis=-1)
    result: np.ndarray = orders[np.argmin(_rotations(orders - origin) + _rotations(np.arange(32) - orders))]
    return result


def moves(source: np.ndarray, target: np.ndarray, words: tuple[int, int]) -> tuple[np.ndarray, np.ndarray, int]:
    """(table, classes, extra words) of `native.permute` that copies each bit source[i] to bit target[i].

    Bits are numbered through words of 32, of which source and target have `words`. A word that takes many moves from
    one source word takes fewer through an extra word between the two; the extra words follow those of the target.
    """
    origin = np.full(32 * words[1], -1, np.int64)  # of each bit of the target
    origin[target] = source
    of_word = origin.reshape(-1, 32)
    from_one = (of_word >= 0).all(axis=1) & (of_word // 32 == of_word[:, :1] // 32).all(axis=1)
    through = np.flatnonzero(from_one & (_rotations(np.arange(32) - of_word) > _MAX_MOVES))
    if not len(through):
        return *_one_pass(source, target), 0
    bits = [tuple(word) for word in (of_word[through] % 32).tolist()]
    intermediate = {each: _intermediate(np.array(each)) for each in set(bits)}
    between = np.ravel([32 * (words[1] + i) + intermediate[each] for i, each in enumerate(bits)])
    into_extra = _one_pass(of_word[through].ravel(), between)
    ends = np.ravel(32 * through[:, None] + np.arange(32))
    direct = ~np.isin(target // 32, through)
    source = np.concatenate([source[direct], 32 * words[0] + between])
    out_of_extra = _one_pass(source, np.concatenate([target[direct], ends]))
    table, classes = (np.concatenate(parts) for parts in zip(into_extra, out_of_extra))
    return table, classes, len(through)


# -------------------------------------------------------------------------------------------------------------- running


class _Direction:
    """The moves from blocks to a group, or back, as arguments of `native.permute`."""

    def __init__(
        self, source: np.ndarray, target: np.ndarray, words: tuple[int, int], signs: np.ndarray, masks: Sequence[int],
        forward: bool,
    ):  # fmt: skip
        self.table, self.classes, self.between = moves(source, target, words)
        self.signs, self.forward = signs, forward
        self.arguments = (
            self.classes.ctypes.data, len(self.classes), self.table.ctypes.data, signs.ctypes.data, len(signs), *masks,
            forward,
        )  # fmt: skip


def _with_prefetch(chunks: np.ndarray, rows: int = 1, pitch: int = 0) -> np.ndarray:
    """int64[2, rows * chunks]: offsets of a block's chunks in `rows` blocks, `pitch` bytes from one to the next; the
    offset of the LANES blocks that `permute` prefetches with each.
    """
    first = pitch * np.arange(rows)[:, None]
    return np.stack([np.ravel(first + chunks), np.ravel(first + LANES * chunks)])


class Permutation:
    """A list of fields compiled for R rows: `forward` from base blocks to the group, `backward` the inverse.

    `header` is the bytes of a row's header. Blocks smaller than a chunk are moved `fold` at a time.
    """

    def __init__(
        self, fields: Sequence[Field], rows: int, block_bytes: int, header: int = 0, signs: Signs | None = None
    ):
        self.rows, self.block_bytes, self.header, self.fold = rows, block_bytes, header, -(-CHUNK // block_bytes)
        nbytes, largest = self.fold * block_bytes, max(fields, key=lambda field: field.width * len(field.base))
        self._base = chunks(nbytes, phase=int(min(largest.base)) // 8 % 4)  # so that its words move whole
        in_group = chunks(rows * nbytes)
        self._group = _with_prefetch(in_group)
        of_block, row_bits = bit_positions(self._base, nbytes), 8 * CHUNK * len(self._base)
        row, bit = np.divmod(bit_map(fields, rows, block_bytes), 8 * block_bytes)
        base = np.concatenate([row_bits * row + of_block[8 * block_bytes * i + bit] for i in range(self.fold)])
        group = bit_positions(in_group, rows * nbytes)
        at = of_block[8 * np.array(signs.words)] if signs else np.empty(0, np.int64)
        if (at % 32).any():
            raise TypeError("the words with indices of signs are not aligned with the words of the largest field")
        words = (np.arange(rows)[:, None] * row_bits + at).ravel() // 32
        one, two, four = (signs.mask(skip) for skip in (1, 2, 4)) if signs else (0, 0, 0)
        count = rows * len(self._base) * CHUNK // 4, len(in_group) * CHUNK // 4
        self._forward = _Direction(base, group, count, words, (one, two, four), True)
        self._backward = _Direction(group, base, count[::-1], words, (one, 0, 0), False)
        self._in_rows: dict[int, np.ndarray] = {}  # by bytes of a row

    def _chunks_in_rows(self, row_bytes: int) -> np.ndarray:
        """`_with_prefetch` of R base blocks under each other, from the first one's start."""
        if row_bytes not in self._in_rows:
            offsets = _with_prefetch(self._base, self.rows, row_bytes)
            self._in_rows.setdefault(row_bytes, offsets)  # another thread's stays: a function may be using its address
        return self._in_rows[row_bytes]

    def forward(self, data: np.ndarray, out: np.ndarray) -> None:
        """Interleave: uint8[groups * rows, row bytes] -> uint8 of the same shape, both contiguous."""
        self._check(data, out)
        self._run(self._forward, data, self._groups(out))

    def backward(self, data: np.ndarray, out: np.ndarray) -> None:
        """Undo `forward`: from groups to rows, arrays as there."""
        self._check(data, out)
        self._run(self._backward, out, self._groups(data))

    def write_to(self, data: np.ndarray, forward: bool, descriptor: int, offset: int) -> bool:
        """Write the result of `forward`, or else of `backward`, for contiguous data to a file, slice by slice.

        False where it was not written, as for rows that have headers or are short.
        """
        from quantkit.types.native.writing import SLICE_BYTES, pwrite_address

        blocks, groups = data.shape[1] // self.block_bytes, len(data) // self.rows
        if self.header or blocks < self.fold or not groups or not (pwrite := pwrite_address()):
            return False
        self._check(data, data)
        from quantkit.types.native.permute import permute_to_file

        nbytes, unwritten = self.rows * data.shape[1], np.empty(1, np.int64)
        slices = min(groups, -(-data.nbytes // SLICE_BYTES))
        buffer = np.empty(-(-groups // slices) * nbytes, np.uint8)
        direction = self._forward if forward else self._backward
        in_rows, in_groups = (data, buffer) if forward else (buffer, data)
        arguments, space = self._arguments(direction, in_rows.ctypes.data, in_groups.ctypes.data, data.shape[1], groups)
        permute_to_file(pwrite, descriptor, offset, slices, unwritten.ctypes.data, *arguments, space.ctypes.data)
        return not unwritten[0]

    def _check(self, data: np.ndarray, out: np.ndarray) -> None:
        """TypeError unless the arrays are safe for a function that gets their addresses."""
        whole_groups = len(data) % self.rows == 0 and (data.shape[1] - self.header) % self.block_bytes == 0
        if data.shape != out.shape or not whole_groups or not (data.flags.c_contiguous and out.flags.c_contiguous):
            raise TypeError(
                f"uint8{data.shape} and uint8{out.shape} are not both contiguous and groups of {self.rows} rows, each "
                f"of {self.header} + a multiple of {self.block_bytes} bytes"
            )

    def _groups(self, data: np.ndarray) -> np.ndarray:
        return data.reshape(len(data) // self.rows, self.rows * data.shape[1])

    def _run(self, direction: _Direction, rows: np.ndarray, groups: np.ndarray) -> None:
        """From rows uint8[groups * R, row bytes] to groups uint8[groups, R * row bytes], or from these to those."""
        header, header_bytes = self.header, self.rows * self.header
        blocks = (rows.shape[1] - header) // self.block_bytes
        if 0 < blocks < self.fold:
            self._run_padded(direction, rows, groups, (self.fold - blocks) * self.block_bytes)
            return
        if header:
            headers = (
                rows.reshape(len(groups), self.rows, -1)[..., :header],
                groups[:, :header_bytes].reshape(-1, self.rows, header),
            )
            headers[direction.forward][...] = headers[not direction.forward]
        from quantkit.types.native.permute import permute  # loads llvmlite

        starts = rows.ctypes.data + header, groups.ctypes.data + header_bytes
        arguments, space = self._arguments(direction, *starts, rows.shape[1], len(groups))
        permute(*arguments, space.ctypes.data)

    def _arguments(
        self, direction: _Direction, rows: int, groups: int, row_bytes: int, count: int
    ) -> tuple[tuple[int, ...], np.ndarray]:
        """Arguments of `permute` for `count` groups whose first blocks are at two addresses, and its work space."""
        from quantkit.types.native.permute import work_space

        in_rows, blocks = self._chunks_in_rows(row_bytes), (row_bytes - self.header) // self.block_bytes
        group_bytes = self.rows * row_bytes
        sides = (
            (rows, group_bytes, self.block_bytes, in_rows.ctypes.data, in_rows.shape[1]),
            (groups, group_bytes, self.rows * self.block_bytes, self._group.ctypes.data, self._group.shape[1]),
        )
        source, target = sides if direction.forward else sides[::-1]
        space = np.empty(work_space(in_rows.shape[1] + self._group.shape[1], direction.between), np.uint8)
        return (*source, *target, count, blocks, self.fold, *direction.arguments), space

    def _run_padded(self, direction: _Direction, rows: np.ndarray, groups: np.ndarray, missing: int) -> None:
        """`_run` of rows shorter than `fold` blocks, which lack `missing` bytes."""
        long_rows = np.pad(rows, ((0, 0), (0, missing)))
        long_groups = np.pad(groups, ((0, 0), (0, self.rows * missing)))
        self._run(direction, long_rows, long_groups)
        if direction.forward:
            groups[...] = long_groups[:, : groups.shape[1]]
        else:
            rows[...] = long_rows[:, : rows.shape[1]]
