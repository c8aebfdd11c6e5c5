"""Factors of types by measured files."""

from __future__ import annotations

import numpy as np
import pytest

from quantkit.placement.allocation.costs import Costs, from_json
from quantkit.placement.allocation.refine import MeasuredFile, refined


def files(true: dict[str, float], rng: np.random.Generator, count: int) -> list[MeasuredFile]:
    found = []
    for _ in range(count):
        predicted = {name: float(rng.uniform(0.01, 0.1)) for name in true}
        kld = sum(true[name] * cost for name, cost in predicted.items())
        found.append(MeasuredFile(predicted, kld, 1e-6))
    return found


@pytest.mark.parametrize("seed", range(3))
def test_factors_are_found(seed: int) -> None:
    true = {"q4_0": 1.3, "q5_0": 0.9, "q6_0": 0.7}
    found = refined(Costs({}), files(true, np.random.default_rng(seed), 30)).factors
    assert found == pytest.approx(true, rel=0.03)


def test_a_type_of_no_file_keeps_its_factor() -> None:
    """One file explains one sum: types share what is missing by what they contribute, others have no factor."""
    found = refined(Costs({}), [MeasuredFile({"q4_0": 0.1, "q6_0": 0.001}, 0.15, 0.0)]).factors
    assert 1.4 < found["q4_0"] < 1.51
    assert 0.99 < found["q6_0"] < 1.05
    assert "q5_0" not in found


def test_files_that_say_nothing() -> None:
    costs = Costs({})
    assert refined(costs, []) is costs
    assert refined(costs, [MeasuredFile({"q4_0": 0.1}, 0.0, 0.0), MeasuredFile({}, 0.1, 0.0)]) is costs


def test_factors_have_bounds() -> None:
    low, high = (refined(Costs({}), [MeasuredFile({"q4_0": 0.1}, kld, 0.0)] * 9).factors["q4_0"] for kld in (1e-4, 9.0))
    assert (low, high) == (0.25, 4.0)


def test_factors_are_in_the_file() -> None:
    made = refined(Costs({}), [MeasuredFile({"q4_0": 0.1}, 0.15, 0.0)])
    assert from_json(made.to_json()).factors == made.factors
