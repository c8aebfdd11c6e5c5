"""Which bits of a block are the code of an element, and the ladder of their values."""

from __future__ import annotations

import numpy as np
import pytest

from quantkit import types
from quantkit.types.families.code_bits import codes_of, read_codes, write_codes
from tests.types import data

# Types whose elements have codes of their own; what else has a codec and an importance names several elements at once.
SINGLE = ("q4_0", "q4_1", "q5_0", "q5_1", "q6_0", "q2_K", "q3_K", "q4_K", "q5_K", "q6_K", "iq4_nl", "iq4_xs", "mxfp4",
          "nvfp4", "iq2_k", "iq3_k", "iq4_k", "iq5_k", "iq6_k", "iq2_ks", "iq3_ks", "iq4_ks", "iq5_ks", "q8_0", "q8_KV",
          "q1_0_g128", "q2_0", "tq2_0")  # fmt: skip
OTHERS = ("iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq3_xxs", "iq3_s", "iq2_kl", "iq4_kss", "iq1_bn", "tq1_0", "f16",
          "bf16", "iq2_kt", "iq4_kt")  # fmt: skip
single = pytest.mark.parametrize("name", SINGLE)


def test_which_types_have_codes_of_single_elements():
    assert all(codes_of(types.get(name)) is not None for name in SINGLE)
    assert not any(codes_of(types.get(name)) for name in OTHERS)


@single
def test_a_code_is_one_element(name):
    """Every element moved alone: no other changes, and the new value is a ladder step away."""
    t = types.get(name)
    codes, n = codes_of(t), 2 * t.block_size
    rows = t.quantize(data.rows("gaussian", 1, 3, n), np.ones(n, np.float32))
    y = t.dequantize(rows, n, products=True)
    result = np.empty((3, n), np.uint8)
    read_codes(rows, codes, result)
    for j in (0, 1, 15, t.block_size - 1, t.block_size, n - 1):
        units = []
        for following, ladder in ((codes.ladder.above, codes.ladder.up), (codes.ladder.below, codes.ladder.down)):
            moved, changed = result.copy(), rows.copy()
            moved[1, j] = following[result[1, j]]
            write_codes(moved, codes, changed)
            back = t.dequantize(changed, n, products=True)
            others = np.ones((3, n), bool)
            others[1, j] = False
            assert np.array_equal(back[others], y[others])
            if moved[1, j] != result[1, j]:
                units.append((back[1, j] - y[1, j]) / ladder[result[1, j]])
                assert units[-1] != 0
        assert len(units) == 1 or np.isclose(*units, rtol=1e-3)


@single
def test_written_codes_are_read(name):
    t = types.get(name)
    codes, n = codes_of(t), 2 * t.block_size
    rows = t.quantize(data.rows("gaussian", 2, 5, n), np.ones(n, np.float32))
    expected = np.random.default_rng(3).integers(0, len(codes.ladder.above), (5, n)).astype(np.uint8)
    write_codes(expected, codes, rows)
    result = np.empty_like(expected)
    read_codes(rows, codes, result)
    assert np.array_equal(result, expected)


@single
def test_the_ladder_holds_all_values_in_their_order(name):
    t = types.get(name)
    codes, n = codes_of(t), t.block_size
    row = t.quantize(data.rows("gaussian", 4, 1, n), np.ones(n, np.float32))
    code = int(np.flatnonzero(codes.ladder.down == 0)[0])
    seen = []
    while True:
        write_codes(np.full((1, n), code, np.uint8), codes, row)
        seen.append((code, t.dequantize(row, n, products=True)[0]))
        if codes.ladder.above[code] == code:
            break
        code = int(codes.ladder.above[code])
    rising = np.diff(np.array([values for _, values in seen]), axis=0)
    assert ((rising > 0).all(axis=0) | (rising < 0).all(axis=0)).all()
    # Two codes of zero, or one that is never written.
    assert len(seen) == len(codes.ladder.above) - (name in ("mxfp4", "nvfp4", "q8_0", "q8_KV", "tq2_0"))


def test_no_step_leads_to_a_code_that_is_never_written():
    for name in ("q8_0", "q8_KV", "iq2_bn", "tq2_0"):
        t = types.get(name)
        codes = codes_of(t)
        assert t.unwritten_code not in np.concatenate([codes.ladder.above, codes.ladder.below])
        assert codes.ladder.up[t.unwritten_code] != 0  # but one away from it
