"""Encoding: never a larger error than the reference's, sane at the edges, the same bytes everywhere."""

from __future__ import annotations

import numpy as np
import pytest

from quantkit import types
from quantkit.errors import DataError, UnknownNameError
from tests.types import data, on_cpu

TYPES = [t for t in types.all() if data.can_encode(t) and not t.base]  # an interleaved type encodes as its base does
by_type = pytest.mark.parametrize("t", TYPES, ids=lambda t: t.name)
by_type_and_importance = pytest.mark.parametrize(
    ("t", "weighted"),
    [(t, weighted) for t in TYPES for weighted in (False, True) if weighted or not t.requires_imatrix],
    ids=lambda value: ("none", "importance")[value] if isinstance(value, bool) else value.name,
)


def rows_for(t: types.QuantType, count: int) -> int:
    return -(-count // t.interleave) * t.interleave


def encoded_and_back(t: types.QuantType, x: np.ndarray, weights: np.ndarray | None, effort: str = "normal"):
    return t.dequantize(t.quantize(x, weights, effort=effort), x.shape[1])


# ------------------------------------------------------------------------------------------------------------- quality


@by_type_and_importance
@pytest.mark.parametrize("kind", ["gaussian", "student4", "student3", "rotated", "outliers"])
def test_error_is_not_above_the_reference(t, kind, weighted, request):
    """With importance, by it. Without, by the weights the reference minimises then; the plain error 1% more at most."""
    from tests.conformance import ggml

    model = request.getfixturevalue("smollm2_q4_1") if kind == "rotated" else None
    n = 512
    x = data.rows(kind, 2027, rows_for(t, 16), n, model)
    weights = data.importance(2027, n) if weighted else None
    ours = encoded_and_back(t, x, weights)
    if not data.reference_encodes(t):
        assert t.name != "f32" or np.array_equal(ours, x)
        return
    reference = ggml.dequantize(t.name, ggml.quantize(t.name, x, weights), n)
    metric = weights if weighted else data.reference_weights(t, x)
    error, bound = (data.squared_error(x, y, metric) for y in (ours, reference))
    assert error <= bound, f"{(error / bound) ** 0.5:.4f} of the reference's error"
    if not weighted:
        error, bound = (data.squared_error(x, y) for y in (ours, reference))
        assert error <= 1.01**2 * bound, f"{(error / bound) ** 0.5:.4f} of the reference's plain error"


@by_type
def test_effort_buys_accuracy(t):
    n = 1024
    x, weights = data.rows("student4", 40, rows_for(t, 16), n), data.importance(40, n)
    fast, normal, best = (data.squared_error(x, encoded_and_back(t, x, weights, e), weights) for e in types.EFFORTS)
    assert best <= 1.003 * normal  # what is minimised is not the importance alone
    assert normal <= 1.003 * fast
    with pytest.raises(UnknownNameError, match="unknown effort 'most'"):
        t.quantize(x, weights, effort="most")


@pytest.mark.parametrize(
    "t",
    [t for t in TYPES if (t.uses_imatrix or t.requires_imatrix) and data.reference_encodes(t)],
    ids=lambda t: t.name,
)
@pytest.mark.parametrize("importance", ["few columns", "unseen columns"])
def test_error_is_not_above_the_reference_under_uneven_importance(t, importance):
    """Columns of massive activations, and columns that the calibration never saw."""
    from tests.conformance import ggml

    n, rng = 768, np.random.default_rng(31)
    x = data.rows("gaussian", 31, rows_for(t, 16), n)
    weights = rng.lognormal(0, 2.5, n) if importance == "few columns" else data.importance(31, n)
    if importance == "unseen columns":
        weights[rng.random(n) < 0.3] = 0
    weights = weights.astype(np.float32)
    ours = data.squared_error(x, t.dequantize(t.quantize(x, weights), n), weights)
    reference = data.squared_error(x, ggml.dequantize(t.name, ggml.quantize(t.name, x, weights), n), weights)
    assert ours <= reference, f"{ours / reference:.4f} of the reference's error"


@pytest.mark.parametrize("name", ["q4_0", "q5_0"])
def test_weights_of_a_grid_stay_exact_beside_one_that_outweighs_them(name):
    """Weights that were quantized before, whatever their block's extreme is, under importance of one column each."""
    t = types.get(name)
    x = (np.random.default_rng(5).integers(-7, 8, (16, 256)) / 64).astype(np.float32)
    weights = np.full(256, 1e-3, np.float32)
    weights[::32] = 10
    np.testing.assert_array_equal(t.dequantize(t.quantize(x, weights), 256), x)


@pytest.mark.parametrize("t", [t for t in TYPES if t.uses_imatrix and not t.requires_imatrix], ids=lambda t: t.name)
def test_importance_is_used(t):
    n = 2 * max(t.block_size, 256)
    x, weights = data.rows("gaussian", 4, rows_for(t, 8), n), data.importance(4, n)
    without, given = (t.dequantize(t.quantize(x, w), n) for w in (None, weights))
    assert data.squared_error(x, given, weights) < data.squared_error(x, without, weights)
    assert data.squared_error(x, without) < data.squared_error(x, given)


@by_type
def test_encoding_again_changes_little(t):
    n = 2 * max(t.block_size, 256)
    x = data.rows("gaussian", 5, rows_for(t, 8), n)
    weights = data.importance(5, n) if t.requires_imatrix else None
    once = t.dequantize(t.quantize(x, weights), n)
    twice = t.dequantize(t.quantize(once, weights), n)
    assert data.squared_error(once, twice) <= 0.05 * data.squared_error(x, once)


# --------------------------------------------------------------------------------------------------------------- edges


def edge_blocks(n: int) -> dict[str, np.ndarray]:
    """Rows of n elements, each with one difficulty."""
    rng = np.random.default_rng(8)
    g = rng.standard_normal(n).astype(np.float32)
    spike = np.zeros(n, np.float32)
    spike[n // 3] = -2.5
    mixed = g.copy()
    mixed[3], mixed[5] = 1e30, 1e-30
    with np.errstate(under="ignore"):
        denormal = g * np.float32(1e-40)
    return {
        "zeros": np.zeros(n, np.float32), "negative zeros": np.full(n, -0.0, np.float32),
        "constant": np.full(n, 0.37, np.float32), "negative": -np.abs(g),
        "spike": spike, "denormal": denormal, "tiny": g * np.float32(1e-7), "small": g * np.float32(1e-5),
        "large": g * np.float32(1e6), "huge": g * np.float32(1e30), "mixed": mixed, "offset": g + np.float32(100),
        "largest": np.copysign(np.finfo(np.float32).max, g),
    }  # fmt: skip


def edge_importances(n: int) -> dict[str, np.ndarray]:
    halves = np.ones(n, np.float32)
    halves[: n // 2] = 0
    return {
        "ones": np.ones(n, np.float32), "zeros": np.zeros(n, np.float32), "half": halves,
        "one column": np.eye(n, dtype=np.float32)[n // 3], "huge": np.full(n, 1e38, np.float32),
        "denormal": np.full(n, 1e-42, np.float32), "wild": np.exp2(np.linspace(-100, 100, n)).astype(np.float32),
    }  # fmt: skip


@by_type
@pytest.mark.parametrize("effort", types.EFFORTS)
def test_edges_are_finite_and_never_worse_than_zero(t, effort):
    n = max(t.block_size, 32)
    for x_name, row in edge_blocks(n).items():
        x = np.repeat(row[None], t.interleave, axis=0)
        if np.abs(row).max() >= t.overflow:
            with pytest.raises(DataError, match="row 0"):
                t.quantize(x, effort=effort)
            continue
        for w_name, weights in edge_importances(n).items():
            y = t.dequantize(t.quantize(x, weights, effort=effort), n)
            assert np.isfinite(y).all(), (x_name, w_name)
            if w_name == "ones":  # every type can store zeros, or nearly
                assert data.squared_error(x, y) <= 1.001 * data.squared_error(x, 0), x_name
            if not row.any():
                assert not y.any(), (x_name, w_name)


@by_type
def test_zero_importance_of_a_block_is_no_importance(t):
    n = 4 * max(t.block_size, 32)
    x = data.rows("gaussian", 9, t.interleave, n)
    weights = np.ones(n, np.float32)
    weights[: n // 2] = 0
    y = t.dequantize(t.quantize(x, weights), n)
    left, right = data.squared_error(x[:, : n // 2], y[:, : n // 2]), data.squared_error(x[:, n // 2 :], y[:, n // 2 :])
    assert left <= 2 * right


@by_type
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_named(t, value):
    n = max(t.block_size, 32)
    x = np.zeros((4 * t.interleave, n), np.float32)
    weights = np.ones(n, np.float32)
    row = 3 * t.interleave
    x[row, 17] = value
    with pytest.raises(DataError, match=rf"row {row}, column 17 is {value}"):
        t.quantize(x, weights, threads=2)
    x[row, 17] = 0
    weights[5] = value
    with pytest.raises(DataError, match=r"column 5 is"):
        t.quantize(x, weights)
    weights[5] = -1
    with pytest.raises(DataError, match=r"column 5 is -1"):
        t.quantize(x, weights)


@pytest.mark.filterwarnings("error")
def test_what_is_no_float32_is_refused():
    t = types.get("q4_0")
    with pytest.raises(DataError, match="row 0, column 0 is inf"):
        t.quantize(np.full((1, 32), 1e300))
    with pytest.raises(DataError, match="column 0 is inf"):
        t.quantize(np.ones((1, 32)), np.full(32, 1e300))
    for values in (np.ones((1, 32), np.complex64), [["a"] * 32]):
        with pytest.raises(DataError, match="expected real numbers"):
            t.quantize(values)
    for n in (-32, 31):
        with pytest.raises(DataError, match="not a multiple"):
            t.row_bytes(n)
    with pytest.raises(DataError, match="0 elements"):
        t.bits_per_weight(0)


@pytest.mark.parametrize(("name", "fits", "too_large"), [("f16", 65519.0, 65520.0), ("bf16", 3.39e38, 3.4e38)])
def test_finite_weights_never_become_inf(name, fits, too_large):
    t = types.get(name)
    x = np.full((3, 32), -fits, np.float32)
    assert np.isfinite(t.dequantize(t.quantize(x), 32)).all()
    x[1, 30] = -too_large
    with pytest.raises(DataError, match=rf"row 1, column 30 is -.* do not fit {name}"):
        t.quantize(x)


# --------------------------------------------------------------------------------------------------------- same bytes


@by_type
def test_threads_slices_and_one_block(t):
    n = 3 * max(t.block_size, 32)
    x = data.rows("student3", 10, 7 * t.interleave, n)
    weights = data.importance(10, n)
    whole = t.quantize(x, weights, threads=1)
    np.testing.assert_array_equal(whole, t.quantize(x, weights, threads=2))
    part = slice(2 * t.interleave, 5 * t.interleave)
    np.testing.assert_array_equal(whole[part], t.quantize(x[part], weights))
    if t.row_meta_bytes == 0 and t.interleave == 1:
        width = max(t.block_size, 32)
        first = t.quantize(np.ascontiguousarray(x[:1, :width]), weights[:width])
        np.testing.assert_array_equal(whole[:1, : t.row_bytes(width)], first)
    assert t.quantize(x[:0], weights).shape == (0, t.row_bytes(n))


@by_type
def test_any_array_is_taken(t):
    """Lists, float64, Fortran order and read-only memory give the bytes of a plain float32 array."""
    n = max(t.block_size, 32)
    x, weights = data.rows("gaussian", 11, t.interleave, n), data.importance(11, n)
    expected = t.quantize(x, weights)
    frozen = x.copy()
    frozen.flags.writeable = False
    for form in (x.astype(np.float64), np.asfortranarray(x), frozen, x.tolist()):
        np.testing.assert_array_equal(t.quantize(form, weights), expected)


def test_tensors_of_torch_are_taken():
    import torch

    t, x = types.get("q8_0"), torch.from_numpy(data.rows("gaussian", 11, 4, 64))
    for form in (x.requires_grad_(), x.double(), x.T.contiguous().T):
        np.testing.assert_array_equal(t.quantize(form), t.quantize(x.detach().numpy()))
    np.testing.assert_array_equal(t.quantize(x.bfloat16()), t.quantize(x.bfloat16().float().detach().numpy()))


@pytest.mark.parametrize("isa", ["generic", "avx2"])
def test_the_same_on_another_cpu(isa):
    """SIMD vectors of any width sum in the same order."""
    names = ["q4_0", "q4_1", "iq4_nl"]
    assert on_cpu.run(isa, "encode", names) == on_cpu.digests("encode", names)


@by_type
def test_only_ratios_of_importance_count(t):
    x, weights = data.rows("student4", 3, rows_for(t, 4), 512), data.importance(3, 512)
    usual = t.quantize(x, weights)
    for power in (-100, 90):
        assert np.array_equal(t.quantize(x, np.ldexp(weights, power)), usual), power
