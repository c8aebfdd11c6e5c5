"""`Reader`: what a codec reads a sub-block with. A sub-block is 32 columns of a row: eight words of four signed bytes.

    y[c] = scale[c // 16] * (code[c] + shift[c // 16]) + min[c // 16]         c in 0 .. 31

In types whose `group` is 32, all 32 columns share one scale, shift and min. Products add shifts and mins once for all
columns of a group, by the sum of the activations; so codes need not be moved to where their zero is.

A codec is a function of a `Reader`, which gives it the type's fields (`fields.LinearAddresses`), bound to the row and
the sub-block that a thread works on, and the operations of `words.py`. It returns a `SubBlock`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from quantkit.runtime.kernels.cuda.fields import LinearAddresses

ONES, LOW = 0x01010101, 0x0F0F0F0F
MAX_LOAD_BYTES = 16  # bytes of the widest load


class SubBlock(NamedTuple):
    """32 columns of a row.

    codes    8 words of four signed bytes
    scales   1 or 2 float32
    mins     as many, or none
    shifts   as many small integers as float32, or none
    """

    codes: list[Any]  # 8 words
    scales: list[Any]  # 1 or 2 float32
    mins: list[Any]  # as many, or none
    shifts: Sequence[Any] = ()


@dataclass(frozen=True)
class Codec:
    """How a GPU reads a type."""

    name: str
    read: Callable[[Reader], SubBlock]
    fields: tuple[LinearAddresses, ...]
    columns: int  # of a block
    nbytes: int  # of a block, of all rows of a group
    group: int = 32  # columns of a scale
    has_min: bool = False
    has_shift: bool = False
    rows: int = 1  # of a group
    head: int = 0  # bytes before the blocks, of all rows of a group
    tail: int = 0  # and after them


class Reader:
    """Reads one sub-block of one row.

    ir                words.DeviceWords or words.SimulatedWords
    row, sub_block    numbers within the group of rows and within the block, as words
    start, block      offsets of the group and of the block, 64 bits
    """

    def __init__(self, ir: Any, codec: Codec, start: Any, block: Any, row: Any, sub_block: Any, row_bytes: Any):
        self.ir, self.codec = ir, codec
        self.start, self.block, self.row, self.sub_block, self.row_bytes = start, block, row, sub_block, row_bytes
        self.align = math.gcd(codec.nbytes, codec.head, codec.tail, MAX_LOAD_BYTES)
        self.fields = [BoundField(self, addresses) for addresses in codec.fields]

    def half(self, word: Any) -> Any:
        """float32 of the 16 bits of an f16."""
        return self.ir.half(word)

    def head_half(self) -> Any:
        """The half that the header has for the row."""
        offset = self.start + self.ir.wide(self.row * 2)
        return self.ir.half(load_half(self.ir, offset, self.align))

    def head_float(self, pitch: int = 4) -> Any:
        """The float32 that the header has for the row."""
        align = math.gcd(self.align, 4)
        return self.ir.float_of(load_word(self.ir, self.start + self.ir.wide(self.row * pitch), align))

    def tail_float(self) -> Any:
        """The float32 after the blocks of a row."""
        return self.ir.float_of(self.ir.load(32, self.start + self.row_bytes - self.codec.tail, 4))

    def words(self, *numbers: int) -> list[Any]:
        """Constants as words."""
        return [self.ir.word(number) for number in numbers]

    def number(self, value: int) -> Any:
        """A constant float32."""
        return self.ir.real(self.ir.word(value))

    def negate(self, word: Any, ones: Any) -> Any:
        """Bytes 1 .. 127, made negative where `ones` has a one in the byte."""
        return (word ^ ones * 255) + ones

    def lookup(self, table: Sequence[Any], index: Any) -> Any:
        """Look up the four bytes of `index` in a table of 4, 8, 16, 32 or 64 bytes, which is given as words."""
        e = self.ir
        nibbles = index & LOW if len(table) > 4 else index
        pairs = nibbles | nibbles >> 4  # byte 0: the first two, byte 2 the others
        select = e.permute(pairs, e.word(0), e.word(0x7720))
        if len(table) == 1:
            return e.permute(table[0], table[0], select)
        low = select & 0x7777
        parts = [e.permute(table[i], table[i + 1], low) for i in range(0, len(table), 2)]
        bit = 3
        while len(parts) > 1:  # of each two the one that the next bit of the index names
            if bit == 3:
                high = (select & 0x8888) >> 1
            else:
                ones = index >> bit & ONES
                high = e.permute(ones | ones >> 4, e.word(0), e.word(0x7720)) << 2 & 0x4444
            parts = [e.permute(a, b, high + 0x3210) for a, b in zip(parts[::2], parts[1::2])]
            bit += 1
        return parts[0]

    def lookup_nibbles(self, table: Sequence[Any], word: Any) -> tuple[Any, Any]:
        """Look up the low nibbles of a word's bytes in a table of 16 bytes, and the high nibbles.

        The nibbles are selectors of `permute` as they are: half as many instructions as two `lookup`s.
        """
        e = self.ir
        low, high = word & 0x77777777, word >> 1 & 0x44444444 | 0x32103210
        mixed = []
        for select, high_or_low in ((low, high), (low >> 16, high >> 16)):
            parts = [e.permute(table[i], table[i + 1], select) for i in (0, 2)]
            mixed.append(e.permute(*parts, high_or_low))
        return e.permute(*mixed, e.word(0x6420)), e.permute(*mixed, e.word(0x7531))

    def lookup_halves(self, table: Sequence[Any], words: Sequence[Any]) -> list[Any]:
        """`lookup_nibbles` of several words: the results of all low nibbles, then those of all high ones."""
        both = [self.lookup_nibbles(table, word) for word in words]
        return [low for low, _ in both] + [high for _, high in both]

    def spread(self, bits: Any) -> Any:
        """The four lowest bits of a word, as ones in its bytes; above them there must be none."""
        return bits * 0x00204081 & ONES

    def join(self, values: Sequence[Any]) -> Any:
        """Four signed numbers as bytes."""
        e = self.ir
        low, high = (e.permute(values[i], values[i + 1], e.word(0x7740)) for i in (0, 2))
        return e.permute(low, high, e.word(0x5410))


def load_word(ir: Any, offset: Any, align: int) -> Any:
    """A word at an offset that is a multiple of `align`."""
    if align >= 4:
        return ir.load(32, offset, 4)
    step = 8 * align
    word = ir.load(step, offset, align)
    for i in range(1, 4 // align):
        word = word | ir.load(step, offset + i * align, align) << step * i
    return word


def load_half(ir: Any, offset: Any, align: int) -> Any:
    """The 16 bits at an offset that is a multiple of `align`."""
    return ir.load(16, offset, 2) if align >= 2 else ir.load(8, offset, 1) | ir.load(8, offset + 1, 1) << 8


class BoundField:
    """A field of a block, bound to the row and the sub-block of a reader."""

    def __init__(self, reader: Reader, addresses: LinearAddresses):
        self.reader, self.addresses = reader, addresses

    def _sum(self, terms: Sequence[tuple[Any, int, int]]) -> Any:
        """Sum of weight * bit over (word, bit, weight), or None; runs of doubling weights are moved together."""
        total = None
        i = 0
        while i < len(terms):
            word, bit, weight = terms[i]
            end = i + 1
            while end < len(terms) and terms[end] == (word, bit + end - i, weight << end - i):
                end += 1
            term = (word >> bit & (1 << end - i) - 1) * weight
            total = term if total is None else total + term
            i = end
        return total

    def _address(self, pitch: int, number: int) -> tuple[Any, int, int, Any, int]:
        """Address of element pitch * sub_block + number: variable, fixed bytes, alignment, variable, fixed bits."""
        addresses, reader = self.addresses, self.reader
        step = pitch.bit_length() - 1 if pitch else len(addresses.columns)
        fixed = addresses.first + sum(w for b, w in enumerate(addresses.columns[:step]) if number >> b & 1)
        terms = [(reader.sub_block, b, w) for b, w in enumerate(addresses.columns[step:])]
        terms += [(reader.row, b, w) for b, w in enumerate(addresses.rows)]
        byte_terms = [(word, bit, w // 8) for word, bit, w in terms if abs(w) >= 8]
        bit_terms = [(word, bit, w % 8 if w > 0 else w) for word, bit, w in terms if w % 8]
        align = math.gcd(reader.align, fixed // 8, *(w for _, _, w in byte_terms))
        return self._sum(byte_terms), fixed // 8, align, self._sum(bit_terms), fixed % 8

    def _offset(self, varying: Any, fixed: int) -> Any:
        """The byte offset; the variable part is added first, so that the fixed part becomes part of the loads."""
        block = self.reader.block
        return (block if varying is None else block + self.reader.ir.wide(varying)) + fixed

    def at(self, pitch: int = 0, number: int = 0) -> Any:
        """Element pitch * sub_block + number; `pitch` a power of two above `number`, or 0."""
        e, width = self.reader.ir, self.addresses.width
        varying, fixed, align, shift, fixed_bits = self._address(pitch, number)
        offset = self._offset(varying, fixed)
        if width == 32:
            return load_word(e, offset, align)
        if width == 16:
            return load_half(e, offset, align)
        word = e.load(8, offset, 1)
        word = self._moved(word, shift, fixed_bits)
        return word if width == 8 else word & (1 << width) - 1

    def quads(self, count: int = 8, pitch: int = 32) -> list[Any]:
        """Elements pitch * sub_block + 4 q .. + 3 for q < count, each four as the bytes of a word."""
        mask = ONES * ((1 << self.addresses.width) - 1)
        if self.addresses.columns[1] == 2 * self.addresses.columns[0] == 2:  # single bits, packed
            return self._packed_bits(count, pitch)
        if tuple(self.addresses.columns[:2]) != (8, 16):
            raise TypeError("four neighbouring columns are not neighbouring bytes")
        found, words = self._words(count, pitch)
        quads = []
        for _, fixed, _, shift, fixed_bits in found:
            word = self._moved(words[fixed], shift, fixed_bits)
            quads.append(word if self.addresses.width == 8 else word & mask)
        return quads

    def looked_up(self, table: Sequence[Any]) -> list[Any]:
        """Look up the sub-block's 4-bit codes in a table of 16 bytes; four values as the bytes of a word."""
        found, words = self._words(8, 32)
        positions = [(fixed, fixed_bits) for _, fixed, _, _, fixed_bits in found]
        all_nibbles = {(fixed, fixed_bits) for fixed in words for fixed_bits in (0, 4)}
        if any(shift is not None for *_, shift, _ in found) or set(positions) != all_nibbles:
            return [self.reader.lookup(table, quad) for quad in self.quads()]
        values = {fixed: self.reader.lookup_nibbles(table, word) for fixed, word in words.items()}
        return [values[fixed][fixed_bits // 4] for fixed, fixed_bits in positions]

    def _words(self, count: int, pitch: int) -> tuple[list[Any], dict[int, Any]]:
        """Where the quads are, and the words that they are in, by their fixed bytes."""
        found = [self._address(pitch, 4 * q) for q in range(count)]
        return found, self._load_words(found[0][0], sorted({fixed for _, fixed, *_ in found}), found)

    @staticmethod
    def _moved(word: Any, varying: Any, fixed: int) -> Any:
        if varying is None:
            return word >> fixed if fixed else word
        return word >> (varying + fixed)

    def _packed_bits(self, count: int, pitch: int) -> list[Any]:
        """`quads` of single bits stored one after the other: the 32 bits of a sub-block are one word."""
        if (count, pitch) != (8, 32):
            raise TypeError("packed bits are read a word at a time")
        varying, fixed, align, _, _ = self._address(pitch, 0)
        word = load_word(self.reader.ir, self._offset(varying, fixed), align)
        return [self.reader.spread(word >> 4 * q & 15) for q in range(8)]

    def _load_words(self, varying: Any, offsets: list[int], found: list[Any]) -> dict[int, Any]:
        """The words at these fixed offsets, four or two of them at once where they are aligned."""
        e = self.reader.ir
        words: dict[int, Any] = {}
        while offsets:
            for count in (4, 2):
                run = [offsets[0] + 4 * i for i in range(count)]
                if run == offsets[:count] and self._aligned(found, run[0]) % (4 * count) == 0:
                    words.update(zip(run, e.load_words(count, self._offset(varying, run[0]))))
                    break
            else:
                run = offsets[:1]
                words[run[0]] = load_word(e, self._offset(varying, run[0]), self._aligned(found, run[0]))
            offsets = offsets[len(run) :]
        return words

    @staticmethod
    def _aligned(found: list[Any], offset: int) -> int:
        return int(next(align for _, fixed, align, _, _ in found if fixed == offset))
