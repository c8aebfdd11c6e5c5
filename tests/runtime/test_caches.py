"""Caches of every type: their rows, and attention over them, compiled against plain and plain against the reference."""

from __future__ import annotations

import ctypes
import functools

import numpy as np
import pytest

from quantkit import types
from quantkit.jit import kernel
from quantkit.runtime.kernels import rounding
from quantkit.runtime.kernels.cpu import rows
from quantkit.simd import emitted
from tests.runtime.other_cpus import run_tests, test_that_this_is_the_path  # noqa: F401


def hard_rows(rng: np.random.Generator, count: int, dim: int) -> np.ndarray:
    """float32[count, dim]: rows of all sizes, rows of zeros, halves of rows of zeros, ties of the extremes."""
    x = rng.standard_normal((count, dim)) * 10.0 ** rng.integers(-6, 4, (count, 1))
    x[0], x[1, : dim // 2], x[2], x[3, ::2] = 0, 0, 1e-30, 0
    x[4, :2] = np.abs(x[4]).max() * np.array([-1, 1])
    x[5, :2] = np.abs(x[5]).max() * np.array([1, -1])
    return x.astype(np.float32)


# ------------------------------------------------------------------------------------------------------------ rows


@functools.cache
def keeper(ggml_type: int, dim: int, size: int):
    @kernel
    def run(x, out, count):
        for row in range(count):
            rows.keep(ggml_type, x + row * dim * 4, dim, out + row * size)

    return run


@functools.cache
def reader(ggml_type: int, dim: int, size: int):
    @emitted("void")
    def read(e, row, out):
        for c, v in rows.row_floats(e, ggml_type, row, 0, dim):
            e.store(v, out + 4 * c)

    @kernel
    def run(data, out, count):
        for row in range(count):
            read(data + row * size, out + row * dim * 4)

    return run


@pytest.mark.parametrize("dim", [64, 96])
@pytest.mark.parametrize("name", rounding.FLOATS + rounding.QUANTIZED)
def test_rows_are_kept_and_read_as_the_plain_ones_are(name: str, dim: int, rng: np.random.Generator) -> None:
    x, t = hard_rows(rng, 40, dim), types.get(name)
    wanted = rounding.encode(name, x)
    got = np.zeros_like(wanted)
    keeper(t.ggml_type, dim, t.row_bytes(dim))(x.ctypes.data, got.ctypes.data, len(x))
    np.testing.assert_array_equal(got, wanted)
    values = np.zeros_like(x)
    reader(t.ggml_type, dim, t.row_bytes(dim))(got.ctypes.data, values.ctypes.data, len(x))
    np.testing.assert_array_equal(values, t.dequantize(wanted, dim))


@pytest.mark.parametrize("name", rounding.QUANTIZED)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_shows(name: str, bad: float, rng: np.random.Generator) -> None:
    x, t = rng.standard_normal((3, 64)).astype(np.float32), types.get(name)
    x[1, 40] = bad
    kept = np.zeros((3, t.row_bytes(64)), np.uint8)
    keeper(t.ggml_type, 64, t.row_bytes(64))(x.ctypes.data, kept.ctypes.data, 3)
    for data in (kept, rounding.encode(name, x)):
        with np.errstate(invalid="ignore"):
            values = t.dequantize(data, 64)
        assert np.isfinite(values[[0, 2]]).all()
        assert not np.isfinite(values[1, 32:]).any()


@pytest.mark.parametrize("name", rounding.QUANTIZED)
def test_rounding_is_the_references(name: str, rng: np.random.Generator) -> None:
    """The same codes but for ties; the reference fits some scales a little better, by 0.1% of the error at most."""
    from tests.conformance import ggml

    x, t = rng.standard_normal((300, 128)).astype(np.float32), types.get(name)
    data = np.zeros((len(x), t.row_bytes(128)), np.uint8)
    quantize = getattr(ggml.library(), f"quantize_row_{t.name}")
    quantize.restype, quantize.argtypes = None, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    for i in range(len(x)):
        quantize(x[i].ctypes.data, data[i].ctypes.data, 128)
    mine, theirs = (((t.dequantize(d, 128) - x) ** 2).sum() for d in (rounding.encode(name, x), data))
    assert mine == pytest.approx(theirs, rel=0.02)


@functools.cache
def rotator(dim: int, block: int):
    @kernel
    def run(x, count):
        for row in range(count):
            rows.rotate(x + row * dim * 4, dim, block)

    return run


@pytest.mark.parametrize("dim", [16, 32, 64, 128, 192, 256, 576])
def test_rotation(dim: int, rng: np.random.Generator) -> None:
    block = rounding.rotation_block(dim)
    assert block == {192: 64, 576: 64}.get(dim, dim)
    x = rng.standard_normal((5, dim)).astype(np.float32)
    y = x.copy()
    rotator(dim, block)(y.ctypes.data, 5)
    np.testing.assert_allclose(y, rounding.rotate(x, block), atol=2e-6)
    np.testing.assert_allclose(rounding.rotate(y, block), x, atol=2e-6)
    assert rounding.rotation_block(80) is None
