"""Encoded trellis rows whose errors along given directions are made to vanish: what changes, and what must not."""

from __future__ import annotations

import numpy as np
import pytest

from quantkit import types
from tests.types import data

NAMES = ["iq1_kt", "iq2_kt", "iq3_kt", "iq4_kt"]
by_name = pytest.mark.parametrize("name", NAMES)
STRENGTH = 0.3  # of the last sweep


def directions(n: int, count: int = 4, heavy: bool = False) -> np.ndarray:
    """Orthonormal float32[count, n]; of heavy tails: most of each lies in a few columns."""
    rng = np.random.default_rng(n)
    rows = rng.standard_t(1.5, (n, count)) if heavy else rng.standard_normal((n, count))
    return np.ascontiguousarray(np.linalg.qr(rows)[0].T, np.float32)


def losses(x, y, weights, v):
    """sum w e^2 and |V e|^2 of each row, and J, in float64."""
    e = y.astype(np.float64) - x
    error, along = (weights * e * e).sum(axis=1), ((e @ v.T.astype(np.float64)) ** 2).sum(axis=1)
    return error, along, error + STRENGTH * weights.sum(dtype=np.float64) / len(v) * along


def nudged(t, x, weights, v, encoded):
    changed = encoded.copy()
    t.nudge_rows(x, weights, v, changed)
    return changed


def scales_alone(name, encoded):
    """The encoded rows with all bits of indices and signs cleared."""
    header, blocks = encoded[:, :4], encoded[:, 4:].reshape(len(encoded), -1, types.get(name).block_bytes)
    size, mask = {"iq1_kt": (8, 0x0F), "iq2_kt": (4, 0xFF), "iq3_kt": (4, 0xFF), "iq4_kt": (32, 0xFF)}[name]
    fields = blocks[:, :, :size] & np.uint8(mask)
    if name == "iq4_kt":
        fields = fields[:, :, ::4]  # the lowest bytes of 32 bits: table and multiplier
    return np.concatenate([header.reshape(-1), fields.reshape(-1)])


@by_name
@pytest.mark.parametrize("n", [256, 768])
def test_fields_come_back(name, n):
    t = types.get(name)
    kind = type(t)
    for encoded in (t.quantize(data.rows("student4", 1, 5, n)), data.random_bytes(t, np.random.default_rng(2), 5, n)):
        signs, fields, again = np.ones((5, n), np.float32), kind._fields_of(5, n), np.empty_like(encoded)
        kind._unpack(encoded, signs, *fields)
        kind._pack(signs, *fields, again)
        assert np.array_equal(again, encoded)
        assert t.dequantize(again, n).tobytes() == t.dequantize(encoded, n).tobytes()


@by_name
@pytest.mark.parametrize("n", [256, 768])
@pytest.mark.parametrize("weighted", [False, True], ids=["none", "importance"])
@pytest.mark.parametrize("heavy", [False, True], ids=["spread", "heavy"])
def test_errors_along_directions_vanish(name, n, weighted, heavy):
    t = types.get(name)
    x, v = data.rows("gaussian", 3, 19, n), directions(n, heavy=heavy)
    weights = data.importance(3, n) if weighted else np.ones(n, np.float32)
    encoded = t.quantize(x, weights)
    changed = nudged(t, x, weights, v, encoded)
    before, after = (losses(x, t.dequantize(rows, n), weights, v) for rows in (encoded, changed))
    assert (after[2] <= before[2]).all()
    if n == 768:
        assert after[1].sum() < 0.05 * before[1].sum()
        assert after[0].sum() < (1.06 if heavy else 1.03) * before[0].sum()
    assert np.array_equal(scales_alone(name, changed), scales_alone(name, encoded))
    assert np.array_equal(nudged(t, x[4:7], weights, v, encoded[4:7]), changed[4:7])  # rows know nothing of others


@by_name
@pytest.mark.filterwarnings("ignore:overflow")
def test_rows_of_extreme_sizes(name):
    t, n = types.get(name), 768
    x, v = data.rows("gaussian", 5, 9, n), directions(n, 7)
    weights = data.importance(5, n)
    weights[::3] = 0
    x[0], x[1, 32:64], x[4, 1:] = 0, 0, 0
    x[2] *= np.float32(1e30 / np.abs(x[2]).max())
    x[3] = np.float32(1e-41) * np.arange(n)
    x[5] *= np.float32(1e-29)
    x[6, 5] = 1e30
    x[7] = x[7] / np.abs(x[7]).max() * np.float32(3.4e38)
    encoded = t.quantize(x, weights)
    for given in (weights, np.zeros(n, np.float32), np.float32(1e30) * weights, np.float32(1e-30) * weights):
        changed = nudged(t, x, given, v, encoded)
        used = given if given.any() else np.ones(n, np.float32)
        before, after = (losses(x, t.dequantize(rows, n), used, v) for rows in (encoded, changed))
        assert np.isfinite(t.dequantize(changed, n)).all()
        assert (after[2] <= before[2]).all()
        assert np.array_equal(changed[0], encoded[0])
        assert after[1][2] < 0.05 * before[1][2]
        assert np.array_equal(scales_alone(name, changed), scales_alone(name, encoded))


@by_name
def test_rows_that_are_not_theirs(name):
    """Any bytes are rows: scales of NaN, Inf and what is far from x among them."""
    t, n = types.get(name), 256
    x, v, weights = data.rows("gaussian", 6, 7, n), directions(n), np.ones(n, np.float32)
    encoded = data.random_bytes(t, np.random.default_rng(7), 7, n)
    encoded[:3, :4] = np.array([np.nan, np.inf, -1e-3], np.float32)[:, None].view(np.uint8)
    changed = nudged(t, x, weights, v, encoded)
    with np.errstate(all="ignore"):
        before, after = (losses(x, t.dequantize(rows, n), weights, v)[2] for rows in (encoded, changed))
    assert np.array_equal(changed[:2], encoded[:2])
    assert (~(after > before)).all()
    assert after[2] < before[2]


@by_name
def test_nothing_to_do(name):
    t, n = types.get(name), 256
    x, weights = data.rows("gaussian", 8, 3, n), np.ones(n, np.float32)
    encoded = t.quantize(x, weights)
    assert np.array_equal(nudged(t, x, weights, directions(n)[:0], encoded), encoded)
    assert nudged(t, x[:0], weights, directions(n), encoded[:0]).shape == (0, encoded.shape[1])
