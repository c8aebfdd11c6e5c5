"""SIMD intrinsics: functions that kernels call, written as Python that builds LLVM vector code.

    F32x16 = vector(16, F32)

    @simd_intrinsic("float32")                 # the type it returns
    def dot(ir, x, y, n):                      # ir: IrBuilder; x, y (addresses) and n: int64 values
        total = ir.variable(ir.zero(F32x16))
        with ir.loop(0, n, 16) as i:
            total.set(ir.fma(ir.load(F32x16, x + i * 4), ir.load(F32x16, y + i * 4), total.get()))
        return ir.sum(total.get())

    @kernel
    def norm(x):                               # float32[n], n a multiple of 16
        return np.sqrt(dot(x.ctypes.data, x.ctypes.data, len(x)))

**What runs when.** The body of `dot` runs once, in Python, while `norm` is compiled. Each operation on `ir` and on
values appends LLVM instructions to `norm`. So a Python `for` unrolls a loop, `ir.loop` makes a loop of the compiled
code, and `if` chooses at compile time. Only `ir.loop` branches on a value; `ir.choose` selects lanes.

**Values** (`ir_values.Value`) are int64 (addresses, counts), float32, or vectors of F32, I8, I16, I32, I64. Operators
work lane by lane; a Python number becomes a constant. `ir.variable` is a value that loops change.

**Parameters** are int64 values; those annotated `float` are float32 values; those annotated `int` must be constants at
the call and arrive as Python integers, to select a format or a width.

**Instructions.** `ir.isa` is the code path of the CPU that is compiled for ("avx512vnni", "avx512", "avx2" or
"generic"). A method of `IrBuilder` such as `dot4` uses the best instruction of that path and has a plain form for
"generic". All paths give the same bits: sums have one order, `fma` rounds once.

**Memory.** Loads and stores need no alignment and check no bounds. Pass addresses only of arrays that the caller holds:
numba frees an array after its last use (`tests/test_addresses.py`).

**Test** an intrinsic against its plain form on each path: `NUMBA_CPU_NAME=generic` (or `haswell`, `skylake-avx512`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from llvmlite import ir as llvm

from quantkit.codegen import jit, numba_loader
from quantkit.codegen.ir_builder import IrBuilder
from quantkit.codegen.ir_values import F16, F32, I8, I16, I32, I64, IntType, Value, Variable, vector

numba_loader.refuse_numba_config()  # before numba is imported and reads the file

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
    """Decorator: a function that builds code, `function(ir, *values)`, which kernels call as `function(*values)`.

    `returns` is "void", "int64" or "float32". Values are int64, or float32 where annotated `float`. Parameters
    annotated `int` are compile-time constants.
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
                ir = IrBuilder(builder)
                arguments = [literals.get(i, Value(ir, v)) for i, v in enumerate(values)]
                result = function(ir, *arguments)
                return context.get_dummy_value() if returns == "void" else result.ir

            return signature, generate

        typing.__name__ = function.__name__
        typing.__doc__ = function.__doc__
        typing.__module__ = function.__module__
        typing.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
        typing.__wrapped__ = function  # type: ignore[attr-defined]  # `digests.identity` unwraps it
        return intrinsic(prefer_literal=True)(typing)

    return decorate


# ------------------------------------------------------------------ loads, stores, atomics and calls for plain kernels


@simd_intrinsic("int64")
def load_int(ir, address):
    """The int64 at an address."""
    return ir.load(I64, address)


@simd_intrinsic("float32")
def load_float(ir, address):
    """The float32 at an address."""
    return ir.load(F32, address)


@simd_intrinsic("void")
def store_int(ir, value, address):
    """Store an int64 at an address."""
    ir.store(value, address)


@simd_intrinsic("int64")
def atomic_load(ir, address):
    """The int64 at an address, with acquire order."""
    return ir.atomic_load(address)


@simd_intrinsic("void")
def atomic_store(ir, value, address):
    """Store an int64 at an address, with release order."""
    ir.atomic_store(value, address)


@simd_intrinsic("int64")
def atomic_add(ir, value, address):
    """Add to the int64 at an address; returns the value before."""
    return ir.atomic_add(value, address)


@simd_intrinsic("void")
def pause(ir):
    """The CPU's hint for spin loops (x86 `pause`); nothing on other CPUs."""
    ir.pause()


@simd_intrinsic("void")
def call3(ir, address, a, b, c):
    """Call a C function `void(int64, int64, int64)`."""
    ir.call_address(address, a, b, c)


@simd_intrinsic("void")
def call6(ir, address, a, b, c, d, f, g):
    """Call a C function of six int64."""
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


@jit.subkernel
def copy_floats(target, source, n):
    """Copy float32[n] from one address to another.

    An assignment between slices compiles numba's message about shapes as well, text formatting included: four seconds.
    """
    x, y = floats(source, n), floats(target, n)
    for i in range(n):
        y[i] = x[i]


@jit.kernel(inline="always")
def halves(address, n):
    """The n halves at an address as an array of their bits."""
    return carray(_half_pointer(address), n)


@jit.kernel(inline="always")
def integers(address, n):
    """The n int64 at an address as an array."""
    return carray(_int_pointer(address), n)


@intrinsic
def load_record(typingctx: Any, declaration: Any, address: Any) -> Any:
    """In kernels: `load_record(Declaration, address)` is the record at an address, as a named tuple of int64.

    `Declaration` is a NamedTuple of ints; its fields stand in memory one after another.
    """
    fields = declaration.instance_class._fields
    record = types.NamedUniTuple(types.int64, len(fields), declaration.instance_class)

    def generate(context: Any, builder: llvm.IRBuilder, signature: Any, values: Any) -> Any:
        first = builder.inttoptr(values[1], llvm.IntType(64).as_pointer())
        loaded = [builder.load(builder.gep(first, [llvm.IntType(64)(i)])) for i in range(len(fields))]
        return context.make_tuple(builder, record, loaded)

    return record(declaration, types.int64), generate
