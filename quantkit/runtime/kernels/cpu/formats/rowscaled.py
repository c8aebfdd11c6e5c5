"""Formats of iq4_xs and of the types with a scale per row: iq2_ks, iq3_ks, iq4_ks, iq5_ks, iq4_kss, iq2_kl.

Blocks of 256: a sub-block of 32 columns has one multiplier and, in types with flags, one flag.
"""

from __future__ import annotations

from quantkit.codegen.simd import F32, I8, I32, IrBuilder, Value, vector
from quantkit.runtime.kernels.cpu.formats.base import (
    BYTES16,
    BYTES32,
    FLOATS8,
    INTS8,
    WORDS16,
    SubBlockScales,
    format_of,
    load_half,
    low_and_high,
    low_then_high,
)
from quantkit.runtime.kernels.cpu.formats.nonlinear import (
    K2_CODES,
    K3_CODES,
    K4_CODES,
    K4_VALUES,
    K5_CODES,
    K5_VALUES,
    nibbles,
    shift_words,
    six_bits,
)
from quantkit.types.iq2_kl import PAIRS


def _five_bits(ir: IrBuilder, low: Value, high: Value) -> Value:
    """Eight 5-bit numbers: low nibbles, and high bits from the byte at `high`.

    That byte is loaded with the one before it, so that all bits are shifted right.
    """
    bits = ir.splat(ir.load(I32, high - 1), 8) >> ir.constant(INTS8, range(4, 12))
    return low & 15 | bits & 16


def _flags(ir: IrBuilder, address: Value, number: int) -> Value:
    """Address of eight words, one per sub-block: `number` in all bytes if the sub-block's flag is set, else 0."""
    return ir.in_memory(ir.where_bits(ir.splat(ir.load(I8, address), 32), [1 << c // 4 for c in range(32)], number))


def _of_sub_block(ir: IrBuilder, flags: Value, j: int) -> Value:
    """The word of sub-block j in all lanes: by a load, because there are fewer loads than shuffles."""
    return ir.splat(ir.load(I32, flags + 4 * j), 8).view(BYTES32)


def _added(ir: IrBuilder, flags: Value, number: int, offset: int) -> Value:
    """`number` for sub-blocks whose bit of a byte is set, else 0, minus an offset."""
    mask = ir.any_bits(ir.splat(flags.unsigned(I32), 8), [1 << g for g in range(8)])
    return ir.choose(mask, ir.constant(FLOATS8, number - offset), ir.constant(FLOATS8, -offset))


def _odd_scales(ir: IrBuilder, head: Value, multipliers: Value, flag: int) -> SubBlockScales:
    """d * m of eight bytes: bits 1..7 give odd m from -127 on, bit 0 is a flag, which adds `flag` to values."""
    numbers = multipliers.unsigned(I32)
    added = (numbers & 1).real() * flag
    return SubBlockScales(ir, ir.splat(ir.load(F32, head), 8), numbers & 254, 127, added)


def _odd_flags(ir: IrBuilder, multipliers: Value, shift: int) -> Value:
    """As `_flags`, with the bytes' lowest bits as flags and 2^shift as number."""
    return ir.in_memory(shift_words(ir.shuffle(multipliers, None, [c // 4 for c in range(32)]), shift) & 1 << shift)


@format_of("iq4_xs", columns=256, nbytes=136, offset=127, largest=240)
def _iq4_xs(ir, block):
    numbers = six_bits(ir, nibbles(ir, block + 4), block + 2)
    scales = SubBlockScales(ir, ir.splat(load_half(ir, block), 8), numbers, 32, None)
    for g in range(8):
        index = low_then_high(ir, ir.load(BYTES16, block + 8 + 16 * g))
        yield scales.sub_block(g, ir.lookup(K4_CODES, index), ir.lookup(K4_VALUES, index), signed=True)


@format_of("iq2_ks", columns=256, nbytes=70, offset=31, largest=53, head=2)
def _iq2_ks(ir, block, head):
    numbers, added = _five_bits(ir, nibbles(ir, block + 2), block + 1), _added(ir, ir.load(I8, block), 5, 31)
    scales = SubBlockScales(ir, ir.splat(load_half(ir, head), 8), numbers, 16, added)
    flags = _flags(ir, block, 4)
    for part in range(2):
        packed = ir.load(BYTES32, block + 6 + 32 * part)
        for t in range(4):
            g = 4 * part + t
            index = shift_words(packed, -2 * t) & 3
            codes = ir.lookup(K2_CODES, index | _of_sub_block(ir, flags, g))
            yield scales.sub_block(g, codes, ir.lookup(K2_CODES, index))


@format_of("iq3_ks", columns=256, nbytes=102, offset=63, largest=114, head=2)
def _iq3_ks(ir, block, head):
    low = ir.splat(ir.load(I32, block + 2), 8) >> ir.constant(INTS8, [g % 4 * 8 + g // 4 * 4 for g in range(8)])
    added = _added(ir, ir.load(I8, block + 1), 4, 63)
    scales = SubBlockScales(ir, ir.splat(load_half(ir, head), 8), _five_bits(ir, low, block), 16, added)
    flags, high = _flags(ir, block + 1, 8), ir.load(BYTES32, block + 70)
    for part in range(2):
        packed = ir.load(BYTES32, block + 6 + 32 * part)
        for t in range(4):
            g = 4 * part + t
            index = shift_words(packed, -2 * t) & 3 | shift_words(high, 2 - g) & 4
            codes = ir.lookup(K3_CODES, index ^ _of_sub_block(ir, flags, g))
            yield scales.sub_block(g, codes, ir.lookup(K3_CODES, index))


@format_of("iq4_ks", columns=256, nbytes=136, offset=127, largest=244, head=4)
def _iq4_ks(ir, block, head):
    multipliers = ir.load(vector(8, I8), block)
    scales, flags = _odd_scales(ir, head, multipliers, 4), _odd_flags(ir, multipliers, 2)
    for g in range(8):
        index = low_then_high(ir, ir.load(BYTES16, block + 8 + 16 * g))
        codes = ir.lookup(K4_CODES, index) + _of_sub_block(ir, flags, g)
        yield scales.sub_block(g, codes, ir.lookup(K4_VALUES, index), signed=True)


@format_of("iq5_ks", columns=256, nbytes=168, offset=127, largest=250, head=4)
def _iq5_ks(ir, block, head):
    multipliers = ir.load(vector(8, I8), block)
    scales, flags = _odd_scales(ir, head, multipliers, 2), _odd_flags(ir, multipliers, 1)
    high = ir.load(BYTES32, block + 136)
    for pair in range(4):
        packed = ir.load(BYTES32, block + 8 + 32 * pair)
        for t in range(2):
            g = 2 * pair + t
            index = shift_words(packed, -4 * t) & 15 | shift_words(high, 4 - g) & ~15
            codes = ir.lookup(K5_CODES, index) + _of_sub_block(ir, flags, g)
            yield scales.sub_block(g, codes, ir.lookup(K5_VALUES, index), signed=True)


@format_of("iq4_kss", columns=256, nbytes=128, offset=127, largest=244, head=4)
def _iq4_kss(ir, block, head):
    # A word has four codes in its upper 15 bits; the lowest bits of a sub-block's words are its multiplier.
    multipliers = _lowest_bits(ir, block)
    scales, flags = _odd_scales(ir, head, multipliers, 4), _odd_flags(ir, multipliers, 2)
    for g in range(8):
        words = ir.shuffle(ir.load(BYTES16, block + 16 * g), None, [*range(16), *range(16)]).view(WORDS16)
        packed = ((words >> 1) ^ (words & -2)).view(BYTES32)
        index = low_and_high(ir, packed)
        codes = ir.lookup(K4_CODES, index) + _of_sub_block(ir, flags, g)
        yield scales.sub_block(g, codes, ir.lookup(K4_VALUES, index), signed=True)


def _lowest_bits(ir: IrBuilder, block: Value) -> Value:
    """Eight bytes: the lowest bits of the 8 words of each sub-block.

    Sub-blocks 0, 1, 4, 5 and 2, 3, 6, 7 are computed together: neighbours would become one vector of 512 bits.
    """
    bits = ir.zero(vector(2, I32))
    for i in range(2):
        a, b = (ir.load(BYTES32, block + 32 * i + 64 * j) & ir.constant(BYTES32, [1, 0] * 16) for j in range(2))
        # Low bytes of the first eight words of both, then of the last eight: one pack instruction.
        lowest = ir.shuffle(a, b, [32 * (c // 8 % 2) + 16 * (c // 16) + 2 * (c % 8) for c in range(32)])
        bits = ir.insert(bits, i, ir.integer_of(lowest, 1))
    return ir.shuffle(bits.view(vector(8, I8)), None, [0, 2, 4, 6, 1, 3, 5, 7])


PAIR_CODES = [int(PAIRS[code, element]) + 63 for element in range(2) for code in range(32)]


@format_of("iq2_kl", columns=256, nbytes=86, offset=63, largest=110, head=2)
def _iq2_kl(ir, block, head):
    # Nibble s / 4 of sl[s % 4] is the multiplier of sub-block s.
    low = ir.splat(ir.load(I32, block + 2), 8) >> ir.constant(INTS8, [s % 4 * 8 + s // 4 * 4 for s in range(8)])
    added = ir.constant(FLOATS8, -63)
    scales = SubBlockScales(ir, ir.splat(load_half(ir, head), 8), six_bits(ir, low, block), 32, added)
    # Each code is repeated for its two columns; the second one looks up the second half of the table.
    columns, second = [j // 2 for j in range(32)], ir.constant(BYTES32, [0, 32] * 16)
    high = ir.shuffle(ir.load(BYTES16, block + 70), None, columns)
    for pair in range(4):
        packed = ir.shuffle(ir.load(BYTES16, block + 6 + 16 * pair), None, columns)
        for t in range(2):
            s = 2 * pair + t
            code = shift_words(packed, -4 * t) & 15 | shift_words(high, 4 - s) & ~15
            codes = ir.lookup(PAIR_CODES, code & 31 | second)
            yield scales.sub_block(s, codes, codes)
