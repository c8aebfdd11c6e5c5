"""Types that llama.cpp has and ik_llama.cpp has not: encoders against the best there is and against llama.cpp's."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from quantkit import types
from quantkit.types.families.e2m1 import E2M1
from quantkit.types.nvfp4 import UE4M3
from tests.types import data

weighted = pytest.mark.parametrize("weighted", [False, True], ids=["none", "importance"])
kinds = pytest.mark.parametrize("kind", ["gaussian", "student3", "outliers"])


def best_of_all_scales(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """The least sum of w (x - y)^2 of each sub-block, over all 127 scales of NVFP4 with the nearest codes.

    x, w float64[sub-blocks, 16]
    """
    entries, best = E2M1[:8].astype(np.float64) / 2, np.full(len(x), np.inf)
    for scale in UE4M3[:127].astype(np.float64):
        nearest = np.abs(np.abs(x)[:, :, None] - scale * entries).min(axis=2)
        best = np.minimum(best, (w * nearest**2).sum(axis=1))
    return best


@weighted
@kinds
@pytest.mark.parametrize("size", [1, 30], ids=["subnormal scales", "normal scales"])
def test_no_scale_of_nvfp4_would_be_better(kind, size, weighted):
    t, n = types.get("nvfp4"), 1024
    x = data.rows(kind, 43, 8, n) * np.float32(size)
    w = np.broadcast_to(data.importance(43, n) if weighted else np.ones(n, np.float32), x.shape)
    y = t.dequantize(t.quantize(x, w[0], effort="best"), n)
    ours = (w.astype(np.float64) * (x.astype(np.float64) - y) ** 2).reshape(-1, 16).sum(axis=1)
    least = best_of_all_scales(*(a.astype(np.float64).reshape(-1, 16) for a in (x, w)))
    assert ours.sum() <= 1.0001 * least.sum()
    normal = data.squared_error(x, t.dequantize(t.quantize(x, w[0]), n), w)
    assert normal <= 1.01 * least.sum()


@kinds
def test_nvfp4_has_a_smaller_error_than_the_largest_element_over_six(kind):
    """The scale that llama.cpp's encoder takes, by the gguf package."""
    t, n, nvfp4 = types.get("nvfp4"), 1024, gguf.quants.NVFP4
    x = data.rows(kind, 44, 16, n)
    blocks = x.reshape(-1, 16)
    d = nvfp4.ue4m3_to_fp32(nvfp4.fp32_to_ue4m3(np.abs(blocks).max(axis=1) / 6))
    values = d[:, None, None] * E2M1
    nearest = np.abs(values - blocks[:, :, None]).argmin(axis=2)
    theirs = np.take_along_axis(values[:, 0], nearest, axis=1).reshape(x.shape)
    for effort in types.EFFORTS:
        assert data.squared_error(x, t.dequantize(t.quantize(x, effort=effort), n)) < data.squared_error(x, theirs)


def test_nvfp4_writes_no_minus_zero_no_nan_and_clips():
    t = types.get("nvfp4")
    x = data.rows("student3", 44, 8, 1024)
    x[0] *= np.float32(1e30)
    x[1] *= np.float32(1e-9)
    encoded = t.quantize(x).reshape(8, -1, 36)
    scales, codes = encoded[:, :, :4], encoded[:, :, 4:]
    assert scales.max() == 126
    assert not scales[1].any()
    assert not ((codes & 15 == 8) | (codes >> 4 == 8)).any()
    assert np.abs(t.dequantize(encoded.reshape(8, -1), 1024)).max() == 2688


TQ1_0, TQ2_0 = (gguf.GGMLQuantizationType(types.get(name).ggml_type) for name in ("tq1_0", "tq2_0"))


@pytest.mark.parametrize("effort", types.EFFORTS)
@pytest.mark.parametrize("name", ["tq1_0", "tq2_0", "q2_0"])
def test_ternary_blocks_stay_what_they_are(name, effort, rng):
    """As the weights of BitNet models are: one scale a row. For two of the types the gguf package has an encoder."""
    t = types.get(name)
    x = rng.integers(-1, 2, (40, 512)).astype(np.float32)
    x[0], x[1, 1:], x[2] = 0, 0, -1
    x *= rng.lognormal(0, 3, (40, 1)).astype(np.float32)
    expected = np.float16(x).astype(np.float32)
    for importance in (None, data.importance(3, 512)):
        encoded = t.quantize(x, importance, effort=effort)
        np.testing.assert_array_equal(t.dequantize(encoded, 512), expected)
    if name != "q2_0":
        np.testing.assert_array_equal(encoded, gguf.quants.quantize(x, TQ1_0 if name == "tq1_0" else TQ2_0))


@weighted
@kinds
def test_tq2_0_comes_close_to_the_best_there_is(kind, weighted):
    """By sorting: the k largest magnitudes of a block, with A = sum w |x| and Q = sum w, take A^2 / Q off the error."""
    t, n = types.get("tq2_0"), 1024
    x = data.rows(kind, 17, 16, n)
    w = data.importance(17, n) if weighted else np.ones(n, np.float32)
    a = np.abs(x.astype(np.float64)).reshape(-1, 256)
    weights = np.broadcast_to(w.astype(np.float64), x.shape).reshape(-1, 256)
    order = np.argsort(-a, axis=1)
    total, sizes = (np.cumsum(np.take_along_axis(v, order, axis=1), axis=1) for v in (weights * a, weights))
    least = ((weights * a * a).sum(axis=1) - (total**2 / sizes).max(axis=1)).sum()
    for effort, bound in (("fast", 1.1), ("normal", 1.05), ("best", 1.01)):
        y = t.dequantize(t.quantize(x, w if weighted else None, effort=effort), n)
        assert data.squared_error(x, y, w) <= bound * least


@weighted
@kinds
def test_q2_0_comes_close_to_the_best_there_is(kind, weighted):
    """400 scales of either sign, each refit to its nearest codes."""
    t, n = types.get("q2_0"), 512
    x = data.rows(kind, 18, 8, n)
    w = data.importance(18, n) if weighted else np.ones(n, np.float32)
    blocks = x.astype(np.float64).reshape(-1, 64)
    weights = np.broadcast_to(w.astype(np.float64), x.shape).reshape(-1, 64)
    least = np.full(len(blocks), np.inf)
    for fraction in np.concatenate([np.linspace(0.1, 1.2, 400), -np.linspace(0.1, 1.2, 400)]):
        q = np.clip(np.rint(blocks / (fraction * np.abs(blocks).max(axis=1, keepdims=True))), -1, 2)
        curve = (weights * q * q).sum(axis=1, keepdims=True)
        d = (weights * blocks * q).sum(axis=1, keepdims=True) / np.where(curve > 0, curve, 1)
        least = np.minimum(least, (weights * (blocks - d * q) ** 2).sum(axis=1))
    for effort, bound in (("fast", 1.05), ("normal", 1.01), ("best", 1.005)):
        y = t.dequantize(t.quantize(x, w if weighted else None, effort=effort), n)
        assert data.squared_error(x, y, w) <= bound * least.sum()


def test_tq1_0_holds_the_values_of_tq2_0():
    """With second moments too, which move the codes."""
    one, two = types.get("tq1_0"), types.get("tq2_0")
    x, h = data.rows("student4", 19, 8, 512), data.second_moments(19, 512)
    for options in ({}, {"second_moments": h}, {"importance": data.importance(1, 512), "effort": "best"}):
        np.testing.assert_array_equal(
            one.dequantize(one.quantize(x, **options), 512), two.dequantize(two.quantize(x, **options), 512)
        )
