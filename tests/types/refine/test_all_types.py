"""Rounding by second moments, for every type: the error never rises, bytes depend on nothing else than they should."""

from __future__ import annotations

import numpy as np
import pytest

from quantkit import types
from quantkit.errors import UnknownNameError
from quantkit.types import base
from quantkit.types.families.interleave import Interleaved
from tests.other_cpus import CPUS, next_simpler
from tests.types import data, on_cpu
from tests.types.refine.test_scalar_codes import errors

TYPES = [t for t in types.all() if data.can_encode(t)]
FLOATS = ("f32", "f16", "bf16", "bf16_r16")
N = 512  # two blocks of the largest, four panels

by_type = pytest.mark.parametrize("t", TYPES, ids=lambda t: t.name)


def effort_of(t: types.QuantType) -> str:
    """Normal, or the least at which the type uses second moments."""
    return types.EFFORTS[max(base.NORMAL, t.moments_effort)]


def all_kinds_of_rows(largest: float) -> np.ndarray:
    """float32[16, N]: Gaussian, with outliers, zeros, one huge value, tiny ones, subnormal ones, ternary, one sign."""
    x = np.concatenate([data.rows(kind, 1, 8, N) for kind in ("gaussian", "outliers")])
    x[1], x[2, 100], x[2, 300] = 0, min(1e30, 0.9 * largest), 3e4
    x[3] *= np.float32(1e-30)
    x[4] *= np.float32(1e-38)
    x[5] = np.sign(x[5]) * (np.abs(x[5]) > 0.02)
    x[6] = np.abs(x[6])
    x[7, :256] = 0
    return x


@pytest.fixture(scope="module", params=["full", "deficient", "diagonal"])
def h(request) -> np.ndarray:
    found = data.second_moments(3, N, {"full": 2000, "deficient": 30, "diagonal": 2000}[request.param])
    return np.diag(np.diagonal(found)) if request.param == "diagonal" else found


@by_type
def test_the_error_never_rises(t: types.QuantType, h: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    x, effort = all_kinds_of_rows(t.overflow), effort_of(t)
    before = t.quantize(x, np.diagonal(h), effort=effort)
    after = t.quantize(x, second_moments=h, effort=effort, threads=1)
    if t.name in FLOATS:
        assert np.array_equal(after, before)
        return
    assert np.isfinite(t.dequantize(after, N)).all()
    a, b = errors(t, x, before, h), errors(t, x, after, h)
    assert (b <= a * (1 + 1e-5)).all()
    if h[0, 1]:
        assert b[8:].sum() < 0.8 * a[8:].sum()
        assert t.uses_second_moments

    monkeypatch.setattr(base, "_MIN_PARALLEL_ELEMENTS", 0)  # so that few rows go to several threads
    for threads in (2, 3):
        assert np.array_equal(t.quantize(x, second_moments=h, effort=effort, threads=threads), after)
    step = t.interleave
    apart = [t.quantize(x[i : i + step], second_moments=h, effort=effort) for i in range(0, 16, step)]
    assert np.array_equal(np.concatenate(apart), after)
    if isinstance(t, Interleaved) and not t.base_type.activation:
        rows = t.base_type.quantize(x, second_moments=h, effort=effort)
        assert np.array_equal(t.interleave_rows(rows), after)


@by_type
def test_types_say_at_which_effort_they_use_them(t: types.QuantType) -> None:
    x, h = data.rows("gaussian", 2, 16, N), data.second_moments(3, N)
    for effort in types.EFFORTS:
        with_h, without = (t.quantize(x, np.diagonal(h), second_moments=s, effort=effort) for s in (h, None))
        assert t.uses_second_moments_at(effort) == (not np.array_equal(with_h, without))
    assert t.uses_second_moments == t.uses_second_moments_at("best") == (t.name not in FLOATS)
    with pytest.raises(UnknownNameError):
        t.uses_second_moments_at("most")


def test_formats_of_activations_do_not_use_them() -> None:
    x, h = data.rows("gaussian", 2, 4, N), data.second_moments(3, N)
    for t in types.activations():
        assert not t.uses_second_moments
        assert np.array_equal(t.quantize(x, second_moments=h, effort="best"), t.quantize(x, effort="best"))


def test_eight_bits_never_hold_minus_128_and_sums_are_of_the_codes() -> None:
    """Rows whose largest elements are at the end of the ladder, so that many steps would lead beyond it."""
    x, h = np.sign(data.rows("gaussian", 5, 16, N)), data.second_moments(6, N)
    x[::2] *= np.random.default_rng(7).uniform(0.98, 1, (8, N))
    x = x.astype(np.float32)
    for name, header, block in (("q8_0", 2, 34), ("q8_KV", 8, 8 + N)):
        found = types.get(name).quantize(x, second_moments=h, effort="best")
        codes = found.reshape(-1, block)[:, header:].view(np.int8)
        assert codes.min() == -127
        if name == "q8_KV":
            assert np.array_equal(found[:, 4:8].copy().view(np.int32)[:, 0], codes.sum(axis=1))
    t = types.get("q8_k_r8")
    rows = t.deinterleave_rows(t.quantize(x, second_moments=h, effort="best"))
    assert rows.reshape(-1, 296)[:, 8:264].view(np.int8).min() == -127


SOME = ["q4_0"]
ALL = [*SOME, "iq4_kss", "iq3_xxs", "iq1_bn", "q8_KV", "iq2_bn", "q8_0", "q1_0_g128"]


@pytest.mark.parametrize(
    ("isa", "names"),
    [(next_simpler(), SOME), *(pytest.param(isa, ALL, marks=pytest.mark.full) for isa in CPUS)],
    ids=["some", *CPUS],
)
def test_the_same_bytes_on_another_cpu(isa: str, names: list[str]) -> None:
    """Kernels of single codes, grids, words and ternary rows; compiling them takes a minute for each type."""
    assert on_cpu.run(isa, "encode-moments", names) == on_cpu.digests("encode-moments", names)
