"""Types of one bit or three values, and q8_KV: known answers, exact rows, and searches against exhaustive ones."""

from __future__ import annotations

import zlib

import numpy as np
import pytest

from quantkit import types
from tests.types import data, on_cpu

ONE, ONE_HALF = (np.array([1], kind).view(np.uint8) for kind in ("<f4", "<f2"))


@pytest.mark.parametrize(
    ("name", "n", "offset", "scale_bytes", "first", "crc"),
    [
        ("iq1_bn", 64, 0, ONE_HALF, [0, -1, 1, 0, -1, 0], "0e22ffad"),
        ("iq2_bn", 64, 0, ONE, [2, -1, 0, 1, 2, -1], "8aaa363a"),
        ("i2_s", 128, 32, ONE, [-1, 1, -1, 2, 0, 2], "979cb593"),
        ("q1_0_g128", 128, 0, ONE_HALF, [1, -1, -1, -1, 1, 1], "ed25b9c9"),
        ("q8_KV", 32, 0, ONE, [-81, 68, -39, 110, 3, -104], "cadcbf53"),
    ],
)
def test_known_answers(name, n, offset, scale_bytes, first, crc):
    """spec/types-ik.md 13."""
    t = types.get(name)
    row = ((149 * np.arange(t.row_bytes(n)) + 7) % 256).astype(np.uint8)
    row[offset : offset + scale_bytes.size] = scale_bytes
    y = t.dequantize(row[None], n)
    assert y[0, :6].tolist() == first
    assert f"{zlib.crc32(y):08x}" == crc


@pytest.mark.parametrize("name", ["iq1_bn", "iq2_bn"])
@pytest.mark.parametrize("effort", ["fast", "normal", "best"])
def test_ternary_rows_stay_what_they_are(name, effort, rng):
    t = types.get(name)
    x = rng.integers(-1, 2, (40, 512)).astype(np.float32)
    x[0], x[1, 1:], x[2] = 0, 0, -1
    x *= rng.lognormal(0, 3, (40, 1)).astype(np.float32)
    expected = np.float16(x).astype(np.float32) if name == "iq1_bn" else x
    for importance in (None, data.importance(3, 512)):
        np.testing.assert_array_equal(t.dequantize(t.quantize(x, importance, effort=effort), 512), expected)


@pytest.mark.parametrize("kind", ["gaussian", "student4", "outliers"])
@pytest.mark.parametrize("weighted", [False, True], ids=["none", "importance"])
def test_ternary_rows_come_close_to_the_best_there_is(kind, weighted):
    """The best threshold of all, by sorting: sum w x^2 - max A^2 / Q over the k largest magnitudes."""
    t, n = types.get("iq2_bn"), 1024
    x = data.rows(kind, 17, 16, n)
    w = data.importance(17, n) if weighted else np.ones(n, np.float32)
    a = np.abs(x.astype(np.float64))
    order = np.argsort(-a, axis=1)
    total, weights = (
        np.cumsum(np.take_along_axis(v, order, axis=1), axis=1) for v in (w * a, np.broadcast_to(w, a.shape))
    )
    least = ((w * a * a).sum(axis=1) - (total**2 / weights).max(axis=1)).sum()
    for effort, bound in (("fast", 1.1), ("normal", 1.06), ("best", 1.02)):
        y = t.dequantize(t.quantize(x, w if weighted else None, effort=effort), n)
        assert data.squared_error(x, y, w) <= bound * least


def test_i2_s_becomes_iq2_bn_without_loss(rng):
    source, target = types.get("i2_s"), types.get("iq2_bn")
    encoded = data.random_bytes(source, rng, 8, 256)
    pairs = np.array([v for v in range(256) if all(v >> 2 * k & 3 < 3 for k in range(4))], np.uint8)
    encoded[:, :64] = rng.choice(pairs, (8, 64))  # fields 0 to 2
    encoded[:, 64:68] = rng.lognormal(0, 3, 8).astype("<f4").view(np.uint8).reshape(8, 4)
    x = source.dequantize(encoded, 256)
    np.testing.assert_array_equal(target.dequantize(target.quantize(x), 256), x)


def test_q1_0_g128_has_the_best_half_there_is():
    t = types.get("q1_0_g128")
    x, w = data.rows("student4", 19, 16, 256), data.importance(19, 256)
    blocks, weights = x.astype(np.float64).reshape(16, 2, 128), w.astype(np.float64).reshape(2, 128)
    best = (weights * np.abs(blocks)).sum(axis=2) / weights.sum(axis=1)
    encoded = t.quantize(x, w).reshape(16, 2, 18)
    np.testing.assert_array_equal(encoded[:, :, :2].copy().view("<f2")[:, :, 0], best.astype(np.float16))
    bits = np.unpackbits(encoded[:, :, 2:], axis=2, bitorder="little")
    np.testing.assert_array_equal(bits, blocks >= 0)


def test_q8_kv_has_the_reference_s_bytes_and_at_best_a_smaller_scale():
    from tests.conformance import ggml

    t, n = types.get("q8_KV"), 2048
    x = data.rows("student4", 23, 8, n)
    x[3] = 0
    usual, best = t.quantize(x), t.quantize(x, effort="best")
    np.testing.assert_array_equal(usual, ggml.quantize("q8_KV", x))
    assert data.squared_error(x, t.dequantize(best, n)) < 0.995 * data.squared_error(x, t.dequantize(usual, n))
    sums = best[:, 8:].view(np.int8).sum(axis=1, dtype=np.int32)
    np.testing.assert_array_equal(best[:, 4:8].copy().view("<i4")[:, 0], sums)


@pytest.mark.parametrize("isa", [pytest.param("generic", marks=pytest.mark.full), "avx2"])
def test_the_same_on_another_cpu(isa):
    names = ["f16", "bf16", "q8_KV", "q1_0_g128", "iq1_bn", "iq2_bn", "tq1_0", "q2_0"]
    assert on_cpu.run(isa, "encode", names) == on_cpu.digests("encode", names)
