"""KL divergence and its statistics against plain formulas, on arrays, and the printed form."""

from __future__ import annotations

import math

import numpy as np
import pytest

from quantkit.evaluate import divergence
from quantkit.evaluate.report import divergence_text
from quantkit.evaluate.statistics import at_share
from quantkit.formats.kld.base_file import encode_rows


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


@pytest.fixture
def rows(rng):
    base = (rng.standard_normal((40, 333)) * 5).astype(np.float32)
    model = (base + rng.standard_normal(base.shape) * 0.2).astype(np.float32)
    return model, encode_rows(base), rng.integers(0, 333, 40)


def test_rows_follow_the_definition(rows):
    model, base, targets = rows
    found = divergence.compare_rows(model, base, targets)
    log_q, log_b = log_softmax(model), base.log_probs().astype(np.float64)
    at = np.arange(len(targets))
    np.testing.assert_allclose(found.nll, -log_q[at, targets], rtol=1e-5)
    np.testing.assert_allclose(found.nll_base, -log_b[at, targets], rtol=1e-6)
    expected = np.where(log_b > -16, np.exp(log_b) * (log_b - log_q), 0).sum(axis=1)
    np.testing.assert_allclose(found.kld, expected, rtol=1e-3, atol=1e-6)
    np.testing.assert_array_equal(found.same_top, model.argmax(1) == base.codes.argmax(1))


def test_tokens_below_the_floor_do_not_count():
    base = np.zeros((1, 4), np.float32)
    base[0, 3] = -17
    model = base.copy()
    model[0, 3] = -60
    found = divergence.compare_rows(model, encode_rows(base), [0])
    assert abs(found.kld[0]) < 1e-5


def test_a_model_against_itself_is_zero(rng):
    logits = (rng.standard_normal((20, 999)) * 4).astype(np.float32)
    found = divergence.compare_rows(logits, encode_rows(logits), np.zeros(20, int))
    assert np.abs(found.kld).max() < 2e-4
    assert abs(found.kld.mean()) < 1e-4
    assert found.same_top.all()


def test_first_of_equals_is_the_top():
    model = np.array([[0, 5, 5, 1]], np.float32)
    base = encode_rows(np.array([[0, 7, 7, 1]], np.float32))
    assert divergence.compare_rows(model, base, [0]).same_top[0]
    later = encode_rows(np.array([[0, 6, 7, 1]], np.float32))
    assert not divergence.compare_rows(model, later, [0]).same_top[0]


@pytest.fixture
def result(rng):
    nll_base = rng.gamma(2, 1, 500)
    nll = nll_base + rng.standard_normal(500) * 0.05 + 0.01
    return divergence.Divergence(nll, nll_base, rng.gamma(1, 0.01, 500), rng.random(500) < 0.9)


def test_statistics(result):
    n = len(result)
    e, e_base = result.nll.std(ddof=1) / math.sqrt(n), result.nll_base.std(ddof=1) / math.sqrt(n)
    assert result.ppl.value == pytest.approx(math.exp(result.nll.mean()))
    assert result.ppl.error == pytest.approx(result.ppl.value * e)
    paired = (result.nll - result.nll_base).std(ddof=1) / math.sqrt(n)
    assert result.ln_ratio.error == pytest.approx(paired, rel=1e-6)
    assert result.ln_ratio.error < 0.1 * e  # pairing is what makes small differences visible
    assert result.correlation == pytest.approx(np.corrcoef(result.nll, result.nll_base)[0, 1])
    assert result.ratio.value == pytest.approx(result.ppl.value / result.ppl_base.value)
    assert result.difference.value == pytest.approx(result.ppl.value - result.ppl_base.value)
    p, p_base = result.ppl.value, result.ppl_base.value
    cov = np.cov(result.nll, result.nll_base)[0, 1] / n
    assert result.difference.error == pytest.approx(
        math.sqrt((p * e) ** 2 + (p_base * e_base) ** 2 - 2 * p * p_base * cov)
    )
    dp = np.exp(-result.nll) - np.exp(-result.nll_base)
    assert result.rms_dp.value == pytest.approx(math.sqrt((dp**2).mean()))
    assert result.rms_dp.error == pytest.approx((dp**2).std(ddof=1) / math.sqrt(n) / 2 / result.rms_dp.value)
    top = result.same_top.mean()
    assert result.top_agreement == pytest.approx((top, math.sqrt(top * (1 - top) / (n - 1))))


def test_few_positions_have_no_error(result):
    assert divergence.mean_error(result.nll[:10]) == 0
    assert divergence.mean_error(result.nll[:11]) > 0
    assert divergence.mean_covariance(result.nll[:9], result.nll_base[:9]) == 0


def test_percentile_interpolates():
    values = np.array([0, 1, 2, 10], np.float32)
    assert at_share(values, 0.5) == 1.5
    assert at_share(values, 0) == 0
    assert at_share(values, 1) == 10
    assert at_share(values, 0.9) == pytest.approx(2 + 0.7 * 8)


def test_printed_form(result):
    line = divergence_text.chunk_line(7, result)
    assert line.startswith("   7    ")
    assert line.count("±") == 5
    assert f"{result.ppl.value:9.4f} ± {result.ppl.error:9.4f}" in line
    text = divergence_text.report(result)
    labels = ["Mean PPL(Q)", "Mean PPL(base)", "Cor(ln(PPL(Q)), ln(PPL(base)))", "Mean ln(PPL(Q)/PPL(base))",
              "Mean PPL(Q)/PPL(base)", "Mean PPL(Q)-PPL(base)", "Mean    KLD:", "Maximum KLD:", "99.9%   KLD:",
              "99.0%   KLD:", "95.0%   KLD:", "90.0%   KLD:", "Median  KLD:", "10.0%   KLD:", " 5.0%   KLD:",
              " 1.0%   KLD:", " 0.1%   KLD:", "Minimum KLD:", "Mean    Δp:", "75.0%   Δp:", "Median  Δp:",
              "25.0%   Δp:", "RMS Δp    :", "Same top p:"]  # fmt: skip
    places = [text.index(label) for label in labels]
    assert places == sorted(places)
