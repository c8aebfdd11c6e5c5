"""How each type's blocks turn into small integers and scales: the one description that all CPU kernels share.

A row is read in units of 32 columns. A format's reader yields the units of one block,

    y[j] = scale[j] * (codes[j] - offset) + floor[j]          j in 0 .. 31

with `codes` 32 unsigned bytes in column order and `scale`, `floor` float32 x 8, lane i for columns 4i .. 4i+3 (the
four that one 32-bit lane of a byte product sums up). The byte maps stand in `quantkit/types`.

An interleaved type has a reader of its own kind: 8 lanes are 8 rows, or 4 rows twice, and a unit is steps of 32 bytes,
lane i of a step holding four columns of row i % rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from quantkit.simd import F32, I8, I16, I32, Emit, Value, vector
from quantkit.types.codebooks import K4

BYTES8, BYTES16, BYTES32 = (vector(lanes, I8) for lanes in (8, 16, 32))
FLOATS8, FLOATS16 = vector(8, F32), vector(16, F32)
INTS8, INTS16 = vector(8, I32), vector(16, I32)

_CODES = [int(v) + 128 for v in K4.values[:16]]  # IQ4_NL has the same values


@dataclass(frozen=True)
class Unit:
    """32 columns of one row; `floor` is None for formats without one."""

    codes: Value
    scale: Value
    floor: Value | None = None


@dataclass(frozen=True)
class LaneUnit:
    """32 columns of `rows` rows: each step is (codes, first column of lanes 0..3, of lanes 4..7)."""

    steps: list[tuple[Value, int, int]]
    scale: Value


@dataclass(frozen=True)
class Format:
    """A type as kernels see it. `rows` rows share a group; `group` columns share a scale."""

    name: str
    read: Callable[[Emit, Value], Iterator]
    columns: int  # of a block
    nbytes: int  # of a block, times `rows` for a group of rows
    offset: int
    largest: int  # code
    group: int = 32
    floor: bool = False
    rows: int = 1


FORMATS: dict[int, Format] = {}  # by ggml type id


def _format(ggml_type: int, name: str, **numbers: Any) -> Callable[[Callable], Callable]:
    def register(read: Callable[[Emit, Value], Iterator]) -> Callable:
        FORMATS[ggml_type] = Format(name, read, **numbers)
        return read

    return register


def _half(e: Emit, address: Value) -> Value:
    return e.half_to_float(e.load(I16, address))


def _halves(e: Emit, address: Value, lanes: int) -> Value:
    return e.half_to_float(e.load(vector(lanes, I16), address))


def _nibbles(e: Emit, packed: Value) -> Value:
    """All low nibbles, then all high ones."""
    return e.join(packed & 15, packed >> 4)


def _pick(e: Emit, scales: Value, *lanes: int) -> Value:
    """Eight lanes filled in equal shares by these lanes of `scales`."""
    each = 8 // len(lanes)
    return e.shuffle(scales, None, [lane for lane in lanes for _ in range(each)])


# ---------------------------------------------------------------------------------------------------- blocks of 32


@_format(2, "q4_0", columns=32, nbytes=18, offset=8, largest=15)
def _q4_0(e, block):
    yield Unit(_nibbles(e, e.load(BYTES16, block + 2)), e.splat(_half(e, block), 8))


@_format(3, "q4_1", columns=32, nbytes=20, offset=0, largest=15, floor=True)
def _q4_1(e, block):
    codes = _nibbles(e, e.load(BYTES16, block + 4))
    yield Unit(codes, e.splat(_half(e, block), 8), e.splat(_half(e, block + 2), 8))


def _fifth_bits(e, address):
    """16 times bit j of the 32-bit word, in byte j."""
    word = e.splat(e.load(I32, address), 8).view(BYTES32)
    spread = e.shuffle(word, None, [j // 8 for j in range(32)])
    return e.where_bits(spread, [1 << j % 8 for j in range(32)], 16)


@_format(6, "q5_0", columns=32, nbytes=22, offset=16, largest=31)
def _q5_0(e, block):
    codes = _nibbles(e, e.load(BYTES16, block + 6)) | _fifth_bits(e, block + 2)
    yield Unit(codes, e.splat(_half(e, block), 8))


@_format(7, "q5_1", columns=32, nbytes=24, offset=0, largest=31, floor=True)
def _q5_1(e, block):
    codes = _nibbles(e, e.load(BYTES16, block + 8)) | _fifth_bits(e, block + 4)
    yield Unit(codes, e.splat(_half(e, block), 8), e.splat(_half(e, block + 2), 8))


@_format(133, "q6_0", columns=32, nbytes=26, offset=32, largest=63)
def _q6_0(e, block):
    high = e.load(BYTES8, block + 2)
    high = e.join(high, high >> 4)
    high = e.join((high << 4) & 0x30, (high << 2) & 0x30)
    yield Unit(_nibbles(e, e.load(BYTES16, block + 10)) | high, e.splat(_half(e, block), 8))


@_format(8, "q8_0", columns=32, nbytes=34, offset=128, largest=255)
def _q8_0(e, block):
    yield Unit(e.load(BYTES32, block + 2) ^ -128, e.splat(_half(e, block), 8))


@_format(20, "iq4_nl", columns=32, nbytes=18, offset=128, largest=255)
def _iq4_nl(e, block):
    codes = e.lookup(_CODES, _nibbles(e, e.load(BYTES16, block + 2)))
    yield Unit(codes, e.splat(_half(e, block), 8))


# --------------------------------------------------------------------------------------------------- blocks of 256


@_format(12, "q4_K", columns=256, nbytes=144, offset=0, largest=15, floor=True)
def _q4_k(e, block):
    # Twelve bytes hold eight 6-bit multipliers of d and eight of dmin: bytes 0..3 and 4..7 the first four of each with,
    # in their top two bits, the high bits of the last four, whose low nibbles share bytes 8..11.
    packed = e.load(vector(4, I8), block + 4), e.load(vector(4, I8), block + 8), e.load(vector(4, I8), block + 12)
    first = e.join(packed[0], packed[2] & 15 | (packed[0] >> 2) & 0x30) & 63
    second = e.join(packed[1], packed[2] >> 4 | (packed[1] >> 2) & 0x30) & 63
    scales = first.unsigned(I32).real() * e.splat(_half(e, block), 8)
    floors = second.unsigned(I32).real() * e.splat(_half(e, block + 2) * -1.0, 8)
    for pair in range(4):
        codes = e.load(BYTES32, block + 16 + 32 * pair)
        yield Unit(codes & 15, _pick(e, scales, 2 * pair), _pick(e, floors, 2 * pair))
        yield Unit(codes >> 4, _pick(e, scales, 2 * pair + 1), _pick(e, floors, 2 * pair + 1))


@_format(14, "q6_K", columns=256, nbytes=210, offset=32, largest=63, group=16)
def _q6_k(e, block):
    scales = e.load(BYTES16, block + 192).signed(I32).real() * e.splat(_half(e, block + 208), 16)
    for part in range(2):
        low = [e.load(BYTES32, block + 64 * part + 32 * i) for i in range(2)]
        high = e.load(BYTES32, block + 128 + 32 * part)
        for t in range(4):
            nibbles = low[t % 2] & 15 if t < 2 else low[t % 2] >> 4
            crumbs = (high << 4 if t == 0 else high << 2 if t == 1 else high if t == 2 else high >> 2) & 0x30
            s = 8 * part + 2 * t
            yield Unit(nibbles | crumbs, _pick(e, scales, s, s + 1))


@_format(139, "iq4_k", columns=256, nbytes=144, offset=128, largest=255, group=16)
def _iq4_k(e, block):
    nibbles = e.load(BYTES8, block + 8)
    nibbles = e.shuffle(nibbles & 15, nibbles >> 4, [s // 2 + 8 * (s % 2) for s in range(16)])
    crumbs = e.shuffle(e.load(vector(4, I8), block + 4), None, [s // 4 for s in range(16)]).unsigned(I32)
    crumbs = crumbs >> e.constant(INTS16, [2 * (s % 4) for s in range(16)]) & 3
    scales = (nibbles.unsigned(I32) | crumbs << 4) - 32
    scales = scales.real() * e.splat(_half(e, block), 16)
    shifts = e.splat(e.load(I16, block + 2), 16).view(BYTES32)
    for j in range(8):
        codes = e.lookup(_CODES, _nibbles(e, e.load(BYTES16, block + 16 + 16 * j)))
        flags = e.shuffle(shifts, None, [2 * j // 8] * 32)  # the byte that holds bits 2j and 2j+1
        shifted = e.where_bits(flags, [1 << (2 * j + c // 16) % 8 for c in range(32)], 4)
        yield Unit(codes + shifted, _pick(e, scales, 2 * j, 2 * j + 1))


# ----------------------------------------------------------------------------------------------------- interleaved


@_format(208, "q8_0_r8", columns=32, nbytes=272, offset=128, largest=255, rows=8)
def _q8_0_r8(e, block):
    steps = [(e.load(BYTES32, block + 16 + 32 * s) ^ -128, 4 * s, 4 * s) for s in range(8)]
    yield LaneUnit(steps, _halves(e, block, 8))


@_format(339, "iq4_k_r4", columns=256, nbytes=576, offset=128, largest=255, group=16, rows=4)
def _iq4_k_r4(e, block):
    # Slot 4 s + k is sub-block s of row k. The two sub-blocks of a unit are its lanes 0..3 and 4..7.
    d = _halves(e, block, 4)
    d = e.join(d, d)
    # Bit j of byte k is the flag of sub-block 2j of row k, bit j of byte 4 + k that of sub-block 2j + 1.
    flags = e.shuffle(e.load(BYTES8, block + 8), None, [c // 4 for c in range(32)])
    for j in range(8):
        low = e.load(BYTES8, block + 32 + 8 * (j % 4))
        low = (low >> 4 if j >= 4 else low & 15).unsigned(I32)
        high = (e.load(BYTES8, block + 16 + 8 * (j % 2)) >> 2 * (j // 2) & 3).unsigned(I32)
        scale = ((low | high << 4) - 32).real() * d
        shifted = e.where_bits(flags, [1 << j] * 32, 4)
        packed = [e.load(BYTES32, block + 64 + 64 * j + 32 * i) for i in range(2)]
        steps = []
        for column, nibbles in ((0, packed[0] & 15), (8, packed[0] >> 4), (4, packed[1] & 15), (12, packed[1] >> 4)):
            steps.append((e.lookup(_CODES, nibbles) + shifted, column, column + 16))
        yield LaneUnit(steps, scale)
