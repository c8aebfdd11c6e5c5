"""The kernels of every type against the decoded weights in float64, on this CPU's path and on every simpler one."""

from __future__ import annotations

import ctypes
from types import ModuleType

import numpy as np
import pytest

from quantkit import types
from quantkit.codegen import cpu_target
from quantkit.codegen.jit import kernel
from quantkit.placement import kernel_sizes
from quantkit.repack import repack
from quantkit.runtime.kernels import dispatch
from quantkit.runtime.kernels.cpu import activations, dequantize, float_gemm, gemm, matvec
from quantkit.runtime.kernels.cpu.formats.registry import FORMATS
from quantkit.runtime.kernels.cpu.op_list import OpList
from quantkit.types import QuantType
from tests.other_cpus import CPUS, is_other_cpu, run_tests
from tests.other_cpus import test_that_this_is_the_path as test_that_this_is_the_path  # collected here too
from tests.types.data import tame_bytes

_SOME = (
    "q4_0",
    "q5_1",
    "q8_0",
    "q6_K",
    "iq4_k_r4",
)  # codes of 4, 5, 8, 6 bits, a codebook; offset, floor, halves, lanes
INTEGER = [types.layout(f.name) for f in FORMATS.values() if not is_other_cpu() or f.name in _SOME]
FLOAT = [types.layout(name) for name in ("f32", "f16", "bf16")]
N = 768
EXACT, ROUNDED = 2e-6, 0.01  # of the sum of the products' magnitudes; of the result's size


def by_name(kind: QuantType) -> str:
    return kind.name


@pytest.mark.parametrize("isa", CPUS)
def test_other_cpus(isa: str) -> None:
    run_tests(__file__, isa)


def test_float_types() -> None:
    assert {t.ggml_type for t in FLOAT} == set(dequantize.FLOAT_TYPES)


def random_rows(kind: QuantType, rows: int, n: int = N, seed: int = 3) -> np.ndarray:
    """Encoded bytes of every bit pattern but for the scales, which are tame."""
    rng = np.random.default_rng(seed)
    if kind in FLOAT:
        return kind.quantize(rng.standard_normal((rows, n)).astype(np.float32))
    return tame_bytes(types.get(kind.name), rng, rows, n)


def fine(x: np.ndarray) -> np.ndarray:
    """float64: activations as the formula of activations.py makes them, in 8 bits, four by four."""
    return rounded(x, 4, 127)


def wide(x: np.ndarray) -> np.ndarray:
    """The same in 16 bits, block by block."""
    return rounded(x, 32, 32512)


def rounded(x: np.ndarray, size: int, largest: int) -> np.ndarray:
    groups = x.reshape(-1, size)
    scale = np.abs(groups).max(1, keepdims=True) * np.float32(1 / largest)
    codes = np.rint(groups * (np.float32(1) / scale))
    return (codes.astype(np.float64) * scale).reshape(x.shape)


def buffer_of(x: np.ndarray) -> np.ndarray:
    """An activation buffer of float32[n]."""
    buffer = np.zeros(kernel_sizes.activation_bytes(len(x)), np.uint8)
    buffer[: 4 * len(x)].view(np.float32)[:] = x
    quantize_buffer(buffer.ctypes.data, len(x))
    return buffer


@kernel
def quantize_buffer(address, n):
    activations.quantize(address, n)


def call(function: int, *arguments: int) -> None:
    ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * len(arguments))(function)(*arguments)


def assert_products(result: np.ndarray, weights: np.ndarray, x: np.ndarray, tolerance: float) -> None:
    """got[t, row] = x[t] . weights[row] within `tolerance` of the sum of the products' magnitudes."""
    size = np.abs(x) @ np.abs(weights).T
    assert np.all(np.abs(result - x @ weights.T) <= tolerance * size)


# ------------------------------------------------------------------------------------------------------- activations


def parts_of(buffer: np.ndarray, n: int) -> list[np.ndarray]:
    """The parts of an activation buffer: fine codes, sums, floors, scales; wide codes, sums, words, scales."""
    kinds = (np.int8, np.int32, np.float32, np.float32, np.int8, np.int32, np.int16, np.float32)
    places = (4, 5, 6, 7, 8, 10, 11, 13, 14)
    return [buffer[n * first : n * last].view(kind) for kind, first, last in zip(kinds, places, places[1:])]


def test_activations(rng: np.random.Generator) -> None:
    x = rng.standard_normal(96).astype(np.float32)
    x[32:64] = 0
    codes, sums, floors, scales, planes, wide_sums, words, wide_scales = parts_of(buffer_of(x), 96)
    np.testing.assert_allclose(scales, np.abs(x.reshape(24, 4)).max(1) / 127, rtol=1e-6)
    np.testing.assert_allclose(codes * np.repeat(scales, 4), fine(x + (x == 0)) * (x != 0), rtol=1e-6)
    np.testing.assert_array_equal(sums, codes.astype(int).reshape(-1, 4).sum(1))
    for group, result in ((16, floors[:6]), (32, floors[6:9])):
        np.testing.assert_allclose(result, (sums * scales).reshape(-1, group // 4).sum(1), rtol=1e-5, atol=1e-6)
    planes = planes.reshape(3, 2, 32).astype(int)
    a = planes[:, 0] * 256 + planes[:, 1]
    np.testing.assert_allclose(wide_scales, np.abs(x.reshape(3, 32)).max(1) / 32512, rtol=1e-6)
    np.testing.assert_allclose(a * wide_scales[:, None], x.reshape(3, 32), atol=float(wide_scales.max()) * 0.51)
    assert np.abs(a).max(1).tolist() == [32512, 0, 32512]
    np.testing.assert_array_equal(wide_sums, a.reshape(-1, 4).sum(1))
    if cpu_target.isa() != "avx512vnni":  # which has no use for them
        np.testing.assert_array_equal(words.reshape(-1, 4), a.reshape(-1, 4)[:, [0, 2, 1, 3]])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_spoiled_activation_shows(bad: float) -> None:
    x = np.ones(64, np.float32)
    x[40] = bad
    parts = parts_of(buffer_of(x), 64)
    assert np.flatnonzero(np.isnan(parts[3])).tolist() == [10]
    assert np.flatnonzero(np.isnan(parts[7])).tolist() == [1]


# -------------------------------------------------------------------------------------------------- one vector, decode


@pytest.mark.parametrize("kind", INTEGER + FLOAT, ids=by_name)
def test_product_with_a_vector(kind: QuantType, rng: np.random.Generator) -> None:
    """A kernel writes the rows of its range and no others: four at once, single rows, groups of rows."""
    rows = 24
    data, x = random_rows(kind, rows), rng.standard_normal(N).astype(np.float32)
    weights = types.get(kind.name).dequantize(data, N, products=True).astype(np.float64)
    form = np.float64 if kind in FLOAT else wide if kind.interleave > 1 else fine
    given, buffer = form(x), buffer_of(x)
    run = dispatch.product(kind)
    assert run is not None
    for first, last in ((0, 24), (8, 24), (16, 24)) if kind.interleave > 1 else ((0, 24), (3, 10), (5, 5), (23, 24)):
        out = np.full(rows, 7, np.float32)
        call(run.address, data.ctypes.data, N, first, last, buffer.ctypes.data, out.ctypes.data)
        assert_products(out[None, first:last], weights[first:last], given[None], EXACT)
        assert np.all(out[:first] == 7)
        assert np.all(out[last:] == 7)
    error = out[first:last] - (weights @ x)[first:last]
    assert np.abs(error).max() <= ROUNDED * np.linalg.norm(weights, axis=1).max() * np.linalg.norm(x) / np.sqrt(N) * 3


@pytest.mark.parametrize("kind", INTEGER + FLOAT, ids=by_name)
def test_descriptions_decode_to_the_bit(kind: QuantType) -> None:
    """A product with the identity matrix gives the weights back, and they are the type's own."""
    n = 256
    data = random_rows(kind, 40, n)
    result = multiply(float_gemm, kind, data, np.eye(n, dtype=np.float32))
    np.testing.assert_array_equal(result.T, types.get(kind.name).dequantize(data, n, products=True))


# ------------------------------------------------------------------------------------------------------------- batches


def multiply(
    module: ModuleType,
    kind: QuantType,
    data: np.ndarray,
    x: np.ndarray,
    add: np.ndarray | None = None,
    threads: int = 2,
) -> np.ndarray:
    """float32[tokens, rows] of a product of gemm.py or float_gemm.py, on several threads; `add` is what was there."""
    rows, (count, n) = len(data), x.shape
    ops = OpList(threads)
    tokens = ops.keep(np.array([count])).ctypes.data
    out = np.full((count + 1, rows), 7, np.float32)
    if add is not None:
        out[:count] = add
    given = x.ctypes.data
    if module is gemm:
        tiles = ops.buffer("tiles", kernel_sizes.tiles_bytes(n, count))
        quantize = gemm.QuantizeParameters(x=given, n=n, tokens=tokens, tiles=tiles)
        ops.add(gemm.quantize_tiles, quantize, barrier=True)
        scratch, stride = ops.private_buffer("scratch", gemm.scratch_bytes(FORMATS[kind.ggml_type], n))
        given = tiles
    else:
        scratch, stride = ops.private_buffer("scratch", kernel_sizes.float_scratch_bytes(n))
    parameters = float_gemm.MultiplyParameters(
        weights=data.ctypes.data, n=n, rows=rows, tokens=tokens, x=given, out=out.ctypes.data, bias=0, scratch=scratch,
        private_stride=stride, claims=ops.claims(),
    )  # fmt: skip
    ops.add(module.multiply(kind.ggml_type, int(add is not None)), parameters)
    ops.run()
    assert np.all(out[count] == 7), "wrote beyond the last token"
    return out[:count]


@pytest.mark.parametrize("kind", INTEGER, ids=by_name)
def test_integer_product_with_a_batch(kind: QuantType, rng: np.random.Generator) -> None:
    """41 rows are a whole pair of panels and a bit; 13 tokens two tiles and a bit."""
    rows = 40 if kind.interleave > 1 else 41
    data, x = random_rows(kind, rows), rng.standard_normal((13, N)).astype(np.float32)
    weights = types.get(kind.name).dequantize(data, N, products=True).astype(np.float64)
    result = multiply(gemm, kind, data, x)
    assert_products(result, weights, wide(x), EXACT)
    np.testing.assert_array_equal(multiply(gemm, kind, data, x[:1]), result[:1])


@pytest.mark.parametrize("module", [gemm, float_gemm])
def test_a_product_is_added(module: ModuleType, rng: np.random.Generator) -> None:
    kind = types.get("q4_0")
    data, x = random_rows(kind, 41), rng.standard_normal((13, N)).astype(np.float32)
    before = rng.standard_normal((13, 41)).astype(np.float32)
    added = multiply(module, kind, data, x, add=before)
    plain = multiply(module, kind, data, x)
    np.testing.assert_allclose(added - before, plain, rtol=0, atol=1e-6 * np.abs(plain).max())


@pytest.mark.parametrize("name", ["f16", "q4_0"])
def test_float_product_with_a_batch(name: str, rng: np.random.Generator) -> None:
    kind = types.get(name)
    data, x = random_rows(kind, 40), rng.standard_normal((13, N)).astype(np.float32)
    weights = kind.dequantize(data, N, products=True).astype(np.float64)
    result = multiply(float_gemm, kind, data, x)
    assert_products(result, weights, x.astype(np.float64), EXACT)


def test_the_integers_are_the_same_everywhere() -> None:
    """Scales of 1 leave only integers, and every path must give exactly those, at the extremes of both codes too."""
    rng = np.random.default_rng(11)
    n, rows = 1024, 48
    codes = rng.integers(-128, 128, (rows, n)).astype(np.int8)
    codes[0], codes[1] = -128, 127
    data = np.empty((rows, n // 32, 34), np.uint8)
    data[:, :, :2] = np.array([1], np.float16).view(np.uint8)
    data[:, :, 2:] = codes.reshape(rows, -1, 32).view(np.uint8)
    x = rng.integers(-127, 128, (7, n)).astype(np.float32)
    x.reshape(7, -1, 4)[:, :, 0] = 127  # the largest of what shares a scale
    x[0], x[1] = 127, -127
    expected = x.astype(np.int64) @ codes.astype(np.int64).T
    assert np.abs(expected).max() < 1 << 24
    result = multiply(gemm, types.get("q8_0"), data.reshape(rows, -1), x)
    np.testing.assert_array_equal(result, expected)
    for token in range(7):
        out = np.zeros(rows, np.float32)
        buffer = buffer_of(x[token])
        run = matvec.product(8)
        assert run is not None
        call(run.address, data.ctypes.data, n, 0, rows, buffer.ctypes.data, out.ctypes.data)
        np.testing.assert_array_equal(out, expected[token])


def test_the_integers_of_both_planes_are_the_same_everywhere() -> None:
    """One unit of 16-bit activations, scales of 1: batches, and interleaved rows with a vector."""
    rng = np.random.default_rng(12)
    q8_0, rows = types.get("q8_0"), 48
    codes = rng.integers(-128, 128, (rows, 32)).astype(np.int8)
    codes[0], codes[1] = -128, 127
    half = np.broadcast_to(np.array([1], np.float16).view(np.uint8), (rows, 2))
    data = np.ascontiguousarray(np.concatenate([half, codes.view(np.uint8)], axis=1))
    x = rng.integers(-32512, 32513, (7, 32)).astype(np.float32)
    x[:, 0] = 32512
    x[0], x[1, 1:], x[2, 1:], x[3] = 32512, 127, 128, -32512  # low bytes of 0, 127, -128
    expected = (x.astype(np.int64) @ codes.astype(np.int64).T).astype(np.float32)
    np.testing.assert_array_equal(multiply(gemm, q8_0, data, x), expected)
    interleaved, name = repack(data, "Q8_0", 32)
    run = dispatch.product(types.get(name))
    assert run is not None
    for token in range(7):
        out, buffer = np.zeros(rows, np.float32), buffer_of(x[token])
        call(run.address, interleaved.ctypes.data, 32, 0, rows, buffer.ctypes.data, out.ctypes.data)
        np.testing.assert_array_equal(out, expected[token])
