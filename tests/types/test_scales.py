"""Which bits of a block are the scale and the minimum of a sub-block, and what their codes stand for."""

from __future__ import annotations

import numpy as np
import pytest

from quantkit import types
from quantkit.types.families.code_bits import codes_of, read_codes
from quantkit.types.families.scale_bits import SubBlockNumber, minimum_of, read_numbers, scale_of, write_numbers
from tests.types import data

# elements of a sub-block and bits of its scale
SCALES = {"q4_0": (32, 16), "q4_1": (32, 16), "q5_0": (32, 16), "q5_1": (32, 16), "q6_0": (32, 16), "q2_K": (16, 4),
          "q3_K": (16, 6), "q4_K": (32, 6), "q5_K": (32, 6), "q6_K": (16, 8), "iq4_nl": (32, 16), "iq4_xs": (32, 6),
          "iq2_k": (16, 4), "iq3_k": (16, 5), "iq4_k": (16, 6), "iq5_k": (16, 6), "iq6_k": (16, 8), "iq2_ks": (32, 5),
          "iq3_ks": (32, 5), "iq4_ks": (32, 7), "iq5_ks": (32, 7), "iq4_kss": (32, 7), "iq2_kl": (32, 6),
          "iq1_s": (32, 3), "iq1_m": (16, 3), "iq2_xxs": (32, 4), "iq2_xs": (16, 4), "iq2_s": (16, 4),
          "iq3_xxs": (32, 4), "iq3_s": (32, 4), "iq1_kt": (32, 4), "iq2_kt": (32, 4), "iq3_kt": (32, 4),
          "iq4_kt": (32, 7)}  # fmt: skip
MINIMA = {"q4_1": 16, "q5_1": 16, "q2_K": 4, "q4_K": 6, "q5_K": 6}


def number_codes(number: SubBlockNumber, rows: np.ndarray, n: int) -> np.ndarray:
    codes = np.empty((len(rows), n // number.size), np.int64)
    read_numbers(rows, number, codes)
    return codes


@pytest.mark.parametrize("name", SCALES)
def test_scales_are_found(name: str) -> None:
    number = scale_of(types.get(name))
    assert number is not None
    assert (number.size, number.bits.shape[1]) == SCALES[name]
    assert number.bits.shape[0] == types.get(name).block_size // number.size
    assert (np.diff(number.values) > 0).all()
    assert np.isfinite(number.values).all()


@pytest.mark.parametrize("name", [t.name for t in types.all() if t.encode_rows and t.interleave == 1])
def test_minima_are_found(name: str) -> None:
    number = minimum_of(types.get(name))
    assert (number.bits.shape[1] if number else None) == MINIMA.get(name)


def test_no_scale_where_a_row_has_only_one() -> None:
    assert scale_of(types.get("f16")) is scale_of(types.get("q8_KV")) is scale_of(types.get("iq2_bn")) is None


@pytest.mark.parametrize(("name", "of"), [*((n, scale_of) for n in SCALES), *((n, minimum_of) for n in MINIMA)])
def test_values_move_in_proportion(name: str, of) -> None:
    """Random codes of one sub-block: what an element changes by is the difference of values times its own factor."""
    t, rng = types.get(name), np.random.default_rng(5)
    number, n = of(t), 2 * t.block_size
    rows = t.quantize(data.rows("gaussian", 1, 1, n), np.ones(n, np.float32))
    before, y = number_codes(number, rows, n), t.dequantize(rows, n, products=True)[0].astype(np.float64)
    usual = number.codes[np.abs(number.values) <= 4 * np.abs(number.values[number.places[before]]).max()]
    changes, differences = [], []
    for code in rng.choice(usual, 6):
        codes, moved = before.copy(), rows.copy()
        codes[0, -1] = code
        write_numbers(codes, number, moved)
        assert np.array_equal(number_codes(number, moved, n), codes)
        change = t.dequantize(moved, n, products=True)[0] - y
        assert not change[: n - number.size].any()
        changes.append(change[n - number.size :])
        differences.append(number.values[number.places[code]] - number.values[number.places[before[0, -1]]])
    factor = np.array(changes)[np.abs(differences).argmax()] / np.abs(differences).max()
    factor *= np.sign(differences[np.abs(differences).argmax()])
    np.testing.assert_allclose(changes, np.outer(differences, factor), rtol=1e-3, atol=1e-5 * np.abs(y).max())


@pytest.mark.parametrize("name", ["q4_0", "q4_K", "iq4_k", "q6_K"])
def test_writing_scales_leaves_codes(name: str) -> None:
    t = types.get(name)
    number, codes, n = scale_of(t), codes_of(t), 2 * t.block_size
    rows = t.quantize(data.rows("gaussian", 1, 2, n), np.ones(n, np.float32))
    before, after = np.empty((2, 2, n), np.uint8)
    read_codes(rows, codes, before)
    wanted = np.random.default_rng(3).choice(number.codes, (2, n // number.size))
    write_numbers(wanted, number, rows)
    read_codes(rows, codes, after)
    assert np.array_equal(before, after)
    assert np.array_equal(number_codes(number, rows, n), wanted)
