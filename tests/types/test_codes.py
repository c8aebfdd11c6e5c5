"""Which bits of a block are the code of an element, and what moving codes does."""

from __future__ import annotations

import numpy as np
import pytest

from quantkit import types
from quantkit.types.families.code_bits import codes_of, neighbours, step
from tests.types import data

# Types whose elements have codes of their own; what else has a codec and an importance names several elements at once.
SINGLE = ("q4_0", "q4_1", "q5_0", "q5_1", "q6_0", "q2_K", "q3_K", "q4_K", "q5_K", "q6_K", "iq4_nl", "iq4_xs", "mxfp4",
          "iq2_k", "iq3_k", "iq4_k", "iq5_k", "iq6_k", "iq2_ks", "iq3_ks", "iq4_ks", "iq5_ks")  # fmt: skip
OTHERS = ("iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq3_xxs", "iq3_s", "iq2_kl", "iq4_kss", "q8_0", "f16", "bf16",
          "iq2_kt", "iq4_kt")  # fmt: skip
single = pytest.mark.parametrize("name", SINGLE)


def test_which_types_have_codes_of_single_elements():
    assert all(codes_of(types.get(name)) is not None for name in SINGLE)
    assert not any(codes_of(types.get(name)) for name in OTHERS)


@single
def test_a_code_is_one_element(name):
    """Every element moved alone: no other changes, and the new value is the next one on that side."""
    t = types.get(name)
    codes, n = codes_of(t), 2 * t.block_size
    rows = t.quantize(data.rows("gaussian", 1, 3, n), np.ones(n, np.float32))
    y = t.dequantize(rows, n)
    next_rows, last_rows = rows.copy(), rows.copy()
    neighbours(rows, next_rows, last_rows, n, codes)
    above, below = t.dequantize(next_rows, n), t.dequantize(last_rows, n)
    assert ((above - y) * (below - y) <= 0).all()
    assert np.mean(above != below) > 0.9
    for j in (0, 1, 15, t.block_size - 1, t.block_size, n - 1):
        for move, values in ((1, above), (-1, below)):
            moves = np.zeros((3, n), np.int8)
            moves[1, j] = move
            moved = rows.copy()
            step(moved, moves, codes)
            expected = y.copy()
            expected[1, j] = values[1, j]
            assert np.array_equal(t.dequantize(moved, n), expected)


@single
def test_all_values_are_met_in_their_order(name):
    t = types.get(name)
    codes, n = codes_of(t), t.block_size
    row = t.quantize(data.rows("gaussian", 4, 1, n), np.ones(n, np.float32))
    seen = []
    for _ in range(len(codes.above) + 1):
        step(row, np.full((1, n), -1, np.int8), codes)
    for _ in range(len(codes.above)):
        seen.append(t.dequantize(row, n)[0])
        step(row, np.full((1, n), 1, np.int8), codes)
    rising = np.diff(np.array(seen), axis=0)
    assert ((rising >= 0).all(axis=0) | (rising <= 0).all(axis=0)).all()
    assert len(np.unique(np.array(seen)[:, 0])) >= len(codes.above) - (name == "mxfp4")  # which has two zeros
