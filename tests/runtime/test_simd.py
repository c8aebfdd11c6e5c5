"""SIMD intrinsics against numpy, on this CPU's path and on every simpler one."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from llvmlite import ir as llvm

from quantkit.codegen.jit import kernel
from quantkit.codegen.simd import (
    F32,
    I8,
    I16,
    I32,
    IrBuilder,
    Value,
    atomic_add,
    floats,
    halves,
    load_float,
    load_int,
    simd_intrinsic,
    store_int,
    vector,
)
from quantkit.runtime.kernels.cpu.float_gemm import transpose_block
from tests.other_cpus import CPUS, run_tests
from tests.other_cpus import test_that_this_is_the_path as test_that_this_is_the_path  # collected here too

FLOATS16 = vector(16, F32)


@pytest.mark.parametrize("isa", CPUS)
def test_other_cpus(isa: str) -> None:
    run_tests(__file__, isa)


def each(ir: IrBuilder, x: Value, n: Value, out: Value, function: Callable[[Value], Value]) -> None:
    with ir.loop(0, n, 16) as i:
        ir.store(function(ir.load(FLOATS16, x + i * 4)), out + i * 4)


@simd_intrinsic("void")
def _exp(ir, x, n, out):
    each(ir, x, n, out, ir.exp)


@kernel
def exp(x, n, out):
    _exp(x, n, out)


def test_exp() -> None:
    x = np.linspace(-87.2, 88, 100_000).astype(np.float32)
    x[-5:] = -200, -np.inf, 100, np.inf, np.nan
    y = np.empty_like(x)
    exp(x.ctypes.data, len(x), y.ctypes.data)
    np.testing.assert_allclose(y[:-5], np.exp(x[:-5].astype(np.float64)), rtol=3e-7)
    np.testing.assert_array_equal(y[-5:-3], 0)
    np.testing.assert_allclose(y[-3:-1], np.exp(88.0), rtol=3e-7)
    assert np.isnan(y[-1])


@simd_intrinsic("void")
def _from_half(ir, x, n, out):
    with ir.loop(0, n, 16) as i:
        ir.store(ir.half_to_float(ir.load(vector(16, I16), x + i * 2)), out + i * 4)


@simd_intrinsic("void")
def _to_half(ir, x, n, out):
    with ir.loop(0, n, 16) as i:
        ir.store(ir.float_to_half(ir.load(FLOATS16, x + i * 4)), out + i * 2)


@kernel
def from_half(x, n, out):
    _from_half(x, n, out)


@kernel
def to_half(x, n, out):
    _to_half(x, n, out)


@kernel
def one_half(x, out):
    y = floats(out, 1)
    y[0] = load_float(x) * np.float32(halves(x, 2)[1] == 0x3F80)


def test_every_half_to_float() -> None:
    bits = np.arange(1 << 16).astype(np.uint16)
    out = np.empty(1 << 16, np.float32)
    from_half(bits.ctypes.data, len(bits), out.ctypes.data)
    expected = bits.view(np.float16).astype(np.float32)
    real = ~np.isnan(expected)
    np.testing.assert_array_equal(out[real].view(np.uint32), expected[real].view(np.uint32))
    assert np.isnan(out[~real]).all()


def test_float_to_half_rounds_as_numpy(rng: np.random.Generator) -> None:
    exact = np.arange(1 << 16).astype(np.uint16).view(np.float16)
    exact = np.sort(exact[np.isfinite(exact)].astype(np.float32))
    ties = ((exact[1:].astype(np.float64) + exact[:-1]) / 2).astype(np.float32)
    wild = rng.integers(0, 1 << 32, 100_000, dtype=np.uint64).astype(np.uint32).view(np.float32)
    edges = np.array([np.inf, -np.inf, 65520, 65519.996], np.float32)
    x = np.concatenate([edges, exact, ties, np.nextafter(ties, np.float32(9)), wild])
    x = np.ascontiguousarray(x[: len(x) // 16 * 16])
    x = np.nan_to_num(x, nan=0.0, posinf=np.inf, neginf=-np.inf)
    out = np.empty(len(x), np.uint16)
    to_half(x.ctypes.data, len(x), out.ctypes.data)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(out, x.astype(np.float16).view(np.uint16))


def test_views_of_memory() -> None:
    x, out = np.array([1.0], np.float32), np.zeros(1, np.float32)
    one_half(x.ctypes.data, out.ctypes.data)
    assert out[0] == 1


@simd_intrinsic("void")
def _dot4(ir: IrBuilder, a: Value, b: Value, start: Value, out: Value, lanes: int, largest: int) -> None:
    total = ir.load(vector(lanes, I32), start)
    size = vector(4 * lanes, I8)
    ir.store(ir.dot4(total, ir.load(size, a), ir.load(size, b), largest), out)


@kernel
def dot4_all(a, b, start, out):
    _dot4(a, b, start, out, 8, 255)
    _dot4(a, b, start, out + 32, 16, 255)


@kernel
def dot4_small(a, b, start, out):
    _dot4(a, b, start, out, 8, 127)
    _dot4(a, b, start, out + 32, 16, 127)


@pytest.mark.parametrize(("function", "largest"), [(dot4_all, 255), (dot4_small, 127)])
def test_dot4_is_exact_to_its_limits(function: Callable, largest: int, rng: np.random.Generator) -> None:
    extremes = [(largest, -127), (largest, 127), (0, -127)]
    for case in itertools.chain(extremes, [None] * 50):
        a = rng.integers(0, largest + 1, 64).astype(np.uint8) if case is None else np.full(64, case[0], np.uint8)
        b = rng.integers(-127, 128, 64).astype(np.int8) if case is None else np.full(64, case[1], np.int8)
        start = rng.integers(-1000, 1000, 16).astype(np.int32)
        out = np.zeros(24, np.int32)
        function(a.ctypes.data, b.ctypes.data, start.ctypes.data, out.ctypes.data)
        expected = start + (a.astype(np.int32) * b).reshape(16, 4).sum(1)
        np.testing.assert_array_equal(out[:8], expected[:8])
        np.testing.assert_array_equal(out[8:], expected)


@simd_intrinsic("void")
def _pairs(ir: IrBuilder, a: Value, b: Value, out: Value, lanes: int) -> None:
    total = ir.zero(vector(lanes, I16))
    for _ in range(8):  # matvec.py keeps eight such sums of 4-bit codes in 16 bits
        total = total + ir.byte_pairs(ir.load(vector(2 * lanes, I8), a), ir.load(vector(2 * lanes, I8), b))
    ir.store(ir.pairs(total), out)


@kernel
def pairs(a, b, out):
    _pairs(a, b, out, 16)
    _pairs(a, b, out + 32, 32)


@pytest.mark.parametrize("byte", [-128, 127])
def test_eight_sums_of_nibbles_fit_16_bits(byte: int) -> None:
    a, b = np.full(64, 15, np.uint8), np.full(64, byte, np.int8)
    out = np.zeros(24, np.int32)
    pairs(a.ctypes.data, b.ctypes.data, out.ctypes.data)
    np.testing.assert_array_equal(out, 8 * 4 * 15 * byte)


@simd_intrinsic("void")
def _signed_pairs(ir: IrBuilder, a: Value, b: Value, out: Value) -> None:
    ir.store(ir.signed_pairs(ir.load(vector(32, I8), a), ir.load(vector(32, I8), b)), out)


@kernel
def signed_pairs(a, b, out):
    _signed_pairs(a, b, out)


def test_signed_pairs_are_exact_to_their_limits(rng: np.random.Generator) -> None:
    extremes = [(-128, -127), (-128, 127), (127, -127), (0, 127), (-1, 0)]
    for case in itertools.chain(extremes, [None] * 50):
        a = rng.integers(-128, 128, 32).astype(np.int8) if case is None else np.full(32, case[0], np.int8)
        b = rng.integers(-127, 128, 32).astype(np.int8) if case is None else np.full(32, case[1], np.int8)
        out = np.zeros(16, np.int16)
        signed_pairs(a.ctypes.data, b.ctypes.data, out.ctypes.data)
        np.testing.assert_array_equal(out, (a.astype(int) * b).reshape(16, 2).sum(1))


@simd_intrinsic("void")
def _bytes(ir, x, masks, out):
    table = [(37 * i + 11) % 256 for i in range(16)]
    for lanes in (16, 32):
        ir.store(ir.lookup(table, ir.load(vector(lanes, I8), x) & 15), out + (lanes - 16) * 2)
    ir.store(ir.where_bits(ir.load(vector(32, I8), masks), [1 << i % 8 for i in range(32)], 16), out + 64)


@kernel
def bytes_(x, masks, out):
    _bytes(x, masks, out)


def test_lookup_and_bits(rng: np.random.Generator) -> None:
    x, masks = (rng.integers(0, 256, 32).astype(np.uint8) for _ in range(2))
    out = np.zeros(96, np.uint8)
    bytes_(x.ctypes.data, masks.ctypes.data, out.ctypes.data)
    table = np.array([(37 * i + 11) % 256 for i in range(16)], np.uint8)
    np.testing.assert_array_equal(out[:16], table[x[:16] & 15])
    np.testing.assert_array_equal(out[32:64], table[x & 15])
    np.testing.assert_array_equal(out[64:], np.where(masks >> np.arange(32) % 8 & 1, 16, 0))


@simd_intrinsic("void")
def _sums(ir, x, out):
    ir.store(ir.sum4(*(ir.load(FLOATS16, x + 64 * i) for i in range(4))), out)
    ir.store(ir.sum(ir.load(FLOATS16, x)), out + 16)
    ir.store(ir.largest(ir.load(FLOATS16, x)), out + 20)


@kernel
def sums(x, out):
    _sums(x, out)


@kernel
def transposed(x, out):
    transpose_block(x, 64, out, 64)


def test_sums_and_transpose() -> None:
    x = (np.arange(256) * 7 % 251).astype(np.float32).reshape(16, 16)
    out, turned = np.zeros(6, np.float32), np.zeros((16, 16), np.float32)
    sums(x.ctypes.data, out.ctypes.data)
    np.testing.assert_array_equal(out, [*x[:4].sum(1), x[0].sum(), x[0].max()])
    transposed(x.ctypes.data, turned.ctypes.data)
    np.testing.assert_array_equal(turned, x.T)


def test_stacks_are_aligned_for_spilled_vectors() -> None:
    """llvmlite leaves the attribute out, without an error, where it is a function's only one."""
    module = llvm.Module()
    function = llvm.Function(module, llvm.FunctionType(llvm.VoidType(), []), "f")
    IrBuilder(llvm.IRBuilder(function.append_basic_block()))
    assert "alignstack(64)" in str(module)


@kernel
def integers(address):
    store_int(load_int(address) + 2, address)
    return atomic_add(5, address)


def test_integers_in_memory() -> None:
    x = np.array([40], np.int64)
    assert integers(x.ctypes.data) == 42
    assert x[0] == 47
