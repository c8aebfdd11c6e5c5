"""Types whose groups of 32 share a super-scale: known answers, and the search compared with an exhaustive one."""

from __future__ import annotations

import importlib
import zlib

import numpy as np
import pytest

from quantkit import types
from quantkit.types.families import codebooks, rowscaled
from tests.types import data, on_cpu

NAMES = ("iq2_ks", "iq3_ks", "iq4_ks", "iq5_ks", "iq4_kss", "iq4_xs")
KNOWN = {"iq2_ks": "b10e5afd", "iq3_ks": "40d56167", "iq4_ks": "8ddad536", "iq5_ks": "f42ba963", "iq4_kss": "997b202a"}
BOOKS = {rowscaled.K2_START: codebooks.K2, rowscaled.K3_START: codebooks.K3, rowscaled.K4_START: codebooks.K4,
         rowscaled.K5_START: codebooks.K5}  # fmt: skip


def rules_of(name: str) -> rowscaled.Rules:
    return importlib.import_module(f"quantkit.types.{name}")._RULES


def books_of(rules: rowscaled.Rules) -> np.ndarray:
    """float64[books, codes]"""
    book = BOOKS[rules.table]
    return book.values.reshape(2, book.count)[: rules.books].astype(np.float64)


def objective(rules: rowscaled.Rules, x: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
    """Weights of one block of 256."""
    variance = np.pi / 2 * np.abs(x).mean() ** 2 if rules.robust_variance else (x * x).mean()
    return rules.variance_weight * variance + x * x if importance is None else importance


def least_errors(rules: rowscaled.Rules, x: np.ndarray, w: np.ndarray, d: float) -> np.ndarray:
    """The least error of each group of 32 of float64[n] under d: all multipliers, books and codes."""
    x, w = x.reshape(-1, 32), w.reshape(-1, 32)
    minimum = np.full(len(x), np.inf)
    for book in books_of(rules):
        for m in np.arange(rules.lowest, rules.highest + 1, rules.step):
            costs = w[..., None] * (x[..., None] - d * m * book) ** 2
            if rules.even_parity:
                odd = np.array([bin(code).count("1") % 2 for code in range(16)])
                of_parity = np.stack([costs[..., odd == parity].min(axis=2) for parity in (0, 1)], axis=2)
                words = of_parity.reshape(-1, 2, 8, 2, 2).transpose(0, 2, 1, 3, 4).reshape(-1, 8, 4, 2)
                flip = np.abs(words[..., 0] - words[..., 1]).min(axis=2)
                error = (words.min(axis=3).sum(axis=2) + flip * (words.argmin(axis=3).sum(axis=2) % 2)).sum(axis=1)
            else:
                error = costs.min(axis=2).sum(axis=1)
            minimum = np.minimum(minimum, error)
    return minimum


def super_scale(name: str, encoded: np.ndarray) -> float:
    kind = np.float16 if rules_of(name).half else np.float32
    return float(encoded[: np.dtype(kind).itemsize].view(kind)[0])


@pytest.mark.parametrize("name", KNOWN)
def test_known_answers(name):
    t, half = types.get(name), rules_of(name).half
    row = ((149 * np.arange(t.row_bytes(256)) + 7) % 256).astype(np.uint8)
    one = np.ones(1, np.float16 if half else np.float32).view(np.uint8)
    row[: len(one)] = one
    assert f"{zlib.crc32(t.dequantize(row[None], 256)):08x}" == KNOWN[name]


@pytest.mark.parametrize("weighted", [False, True], ids=["none", "importance"])
@pytest.mark.parametrize("name", NAMES)
def test_close_to_trying_everything(name, weighted):
    """Under the d that is stored, and under 24 others around it: errors within 1% and 2% of the smallest possible."""
    t, rules = types.get(name), rules_of(name)
    rows, importance = data.rows("student4", 3, 8, 256), data.importance(3, 256) if weighted else None
    ours = under_d = anywhere = 0.0
    for x, encoded in zip(rows.astype(np.float64), t.quantize(rows, importance)):
        w, d = objective(rules, x, importance), super_scale(name, encoded)
        ours += (w * (x - t.dequantize(encoded[None], 256)[0]) ** 2).sum()
        errors = [least_errors(rules, x, w, d * factor).sum() for factor in np.r_[1, np.linspace(0.85, 1.2, 24)]]
        under_d, anywhere = under_d + errors[0], anywhere + min(errors)
    assert under_d * (1 - 1e-5) <= ours <= 1.01 * under_d
    assert ours <= 1.02 * anywhere


def test_codes_of_even_words_are_the_best(rng):
    """Of all 32768 words, for the multipliers and books that were chosen."""
    t, rules = types.get("iq4_kss"), rules_of("iq4_kss")
    x = rng.standard_normal((1, 256)).astype(np.float32)
    encoded = t.quantize(x)
    y, w = t.dequantize(encoded, 256)[0], objective(rules, x[0].astype(np.float64), None)
    codes = np.array([c for c in np.ndindex(16, 16, 16, 16) if sum(v.bit_count() for v in c) % 2 == 0])
    for group in range(2):
        scale_byte = sum(int(encoded[0, 4 + 16 * group + 2 * k] & 1) << k for k in range(8))
        scale = super_scale("iq4_kss", encoded[0]) * ((scale_byte & 254) - 127)
        values = scale * books_of(rules)[scale_byte & 1][codes]
        for k in range(8):
            at = 32 * group + 2 * k + np.array([0, 16, 1, 17])
            minimum = (w[at] * (x[0, at] - values) ** 2).sum(axis=1).min()
            assert (w[at] * (x[0, at] - y[at]) ** 2).sum() <= minimum * (1 + 1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_rows_of_any_length(name):
    """Tiles that are not full, and a d of its own for each row."""
    t = types.get(name)
    for n in (0, 256, 768, 4096 + 256):
        x = data.rows("gaussian", 14, 3, n) * np.array([[1], [100], [1e-3]], np.float32)
        y = t.dequantize(t.quantize(x), n)
        errors = ((x - y) ** 2).sum(axis=1)
        assert (errors <= 0.13 * (x**2).sum(axis=1)).all()


@pytest.mark.parametrize("what", ["encode", "decode"])
@pytest.mark.parametrize("isa", [pytest.param("generic", marks=pytest.mark.full), "avx2"])
def test_the_same_on_another_cpu(isa, what):
    names = ["iq2_ks", "iq4_kss", "iq4_xs"]
    assert on_cpu.run(isa, what, names) == on_cpu.digests(what, names)
