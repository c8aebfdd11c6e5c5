"""Which bits of a block are the code of each element; reading and writing of these codes.

The map is derived from the type's decoder. A bit that changes exactly one element of a block belongs to that element's
code. Of the bits of a code, the one that changes its value most is the highest. The values of all codes under one scale
give their order. So the map cannot disagree with the codec. For types whose codes stand for several elements (grids,
pairs, trellises) `codes_of` gives None.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, Protocol

import numpy as np

from quantkit.codegen import jit
from quantkit.codegen.jit import kernel

MAX_BITS = 8
_PROBE_ROWS = 4  # encoded rows: a bit may have no effect in one of them


class Codec(Protocol):
    """What this module needs of a type; `QuantType` has it. (Importing `types.base` here would be a cycle.)"""

    block_size: int
    block_bytes: int
    row_meta_bytes: int
    unwritten_code: int | None

    def __hash__(self) -> int: ...
    def quantize(self, x: Any, importance: Any = None, *, threads: int | None = None) -> np.ndarray: ...
    def dequantize(self, data: Any, n: int, *, threads: int | None = None, products: bool = False) -> np.ndarray: ...


class Ladder(NamedTuple):
    """The values of a type's codes in their order, up to a factor and an offset of the element.

    From `code` to the next larger value it is up[code] units, to the next smaller one down[code] (negative; both 0 at
    the ends). A code that the type never writes (`QuantType.unwritten_code`) is no rung: no step leads to it.
    """

    above: np.ndarray  # uint8[2^bits] the code of the next value after each code's; its own at the end
    below: np.ndarray  # uint8[2^bits] of the value before
    up: np.ndarray  # float32[2^bits]
    down: np.ndarray  # float32[2^bits]
    position: np.ndarray  # float32[2^bits]: units from the smallest value of all codes
    rungs: np.ndarray  # uint8[n]: a code of each value that is written, rising


class Codes(NamedTuple):
    """Where the codes of a block's elements are: each is one run of bits within a byte, or two, low bits first."""

    header: int  # bytes before the blocks of a row
    block_bytes: int
    runs: np.ndarray  # int64[elements, 2, 3]: byte of the block, first bit in it, mask at bit 0, which may be 0
    low: int  # bits in the first run
    ladder: Ladder


@functools.cache
def codes_of(kind: Codec) -> Codes | None:
    """The codes of a type; None where they are not of single elements, or wider than MAX_BITS."""
    bits = _bits(kind)
    if bits is None:
        return None
    decoded = np.stack([_with_codes(kind, bits, code) for code in range(1 << bits.shape[1])])
    order = np.argsort(decoded[:, 0], kind="stable")
    ladder = decoded[order, 0].astype(np.float64)
    span = ladder[-1] - ladder[0]
    if not span or not _are_affine(decoded[order], (ladder - ladder[0]) / span):
        return None
    above, below = np.empty((2, len(order)), np.uint8)
    up, down, position = np.empty((3, len(order)), np.float32)
    written = order != kind.unwritten_code
    rungs, codes = ladder[written], order[written]
    higher = np.minimum(np.searchsorted(rungs, ladder, "right"), len(rungs) - 1)  # equal values are one step
    lower = np.maximum(np.searchsorted(rungs, ladder, "left") - 1, 0)
    above[order], below[order] = codes[higher], codes[lower]
    up[order], down[order] = (rungs[higher] - ladder) / span, (rungs[lower] - ladder) / span
    position[order] = (ladder - ladder[0]) / span
    own = codes[np.append(True, np.diff(rungs) > 0)].astype(np.uint8)
    runs = _runs(bits)
    low = int(runs[0, 0, 2]).bit_length()
    tables = (jit.readonly(table) for table in (above, below, up, down, position, own))
    return Codes(kind.row_meta_bytes, kind.block_bytes, jit.readonly(runs), low, Ladder(*tables))


def _are_affine(values: np.ndarray, ladder: np.ndarray) -> bool:
    """Whether each column of values float32[codes, elements] is a + b * ladder, ladder rising from 0 to 1."""
    first, last = values[0].astype(np.float64), values[-1].astype(np.float64)
    expected = first + (last - first) * ladder[:, None]
    return bool((np.abs(values - expected) <= 1e-4 * np.abs(last - first)).all())


@functools.cache
def probes(kind: Codec) -> np.ndarray:
    """uint8[_PROBE_ROWS, row bytes]: rows of one block, with scales of no special value."""
    x = np.random.RandomState(1).standard_normal((_PROBE_ROWS, kind.block_size)).astype(np.float32)
    return kind.quantize(x, np.ones(kind.block_size, np.float32), threads=1)


@functools.cache
def changed_elements(kind: Codec) -> np.ndarray:
    """bool[bits of a block, elements]: which elements each bit changes in one of the probes."""
    data, size = probes(kind), kind.block_size
    y = kind.dequantize(data, size, threads=1, products=True)
    address = np.arange(8 * kind.block_bytes)
    changed = np.zeros((len(address), size), bool)
    with np.errstate(all="ignore"):  # a flipped bit of a scale may give Inf or NaN
        for row, plain in zip(data, y):
            flipped = np.repeat(row[None], len(address), axis=0)
            flipped[address, kind.row_meta_bytes + address // 8] ^= (1 << address % 8).astype(np.uint8)
            changed |= kind.dequantize(flipped, size, threads=1, products=True) != plain
    return changed


def _bits(kind: Codec) -> np.ndarray | None:
    """int64[elements, width]: addresses in a block of the bits of each code, the lowest first."""
    changed, size = changed_elements(kind), kind.block_size
    code_bits = np.flatnonzero(changed.sum(axis=1) == 1)
    element = changed[code_bits].argmax(axis=1)
    width = np.bincount(element, minlength=size)
    if not 0 < width[0] <= MAX_BITS or (width != width[0]).any():
        return None
    bits = code_bits[np.argsort(element, kind="stable")].reshape(size, width[0])
    zeros = _with_codes(kind, bits, 0)
    effect = np.stack([np.abs(_with_codes(kind, bits, 1 << k) - zeros) for k in range(width[0])], axis=1)
    return np.take_along_axis(bits, np.argsort(effect, axis=1, kind="stable"), axis=1)


def _with_codes(kind: Codec, bits: np.ndarray, code: int) -> np.ndarray:
    """float32[elements]: the probe's first block with one code for all elements."""
    block = np.unpackbits(probes(kind)[0, kind.row_meta_bytes :], bitorder="little")
    block[bits] = code >> np.arange(bits.shape[1]) & 1
    row = np.concatenate([probes(kind)[0, : kind.row_meta_bytes], np.packbits(block, bitorder="little")])
    result: np.ndarray = kind.dequantize(row[None], kind.block_size, threads=1, products=True)[0]
    return result


def _runs(bits: np.ndarray) -> np.ndarray:
    """`Codes.runs`; the first runs of all elements have the same width."""
    table_rows = []
    for addresses in bits:
        starts = [
            k for k in range(len(addresses)) if k == 0 or addresses[k] != addresses[k - 1] + 1 or addresses[k] % 8 == 0
        ]
        runs = [
            (addresses[a] // 8, addresses[a] % 8, (1 << (b - a)) - 1)
            for a, b in zip(starts, [*starts[1:], len(addresses)])
        ]
        table_rows.append([*runs, (runs[0][0], 0, 0)][:2] if len(runs) < 3 else [])
    table = np.array(table_rows, np.int64)  # of codes in more runs there is none
    assert (table[:, 0, 2] == table[0, 0, 2]).all()
    return table


@kernel
def read_codes(data: np.ndarray, codes: Codes, out: np.ndarray) -> None:
    """The codes of data uint8[rows, row bytes] as out uint8[rows, n]."""
    size, two = len(codes.runs), codes.runs[0, 1, 2] != 0
    for row in range(len(data)):
        for b in range(out.shape[1] // size):
            block = data[row, codes.header + b * codes.block_bytes :]
            for j in range(size):
                code = np.int64(block[codes.runs[j, 0, 0]]) >> codes.runs[j, 0, 1] & codes.runs[j, 0, 2]
                if two:
                    code |= (
                        np.int64(block[codes.runs[j, 1, 0]]) >> codes.runs[j, 1, 1] & codes.runs[j, 1, 2]
                    ) << codes.low
                out[row, b * size + j] = code


@kernel
def write_codes(values: np.ndarray, codes: Codes, data: np.ndarray) -> None:
    """Set the codes of data uint8[rows, row bytes] to values uint8[rows, n]; scales stay."""
    size, runs = len(codes.runs), 2 if codes.runs[0, 1, 2] else 1
    for row in range(len(data)):
        for b in range(values.shape[1] // size):
            block = data[row, codes.header + b * codes.block_bytes :]
            for j in range(size):
                code = np.int64(values[row, b * size + j])
                for i in range(runs):
                    byte, shift, mask = codes.runs[j, i]
                    part = code >> codes.low * i & mask
                    block[byte] = block[byte] & (255 - (mask << shift)) | part << shift
