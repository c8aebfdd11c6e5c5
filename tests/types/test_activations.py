"""Formats of activations: the reference's bytes, and that the registry lists them apart from weights' types."""

from __future__ import annotations

import ctypes
import zlib

import numpy as np
import pytest

from quantkit import types
from quantkit.errors import DataError
from tests.types import data, naive

TYPES = types.activations()
by_type = pytest.mark.parametrize("t", TYPES, ids=lambda t: t.name)


def reference(t: types.QuantType, x: np.ndarray) -> np.ndarray:
    """The bytes that quantize_row_* makes of each row."""
    from tests.conformance import ggml

    function = getattr(ggml.library(), f"quantize_row_{t.name}")
    function.restype, function.argtypes = None, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    n = x.shape[1]
    out = np.zeros((len(x), t.row_bytes(n)), np.uint8)
    for row, encoded in zip(x, out):
        function(row.ctypes.data, encoded.ctypes.data, n)
    return out


def test_ids_and_sizes():
    result = {t.name: (t.ggml_type, t.row_bytes(1024)) for t in TYPES}
    assert result == {
        "q8_1": (9, 1152), "q8_K": (15, 1184), "q8_0_x4": (97, 1088), "q8_1_x4": (98, 1152), "q8_2_x4": (99, 1152),
        "q8_K64": (136, 1056), "q8_K16": (147, 1044), "q8_K32": (148, 1184), "q8_KR8": (149, 1184),
        "q8_K128": (150, 1120),
    }  # fmt: skip
    assert not {t.name for t in types.all()} & set(result)
    assert all(types.get(name) is types.from_id(number) for name, (number, _) in result.items())


@pytest.mark.parametrize("kind", ["gaussian", "student3", "outliers"])
@pytest.mark.parametrize(
    ("t", "n"),
    [(t, n) for t in TYPES for n in (512, 1024, 992, 928) if n % t.block_size == 0],
    ids=lambda value: str(getattr(value, "name", value)),
)
def test_the_bytes_of_the_reference(t, kind, n):
    """Also where blocks are left over from four, and for rows with zeros."""
    x = data.rows(kind, 71, 8, n)
    x[2] = 0
    x[3, : n // 2] = 0
    np.testing.assert_array_equal(t.quantize(x, threads=1), reference(t, x))


@by_type
def test_decoding_against_plain_python(t, rng):
    for blocks in (1, 3, 7):
        n = blocks * max(t.block_size, 32)
        encoded = data.random_bytes(t, rng, 5, n)
        with np.errstate(all="ignore"):
            expected = np.array([naive.DECODERS[t.name.lower()](bytes(row), n) for row in encoded], np.float32)
        result = t.dequantize(encoded, n)
        nan = np.isnan(expected)
        np.testing.assert_array_equal(nan, np.isnan(result))
        np.testing.assert_array_equal(result.view(np.uint32)[~nan], expected.view(np.uint32)[~nan])


@by_type
def test_codes_are_within_half_a_step_and_edges_are_finite(t):
    n = 1024
    x = data.rows("student3", 5, 6, n)
    x[1] *= np.float32(1e-42)
    x[2] *= np.float32(1e-20)
    x[3] *= np.float32(100)
    x[4] = 0
    y = t.dequantize(t.quantize(x), n)
    assert np.isfinite(y).all()
    assert not y[4].any()
    step = np.abs(x).max(axis=1, keepdims=True) / 127
    lost = 2.0**-18 if t.block_size == 32 else 2.0**-117  # their scales are halves; what is smaller becomes zeros
    assert (np.abs(x - y) <= 0.57 * step + lost).all()
    x[5, 3] = np.nan
    with pytest.raises(DataError, match="row 5, column 3 is nan"):
        t.quantize(x)


def test_known_answer_of_q8_k():
    """spec/types-ik.md 13."""
    row = ((149 * np.arange(296) + 7) % 256).astype(np.uint8)
    row[:4] = np.float32(1).reshape(1).view(np.uint8)
    y = types.get("q8_K").dequantize(row[None], 256)
    assert y[0, :6].tolist() == [-81, 68, -39, 110, 3, -104]
    assert f"{zlib.crc32(y):08x}" == "85b731b7"
