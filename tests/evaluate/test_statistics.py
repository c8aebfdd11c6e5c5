"""Intervals hold what they promise on tokens that hang together; differences are found where they can be."""

from __future__ import annotations

import math

import numpy as np
import pytest

from quantkit.evaluate.perplexity import Perplexity
from quantkit.evaluate.statistics import Sample, rank, separate, student

RUNS, CHUNKS, PER_CHUNK = 2000, 24, 31


@pytest.fixture(scope="module")
def runs():
    """2,000 paired runs: passages differ in how hard they are, for a token's nll and for its divergence."""
    rng = np.random.default_rng(5)
    shape = (RUNS, CHUNKS, PER_CHUNK)
    passage = rng.standard_normal((RUNS, CHUNKS, 1))
    nll = np.exp(0.6 * rng.standard_normal(shape) + 0.3 * passage) * 2.5
    change = 0.01 + 0.05 * rng.standard_normal(shape) + 0.02 * passage
    kld = np.exp(0.9 * rng.standard_normal(shape) + 0.3 * passage - 4)
    same = rng.random(shape) < 0.9 + 0.03 * np.tanh(passage)
    return {name: a.reshape(RUNS, -1) for name, a in
            (("nll", nll), ("other", nll + change), ("kld", kld), ("same", same))}  # fmt: skip


def covered(truth, intervals):
    return np.mean([i.low <= truth <= i.high for i in intervals])


def test_95_percent_intervals_cover_as_often(runs):
    sample = Sample(CHUNKS, PER_CHUNK)
    deviation = math.sqrt(0.81 + 0.09)
    found = {
        "ln ratio": covered(0.01, (sample.mean(b - a) for a, b in zip(runs["nll"], runs["other"]))),
        "mean": covered(math.exp(-4 + deviation**2 / 2), map(sample.mean, runs["kld"])),
        "median": covered(math.exp(-4), (sample.quantile(x, 0.5) for x in runs["kld"])),
        "p90": covered(math.exp(-4 + 1.2815516 * deviation), (sample.quantile(x, 0.9) for x in runs["kld"])),
        "same top": covered(0.9, map(sample.mean, runs["same"])),
        "rms": covered(math.sqrt(0.01**2 + 0.05**2 + 0.02**2),
                       (sample.root_mean_square(b - a) for a, b in zip(runs["nll"], runs["other"]))),
    }  # fmt: skip
    assert all(0.93 <= share <= 0.97 for share in found.values()), found


def test_errors_over_tokens_promise_too_much(runs):
    """Why chunks are the unit: the usual error over tokens covers far less than 95 % here."""
    d = runs["other"] - runs["nll"]
    reach = 1.96 * d.std(1) / math.sqrt(d.shape[1])
    assert np.mean(np.abs(d.mean(1) - 0.01) < reach) < 0.85


def test_pairing_separates_what_two_perplexities_cannot(runs):
    a, b = runs["nll"][0], runs["other"][0] + 0.02
    first, second = (Perplexity(x.reshape(CHUNKS, -1), 64) for x in (a, b))
    assert abs(first.value - second.value) < 0.5 * math.hypot(first.error, second.error)
    found = separate(Sample(CHUNKS, PER_CHUNK), a, b)
    assert found.separated
    assert found.more_tokens == 0
    assert abs(found.difference.value - 0.03) < 3 * found.difference.error


def test_what_cannot_be_told_apart_says_how_much_more_it_takes(rng):
    sample = Sample(16, 50)
    a = rng.gamma(1, 0.1, 800)
    b = a + 0.01 * rng.standard_normal(800)
    b += 0.0005 - (b - a).mean()
    found = separate(sample, a, b)
    assert not found.separated
    assert found.more_tokens > 0
    times = 1 + found.more_tokens / 800
    more = Sample(math.ceil(16 * times), 50)
    tokens = more.chunks * 50
    a = rng.gamma(1, 0.1, tokens)
    b = a + 0.01 * rng.standard_normal(tokens)
    b += 0.0005 - (b - a).mean()
    assert separate(more, a, b).separated
    assert separate(sample, a[:800], a[:800]).more_tokens is None


def test_ranks_are_shared_by_what_is_not_separated(rng):
    sample = Sample(20, 40)
    base = rng.gamma(1, 0.1, 800)
    figures = [base + 0.2, base, base + 1e-6 * rng.standard_normal(800), base * 0.5]
    found = rank(sample, figures)
    assert {r.model: r.place for r in found} == {3: 1, 1: 2, 2: 2, 0: 4}
    assert found[-1].to_next is None


def test_few_chunks_are_cut_into_blocks():
    assert list(Sample(3, 10).starts) == [0, 3, 6, 10, 13, 16, 20, 23, 26]
    assert len(Sample(9, 10).starts) == 9
    assert math.isnan(Sample(1, 2).mean(np.arange(2.0)).error)
    np.testing.assert_allclose(Sample(1, 8).means(np.arange(8)), np.arange(8))


QUANTILES = {  # of Student's t, two-sided, to ten digits
    (1, 0.95): 12.70620474, (2, 0.95): 4.302652730, (3, 0.95): 3.182446305, (4, 0.95): 2.776445105,
    (7, 0.95): 2.364624252, (10, 0.95): 2.228138852, (30, 0.95): 2.042272456, (100, 0.95): 1.983971519,
    (1000, 0.95): 1.962339081, (2, 0.99): 9.924843201, (3, 0.99): 5.840909310, (2, 0.999): 31.59905458,
}  # fmt: skip


@pytest.mark.parametrize(("degrees", "level"), QUANTILES)
def test_student(degrees, level):
    assert student(degrees, level) == pytest.approx(QUANTILES[degrees, level], rel=1e-9)


@pytest.mark.parametrize("level", [0.5, 0.95, 0.995, 0.9999])
def test_student_of_one_and_two_degrees_and_of_many(level):
    assert student(1, level) == pytest.approx(math.tan(math.pi / 2 * level), rel=1e-9)
    assert student(2, level) == pytest.approx(level * math.sqrt(2 / (1 - level**2)), rel=1e-9)
    found = [student(degrees, level) for degrees in (*range(1, 12), 199, 200, 201, 202, 10**6)]
    assert found == sorted(found, reverse=True)
    assert found[-4] - found[-3] == pytest.approx(found[-5] - found[-4], rel=0.03)
