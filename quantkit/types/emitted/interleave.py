"""Moving the bits of sixteen blocks at a time, each in a SIMD lane of its own: the machine under `types/interleave.py`.

    gather    four neighbouring words of each lane's block -> four vectors with one word of every lane, again and again
    move      target vector = (source vector rotated & mask) | …, as the table says
    scatter   what gather does, backwards

A block is read and written in units of 16 bytes at given offsets. Units may overlap; what is written later stays.
"""

from __future__ import annotations

import numpy as np

from quantkit.jit import kernel
from quantkit.simd import I32, I64, Emit, Value, emitted, vector

LANES = 16
_WORDS = vector(LANES, I32)
_VECTOR = 4 * LANES  # bytes
_FOUR = vector(4, I32)


def _transposed(e: Emit, rows: list[Value]) -> list[Value]:
    """Vectors of four 4-word parts; part q of result j is word j of part q of each of the four. Its own inverse."""

    def zipped(a: Value, b: Value, order: tuple[int, ...]) -> Value:
        return e.shuffle(a, b, [4 * part + i % 4 + LANES * (i // 4) for part in range(LANES // 4) for i in order])

    a, b, c, d = rows
    low, high = (0, 4, 1, 5), (2, 6, 3, 7)
    pairs = [(zipped(a, b, half), zipped(c, d, half)) for half in (low, high)]
    return [zipped(x, y, half) for x, y in pairs for half in ((0, 1, 4, 5), (2, 3, 6, 7))]


@emitted("void")
def expect(e, lanes, offsets, count):
    """Ask for the cache lines at int64[count] offsets from each of the 16 addresses at `lanes`."""
    at = [e.load(I64, lanes + 8 * lane) for lane in range(LANES)]
    with e.loop(0, count) as i:
        offset = e.load(I64, offsets + i * 8)
        for address in at:
            e.prefetch(address + offset)


@emitted("void")
def gather(e, lanes, offsets, count, words):
    """words int32[count, 4, 16]: from each of the 16 addresses at `lanes`, the unit at each of int64[count] offsets."""
    at = [e.load(I64, lanes + 8 * lane) for lane in range(LANES)]
    with e.loop(0, count) as unit:
        offset = e.load(I64, offsets + unit * 8)
        rows = []
        for i in range(4):
            parts = [e.load(_FOUR, at[4 * q + i] + offset) for q in range(4)]
            rows.append(e.join(e.join(*parts[:2]), e.join(*parts[2:])))
        for j, word in enumerate(_transposed(e, rows)):
            e.store(word, words + unit * (4 * _VECTOR) + j * _VECTOR)


@emitted("void")
def scatter(e, words, lanes, offsets, count):
    """Write what `gather` reads."""
    at = [e.load(I64, lanes + 8 * lane) for lane in range(LANES)]
    with e.loop(0, count) as unit:
        offset = e.load(I64, offsets + unit * 8)
        found = [e.load(_WORDS, words + unit * (4 * _VECTOR) + j * _VECTOR) for j in range(4)]
        for i, row in enumerate(_transposed(e, found)):
            for q in range(4):
                e.store(e.part(row, 4 * q, 4), at[4 * q + i] + offset)


@emitted("void")
def move(e, source, target, classes, count, table):
    """Fill the target words that the table names.

    classes   int64[count, 2]: moves of a target word, number of such words
    table     int32: of each word its number and per move the number of a source word, left rotation, mask
    """
    entry = e.variable(table)

    def field(index: int) -> Value:
        return e.load(I32, entry.get() + 4 * index)

    with e.loop(0, count) as kind:
        moves = e.load(I64, classes + kind * 16)
        with e.loop(0, e.load(I64, classes + kind * 16 + 8)):
            word = field(0).unsigned(I64)
            entry.set(entry.get() + 4)
            total = e.variable(e.zero(_WORDS))
            with e.loop(0, moves):
                found = e.load(_WORDS, source + field(0).unsigned(I64) * _VECTOR)
                turned = e.call("llvm.fshl.v16i32", _WORDS, found, found, e.splat(field(1), LANES))
                total.set(total.get() | (turned & e.splat(field(2), LANES)))
                entry.set(entry.get() + 12)
            e.store(total.get(), target + word * _VECTOR)


@emitted("void")
def running_xor(e, words, numbers, count, by_one, by_two, by_four):
    """In the numbered words, t ^= t << 1 & by_one, then the same with 2 and 4."""
    masks = [(shift, e.splat(mask.narrow(I32), LANES)) for shift, mask in ((1, by_one), (2, by_two), (4, by_four))]
    with e.loop(0, count) as i:
        at = words + e.load(I64, numbers + i * 8) * _VECTOR
        t = e.load(_WORDS, at)
        for shift, mask in masks:
            t = t ^ ((t << shift) & mask)
        e.store(t, at)


def work_space(units: int) -> tuple[np.ndarray, np.ndarray]:
    """What `permute` works in, for so many units of source and target together."""
    return np.empty((2, 2, LANES), np.int64), np.empty((4 * units + 1) * LANES, np.int32)


@kernel(inline="always")
def _at(array):
    return np.int64(array.ctypes.data)


@kernel
def _point(lanes, group, i, groups, blocks, fold, source, target):
    """The addresses, int64[2, 16], of sixteen blocks from the i-th of a group on; for want of more, of the last again.

    Returns where the next ones begin.
    """
    for lane in range(LANES):
        if group < groups:
            at = min(i * fold, blocks - fold)
            lanes[0, lane] = source[0] + group * source[1] + at * source[2]
            lanes[1, lane] = target[0] + group * target[1] + at * target[2]
            i += 1
            if i * fold >= blocks:
                group, i = group + 1, 0
        else:
            lanes[:, lane] = lanes[:, lane - 1]
    return group, i


@kernel
def permute(
    source, source_units, source_lines, target, target_units, target_lines, groups, blocks, fold,
    classes, table, signs, masks, before, lanes, space,
):  # fmt: skip
    """Move the bits of `groups` groups of `blocks` blocks; `fold` neighbouring blocks, of at least as many, go as one.

    source, target               address of the first block, bytes of a group, bytes from block to block
    source_units, source_lines   int64: offsets of the units and the cache lines of a block; of the target likewise
    classes, table               the moves
    signs, masks, before         words that running_xor changes, its masks, whether of the source or of the target
    lanes, space                 of `work_space`: numba would free an array made here once only its address is used
    """
    n_source, n_target = len(source_units), len(target_units)
    words = (np.int64(space.ctypes.data) + _VECTOR - 1) // _VECTOR * _VECTOR  # vectors across two cache lines are slow
    moved = words + 4 * n_source * _VECTOR
    now, after = lanes[0], lanes[1]
    group, i = _point(now, 0, 0, groups, blocks, fold, source, target)
    for _ in range(0, groups * -(-blocks // fold), LANES):
        if group < groups:  # the CPU does not foresee where we go, so it is told
            group, i = _point(after, group, i, groups, blocks, fold, source, target)
            expect(_at(after[0]), _at(source_lines), len(source_lines))
            expect(_at(after[1]), _at(target_lines), len(target_lines))
        gather(_at(now[0]), _at(source_units), n_source, words)
        if before:
            running_xor(words, _at(signs), len(signs), masks[0], masks[1], masks[2])
        move(words, moved, _at(classes), len(classes), _at(table))
        if not before:
            running_xor(moved, _at(signs), len(signs), masks[0], masks[1], masks[2])
        scatter(moved, _at(now[1]), _at(target_units), n_target)
        now, after = after, now
