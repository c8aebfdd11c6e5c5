"""LLVM values with Python's operators: `Value` and `Variable`. `ir_builder.IrBuilder` makes them.

Types are llvmlite's: `F32`, `I64`, ... and `vector(16, F32)`. Integers have no sign; operations do.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias

from llvmlite import ir as llvm

IntType: TypeAlias = llvm.IntType
I8, I16, I32, I64 = (IntType(bits) for bits in (8, 16, 32, 64))
F16, F32 = llvm.HalfType(), llvm.FloatType()


def vector(lanes: int, element: llvm.Type) -> llvm.VectorType:
    """The type of a vector: `vector(16, F32)` has 16 float32 lanes."""
    return llvm.VectorType(element, lanes)


def element_of(kind: llvm.Type) -> llvm.Type:
    """The type of a vector's lanes; a scalar type itself."""
    return kind.element if isinstance(kind, llvm.VectorType) else kind


def wrapped(number: int, bits: int) -> int:
    """The signed integer with the same low `bits` bits, the only form that LLVM's assembly has."""
    return (number + (1 << bits - 1)) % (1 << bits) - (1 << bits - 1)


class Builder(Protocol):
    """The part of `ir_builder.IrBuilder` that a value uses."""

    builder: Any  # llvmlite's IRBuilder

    def constant(self, kind: llvm.Type, number: float) -> Value:
        """A constant of a type."""
        ...


class Value:
    """An LLVM value, scalar or vector, with Python's operators. Numbers become constants of its type.

    `>>` shifts in zeros, `signed_shift` copies of the sign. `/` of integers is signed. `ir` is llvmlite's value.
    """

    __slots__ = ("builder", "ir")

    def __init__(self, builder: Builder, value: llvm.Value):
        self.builder, self.ir = builder, value

    @property
    def type(self) -> llvm.Type:
        """llvmlite's type."""
        return self.ir.type

    @property
    def lanes(self) -> int:
        """Number of lanes of a vector."""
        count: int = self.ir.type.count
        return count

    def _operand(self, other: Value | float) -> llvm.Value:
        if isinstance(other, Value):
            return other.ir
        if isinstance(other, int) and isinstance(element_of(self.type), llvm.IntType):
            other = wrapped(other, element_of(self.type).width)
        return self.builder.constant(self.type, other).ir

    def _apply(self, other: Value | float, integer: str, real: str | None = None) -> Value:
        name = real if real and element_of(self.type) in (F16, F32) else integer
        return Value(self.builder, getattr(self.builder.builder, name)(self.ir, self._operand(other)))

    def __add__(self, other: Value | float) -> Value:
        return self._apply(other, "add", "fadd")

    def __sub__(self, other: Value | float) -> Value:
        return self._apply(other, "sub", "fsub")

    def __rsub__(self, other: float) -> Value:
        return Value(self.builder, self._operand(other)) - self

    def __mul__(self, other: Value | float) -> Value:
        return self._apply(other, "mul", "fmul")

    def __truediv__(self, other: Value | float) -> Value:
        return self._apply(other, "sdiv", "fdiv")

    def __and__(self, other: Value | int) -> Value:
        return self._apply(other, "and_")

    def __or__(self, other: Value | int) -> Value:
        return self._apply(other, "or_")

    def __xor__(self, other: Value | int) -> Value:
        return self._apply(other, "xor")

    def __lshift__(self, other: Value | int) -> Value:
        return self._apply(other, "shl")

    def __rshift__(self, other: Value | int) -> Value:
        return self._apply(other, "lshr")

    def signed_shift(self, bits: int) -> Value:
        """Shift right, filling with copies of the sign."""
        return self._apply(bits, "ashr")

    def _convert(self, element: llvm.Type, operation: str) -> Value:
        kind = vector(self.lanes, element) if isinstance(self.type, llvm.VectorType) else element
        return Value(self.builder, getattr(self.builder.builder, operation)(self.ir, kind))

    def signed(self, element: llvm.Type) -> Value:
        """Integers sign-extended to a wider type."""
        return self._convert(element, "sext")

    def unsigned(self, element: llvm.Type) -> Value:
        """Integers zero-extended to a wider type."""
        return self._convert(element, "zext")

    def narrow(self, element: llvm.Type) -> Value:
        """Integers truncated to a narrower type."""
        return self._convert(element, "trunc")

    def real(self) -> Value:
        """Signed integers converted to float32."""
        return self._convert(F32, "sitofp")

    def view(self, kind: llvm.Type) -> Value:
        """The same bits as another type (a bitcast)."""
        return Value(self.builder, self.builder.builder.bitcast(self.ir, kind))

    def lane(self, index: int) -> Value:
        """One lane of a vector, as a scalar."""
        return Value(self.builder, self.builder.builder.extract_element(self.ir, llvm.Constant(I32, index)))


class Variable:
    """A value that loops change. LLVM turns it into a register."""

    def __init__(self, builder: Builder, first: Value):
        self._builder = builder
        with builder.builder.goto_entry_block():  # allocated once, even if the variable is made in a loop
            self._slot = builder.builder.alloca(first.type)
        self.set(first)

    def get(self) -> Value:
        """The value it has here."""
        return Value(self._builder, self._builder.builder.load(self._slot))

    def set(self, value: Value) -> None:
        """Assign a value."""
        self._builder.builder.store(value.ir, self._slot)
