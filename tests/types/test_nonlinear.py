"""iq2_k, iq3_k, iq4_k, iq5_k, iq6_k: what the tests of all types do not show."""

from __future__ import annotations

import importlib
import zlib

import numpy as np
import pytest

from quantkit import types
from quantkit.types.families import codebooks, nonlinear
from tests.types import data, on_cpu

NAMES = ("iq2_k", "iq3_k", "iq4_k", "iq5_k", "iq6_k")
KNOWN = {"iq2_k": "b2bfcd93", "iq3_k": "e33bbeba", "iq4_k": "fceb0d35", "iq5_k": "a1b241f9", "iq6_k": "0bf14dee"}


def format_of(name: str) -> nonlinear.NonlinearFormat:
    return importlib.import_module(f"quantkit.types.{name}").FORMAT


@pytest.mark.parametrize("name", NAMES)
def test_known_answer(name):
    """spec/types-ik.md 13."""
    t = types.get(name)
    row = ((149 * np.arange(t.block_bytes) + 7) % 256).astype(np.uint8)
    row[:2] = 0x00, 0x3C
    assert f"{zlib.crc32(t.dequantize(row[None], 256)):08x}" == KNOWN[name]


def least_error(name: str, block: np.ndarray, w: np.ndarray) -> float:
    """All multipliers and both codebooks with nearest codes, under 300 super-scales of either sign: float64[16, 16]."""
    f, book = format_of(name), getattr(codebooks, f"K{name[2]}")
    levels = book.values.astype(np.float64).reshape(2, -1)
    magnitudes = np.arange(f.min_multiplier, f.max_multiplier + 1, f.step)
    multipliers = np.r_[magnitudes, -magnitudes, [-f.extreme] if f.extreme > f.max_multiplier else []].astype(
        np.float64
    )
    best = np.inf
    usual = np.abs(block).max() / np.abs(levels).max() / f.max_multiplier
    for d in usual * np.r_[np.geomspace(0.6, 2, 150), -np.geomspace(0.6, 2, 150)]:
        s = np.float64(np.float16(d)) * multipliers[:, None, None, None]
        midpoints = (levels[:, 1:] + levels[:, :-1]) / 2
        codes = [levels[k][np.searchsorted(midpoints[k], block / s[:, 0])] for k in range(2)]
        each = (w * (block - s * np.stack(codes, axis=1)) ** 2).sum(axis=3).min(axis=(0, 1))
        if f.step == 1:
            each = np.minimum(each, (w * block**2).sum(axis=1))
        best = min(best, each.sum())
    return best


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("weighted", [False, True])
def test_blocks_keep_their_norm(name, weighted):
    t, f = types.get(name), format_of(name)
    x = 50 * data.rows("gaussian", 21, 16, 1024)
    q = data.importance(21, 1024) if weighted else None
    y = t.dequantize(t.quantize(x, q), 1024)
    mean = np.repeat((x.reshape(-1, 256).astype(np.float64) ** 2).mean(axis=1), 256).reshape(x.shape)
    w = f.variance_weight * mean + x**2 if q is None else q
    assert abs((w * y**2).sum() / (w * x**2).sum() - 1) < 0.005  # least squares: .93 to .966 of iq2_k, .985 of iq3_k


@pytest.mark.parametrize("name", NAMES)
def test_search_comes_close_to_trying_everything(name):
    t, f = types.get(name), format_of(name)
    x = 50 * data.rows("student4", 13, 4, 256)  # super-scales are normal halves
    y = t.dequantize(t.quantize(x), 256)
    if name == "iq6_k":  # decoded values are not those that the search is after
        y = integer_form(t.quantize(x))
    ours = exhaustive = 0.0
    for block, decoded in zip(x.reshape(-1, 16, 16).astype(np.float64), y.reshape(-1, 16, 16)):
        w = f.variance_weight * (block**2).mean() + block**2
        ours += (w * (block - decoded) ** 2).sum()
        exhaustive += least_error(name, block, w)
    # iq6_k has 254 scales under each super-scale: everything is far more than a search can try.
    assert ours <= (1.15 if name == "iq6_k" else 1.05) * exhaustive


def integer_form(rows: np.ndarray) -> np.ndarray:
    """What matrix products make of iq6_k rows of one block: the code's integer times d times the multiplier."""
    y = np.empty((len(rows), 256))
    for row, out in zip(rows, y):
        d, flags = float(row[:2].view(np.float16)[0]), int(row[2:4].view(np.uint16)[0])
        j = np.arange(256)
        low = row[20 + 32 * (j // 64) + j % 32] >> 4 * (j // 32 % 2) & 15
        high = row[148 + 32 * (j // 128) + j % 32] >> 2 * (j // 32 % 4) & 3
        flag = flags >> (j // 16) & 1
        out[:] = d * row[4:20].view(np.int8)[j // 16] * codebooks.K6.values[64 * flag + low + 16 * high]
    return y


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [0.05, 0.005])
def test_small_weights_lose_little(name, size):
    """Standard deviations of 1e-3 and 1e-4: super-scales are subnormal halves, of 1 to 300 units, chosen as such."""
    t = types.get(name)
    x = data.rows("gaussian", 12, 16, 512)
    usual, small = (data.squared_error(x * s, t.dequantize(t.quantize(x * s), 512)) / s**2 for s in (1, size))
    assert small <= (1.1 if size > 0.01 else 1.5) * usual


@pytest.mark.parametrize("name", NAMES)
def test_efforts_differ_in_error(name):
    t, x, importance = types.get(name), data.rows("student4", 14, 16, 512), data.importance(14, 512)
    fast, normal, best = (
        data.squared_error(x, t.dequantize(t.quantize(x, importance, effort=effort), 512), importance)
        for effort in ("fast", "normal", "best")
    )
    assert best <= 1.003 * normal
    assert normal <= 1.003 * fast <= 1.2 * normal


def test_logarithms_are_those_of_the_machine():
    places = np.log2(1 + (np.arange(1024) + 0.5) / 1024) * 4096
    assert np.abs(nonlinear._LOG - np.floor(places)).max() <= 1
    np.testing.assert_allclose(nonlinear._POWER, 2 ** (np.arange(128) / 128), rtol=1e-7)


@pytest.mark.parametrize("isa", ["generic", "avx2"])
@pytest.mark.parametrize("what", ["encode", "decode"])
def test_the_same_on_another_cpu(isa, what):
    names = ["iq2_k", "iq3_k", "iq5_k", "iq6_k"]
    assert on_cpu.run(isa, what, names) == on_cpu.digests(what, names)
