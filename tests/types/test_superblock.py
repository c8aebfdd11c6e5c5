"""Types with blocks of 256: what the tests of all types do not show."""

from __future__ import annotations

import numpy as np
import pytest

from quantkit import types
from quantkit.types.families import superblock
from tests.types import data, on_cpu

NAMES = ("q4_K", "q6_K", "iq4_k")


def objective(name: str, x: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
    """Weights of the reference's own objective, float64[rows, n]; of iq4_k with importance ours, which is q alone."""
    blocks = x.astype(np.float64).reshape(len(x), -1, 256)
    if importance is not None and name != "q4_K":
        return np.broadcast_to(importance, x.shape)
    if importance is not None:
        size = np.sqrt(2 * (blocks**2).mean(axis=2, keepdims=True) + blocks**2)
        return importance * size.reshape(x.shape)
    if name == "q4_K":
        parts = blocks.reshape(len(x), -1, 32)
        return (np.sqrt((parts**2).mean(axis=2, keepdims=True)) + np.abs(parts)).reshape(x.shape)
    return (blocks**2).reshape(x.shape)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", data.DISTRIBUTIONS)
@pytest.mark.parametrize("weighted", [False, True], ids=["none", "importance"])
def test_also_better_in_the_references_own_objective(name, kind, weighted, request):
    from tests.conformance import ggml

    model = request.getfixturevalue("smollm2_q4_1") if kind in ("real", "rotated") else None
    n, t = 512, types.get(name)
    x = data.rows(kind, 31, 32, n, model)
    weights = data.importance(31, n) if weighted else None
    w = objective(name, x, weights)
    errors = [
        (w * (x - t.dequantize(encoded, n).astype(np.float64)) ** 2).sum()
        for encoded in (t.quantize(x, weights), ggml.quantize(name, x, weights))
    ]
    assert errors[0] <= errors[1], f"{errors[0] / errors[1]:.4f}"


@pytest.mark.parametrize("name", NAMES)
def test_small_weights_lose_nothing(name):
    """Super-scales that are subnormal halves are chosen as such, so the relative error stays what it was."""
    t = types.get(name)
    x = data.rows("gaussian", 12, 16, 512)
    usual, small = (data.squared_error(x * s, t.dequantize(t.quantize(x * s), 512)) / s**2 for s in (1, 0.05))
    assert small <= 1.05 * usual


def test_scales_are_stored_as_halves():
    for value, unit in ((0.3, 1.0), (3e-6, 2.0**-9), (1e-9, 1.0), (1e6, 1.0), (70000.0, 1.0), (-0.3, 4.0)):
        result = superblock.storable(np.float32(value), np.float32(unit)) * unit
        expected = np.float16(np.clip(abs(value) * unit, 2.0**-24, 65504)) * np.sign(value)
        assert result == expected


@pytest.mark.parametrize("isa", [pytest.param("generic", marks=pytest.mark.full), "avx2"])
def test_the_same_bytes_on_another_cpu(isa):
    assert on_cpu.run(isa, "encode", list(NAMES)) == on_cpu.digests("encode", list(NAMES))
