"""Permute the bits of 16 blocks at a time, each in a SIMD lane of its own: the native function of
`types/families/interleave.py`.

    gather    four neighbouring words of each lane's block -> four vectors with one word of every lane, again and again
    move      target vector = (source vector rotated & mask) | …, as the table says
    scatter   what gather does, backwards

A block is read and written in units of 16 bytes at given offsets. Units may overlap; what is written later stays.
All of it is one native function (`codegen.native`): repacking a file takes less time than importing numba.
"""

from __future__ import annotations

import functools
import operator

from quantkit.codegen.ir_builder import IrBuilder
from quantkit.codegen.ir_values import I32, I64, Value, vector
from quantkit.codegen.native import function
from quantkit.types.native.writing import write

LANES = 16
_UNIT = 16  # bytes, as there
_WORDS = vector(LANES, I32)
_VECTOR = 4 * LANES  # bytes
_FOUR = vector(4, I32)
_UNROLLED = 2  # moves of a target word up to which there is a loop of their own; most words have so few


def _transposed(ir: IrBuilder, rows: list[Value]) -> list[Value]:
    """Vectors of four 4-word parts; part q of result j is word j of part q of each of the four. Its own inverse."""

    def zipped(a: Value, b: Value, order: tuple[int, ...]) -> Value:
        return ir.shuffle(a, b, [4 * part + i % 4 + LANES * (i // 4) for part in range(LANES // 4) for i in order])

    a, b, c, d = rows
    low, high = (0, 4, 1, 5), (2, 6, 3, 7)
    pairs = [(zipped(a, b, half), zipped(c, d, half)) for half in (low, high)]
    return [zipped(x, y, half) for x, y in pairs for half in ((0, 1, 4, 5), (2, 3, 6, 7))]


def _gather(ir, lanes, offsets, count, words, following):
    """words int32[count, 4, 16]: from each of the 16 addresses at `lanes`, the unit at each of int64[count] offsets.

    Meanwhile the cache lines at `following` + as many further offsets are prefetched.
    """
    addresses = [ir.load(I64, lanes + 8 * lane) for lane in range(LANES)]
    with ir.loop(0, count) as unit:
        offset = ir.load(I64, offsets + unit * 8)
        ahead = following + ir.load(I64, offsets + (count + unit) * 8)
        for line in range(0, LANES * _UNIT, 64):
            ir.prefetch(ahead + line, to_l1=False)
        rows = []
        for i in range(4):
            parts = [ir.load(_FOUR, addresses[4 * q + i] + offset) for q in range(4)]
            rows.append(ir.join(ir.join(*parts[:2]), ir.join(*parts[2:])))
        for j, word in enumerate(_transposed(ir, rows)):
            ir.store(word, words + unit * (4 * _VECTOR) + j * _VECTOR)


def _scatter(ir, words, lanes, offsets, count):
    """Write what `gather` reads."""
    addresses = [ir.load(I64, lanes + 8 * lane) for lane in range(LANES)]
    with ir.loop(0, count) as unit:
        offset = ir.load(I64, offsets + unit * 8)
        vectors = [ir.load(_WORDS, words + unit * (4 * _VECTOR) + j * _VECTOR) for j in range(4)]
        for i, row in enumerate(_transposed(ir, vectors)):
            for q in range(4):
                ir.store(ir.part(row, 4 * q, 4), addresses[4 * q + i] + offset)


def _move(ir, source, target, classes, count, table):
    """Fill the target words that the table names, in its order: later ones may be made of earlier ones.

    classes   int64[count, 2]: moves of a target word, number of such words
    table     int32: of each word its number and per move the number of a source word, left rotation, mask
    """
    entry = ir.variable(table)

    def moved(word_entry: Value) -> Value:
        number, rotation, mask = (ir.load(I32, word_entry + 4 * i) for i in range(3))
        value = ir.load(_WORDS, source + number.unsigned(I64) * _VECTOR)
        return ir.call("llvm.fshl.v16i32", _WORDS, value, value, ir.splat(rotation, LANES)) & ir.splat(mask, LANES)

    with ir.loop(0, count) as kind:
        moves, words = (ir.load(I64, classes + kind * 16 + 8 * i) for i in range(2))
        for move_count in range(1, _UNROLLED + 1):
            with (
                ir.builder.if_then(ir.builder.icmp_signed("==", moves.ir, ir.integer(move_count).ir)),
                ir.loop(0, words),
            ):
                word_entry = entry.get()
                total = functools.reduce(operator.or_, [moved(word_entry + (4 + 12 * i)) for i in range(move_count)])
                ir.store(total, target + ir.load(I32, word_entry).unsigned(I64) * _VECTOR)
                entry.set(word_entry + (4 + 12 * move_count))
        with ir.builder.if_then(ir.builder.icmp_signed(">", moves.ir, ir.integer(_UNROLLED).ir)), ir.loop(0, words):
            word_entry = entry.get()
            total = ir.variable(ir.zero(_WORDS))
            with ir.loop(0, moves) as i:
                total.set(total.get() | moved(word_entry + (i * 12 + 4)))
            ir.store(total.get(), target + ir.load(I32, word_entry).unsigned(I64) * _VECTOR)
            entry.set(word_entry + (moves * 12 + 4))


def _running_xor(ir, words, numbers, count, by_one, by_two, by_four):
    """In the numbered words, t ^= t << 1 & by_one, then the same with 2 and 4."""
    masks = [(shift, ir.splat(mask.narrow(I32), LANES)) for shift, mask in ((1, by_one), (2, by_two), (4, by_four))]
    with ir.loop(0, count) as i:
        address = words + ir.load(I64, numbers + i * 8) * _VECTOR
        t = ir.load(_WORDS, address)
        for shift, mask in masks:
            t = t ^ ((t << shift) & mask)
        ir.store(t, address)


def _set_addresses(ir, lanes, group, i, shape, source, target):
    """Store the addresses of the next sixteen blocks, int64[2, 16], at `lanes`, and advance `group` and `i` past them.

    Past the end the last block is repeated. `group` and `i` are variables, the others triples as `permute` has them.
    """
    groups, blocks, fold = shape
    first, second = (ir.variable(ir.integer(0)) for _ in range(2))
    last = blocks - fold
    with ir.loop(lanes, lanes + 8 * LANES, 8) as slot:
        is_there = ir.less(group.get(), groups)
        block = i.get() * fold
        block = ir.choose(ir.less(block, last), block, last)
        for (begin, group_bytes, pitch), latest, offset in ((source, first, 0), (target, second, 8 * LANES)):
            address = begin + group.get() * group_bytes + block * pitch
            latest.set(ir.choose(is_there, address, latest.get()))
            ir.store(latest.get(), slot + offset)
        following = i.get() + 1
        is_next = ir.less(following * fold, blocks)
        i.set(ir.choose(is_next, following, ir.integer(0)))
        group.set(ir.choose(is_next, group.get(), group.get() + 1))


def work_space(units: int, between: int) -> int:
    """Bytes of `permute`'s work space, by the units of source and target together and the words between the two."""
    return 2 * 8 * LANES + ((units + 1) * 4 + between) * _VECTOR


@function
def permute(
    ir, source, source_group, source_pitch, source_units, source_unit_count,
    target, target_group, target_pitch, target_units, target_unit_count,
    groups, blocks, fold, classes, class_count, table, signs, sign_count, by_one, by_two, by_four, signs_first, space,
):  # fmt: skip
    """Permute the bits of `groups` groups of `blocks` blocks; `fold` <= `blocks` neighbours are moved as one.

    source, target               address of the first block, bytes of a group, bytes from block to block
    source_units, target_units   int64[2, count]: offsets of the units of a block; offsets in the next sixteen blocks of
                                 what is prefetched while a unit is read (to the L2 cache: L1 holds these sixteen)
    classes, table               the moves
    signs, by_*, signs_first     words that _running_xor changes, its masks, 1 for words of the source, else 0
    space                        `work_space` bytes
    """
    words = (space + (2 * 8 * LANES + _VECTOR - 1)) & -_VECTOR  # vectors across two cache lines are slow
    moved = words + source_unit_count * (4 * _VECTOR)
    group, i = ir.variable(ir.integer(0)), ir.variable(ir.integer(0))
    shape_and_sides = (groups, blocks, fold), (source, source_group, source_pitch), (target, target_group, target_pitch)
    with ir.loop(0, groups * ((blocks + fold - 1) / fold), LANES):
        _set_addresses(ir, space, group, i, *shape_and_sides)
        following = source + group.get() * source_group + i.get() * (fold * source_pitch)
        _gather(ir, space, source_units, source_unit_count, words, following)
        _running_xor(ir, words, signs, sign_count * signs_first, by_one, by_two, by_four)
        _move(ir, words, moved, classes, class_count, table)
        _running_xor(ir, moved, signs, sign_count * (ir.integer(1) - signs_first), by_one, by_two, by_four)
        _scatter(ir, moved, space + 8 * LANES, target_units, target_unit_count)


@function
def permute_to_file(
    ir, pwrite, file, offset, slices, missed,
    source, source_group, source_pitch, source_units, source_unit_count,
    target, target_group, target_pitch, target_units, target_unit_count,
    groups, blocks, fold, classes, class_count, table, signs, sign_count, by_one, by_two, by_four, signs_first, space,
):  # fmt: skip
    """`permute` in `slices` slices: each is permuted to `target` and written to a file while it is in the cache.

    pwrite, file, offset   address of the C function, file descriptor, offset of the first group in the file
    missed                 address of an int64: the bytes that could not be written
    """
    missing = ir.variable(ir.integer(0))
    with ir.loop(0, slices) as number:
        first, last = groups * number / slices, groups * (number + 1) / slices
        permute.body(
            ir, source + first * source_group, source_group, source_pitch, source_units, source_unit_count,
            target, target_group, target_pitch, target_units, target_unit_count, last - first, blocks, fold,
            classes, class_count, table, signs, sign_count, by_one, by_two, by_four, signs_first, space,
        )  # fmt: skip
        write(ir, (pwrite, file), target, (last - first) * target_group, offset + first * target_group, missing)
    ir.store(missing.get(), missed)
