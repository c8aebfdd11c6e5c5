"""The values of SIMD code: LLVM's, with Python's operators. What makes them is `ir_builder.IrBuilder`."""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias

from llvmlite import ir as llvm

IntType: TypeAlias = llvm.IntType
I8, I16, I32, I64 = (IntType(bits) for bits in (8, 16, 32, 64))
F16, F32 = llvm.HalfType(), llvm.FloatType()


def vector(lanes: int, element: llvm.Type) -> llvm.VectorType:
    return llvm.VectorType(element, lanes)


def element_of(kind: llvm.Type) -> llvm.Type:
    return kind.element if isinstance(kind, llvm.VectorType) else kind


def wrapped(number: int, bits: int) -> int:
    """The signed integer with the same `bits` low bits: LLVM's text form has no other."""
    return (number + (1 << bits - 1)) % (1 << bits) - (1 << bits - 1)


class Builder(Protocol):
    """What a value asks of `ir_builder.IrBuilder`, which made it."""

    builder: Any  # llvmlite's IRBuilder

    def constant(self, kind: llvm.Type, value: float) -> Value: ...


class Value:
    """An LLVM value, scalar or vector, with Python's operators. Numbers become constants of its type.

    `>>` shifts in zeros; integers carry no sign, the conversions say which is meant.
    """

    __slots__ = ("emit", "ir")

    def __init__(self, emit: Builder, value: llvm.Value):
        self.emit, self.ir = emit, value

    @property
    def type(self) -> llvm.Type:
        return self.ir.type

    @property
    def lanes(self) -> int:
        return self.ir.type.count

    def _operand(self, other: Value | float) -> llvm.Value:
        if isinstance(other, Value):
            return other.ir
        if isinstance(other, int) and isinstance(element_of(self.type), llvm.IntType):
            other = wrapped(other, element_of(self.type).width)
        return self.emit.constant(self.type, other).ir

    def _apply(self, other: Value | float, integer: str, real: str | None = None) -> Value:
        name = real if real and element_of(self.type) in (F16, F32) else integer
        return Value(self.emit, getattr(self.emit.builder, name)(self.ir, self._operand(other)))

    def __add__(self, other: Value | float) -> Value:
        return self._apply(other, "add", "fadd")

    def __sub__(self, other: Value | float) -> Value:
        return self._apply(other, "sub", "fsub")

    def __rsub__(self, other: float) -> Value:
        return Value(self.emit, self._operand(other)) - self

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
        """Shift right, copying the sign."""
        return self._apply(bits, "ashr")

    def _convert(self, element: llvm.Type, operation: str) -> Value:
        kind = vector(self.lanes, element) if isinstance(self.type, llvm.VectorType) else element
        return Value(self.emit, getattr(self.emit.builder, operation)(self.ir, kind))

    def signed(self, element: llvm.Type) -> Value:
        """Integers widened with their sign."""
        return self._convert(element, "sext")

    def unsigned(self, element: llvm.Type) -> Value:
        """Integers widened with zeros."""
        return self._convert(element, "zext")

    def narrow(self, element: llvm.Type) -> Value:
        """The low bits of integers."""
        return self._convert(element, "trunc")

    def real(self) -> Value:
        """Signed integers as float32."""
        return self._convert(F32, "sitofp")

    def view(self, kind: llvm.Type) -> Value:
        """The same bits as another type."""
        return Value(self.emit, self.emit.builder.bitcast(self.ir, kind))

    def lane(self, index: int) -> Value:
        return Value(self.emit, self.emit.builder.extract_element(self.ir, llvm.Constant(I32, index)))


class Variable:
    """A place for a value that changes in loops; LLVM makes it a register."""

    def __init__(self, emit: Builder, first: Value):
        self._emit = emit
        with emit.builder.goto_entry_block():  # once, though the variable may be in a loop
            self._slot = emit.builder.alloca(first.type)
        self.set(first)

    def get(self) -> Value:
        return Value(self._emit, self._emit.builder.load(self._slot))

    def set(self, value: Value) -> None:
        self._emit.builder.store(value.ir, self._slot)
