"""SIMD code for kernels, written as Python that emits LLVM vectors.

    F32x16 = vector(16, F32)

    @simd_intrinsic("float32")
    def dot(ir, x, y, n):                      # ir: IrBuilder; x, y, n: int64 values (addresses are integers)
        total = ir.variable(ir.zero(F32x16))
        with ir.loop(0, n, 16) as i:
            total.set(ir.fma(ir.load(F32x16, x + i * 4), ir.load(F32x16, y + i * 4), total.get()))
        return ir.sum(total.get())

Inside a kernel `dot(x, y, n)` is then a call like any other. The body runs once, when the kernel is compiled: Python
`for` unrolls, `ir.loop` makes a loop of the machine, and `jit.isa()` chooses instructions. Whatever it chooses, results
are the same, bit by bit.

Parameters annotated `int` must be constants at the call and arrive as Python integers: what selects a format or a
width. Loads and stores need no alignment.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from llvmlite import ir as llvm

from quantkit.codegen import jit
from quantkit.codegen.ir_builder import IrBuilder
from quantkit.codegen.ir_values import F16, F32, I8, I16, I32, I64, IntType, Value, Variable, vector

jit.refuse_numba_config()  # before the import that would read the file

from numba import carray, types  # noqa: E402
from numba.extending import intrinsic  # noqa: E402

__all__ = [
    "F16",
    "F32",
    "I8",
    "I16",
    "I32",
    "I64",
    "IntType",
    "IrBuilder",
    "Value",
    "Variable",
    "simd_intrinsic",
    "vector",
]

_NUMBA = {"void": types.void, "int64": types.int64, "float32": types.float32}


def simd_intrinsic(returns: str) -> Callable[[Callable], Any]:
    """Decorator: make `function(ir, *values)` callable in kernels. `returns` is "void", "int64" or "float32".

    Values are int64, or float32 where annotated `float`; parameters annotated `int` are compile-time constants.
    """

    def decorate(function: Callable) -> Any:
        parameters = list(inspect.signature(function).parameters.values())[1:]
        fixed = [p.annotation in (int, "int") for p in parameters]
        kinds = [types.float32 if p.annotation in (float, "float") else types.int64 for p in parameters]

        def typing(typingctx: Any, *args: Any) -> Any:
            if any(const and not isinstance(a, types.Literal) for a, const in zip(args, fixed)):
                return None
            literals = {i: a.literal_value for i, (a, const) in enumerate(zip(args, fixed)) if const}
            signature = _NUMBA[returns](*(a if const else k for a, k, const in zip(args, kinds, fixed)))

            def generate(context: Any, builder: llvm.IRBuilder, signature: Any, values: Any) -> Any:
                emit = IrBuilder(builder)
                given = [literals.get(i, Value(emit, v)) for i, v in enumerate(values)]
                result = function(emit, *given)
                return context.get_dummy_value() if returns == "void" else result.ir

            return signature, generate

        typing.__name__ = function.__name__
        typing.__doc__ = function.__doc__
        typing.__module__ = function.__module__
        typing.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
        typing.__wrapped__ = function  # type: ignore[attr-defined]  # what `jit.identity` describes
        return intrinsic(prefer_literal=True)(typing)

    return decorate


# ---------------------------------------------------------------------------------------- what plain kernels need of it


@simd_intrinsic("int64")
def load_int(ir, address):
    """The int64 at an address."""
    return ir.load(I64, address)


@simd_intrinsic("float32")
def load_float(ir, address):
    return ir.load(F32, address)


@simd_intrinsic("void")
def store_int(ir, value, address):
    ir.store(value, address)


@simd_intrinsic("int64")
def atomic_load(ir, address):
    return ir.atomic_load(address)


@simd_intrinsic("void")
def atomic_store(ir, value, address):
    ir.atomic_store(value, address)


@simd_intrinsic("int64")
def atomic_add(ir, value, address):
    return ir.atomic_add(value, address)


@simd_intrinsic("void")
def pause(ir):
    ir.pause()


@simd_intrinsic("void")
def call3(ir, address, a, b, c):
    """Call a C function `void(int64, int64, int64)`."""
    ir.call_address(address, a, b, c)


@simd_intrinsic("void")
def call6(ir, address, a, b, c, d, f, g):
    ir.call_address(address, a, b, c, d, f, g)


def _pointer_of(element: Any) -> Any:
    @intrinsic
    def pointer(typingctx: Any, address: Any) -> Any:
        kind = types.CPointer(element)

        def generate(context: Any, builder: llvm.IRBuilder, signature: Any, values: Any) -> Any:
            return builder.inttoptr(values[0], context.get_value_type(kind))

        return kind(types.int64), generate

    return pointer


_float_pointer = _pointer_of(types.float32)
_half_pointer = _pointer_of(types.uint16)
_int_pointer = _pointer_of(types.int64)


@jit.kernel(inline="always")
def floats(address, n):
    """The n float32 at an address as an array."""
    return carray(_float_pointer(address), n)


@jit.kernel(inline="always")
def halves(address, n):
    """The n halves at an address as an array of their bits."""
    return carray(_half_pointer(address), n)


@jit.kernel(inline="always")
def integers(address, n):
    """The n int64 at an address as an array."""
    return carray(_int_pointer(address), n)
