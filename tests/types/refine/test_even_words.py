"""Rounding by second moments for IQ4_KSS: codes keep their words even, and each move is the best of a word."""

from __future__ import annotations

import numpy as np
import pytest

from quantkit import types
from quantkit.types.families.codebooks import K4
from quantkit.types.refine import prepare
from quantkit.types.refine.even_words import descend
from quantkit.types.refine.moments import TILE_ROWS
from tests.types import data

ONES = np.array([bin(code).count("1") for code in range(16)])
WORD = np.array([0, 16, 1, 17])  # its elements, from the first one


def codes_of_rows(found: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    codes, scales = np.empty((len(found), n), np.uint8), np.empty((len(found), n // 32), np.float32)
    types.get("iq4_kss").read_codes(found, codes, scales)
    return codes, scales


def words(n: int) -> list[np.ndarray]:
    return [32 * group + 2 * k + WORD for group in range(n // 32) for k in range(8)]


def test_codes_are_those_that_the_decoder_reads() -> None:
    t, n = types.get("iq4_kss"), 512
    found = data.tame_bytes(t, np.random.default_rng(1), 5, n)
    codes, scales = codes_of_rows(found, n)
    book = np.repeat(found[:, 4:].reshape(5, -1, 16)[:, :, 0] & 1, 32, axis=1)
    assert np.array_equal(t.dequantize(found, n), np.repeat(scales, 32, axis=1) * K4.values[16 * book + codes])
    unchanged = found.copy()
    t.write_codes(codes, unchanged)
    assert np.array_equal(unchanged, found)
    wanted = np.random.default_rng(2).integers(0, 16, (5, n)).astype(np.uint8)
    for word in words(n):
        wanted[:, word[0]] ^= (ONES[wanted[:, word]].sum(axis=1) % 2).astype(np.uint8)
    t.write_codes(wanted, found)
    again, same_scales = codes_of_rows(found, n)
    assert np.array_equal(again, wanted)
    assert np.array_equal(same_scales, scales)


def plain_sweep(e: np.ndarray, codes: np.ndarray, scales: np.ndarray, h: np.ndarray) -> None:
    """What `descend` does with one row in one sweep, in place, the error computed anew for each candidate."""
    values = K4.values[:16].astype(np.float64)

    def next_codes(code: int, flips: int) -> list[int]:
        fitting = [c for c in range(16) if (ONES[c] - ONES[code]) % 2 == flips]
        return [c for c in (max((c for c in fitting if c < code), default=-1),
                            min((c for c in fitting if c > code), default=-1)) if c >= 0]  # fmt: skip

    for word in words(len(e)):
        scale = float(scales[word[0] // 32])
        candidates = [{j: to} for j in word for to in next_codes(codes[j], 0)]
        candidates += [
            {j: a, k: b}
            for i, j in enumerate(word)
            for k in word[:i]
            for a in next_codes(codes[j], 1)
            for b in next_codes(codes[k], 1)
        ]
        own, best, chosen = e @ h @ e, 0.0, {}
        for candidate in candidates:
            moved = e.copy()
            for j, to in candidate.items():
                moved[j] += scale * (values[to] - values[codes[j]])
            if (gain := moved @ h @ moved - own) < best:
                best, chosen = gain, candidate
        for j, to in chosen.items():
            e[j] += scale * (values[to] - values[codes[j]])
            codes[j] = to


@pytest.mark.parametrize("n", [256, 512])
def test_one_sweep_against_the_plain_formula(n: int) -> None:
    t = types.get("iq4_kss")
    h = data.second_moments(4, n, 3 * n)
    prepared = prepare(h, n)
    x = np.random.default_rng(3).standard_normal((3, n)).astype(np.float32)
    found = t.quantize(x, np.diagonal(h))
    codes, scales = codes_of_rows(found, n)
    e = np.zeros((TILE_ROWS, n), np.float32)
    e[:3] = t.dequantize(found, n) - x
    damped = prepared.panels.transpose(1, 0, 2).reshape(n, -1)[:, :n].astype(np.float64)
    expected = [(e[row].astype(np.float64), codes[row].copy()) for row in range(3)]
    assert descend(e, codes, scales, prepared.panels, 3, 1) > 0
    for row, (plain_e, plain_codes) in enumerate(expected):
        plain_sweep(plain_e, plain_codes, scales[row], damped)
        assert np.mean(plain_codes != codes[row]) < 0.02  # a rounding error may decide between two
        a, b = (v @ damped @ v for v in (plain_e, e[row].astype(np.float64)))
        assert abs(a - b) < 0.01 * a
    assert all((ONES[codes[:, word]].sum(axis=1) % 2 == 0).all() for word in words(n))
