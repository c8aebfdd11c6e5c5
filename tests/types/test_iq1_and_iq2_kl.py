"""The ternary grid of the IQ1 types, their groups of rows, IQ2_KL's pairs; their searches against exhaustive ones."""

from __future__ import annotations

import itertools
import zlib

import numpy as np
import pytest

from quantkit import types
from quantkit.types import iq2_kl
from quantkit.types.families import iq1
from tests.types import data
from tests.types.naive import pairs_and_ternary as naive
from tests.types.test_decode import same_bits


def test_the_grid_is_that_of_the_gguf_package():
    np.testing.assert_array_equal(iq1.LEVELS, naive.grid())
    np.testing.assert_array_equal(iq1.NUMBER[iq1.POINTS], np.arange(2048))


def test_the_pairs_are_those_of_the_specification():
    np.testing.assert_array_equal(iq2_kl.PAIRS, naive.PAIRS)


@pytest.mark.parametrize("name", ["iq1_s_r4", "iq1_m_r4"])
def test_groups_of_rows_against_plain_python(name, rng):
    t, n = types.get(name), 96
    encoded = data.random_bytes(t, rng, 12, n)
    with np.errstate(all="ignore"):
        expected = [getattr(naive, name)(bytes(encoded[r : r + 4]), n) for r in range(0, 12, 4)]
    same_bits(t.dequantize(encoded, n), np.array(expected, np.float32).reshape(12, n))


@pytest.mark.parametrize(
    ("name", "group_crc", "crc", "total"),
    [("iq1_s_r4", 0x1A0562B4, 0x750AA362, -267.25), ("iq1_m_r4", 0x05818D60, 0xA1E3AC58, 146.5)],
)
def test_known_groups(name, group_crc, crc, total):
    t = types.get(name)
    count = 4 * t.row_bytes(256) - 8
    blocks = (np.arange(count, dtype=np.uint32) * np.uint32(2654435761) >> 24).astype(np.uint8)
    group = np.concatenate([np.array([1, 0.5, 0.25, 2], "<f2").view(np.uint8), blocks])
    assert zlib.crc32(group.tobytes()) == group_crc
    y = t.dequantize(group.reshape(4, -1), 256)
    assert (zlib.crc32(y.tobytes()), y.sum()) == (crc, total)


def test_a_known_row_of_iq2_kl():
    row = ((149 * np.arange(88) + 7) % 256).astype(np.uint8)
    row[:2] = 0x00, 0x3C
    y = types.get("iq2_kl").dequantize(row[None], 256)
    assert (zlib.crc32(y.tobytes()), y.sum()) == (0x334632D2, -7362)


@pytest.mark.parametrize("name", ["iq1_s", "iq1_m"])
def test_points_come_close_to_the_best_of_all(name):
    """Under the scales and deltas that an encoder chose, against the weighted nearest of the 2048 points."""
    t = types.get(name)
    x, weights = data.rows("gaussian", 6, 8, 256), data.importance(6, 256)
    y = t.dequantize(t.quantize(x, weights), 256)
    w = np.broadcast_to(weights, x.shape).astype(np.float64).reshape(-1, 8)
    ours = (w * (x - y).reshape(-1, 8) ** 2).sum()
    best = 0.0
    for z, u, v in zip(x.reshape(-1, 8), w, y.reshape(-1, 8)):
        scale, delta = _scale_and_delta(v)
        best += (u * (z - scale * (iq1.LEVELS + delta)) ** 2).sum(axis=1).min()
    assert ours <= 1.01 * best


def _scale_and_delta(y: np.ndarray) -> tuple[float, float]:
    """What gives eight decoded values: magnitudes are 1/8, 7/8 and 9/8 of the scale, zeros show the delta's sign."""
    for scale in np.abs(y[np.argmax(np.abs(y))]) / np.array([0.125, 0.875, 1.125]):
        for delta in (0.125, -0.125):
            level = y / scale - delta
            if np.abs(level - np.rint(level)).max() < 1e-3 and np.abs(level).max() < 1.5:
                return scale, delta
    raise AssertionError(y)


def test_iq2_kl_comes_close_to_trying_everything():
    """Against every multiplier with the best pairs, under the super-scale that the encoder chose and its neighbours."""
    t = types.get("iq2_kl")
    x, q = data.rows("student4", 7, 4, 256), data.importance(7, 256)
    encoded = t.quantize(x, q)
    w = np.broadcast_to(q, x.shape).astype(np.float64)
    ours = (w * (x - t.dequantize(encoded, 256)) ** 2).sum()
    best = 0.0
    for row, u, d in zip(x, w, encoded[:, :2].copy().view("<f2")[:, 0].astype(np.float64)):
        best += min(_every_multiplier(row, u, d * f) for f in (0.97, 0.99, 1, 1.01, 1.03))
    assert ours <= 1.01 * best


def _every_multiplier(x: np.ndarray, w: np.ndarray, d: float) -> float:
    """The least error of a row of 256 under super-scale d."""
    least = np.full(8, np.inf)
    for m, (sub, u) in itertools.product(range(-32, 32), enumerate(zip(x.reshape(8, 16, 2), w.reshape(8, 16, 2)))):
        z, weight = u
        error = (weight[:, None] * (z[:, None] - d * m * iq2_kl.PAIRS) ** 2).sum(axis=2).min(axis=1).sum()
        least[sub] = min(least[sub], error)
    return least.sum()
