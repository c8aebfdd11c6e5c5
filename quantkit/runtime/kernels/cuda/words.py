"""Operations on 32-bit words that codecs are written with: as LLVM code for a GPU, or on Python's integers.

`DeviceWords` emits LLVM code, inlined into the kernels that numba.cuda compiles. `SimulatedWords` computes with
integers, for numba's simulator (NUMBA_ENABLE_CUDASIM=1), which has neither the instructions for bytes nor vector loads.

    load(bits, offset, align)     the integer at a byte offset (an I64), whose address is a multiple of `align`
    load_words(count, offset)     2 or 4 words at once, aligned to their size
    table(name, words, index)     a word of a constant table in global memory: constant memory serves one address a time
    permute(a, b, selector)       byte i is byte (selector >> 4 i & 7) of a (0..3) and b (4..7)
    dot(a, b, c)                  c + the sum of products of the signed bytes of a and b
    half(bits)                    the value of a half
    choose(word, a, b)            a where the word is not 0
    power(exponent)               2^(exponent - 128) of 0..255
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import ir as llvm

from quantkit.codegen.ir_values import F32, I8, I16, I32, I64, Value, wrapped

_GLOBAL = 1  # address space


class DeviceWords:
    """Writes LLVM code for the GPU. Values are `codegen.ir_values.Value`."""

    def __init__(self, builder: llvm.IRBuilder, data: llvm.Value):
        self.builder, self.data = builder, data

    def constant(self, kind: llvm.Type, number: float) -> Value:
        """A constant."""
        return Value(self, llvm.Constant(kind, number))

    def word(self, number: int) -> Value:
        """A constant word."""
        return self.constant(I32, wrapped(number, 32))

    def wide(self, value: Value) -> Value:
        """A signed word as 64 bits."""
        return value.signed(I64)

    def _load(self, kind: llvm.Type, pointer: llvm.Value, align: int) -> llvm.Value:
        loaded = self.builder.load(self.builder.bitcast(pointer, kind.as_pointer()), align=align)
        loaded.set_metadata("invariant.load", self.builder.module.add_metadata([]))  # no kernel writes weights
        return loaded

    def load(self, bits: int, offset: Value, align: int) -> Value:
        """The integer of `bits` bits at a byte offset that is a multiple of `align`."""
        pointer = self.builder.gep(self.data, [offset.ir])
        loaded = Value(self, self._load(llvm.IntType(bits), pointer, align))
        return loaded if bits == 32 else loaded.unsigned(I32)

    def load_words(self, count: int, offset: Value) -> list[Value]:
        """2 or 4 words at an offset that is aligned to their size."""
        pointer = self.builder.gep(self.data, [offset.ir])
        loaded = self._load(llvm.VectorType(I32, count), pointer, 4 * count)
        return [Value(self, self.builder.extract_element(loaded, llvm.Constant(I32, i))) for i in range(count)]

    def table(self, name: str, words: Sequence[int], index: Value) -> Value:
        """A word of a constant table in global memory."""
        module = self.builder.module
        kind = llvm.ArrayType(I32, len(words))
        variable = module.globals.get(f"quantkit_{name}")
        if variable is None:
            variable = llvm.GlobalVariable(module, kind, f"quantkit_{name}", addrspace=_GLOBAL)
            variable.linkage, variable.global_constant, variable.align = "internal", True, 16
            variable.initializer = llvm.Constant(kind, [llvm.Constant(I32, wrapped(w, 32)) for w in words])
        pointer = self.builder.gep(variable, [llvm.Constant(I32, 0), index.ir])
        loaded = self.builder.load(pointer, align=4)
        return Value(self, loaded)

    def _assembly(self, text: str, kinds: str, result: llvm.Type, *args: Value) -> Value:
        kind = llvm.FunctionType(result, [a.type for a in args])
        return Value(self, self.builder.asm(kind, text, kinds, [a.ir for a in args], False))

    def permute(self, a: Value, b: Value, selector: Value) -> Value:
        """Byte i is byte (selector >> 4 i & 7) of the eight bytes of a and b."""
        return self._assembly("prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", I32, a, b, selector)

    def dot(self, a: Value, b: Value, c: Value) -> Value:
        """c + the sum of products of four signed bytes."""
        return self._assembly("dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", I32, a, b, c)

    def half(self, bits: Value) -> Value:
        """float32 of the 16 bits of an f16."""
        return self._assembly("cvt.f32.f16 $0, $1;", "=f,h", F32, bits.narrow(I16))

    def choose(self, word: Value, a: Value, b: Value) -> Value:
        """a where the word is not 0, else b."""
        is_set = self.builder.icmp_unsigned("!=", word.ir, llvm.Constant(I32, 0))
        return Value(self, self.builder.select(is_set, a.ir, b.ir))

    def real(self, word: Value) -> Value:
        """float32 of a signed word."""
        return word.real()

    def float_of(self, bits: Value) -> Value:
        """The float32 with these bits."""
        return bits.view(F32)

    def signed_byte(self, word: Value) -> Value:
        """The lowest byte, sign-extended."""
        return word.narrow(I8).signed(I32)

    def power(self, exponent: Value) -> Value:
        """2^(exponent - 128) of 0 to 255."""
        large = self.choose(exponent >> 1, (exponent - 1) << 23, self.word(0x200000) << exponent)
        return large.view(F32)


class Word(int):
    """A word of the simulator: 32 bits, or 64 where it is an offset; operators wrap as the GPU's do."""

    def _of(self, value: int) -> Word:
        return Word(value & 0xFFFFFFFF)

    def __add__(self, other: int) -> Word:
        return self._of(int(self) + int(other))

    def __sub__(self, other: int) -> Word:
        return self._of(int(self) - int(other))

    def __mul__(self, other: int) -> Word:
        return self._of(int(self) * int(other))

    def __and__(self, other: int) -> Word:
        return self._of(int(self) & (int(other) & 0xFFFFFFFF))

    def __or__(self, other: int) -> Word:
        return self._of(int(self) | int(other))

    def __xor__(self, other: int) -> Word:
        return self._of(int(self) ^ (int(other) & 0xFFFFFFFF))

    def __lshift__(self, other: int) -> Word:
        return self._of(int(self) << int(other))

    def __rshift__(self, other: int) -> Word:
        return self._of(int(self) >> int(other))


def signed(word: int) -> int:
    """The value of a word in two's complement."""
    return (int(word) + (1 << 31)) % (1 << 32) - (1 << 31)


class SimulatedWords:
    """The operations of `DeviceWords`, computed with Python numbers."""

    def __init__(self, data: Any):
        self.data = data

    def word(self, number: int) -> Word:
        """A constant word."""
        return Word(int(number) & 0xFFFFFFFF)

    def wide(self, value: int) -> int:
        """A signed word as 64 bits."""
        return signed(value)

    def load(self, bits: int, offset: int, align: int) -> Word:
        """The integer of `bits` bits at a byte offset that is a multiple of `align`."""
        assert int(offset) % align == 0, "a load is not aligned"
        return Word(int.from_bytes(bytes(int(self.data[int(offset) + i]) for i in range(bits // 8)), "little"))

    def load_words(self, count: int, offset: int) -> list[Word]:
        """2 or 4 words at an offset that is aligned to their size."""
        assert int(offset) % (4 * count) == 0, "a load is not aligned"
        return [self.load(32, int(offset) + 4 * i, 4) for i in range(count)]

    def table(self, name: str, words: Sequence[int], index: int) -> Word:
        """A word of a constant table in global memory."""
        return Word(int(words[index]) & 0xFFFFFFFF)

    def permute(self, a: int, b: int, selector: int) -> Word:
        """Byte i is byte (selector >> 4 i & 7) of the eight bytes of a and b."""
        eight_bytes = int(a) | int(b) << 32
        return Word(sum((eight_bytes >> 8 * (int(selector) >> 4 * i & 7) & 255) << 8 * i for i in range(4)))

    def dot(self, a: int, b: int, c: int) -> Word:
        """c + the sum of products of four signed bytes."""
        return Word((int(c) + sum(x * y for x, y in zip(_bytes(a), _bytes(b)))) & 0xFFFFFFFF)

    def half(self, bits: int) -> np.float32:
        """float32 of the 16 bits of an f16."""
        return np.float32(np.uint16(bits & 0xFFFF).view(np.float16))

    def choose(self, word: int, a: Any, b: Any) -> Any:
        """a where the word is not 0, else b."""
        return a if word else b

    def real(self, word: int) -> np.float32:
        """float32 of a signed word."""
        return np.float32(signed(word))

    def float_of(self, bits: int) -> np.float32:
        """The float32 with these bits."""
        return np.uint32(bits).view(np.float32)

    def signed_byte(self, word: int) -> Word:
        """The lowest byte, sign-extended."""
        return Word((int(word) & 255 ^ 128) - 128 & 0xFFFFFFFF)

    def power(self, exponent: int) -> np.float32:
        """2^(exponent - 128) of 0 to 255."""
        return self.float_of((exponent - 1) << 23 if exponent > 1 else 0x200000 << exponent)


def _bytes(word: int) -> tuple[int, ...]:
    return struct.unpack("4b", struct.pack("<I", int(word) & 0xFFFFFFFF))
