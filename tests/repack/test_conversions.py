"""Interleaved types that are unpacked to another type: the same values bit for bit, or an error that names the row."""

from __future__ import annotations

import numpy as np
import pytest

from quantkit import repack, types
from quantkit.errors import DataError


def groups_of(name: str, rng: np.random.Generator, rows: int, n: int) -> np.ndarray:
    """Any bytes as rows of IQ1_S_R4 or IQ1_M_R4, with finite scales small enough to be multiplied by 8."""
    data = rng.integers(0, 256, (rows, types.get(name).row_bytes(n)), dtype=np.uint8)
    data.reshape(rows // 4, -1)[:, 1:8:2] &= 0xAF
    return data


def heads(data: np.ndarray) -> np.ndarray:
    """The rows' scales, float16[groups, 4], to be written to."""
    return data.reshape(len(data) // 4, -1)[:, :8].view("<f2")


def multipliers(data: np.ndarray) -> np.ndarray:
    """The bytes with multipliers of IQ1_M_R4: uint8[groups, blocks of 32, 4], to be written to."""
    return data.reshape(len(data) // 4, -1)[:, 8:].reshape(len(data) // 4, -1, 28)[:, :, 24:]


def naive_iq1_s(data: np.ndarray, n: int) -> np.ndarray:
    """Field by field, as spec/repack.md 6.1 has them."""
    out = np.zeros((len(data), n // 256, 50), np.uint8)
    for row in range(len(data)):
        group, k = data.reshape(len(data) // 4, -1)[row // 4], row % 4
        for ib in range(n // 32):
            block = group[8 + 24 * ib : 32 + 24 * ib]
            out[row, ib // 8, :2] = group[2 * k : 2 * k + 2]
            out[row, ib // 8, 2 + ib % 8 * 4 : 6 + ib % 8 * 4] = block[k:16:4]
            out[row, ib // 8, 34 + ib % 8 * 2 : 36 + ib % 8 * 2] = block[16 + 2 * k : 18 + 2 * k]
    return out.reshape(len(data), -1)


def assert_same_values(data: np.ndarray, name: str, n: int) -> np.ndarray:
    """Unpack and compare decoded bits; returns the unpacked tensor."""
    made, base = repack.unpack(data, name, n)
    with np.errstate(all="ignore"):
        there = types.get(name).dequantize(data.reshape(-1, data.shape[-1]), n)
        here = types.get(base).dequantize(made.reshape(-1, made.shape[-1]), n)
    np.testing.assert_array_equal(here.view(np.uint32), there.view(np.uint32))
    return made


@pytest.mark.parametrize("n", [256, 768])
def test_iq1_s(n: int, rng: np.random.Generator) -> None:
    data = groups_of("iq1_s_r4", rng, 12, n)
    heads(data)[0] = np.inf, np.nan, 0, -0.0
    made, name = repack.unpack(data, "iq1_s_r4", n)
    assert name == "IQ1_S"
    np.testing.assert_array_equal(made, naive_iq1_s(data, n))
    heads(data)[0] = 1, 2, 0, -0.0
    stack = data.reshape(3, 4, -1)
    np.testing.assert_array_equal(assert_same_values(stack, "iq1_s_r4", n).reshape(12, -1), naive_iq1_s(data, n))


def test_values_beside_the_references_decoders(rng: np.random.Generator) -> None:
    from tests.conformance import ggml

    for name in ("iq1_s_r4", "iq1_m_r4"):
        data = groups_of(name, rng, 8, 512)
        if name == "iq1_m_r4":
            multipliers(data)[...] |= 0x11
        made, base = repack.unpack(data, name, 512)
        np.testing.assert_array_equal(ggml.dequantize(base, made, 512), ggml.dequantize(name, data, 512))


@pytest.mark.parametrize("power", [1, 2, 4, 8])
def test_iq1_m_of_odd_numbers_times_a_power_of_two(power: int, rng: np.random.Generator) -> None:
    n = 768
    data = groups_of("iq1_m_r4", rng, 8, n)
    odd = rng.integers(0, 8 // power, (2, *multipliers(data).shape)) * 2 + 1
    multipliers(data)[...] = (power * (odd[0] | odd[1] << 4)).astype(np.uint8)
    heads(data)[1] = 2.0**-24, 0, -(2.0**-15), 3 * 2.0**-24  # subnormal
    assert_same_values(data, "iq1_m_r4", n)


def test_iq1_m_of_zeros(rng: np.random.Generator) -> None:
    """Blocks of zeros of either sign; a scale of 0, with which multipliers have no effect."""
    data = groups_of("iq1_m_r4", rng, 8, 512)
    multipliers(data)[...] |= 0x11
    multipliers(data)[0, :8] = 0
    multipliers(data)[1, 3, 2] = 0x40
    heads(data)[0, :2] = 1.5, -1.5
    heads(data)[1, 2] = -0.0
    made = assert_same_values(data, "iq1_m_r4", 512)
    assert np.signbit(types.get("iq1_m").dequantize(made, 512)).any()


@pytest.mark.parametrize("inside", [0x10, 0x21, 0x4A, 0x01])
def test_iq1_m_that_cannot_be_converted_names_the_row(inside: int, rng: np.random.Generator) -> None:
    data = groups_of("iq1_m_r4", rng, 12, 768)
    multipliers(data)[...] |= 0x11
    multipliers(data)[1, 8 + 5, 2] = inside
    heads(data)[1, 2] = 1
    with pytest.raises(DataError, match="iq1_m_r4: iq1_m cannot hold the multipliers of row 6, columns 256 to 511"):
        repack.unpack(data, "IQ1_M_R4", 768)
    assert repack.why_not(types.get("iq1_m_r4"), data[4:], 768, first_row=100).endswith("row 102, columns 256 to 511")
    assert repack.why_not(types.get("iq1_m_r4"), data[8:], 768) == ""


def test_a_scale_that_would_leave_its_range_is_not_converted(rng: np.random.Generator) -> None:
    data = groups_of("iq1_m_r4", rng, 4, 256)
    multipliers(data)[...] = 0x88
    heads(data)[0] = 1, 2, 8192, 3
    with pytest.raises(DataError, match="row 2"):
        repack.unpack(data, "IQ1_M_R4", 256)
    heads(data)[0] = 1, 2, 8188, np.inf
    with pytest.raises(DataError, match="row 3"):
        repack.unpack(data, "IQ1_M_R4", 256)


def test_columns_that_do_not_fit(rng: np.random.Generator) -> None:
    for name, base in (("iq1_s_r4", "iq1_s"), ("iq1_m_r4", "iq1_m")):
        with pytest.raises(DataError, match=f"{name}: 288 columns are not a multiple of {base}'s 256"):
            repack.unpack(groups_of(name, rng, 4, 288), name, 288)


def test_rows_that_quantkit_encoded_are_the_same_after_unpacking(rng: np.random.Generator) -> None:
    x = rng.standard_normal((8, 512)).astype(np.float32)
    data = types.get("iq1_s_r4").quantize(x, np.ones(512, np.float32))
    assert_same_values(data, "iq1_s_r4", 512)


@pytest.mark.parametrize("name", ["q8_k_r8", "q8_k_r16"])
def test_q8_k_becomes_q8_0(name: str, rng: np.random.Generator) -> None:
    x = rng.standard_normal((2, 32, 512)).astype(np.float32)
    x[1, 3, :256] = 0
    t = types.get(name)
    data = np.stack([t.quantize(m) for m in x])
    made = assert_same_values(data, name, 512)
    assert made.shape == (2, 32, types.get("q8_0").row_bytes(512))
    assert repack.unpack(data, name, 512)[1] == "Q8_0"
