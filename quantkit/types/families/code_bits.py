"""Which bits of a block are the code of an element, for every type whose elements have codes of their own.

The map is derived from the type's decoder. A bit that changes exactly one element of a block belongs to that element's
code; of the bits of a code the one that changes its value most is the highest; the values of all codes under one scale
give their order. So the map holds for each type that has a codec and cannot disagree with it. Types whose codes stand
for several elements (grids, pairs, trellises) have none: `codes_of` gives None.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from quantkit.codegen.jit import kernel
from quantkit.types.base import QuantType

WIDEST = 6  # bits; rounding errors of wider codes are negligible, and int8 has a value, -128, that kernels do not take
_PROBES = 4  # encoded rows: a bit may have no effect in one of them


class Codes(NamedTuple):
    """Where the codes of a block's elements are: each is one run of bits within a byte, or two, low bits first."""

    header: int  # bytes before the blocks of a row
    block_bytes: int
    runs: np.ndarray  # int64[elements, 2, 3]: byte of the block, first bit in it, mask at bit 0, which may be 0
    low: int  # bits in the first run
    above: np.ndarray  # uint8[2^bits] the code of the next value after each code's; its own at the end
    below: np.ndarray  # uint8[2^bits] of the value before


@functools.cache
def codes_of(kind: QuantType) -> Codes | None:
    """The codes of a type; None where they are not of single elements, or wider than WIDEST."""
    bits = _bits(kind)
    if bits is None:
        return None
    values = np.stack([_with_codes(kind, bits, code) for code in range(1 << bits.shape[1])])
    order = np.argsort(values[:, 0], kind="stable")
    rising = np.diff(values[order], axis=0)
    if not ((rising >= 0).all(axis=0) | (rising <= 0).all(axis=0)).all():
        return None
    above, below = np.empty((2, len(order)), np.uint8)
    above[order] = order[np.minimum(np.arange(len(order)) + 1, len(order) - 1)]
    below[order] = order[np.maximum(np.arange(len(order)) - 1, 0)]
    runs = _runs(bits)
    return Codes(kind.row_meta_bytes, kind.block_bytes, runs, int(runs[0, 0, 2]).bit_length(), above, below)


@functools.cache
def _block(kind: QuantType) -> np.ndarray:
    """uint8[_PROBES, row bytes]: rows of one block, with scales of no special value."""
    x = np.random.RandomState(1).standard_normal((_PROBES, kind.block_size)).astype(np.float32)
    return kind.quantize(x, np.ones(kind.block_size, np.float32), threads=1)


def _bits(kind: QuantType) -> np.ndarray | None:
    """int64[elements, width]: addresses in a block of the bits of each code, the lowest first."""
    data, size = _block(kind), kind.block_size
    y = kind.dequantize(data, size, threads=1)
    address = np.arange(8 * kind.block_bytes)
    changed = np.zeros((len(address), size), bool)
    with np.errstate(all="ignore"):  # bits of scales may make anything
        for row, plain in zip(data, y):
            flipped = np.repeat(row[None], len(address), axis=0)
            flipped[address, kind.row_meta_bytes + address // 8] ^= (1 << address % 8).astype(np.uint8)
            changed |= kind.dequantize(flipped, size, threads=1) != plain
    own = np.flatnonzero(changed.sum(axis=1) == 1)
    element = changed[own].argmax(axis=1)
    width = np.bincount(element, minlength=size)
    if not 0 < width[0] <= WIDEST or (width != width[0]).any():
        return None
    bits = own[np.argsort(element, kind="stable")].reshape(size, width[0])
    none = _with_codes(kind, bits, 0)
    effect = np.stack([np.abs(_with_codes(kind, bits, 1 << k) - none) for k in range(width[0])], axis=1)
    return np.take_along_axis(bits, np.argsort(effect, axis=1, kind="stable"), axis=1)


def _with_codes(kind: QuantType, bits: np.ndarray, code: int) -> np.ndarray:
    """float32[elements]: the probe's first block with one code for all elements."""
    block = np.unpackbits(_block(kind)[0, kind.row_meta_bytes :], bitorder="little")
    block[bits] = code >> np.arange(bits.shape[1]) & 1
    row = np.concatenate([_block(kind)[0, : kind.row_meta_bytes], np.packbits(block, bitorder="little")])
    result: np.ndarray = kind.dequantize(row[None], kind.block_size, threads=1)[0]
    return result


def _runs(bits: np.ndarray) -> np.ndarray:
    """`Codes.runs`; the first runs of all elements have the same width."""
    found = []
    for of in bits:
        starts = [k for k in range(len(of)) if k == 0 or of[k] != of[k - 1] + 1 or of[k] % 8 == 0]
        runs = [(of[a] // 8, of[a] % 8, (1 << (b - a)) - 1) for a, b in zip(starts, [*starts[1:], len(of)])]
        found.append([*runs, (runs[0][0], 0, 0)][:2] if len(runs) < 3 else [])
    table = np.array(found, np.int64)  # of codes in more runs there is none
    assert (table[:, 0, 2] == table[0, 0, 2]).all()
    return table


@kernel
def neighbours(data: np.ndarray, above: np.ndarray, below: np.ndarray, n: int, codes: Codes) -> None:
    """Move all codes to the next larger value in `above` and to the next smaller one in `below`.

    Both are copies of data uint8[rows, row bytes], whose rows have n elements.
    """
    size = len(codes.runs)
    next_code, last_code = codes.above, codes.below
    for j in range(size):  # outermost: the place of its bits stays in registers
        byte, shift, mask = codes.runs[j, 0]
        high_byte, high_shift, high_mask = codes.runs[j, 1]
        kept, high_kept = 255 - (mask << shift), 255 - (high_mask << high_shift)
        for row in range(len(data)):
            for b in range(n // size):
                at = codes.header + b * codes.block_bytes
                code = np.int64(data[row, at + byte]) >> shift & mask
                code |= (np.int64(data[row, at + high_byte]) >> high_shift & high_mask) << codes.low
                up, down = np.int64(next_code[code]), np.int64(last_code[code])
                above[row, at + byte] = above[row, at + byte] & kept | (up & mask) << shift
                below[row, at + byte] = below[row, at + byte] & kept | (down & mask) << shift
                if high_mask != 0:
                    up, down = (up >> codes.low) << high_shift, (down >> codes.low) << high_shift
                    above[row, at + high_byte] = above[row, at + high_byte] & high_kept | up
                    below[row, at + high_byte] = below[row, at + high_byte] & high_kept | down


@kernel
def step(data: np.ndarray, moves: np.ndarray, codes: Codes) -> None:
    """Move codes of uint8[rows, row bytes], in place: to the next value where int8[rows, n] is 1, back where -1."""
    size = len(codes.runs)
    for row in range(len(data)):
        eights = moves[row].view(np.int64)  # most are all 0
        for first in range(0, moves.shape[1], 8):
            if eights[first // 8] == 0:
                continue
            for j in range(first, first + 8):
                if moves[row, j] != 0:
                    _move(data[row, codes.header + j // size * codes.block_bytes :], j % size, moves[row, j], codes)


@kernel
def _move(block: np.ndarray, j: int, move: int, codes: Codes) -> None:
    runs = codes.runs[j]
    code = np.int64(block[runs[0, 0]]) >> runs[0, 1] & runs[0, 2]
    code |= (np.int64(block[runs[1, 0]]) >> runs[1, 1] & runs[1, 2]) << codes.low
    moved = np.int64(codes.above[code] if move > 0 else codes.below[code])
    for i in range(2):
        byte, shift, mask = runs[i]
        block[byte] = block[byte] & (255 - (mask << shift)) | (moved >> codes.low * i & mask) << shift
