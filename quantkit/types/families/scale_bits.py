"""Which bits of a block are the scale and the minimum of a sub-block, for rounding by second moments.

    element of a sub-block    y = scale * u + rest        y = rest + minimum * u, u the same for all elements

The map is derived from the type's decoder, as that of codes is (`code_bits`). A bit that changes several elements of
one sub-block, and no others, belongs to a number stored for that sub-block. Bits whose changes are proportional to each
other belong to one number: to the minimum where they change all elements alike, else to the scale. What a code of the
number stands for is read from decoded blocks, up to a factor. Scales of whole rows and of blocks above PANEL elements
are not found: a change there concerns too many elements for the descent over panels.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from quantkit.codegen import jit
from quantkit.codegen.jit import kernel, shared_subkernel
from quantkit.types.families.code_bits import Codec, changed_elements, codes_of, probes, write_codes

_SIZES = (16, 32, 64, 128)  # elements of a sub-block


class SubBlockNumber(NamedTuple):
    """A number that is stored once for each sub-block, as a code.

    bits     int64[sub-blocks of a block, width]: addresses of the code's bits in a block, the lowest first
    values   float32[n], rising: the values that codes stand for, up to a factor
    codes    int64[n]: the code of each value
    places   int64[2^width]: the place in `values` of each code, -1 for NaN and Inf, which no encoder writes
    """

    header: int  # bytes before the blocks of a row
    block_bytes: int
    size: int  # elements of a sub-block
    bits: np.ndarray
    values: np.ndarray
    codes: np.ndarray
    places: np.ndarray


@functools.cache
def scale_of(kind: Codec) -> SubBlockNumber | None:
    """The scale of the sub-blocks of a type; None where each block has only one above PANEL elements, or a row has."""
    for bits, is_minimum in _numbers(kind):
        if not is_minimum:
            return _with_values(kind, bits, _values(kind, bits, False))
    return None


@functools.cache
def minimum_of(kind: Codec) -> SubBlockNumber | None:
    """The minimum (offset) of the sub-blocks of a type; None where there is none that is independent of the scale."""
    for bits, is_minimum in _numbers(kind):
        if is_minimum:
            return _with_values(kind, bits, _values(kind, bits, True))
    return None


@functools.cache
def table_of(kind: Codec) -> SubBlockNumber | None:
    """The bit that chooses one of two tables for a sub-block, the second a shift of the first; None without one."""
    scale = scale_of(kind)
    if scale is None:
        return None
    found = []
    for i in range(len(scale.bits)):
        inside = _bits_within(kind, scale.size, i)
        flat = [bits for bits, is_flat in _proportional(kind, inside, i * scale.size, scale.size) if is_flat]
        if len(flat) != 1 or len(flat[0]) != 1:
            return None
        found.append(flat[0])
    two = np.arange(2)
    arrays = (jit.readonly(a) for a in (np.array(found, np.int64), two.astype(np.float32), two, two))
    return SubBlockNumber(scale.header, scale.block_bytes, scale.size, *arrays)


@functools.cache
def _numbers(kind: Codec) -> list[tuple[np.ndarray, bool]]:
    """Of each number of the sub-blocks its bits int64[sub-blocks, width], and whether it is a minimum.

    The widest scale first, then the widest minimum. Numbers of one bit are left out: they choose tables.
    """
    for size in [s for s in _SIZES if s <= kind.block_size]:
        groups = [
            _proportional(kind, _bits_within(kind, size, i), i * size, size) for i in range(kind.block_size // size)
        ]
        found: list[tuple[np.ndarray, bool]] = []
        for is_minimum in (False, True):
            widest = [
                max((bits for bits, flat in group if flat == is_minimum), key=len, default=[]) for group in groups
            ]
            if len(widest[0]) > 1 and all(len(bits) == len(widest[0]) for bits in widest):
                found.append((_lowest_first(kind, np.array(widest, np.int64)), is_minimum))
        if found:
            return found
    return []


def _bits_within(kind: Codec, size: int, i: int) -> np.ndarray:
    """Addresses of the bits that change two elements or more, all of them in sub-block `i` and in no smaller one."""
    changed = changed_elements(kind)
    first, last = changed.argmax(axis=1), changed.shape[1] - 1 - changed[:, ::-1].argmax(axis=1)
    within = np.array([min((s for s in _SIZES if a // s == b // s), default=0) for a, b in zip(first, last)])
    found: np.ndarray = np.flatnonzero((changed.sum(axis=1) > 1) & (within == size) & (first // size == i))
    return found


def _proportional(kind: Codec, bits: np.ndarray, start: int, size: int) -> list[tuple[list[int], bool]]:
    """Bits of one sub-block in groups that change its elements in proportion, and whether they change all alike."""
    data, elements = probes(kind)[0], slice(start, start + size)
    flipped = np.repeat(data[None], len(bits), axis=0)
    flipped[np.arange(len(bits)), kind.row_meta_bytes + bits // 8] ^= (1 << bits % 8).astype(np.uint8)
    plain = kind.dequantize(data[None], kind.block_size, threads=1, products=True)[0, elements].astype(np.float64)
    with np.errstate(all="ignore"):
        changes = kind.dequantize(flipped, kind.block_size, threads=1, products=True)[:, elements] - plain
    groups: list[tuple[np.ndarray, list[int]]] = []
    for bit, change in zip(bits, changes):
        most = change[np.abs(change).argmax()]
        if not np.isfinite(change).all() or not most:
            continue
        direction = change / most
        for other, members in groups:
            if np.abs(direction - other).max() < 1e-2:
                members.append(int(bit))
                break
        else:
            groups.append((direction, [int(bit)]))
    return [(members, bool(np.ptp(direction) < 1e-2)) for direction, members in groups]


def _lowest_first(kind: Codec, bits: np.ndarray) -> np.ndarray:
    """Bits int64[sub-blocks, width] ordered by what they change where all are 0; those of a float16 as they stand."""
    count, width = bits.shape
    if width == 16:
        return bits
    effects = np.empty((count, width))
    none = _decoded(kind, bits, codes=np.array([0]))
    for k in range(width):
        change = np.abs(_decoded(kind, bits[:, k : k + 1], codes=np.array([1]), base=bits) - none)[0]
        effects[:, k] = change.reshape(count, -1).max(axis=1)
    return np.take_along_axis(bits, np.argsort(effects, axis=1, kind="stable"), axis=1)


def _decoded(
    kind: Codec, bits: np.ndarray, codes: np.ndarray, element_code: int | None = None, base: np.ndarray | None = None
) -> np.ndarray:
    """float64[codes, elements]: the first probe's block with each of `codes` of a number in all sub-blocks.

    element_code: the code of all elements, if not that of the probe; base: bits that are 0 first
    """
    data = probes(kind)[:1].copy()
    if element_code is not None:
        own = codes_of(kind)
        assert own is not None
        write_codes(np.full((1, kind.block_size), element_code, np.uint8), own, data)
    block = np.repeat(np.unpackbits(data[0, kind.row_meta_bytes :], bitorder="little")[None], len(codes), axis=0)
    if base is not None:
        block[:, base] = 0
    block[:, bits] = (codes[:, None] >> np.arange(bits.shape[1]) & 1)[:, None, :]
    rows = np.packbits(block, axis=1, bitorder="little")
    rows = np.concatenate([np.repeat(data[:, : kind.row_meta_bytes], len(rows), axis=0), rows], axis=1)
    with np.errstate(all="ignore"):
        return kind.dequantize(rows, kind.block_size, threads=1, products=True).astype(np.float64)


def _values(kind: Codec, bits: np.ndarray, is_minimum: bool) -> np.ndarray:
    """float64[codes, elements]: what each code adds to each element, up to a factor and a constant of the element."""
    codes = np.arange(1 << bits.shape[1])
    if bits.shape[1] == 16:
        return codes.astype(np.uint16).view(np.float16).astype(np.float64)[:, None]
    own = codes_of(kind)
    if is_minimum:
        y = _decoded(kind, bits, codes)
        y -= y[0]
        return y
    if own is None:  # of groups of elements
        return _decoded(kind, bits, codes)
    ends = np.flatnonzero(own.ladder.down == 0)[0], np.flatnonzero(own.ladder.up == 0)[0]
    low, high = (_decoded(kind, bits, codes, int(code)) for code in ends)
    high -= low
    return high


def _with_values(kind: Codec, bits: np.ndarray, values: np.ndarray) -> SubBlockNumber | None:
    """The number; None where its codes do not stand for one value in all elements, up to a factor for each."""
    usable = np.isfinite(values).all(axis=1)
    if not usable.any():
        return None
    values[~usable] = 0
    reference = values[np.abs(values).max(axis=1).argmax()]
    elements = np.abs(reference) > 1e-3 * np.abs(reference).max()
    shares = values[:, elements] / reference[elements]
    own = shares[:, 0]
    if not (np.abs(shares - own[:, None]) <= 1e-4 * np.abs(own[:, None]) + 1e-12).all():
        return None
    own = (own / np.sqrt(np.abs(own[own != 0]).min())).astype(np.float32)
    order = np.flatnonzero(usable)[np.argsort(own[usable], kind="stable")]
    is_new = np.append(True, np.diff(own[order]) > 0)
    places = np.full(len(own), -1, np.int64)
    places[order] = np.cumsum(is_new) - 1
    codes = order[is_new].astype(np.int64)
    arrays = (jit.readonly(np.ascontiguousarray(a)) for a in (bits, own[codes], codes, places))
    return SubBlockNumber(kind.row_meta_bytes, kind.block_bytes, kind.block_size // len(bits), *arrays)


@shared_subkernel
def get_bit(block: np.ndarray, address: np.int64) -> np.int64:
    """The bit at an address of a block uint8[bytes]."""
    return np.int64(block[address >> 3]) >> (address & 7) & 1


@shared_subkernel
def set_bit(block: np.ndarray, address: np.int64, value: np.int64) -> None:
    """Set the bit at an address of a block uint8[bytes] to 0 or 1."""
    byte = np.int64(block[address >> 3]) & (255 - (1 << (address & 7)))
    block[address >> 3] = byte | value << (address & 7)


@shared_subkernel
def read_field(block: np.ndarray, addresses: np.ndarray) -> np.int64:
    """The number whose bits are at int64[bits] addresses of a block uint8[bytes], the lowest first."""
    number = np.int64(0)
    for k in range(len(addresses)):
        number |= get_bit(block, addresses[k]) << k
    return number


@shared_subkernel
def write_field(block: np.ndarray, addresses: np.ndarray, number: np.int64) -> None:
    """Set the bits at int64[bits] addresses of a block uint8[bytes] to those of a number, the lowest first."""
    for k in range(len(addresses)):
        set_bit(block, addresses[k], number >> k & 1)


@kernel
def read_numbers(data: np.ndarray, number: SubBlockNumber, out: np.ndarray) -> None:
    """The codes of a number in data uint8[rows, row bytes] as out int64[rows, sub-blocks]."""
    count = len(number.bits)
    for row in range(len(data)):
        for b in range(out.shape[1] // count):
            block = data[row, number.header + b * number.block_bytes :]
            for i in range(count):
                out[row, b * count + i] = read_field(block, number.bits[i])


@kernel
def write_numbers(codes: np.ndarray, number: SubBlockNumber, data: np.ndarray) -> None:
    """Set the codes of a number in data uint8[rows, row bytes] to codes int64[rows, sub-blocks]."""
    count = len(number.bits)
    for row in range(len(data)):
        for b in range(codes.shape[1] // count):
            block = data[row, number.header + b * number.block_bytes :]
            for i in range(count):
                write_field(block, number.bits[i], codes[row, b * count + i])
