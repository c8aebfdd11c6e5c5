"""What callers pass to public functions is checked before native code gets an address or a count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from quantkit import repack, types
from quantkit.errors import DataError, FormatError, QuantkitError, UnknownNameError
from quantkit.inputs import arguments

X = np.random.default_rng(0).standard_normal((8, 64)).astype(np.float32)
KIND = types.get("q4_0")
DATA = KIND.quantize(X)
WOVEN = types.get("q4_0_r8")

BAD_NUMBERS = {
    "row_bytes of a float": lambda: KIND.row_bytes(64.0),
    "row_bytes of a bool": lambda: types.get("f32").row_bytes(True),
    "row_bytes of text": lambda: KIND.row_bytes("64"),
    "row_bytes of None": lambda: KIND.row_bytes(None),
    "row_bytes below 0": lambda: KIND.row_bytes(-32),
    "tensor_bytes below 0": lambda: KIND.tensor_bytes((-3, 64)),
    "tensor_bytes of no dimension": lambda: KIND.tensor_bytes(()),
    "bits_per_weight of a float": lambda: KIND.bits_per_weight(64.0),
    "dequantize with n a float": lambda: KIND.dequantize(DATA, 64.0),
    "dequantize with n text": lambda: KIND.dequantize(DATA, "64"),
    "dequantize with n of other rows": lambda: KIND.dequantize(DATA, 32),
    "quantize with threads as text": lambda: KIND.quantize(X, threads="2"),
    "quantize with threads below 1": lambda: KIND.quantize(X, threads=-1),
    "dequantize with too many threads": lambda: KIND.dequantize(DATA, 64, threads=10**9),
    "repack without n": lambda: repack.repack(DATA, "q4_0", None),
    "interleave_rows with threads a float": lambda: WOVEN.interleave_rows(DATA, threads=1.5),
}
BAD_ARRAYS = {
    "quantize of text": lambda: KIND.quantize("hello"),
    "quantize of objects": lambda: KIND.quantize(np.array([["a"] * 32], object)),
    "quantize of unequal rows": lambda: KIND.quantize([[1.0] * 32, [1.0]]),
    "quantize of None": lambda: KIND.quantize(None),
    "quantize of three dimensions": lambda: KIND.quantize(X[None]),
    "quantize of dates": lambda: KIND.quantize(X.astype("i8").astype("M8[s]")),
    "quantize of records": lambda: KIND.quantize(np.zeros((4, 64), [("a", "f4")])),
    "quantize of complex numbers": lambda: KIND.quantize(X.astype(complex)),
    "importance of another length": lambda: KIND.quantize(X, np.ones(63)),
    "importance below 0": lambda: KIND.quantize(X, -np.ones(64)),
    "importance that is NaN": lambda: KIND.quantize(X, np.full(64, np.nan)),
    "importance of unequal rows": lambda: KIND.quantize(X, [[1.0], [2.0, 3.0]]),
    "dequantize of floats": lambda: KIND.dequantize(DATA.astype(np.float32), 64),
    "dequantize of bools": lambda: KIND.dequantize(DATA.astype(bool), 64),
    "dequantize of numbers above 255": lambda: KIND.dequantize(DATA.astype(np.int32) + 256, 64),
    "dequantize of an object": lambda: KIND.dequantize(object(), 64),
    "repack of floats": lambda: repack.repack(DATA + 0.5, "q4_0", 64),
    "repack of numbers below 0": lambda: repack.repack(DATA.astype(np.int32) - 300, "q4_0", 64),
    "repack of text": lambda: repack.repack("abc", "q4_0", 64),
    "repack of one row": lambda: repack.repack(DATA[0], "q4_0", 64),
    "unpack of floats": lambda: repack.unpack(DATA + 0.5, "q4_0_r8", 64),
    "unpack of other rows": lambda: repack.unpack(DATA, "q4_0_r8", 32),
    "interleave_rows of floats": lambda: WOVEN.interleave_rows(DATA.astype(np.float32)),
    "interleave_rows of 7 rows": lambda: WOVEN.interleave_rows(DATA[:7]),
}


@pytest.mark.parametrize("call", [*BAD_NUMBERS.values(), *BAD_ARRAYS.values()], ids=[*BAD_NUMBERS, *BAD_ARRAYS])
def test_a_wrong_argument_is_one_clear_error(call: Callable[[], Any]) -> None:
    with pytest.raises(DataError) as raised:
        call()
    assert len(str(raised.value)) > 20


def unaligned(x: np.ndarray) -> np.ndarray:
    out = np.zeros(x.nbytes + 1, np.uint8)[1:].view(x.dtype).reshape(x.shape)
    out[:] = x
    return out


@pytest.mark.parametrize("name", ["q4_0", "q8_0", "iq4_k", "q6_K", "f16", "iq2_kt"])
def test_arrays_of_any_layout_give_the_same_bytes(name: str) -> None:
    kind, x = types.get(name), np.repeat(X, 4, axis=1)
    data = kind.quantize(x)
    frozen = x.copy()
    frozen.flags.writeable = False
    for other in (x.astype(">f4"), np.asfortranarray(x), unaligned(x), frozen, x.astype(np.float64), x.tolist()):
        np.testing.assert_array_equal(kind.quantize(other), data)
    values = kind.dequantize(data, 256)
    for other in (np.asfortranarray(data), unaligned(data), data.astype(">u2"), data.astype(np.int64)):
        np.testing.assert_array_equal(kind.dequantize(other, 256), values)


@pytest.mark.parametrize(("rows", "n"), [(0, 64), (8, 0), (0, 0)])
def test_empty_arrays_stay_empty(rows: int, n: int) -> None:
    data = KIND.quantize(np.zeros((rows, n), np.float32))
    assert data.shape == (rows, KIND.row_bytes(n))
    assert KIND.tensor_bytes((rows, n)) == data.nbytes
    assert KIND.dequantize(data, n).shape == (rows, n)
    woven, name = repack.repack(data, "q4_0", n)
    assert woven.shape == data.shape
    assert repack.unpack(woven, name, n)[0].shape == data.shape


def outputs() -> dict[str, Any]:
    shared = np.zeros((8, 64), np.float32)
    frozen = np.zeros((8, 64), np.float32)
    frozen.flags.writeable = False
    return {
        "list": [[0.0] * 64] * 8,
        "float64": np.zeros((8, 64)),
        "other byte order": np.zeros((8, 64), ">f4"),
        "too small": np.zeros((4, 64), np.float32),
        "not contiguous": np.zeros((8, 128), np.float32)[:, ::2],
        "read-only": frozen,
        "overlapping": shared,
    }


@pytest.mark.parametrize("case", outputs())
def test_an_output_that_cannot_be_filled_is_refused(case: str) -> None:
    out = outputs()[case]
    data = DATA
    if case == "overlapping":  # decoding would overwrite what is still to be read
        data = out.view(np.uint8).reshape(-1)[: DATA.size].reshape(DATA.shape)
        data[:] = DATA
    with pytest.raises(DataError, match="out=float32"):
        KIND.dequantize(data, 64, out=out)
    woven = {
        "read-only": jit_readonly(np.zeros_like(DATA)),
        "not contiguous": np.zeros((8, 72), np.uint8)[:, ::2],
        "overlapping": DATA,
    }
    if case in woven:
        with pytest.raises(DataError, match="out=uint8"):
            WOVEN.interleave_rows(DATA, out=woven[case])


def jit_readonly(x: np.ndarray) -> np.ndarray:
    x.flags.writeable = False
    return x


@pytest.mark.parametrize("name", [None, 5, b"q4_0", ["q4_0"]])
def test_names_that_are_no_text_are_unknown_names(name: Any) -> None:
    with pytest.raises(UnknownNameError, match="unknown type"):
        types.get(name)
    with pytest.raises(UnknownNameError, match="unknown type"):
        repack.repack(DATA, name, 64)
    with pytest.raises(UnknownNameError, match="unknown effort"):
        KIND.quantize(X, effort=name)
    with pytest.raises(FormatError):
        types.from_id(name if name != 5 else -5)


def test_integers_take_every_integer_type_and_nothing_else() -> None:
    assert arguments.integer(np.int32(2**31 - 32), "n") * 4 == 2**33 - 128  # no overflow of 32 bits
    for bad in (True, np.bool_(True), 1.0, "1", None, 11, -1):
        with pytest.raises(DataError, match="the size"):
            arguments.integer(bad, "the size", 0, 10)


@pytest.mark.parametrize(
    "bad", [[1.5], [True], ["a"], [2**70], [-1], [320], None, [[1], [2, 3]], [2**63 + 5], [1, None]]
)
def test_indices_are_integers_in_range(bad: Any) -> None:
    with pytest.raises(QuantkitError, match="tokens"):
        arguments.integers(bad, "tokens", 320)


def test_indices_of_any_integer_type_become_int64() -> None:
    for given in ([1, 2], (1, 2), np.array([1, 2], ">i4"), np.array([1, 2], np.uint64), np.array([1, 2], np.uint8)):
        made = arguments.integers(given, "tokens", 320)
        assert made.dtype == np.int64
        assert made.tolist() == [1, 2]
    assert arguments.integers([], "tokens", 320).shape == (0,)
