"""Exponentials and halves: one of each for vectors and for scalars, the same bits on every CPU.

`half` converts halves in kernels of types, which load no SIMD code; `IrBuilder` converts vectors, with the CPU's
instruction where there is one. Both promise the same bits for all numbers; of a NaN only that it stays one.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from quantkit.codegen import half
from quantkit.codegen.jit import kernel
from quantkit.codegen.simd import F32, I16, simd_intrinsic, vector
from quantkit.runtime.kernels import reference
from tests.other_cpus import CPUS, environment_of

FLOATS16 = vector(16, F32)


@kernel
def exp_one_by_one(x, out):
    for i in range(len(x)):
        out[i] = reference.exp(x[i])


@simd_intrinsic("void")
def _exp(ir, x, n, out):
    with ir.loop(0, n, 16) as i:
        ir.store(ir.exp(ir.load(FLOATS16, x + i * 4)), out + i * 4)


@kernel
def exp_of_vectors(x, n, out):
    _exp(x, n, out)


@kernel
def halves_of(x, out):
    for i in range(len(x)):
        out[i] = half.float_to_half(x[i])


@kernel
def floats_of(x, out):
    for i in range(len(x)):
        out[i] = half.half_to_float(x[i])


@simd_intrinsic("void")
def _halves(ir, x, n, out):
    with ir.loop(0, n, 16) as i:
        ir.store(ir.float_to_half(ir.load(FLOATS16, x + i * 4)), out + i * 2)


@kernel
def halves_of_vectors(x, n, out):
    _halves(x, n, out)


@simd_intrinsic("void")
def _floats(ir, x, n, out):
    with ir.loop(0, n, 16) as i:
        ir.store(ir.half_to_float(ir.load(vector(16, I16), x + i * 2)), out + i * 4)


@kernel
def floats_of_vectors(x, n, out):
    _floats(x, n, out)


def arguments() -> np.ndarray:
    edges = [-np.inf, -1e30, -88, np.nextafter(np.float32(-87.3), np.float32(-88)), -87.3, 88, 89, 1e30, np.inf, np.nan]
    x = np.concatenate([np.linspace(-90, 90, 200_000), edges, np.zeros(6)]).astype(np.float32)
    return x[: len(x) // 16 * 16]


def exponentials() -> tuple[np.ndarray, np.ndarray]:
    x = arguments()
    scalars, vectors = np.empty_like(x), np.empty_like(x)
    exp_one_by_one(x, scalars)
    exp_of_vectors(x.ctypes.data, len(x), vectors.ctypes.data)
    return scalars, vectors


def routed() -> np.ndarray:
    """Weights of 128 experts, of which 8 are used: a sum that vectors of other lengths would add up otherwise."""
    rng = np.random.default_rng(1)
    result = []
    for _ in range(50):
        logits, chosen, weights = (
            rng.standard_normal(128).astype(np.float32),
            np.empty(8, np.int64),
            np.empty(8, np.float32),
        )
        none = np.empty(0, np.float32)
        reference.route(logits, none, False, 1, 1, 8, 8, np.float32(0), False, np.float32(1), chosen, weights)
        result.append(weights)
    return np.array(result)


def test_one_exponential_for_scalars_and_vectors() -> None:
    x, (scalars, vectors) = arguments(), exponentials()
    np.testing.assert_array_equal(scalars.view(np.uint32), vectors.view(np.uint32))
    exact = np.exp(np.minimum(x.astype(np.float64), 88))
    exact[x < np.float32(-87.3)] = 0
    real = ~np.isnan(x)
    assert (np.abs(scalars - exact) <= 2 * np.spacing(exact.astype(np.float32)))[real & (exact > 0)].all()
    assert (scalars[exact == 0] == 0).all()
    assert np.isnan(scalars[~real]).all()
    assert scalars[x == 0].tolist() == [1.0] * int((x == 0).sum())


def test_halves_are_the_same_for_scalars_and_vectors(rng: np.random.Generator) -> None:
    bits = np.arange(1 << 16).astype(np.uint16)
    scalars, vectors = np.empty((2, len(bits)), np.float32)
    floats_of(bits, scalars)
    floats_of_vectors(bits.ctypes.data, len(bits), vectors.ctypes.data)
    expected = bits.view(np.float16).astype(np.float32)
    check(scalars, vectors, expected)
    finite = np.sort(expected[np.isfinite(expected)])
    ties = ((finite[1:].astype(np.float64) + finite[:-1]) / 2).astype(np.float32)
    near = [np.nextafter(ties, np.float32(sign * np.inf)) for sign in (-1, 1)]
    edges = np.array([np.nan, -np.nan, np.inf, -np.inf, 65519.996, 65520, 1e30, -1e30, 1e-40, 0, -0.0], np.float32)
    wild = rng.integers(0, 1 << 32, 100_000, dtype=np.uint64).astype(np.uint32).view(np.float32)
    x = np.concatenate([edges, expected, ties, *near, wild])
    x = x[: len(x) // 16 * 16]
    scalar_halves, vector_halves = np.empty((2, len(x)), np.uint16)
    halves_of(x, scalar_halves)
    halves_of_vectors(x.ctypes.data, len(x), vector_halves.ctypes.data)
    with np.errstate(over="ignore", invalid="ignore"):
        check(scalar_halves.view(np.float16), vector_halves.view(np.float16), x.astype(np.float16))


def check(scalars: np.ndarray, vectors: np.ndarray, expected: np.ndarray) -> None:
    """The same bits, but for NaN."""
    real, bits = ~np.isnan(expected), f"u{expected.itemsize}"
    for result in (scalars, vectors):
        np.testing.assert_array_equal(result[real].view(bits), expected[real].view(bits))
        assert np.isnan(result[~real]).all()


def digest() -> str:
    scalars, vectors = exponentials()
    return hashlib.sha256(scalars.tobytes() + vectors.tobytes() + routed().tobytes()).hexdigest()


@pytest.mark.parametrize("isa", CPUS)
def test_the_same_bits_on_other_cpus(isa: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.runtime.test_elementary"], env=environment_of(isa), text=True,
        cwd=Path(__file__).parents[2], capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == digest()


if __name__ == "__main__":
    print(digest())
