"""What benchmarks/bench_fit.py derives from its measurements."""

from __future__ import annotations

import pytest

from benchmarks.bench_fit import needed


def test_bits_that_the_reference_needs_for_a_divergence() -> None:
    files = [("a", 4.0, 0.1), ("b", 4.5, 0.2), ("c", 5.0, 0.01)]  # b is larger and worse than a: it does not count
    rows = [{"name": f"{name} ik_llama.cpp", "bits": bits, "measured": kld} for name, bits, kld in files]
    rows.append({"name": "fit 4.2", "bits": 4.2, "measured": 1e-9})
    assert needed(rows, 0.1) == 4.0
    assert needed(rows, 0.01) == 5.0
    assert needed(rows, 0.1 * 10**-0.5) == pytest.approx(4.5)
    assert needed(rows, 0.11) is None
    assert needed(rows, 0.009) is None
