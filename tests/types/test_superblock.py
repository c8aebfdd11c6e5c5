"""Types with blocks of 256: what the tests of all types do not show."""

from __future__ import annotations

import zlib

import numpy as np
import pytest

from quantkit import types
from quantkit.types import iq4_k, superblock
from tests.types import data, on_cpu

NAMES = ("q4_K", "q6_K", "iq4_k")


def test_known_answer_of_iq4_k():
    """spec/types-ik.md 13."""
    row = ((149 * np.arange(144) + 7) % 256).astype(np.uint8)
    row[:2] = 0x00, 0x3C
    y = types.get("iq4_k").dequantize(row[None], 256)
    assert y[0, :6].tolist() == [-186, 1767, -3100, -558, 1302, -3813]
    assert f"{zlib.crc32(y):08x}" == "fceb0d35"


def objective(name: str, x: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
    """Weights of the reference's own objective, float64[rows, n]."""
    blocks = x.astype(np.float64).reshape(len(x), -1, 256)
    if importance is not None and name == "q6_K":
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

    model = request.getfixturevalue("smollm2_q4_1") if kind == "real" else None
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


def test_search_of_iq4_k_comes_close_to_trying_everything():
    """All multipliers and codebooks with nearest codes, under 300 super-scales of either sign."""
    t = types.get("iq4_k")
    x = data.rows("student4", 13, 4, 256)
    blocks = x.reshape(-1, 16, 16).astype(np.float64)
    square = (blocks**2).mean(axis=(1, 2), keepdims=True)
    w = square + blocks**2
    ours = (w * (blocks - t.dequantize(t.quantize(x), 256).reshape(blocks.shape)) ** 2).sum(axis=(1, 2))
    books = np.array([iq4_k.CODEBOOK, iq4_k.CODEBOOK + iq4_k.SHIFT], np.float64)
    multipliers = np.r_[-32:0, 1:32].astype(np.float64)
    for block, weight, error in zip(blocks, w, ours):
        best = np.inf
        for factor in np.geomspace(0.7, 2, 300):
            d = np.float64(np.float16(np.abs(block).max() / (127 * 32) * factor))
            scaled = block[None, None] / (d * multipliers[:, None, None, None])  # [m, 1, s, j]
            midpoints = (books[:, 1:] + books[:, :-1]) / 2
            codes = np.stack([books[k][np.searchsorted(midpoints[k], scaled[:, 0])] for k in range(2)], axis=1)
            y = d * multipliers[:, None, None, None] * codes
            each = (weight * (block - y) ** 2).sum(axis=3).min(axis=(0, 1))
            best = min(best, np.minimum(each, (weight * block**2).sum(axis=1)).sum())
        assert error <= 1.04 * best


def test_a_profile_tells_the_error_removed(rng):
    """Against nearest codes by plain numpy at scales all over the grid."""
    x, w = rng.standard_normal(16).astype(np.float32), rng.chisquare(1, 16).astype(np.float32)
    levels = iq4_k.CODEBOOK.astype(np.float32)
    first, step = np.float32(80), np.float32(2.5)
    gains = np.zeros((2, superblock.PLACES), np.float32)
    best = np.zeros((2, superblock.PLACES), np.float32)
    table = superblock.nearest_table(levels)
    superblock.enter_crossings(x, w, np.float32(1), levels, table, first, step, gains[0], gains[1])
    superblock.merge_profile(gains[0], gains[1], first, step, best[0], best[1])
    assert not gains.any()
    for place in range(superblock.PLACES):
        s = 1 / (float(first) + place * float(step))
        codes = levels[np.abs(x[:, None] / s - levels).argmin(axis=1)]
        removed = (w * x.astype(np.float64) ** 2).sum() - (w * (x - s * codes.astype(np.float64)) ** 2).sum()
        told = superblock.profile_gain(best[0], best[1], np.float32(s), first, 1 / step)
        assert told == pytest.approx(max(removed, 0), rel=2e-3, abs=1e-4)


def test_scales_are_stored_as_halves():
    for value, unit in ((0.3, 1.0), (3e-6, 2.0**-9), (1e-9, 1.0), (1e6, 1.0), (70000.0, 1.0), (-0.3, 4.0)):
        got = superblock.storable(np.float32(value), np.float32(unit)) * unit
        expected = np.float16(np.clip(abs(value) * unit, 2.0**-24, 65504)) * np.sign(value)
        assert got == expected


@pytest.mark.parametrize("cpu", [pytest.param("generic", marks=pytest.mark.full), "haswell"])
def test_the_same_bytes_on_another_cpu(cpu):
    assert on_cpu.run(cpu, "encode", list(NAMES)) == on_cpu.digests("encode", list(NAMES))
