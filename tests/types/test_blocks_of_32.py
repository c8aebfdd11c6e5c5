"""Types with blocks of 32: searches and closed forms against plain numpy, what the tests of all types do not show."""

from __future__ import annotations

import zlib

import numpy as np
import pytest

from quantkit import types
from quantkit.types.families.e2m1 import E2M1
from tests.types import data, on_cpu


@pytest.mark.parametrize(
    ("name", "first", "crc"),
    [("q6_0", [-7, 14, 19, -24, -3, 2], "1c7cee30"), ("mxfp4", [-4, 1, 8, -3, 0, 6], "7dbfa3c0")],
)
def test_known_answers(name, first, crc):
    """spec/types-ik.md 13."""
    t = types.get(name)
    row = ((149 * np.arange(t.block_bytes) + 7) % 256).astype(np.uint8)
    if name == "mxfp4":
        row[0] = 128
    else:
        row[:2] = 0x00, 0x3C
    y = t.dequantize(row[None], 32)
    assert y[0, :6].tolist() == first
    assert f"{zlib.crc32(y + 0):08x}" == crc  # + 0: of both zeros the positive


def blocks_error(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return ((x.reshape(-1, 32).astype(np.float64) - y.reshape(-1, 32)) ** 2).sum(axis=1)


def fitted(x: np.ndarray, d: np.ndarray, lo: int, hi: int) -> np.ndarray:
    """Squared errors of blocks float64[blocks, 32] under the least-squares halves for the codes nearest under d."""
    q = np.clip(np.rint(x / d[:, None]), lo, hi)
    d = np.float16((x * q).sum(axis=1) / (q * q).sum(axis=1)).astype(np.float64)[:, None]
    return blocks_error(x, d * np.clip(np.rint(x / d), lo, hi))


@pytest.mark.parametrize(
    ("name", "lo", "hi", "ends"),
    [("q4_0", -8, 7, (-8, -8.8)), ("q5_0", -16, 15, (-16, 15)), ("q8_0", -127, 127, (127, 125.095, 123.19, 121.285))],
)
@pytest.mark.parametrize("kind", ["gaussian", "student3", "outliers"])
def test_the_closed_form_is_least_squares(name, lo, hi, ends, kind):
    """Without importance: the better of few candidates, each moved to the optimum of its codes."""
    t = types.get(name)
    x = data.rows(kind, 41, 8, 1024)
    ours = blocks_error(x, t.dequantize(t.quantize(x), 1024)).sum()
    blocks = x.reshape(-1, 32).astype(np.float64)
    extreme = blocks[np.arange(len(blocks)), np.abs(blocks).argmax(axis=1)]
    expected = np.min([fitted(blocks, extreme / end, lo, hi) for end in ends], axis=0).sum()
    assert ours == pytest.approx(expected, rel=8e-3)


@pytest.mark.parametrize(("name", "top"), [("q4_1", 15), ("q5_1", 31)])
@pytest.mark.parametrize("kind", ["gaussian", "student3", "outliers"])
def test_the_closed_form_of_pairs_is_least_squares(name, top, kind):
    t = types.get(name)
    x = data.rows(kind, 42, 8, 1024)
    x[0, :32] = 0.3  # a block without a range
    ours = blocks_error(x, t.dequantize(t.quantize(x), 1024))
    assert ours[0] < 1e-6
    for block, error in zip(x.reshape(-1, 32)[1:].astype(np.float64), ours[1:]):
        low, span = block.min(), np.ptp(block)
        q = np.rint((block - low) * top / span)
        d, m = np.float16(np.polyfit(q, block, 1)).astype(np.float64)
        assert error <= 1.02 * ((block - d * q - m) ** 2).sum()


@pytest.mark.parametrize(
    ("name", "lo", "hi"), [("q4_0", -8, 7), ("q5_0", -16, 15), ("q6_0", -32, 31), ("q8_0", -127, 127)]
)
def test_the_best_effort_comes_close_to_trying_everything(name, lo, hi):
    """Against 600 scales of either sign with nearest codes, by the plain formula; effort orders the errors."""
    t, ones = types.get(name), np.ones(256, np.float32)
    x = data.rows("student4", 6, 8, 256)
    fast, normal, best = (
        data.squared_error(x, t.dequantize(t.quantize(x, ones, effort=effort), 256))
        for effort in ("fast", "normal", "best")
    )
    blocks = x.reshape(-1, 32).astype(np.float64)
    extreme = np.abs(blocks).max(axis=1)
    everything = np.full(len(blocks), np.inf)
    for fraction in np.linspace(0.5, 1.2, 300):
        for sign in (-1, 1):
            d = np.float16(sign * extreme * fraction / hi).astype(np.float64)[:, None]
            everything = np.minimum(everything, blocks_error(blocks, d * np.clip(np.rint(blocks / d), lo, hi)))
    assert best <= 1.001 * normal <= 1.002 * fast
    assert best <= 1.005 * everything.sum()


@pytest.mark.parametrize("weighted", [False, True], ids=["none", "importance"])
@pytest.mark.parametrize("kind", ["gaussian", "student3", "outliers"])
def test_no_exponent_of_mxfp4_would_be_better(kind, weighted):
    t, n = types.get("mxfp4"), 1024
    x = data.rows(kind, 43, 8, n)
    x[1] *= np.float32(1e-37)  # down to where exponents end
    w = data.importance(43, n) if weighted else None
    weights = np.broadcast_to(1 if w is None else w, x.shape).reshape(-1, 32).astype(np.float64)
    y = t.dequantize(t.quantize(x, w, effort="best"), n).reshape(-1, 32)
    blocks = x.reshape(-1, 32).astype(np.float64)
    ours = (weights * (blocks - y) ** 2).sum(axis=1)
    entries = E2M1[:8].astype(np.float64)
    for e in range(253):
        nearest = entries[np.abs(np.abs(blocks)[:, :, None] / 2.0 ** (e - 128) - entries).argmin(axis=2)] * 2.0 ** (
            e - 128
        )
        assert (ours <= 1.0001 * (weights * (np.abs(blocks) - nearest) ** 2).sum(axis=1)).all(), e


def test_mxfp4_never_writes_minus_zero_nor_infinity():
    t = types.get("mxfp4")
    x = data.rows("student3", 44, 8, 1024)
    x[0] = x[0] / np.abs(x[0]).max() * np.finfo(np.float32).max
    encoded = t.quantize(x)
    codes = encoded.reshape(-1, 17)[:, 1:]
    assert not ((codes & 15 == 8) | (codes >> 4 == 8)).any()
    assert np.isfinite(t.dequantize(encoded, 1024)).all()


@pytest.mark.parametrize("what", ["encode", "encode-plain"])
def test_the_same_bytes_on_another_cpu(what):
    names = ["q4_0", "q5_1", "q6_0", "q8_0", "iq4_nl", "mxfp4", "nvfp4"]
    assert on_cpu.run("avx2", what, names) == on_cpu.digests(what, names)
