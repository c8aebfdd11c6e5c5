"""NF4 against a decoder that goes through the values one by one, and what does not hold together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quantkit.errors import FormatError, QuantkitError, UnsupportedError
from quantkit.formats.safetensors.quantized import unscaled
from tests.formats.checkpoints import Stored, written_in_shards

SETTINGS = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
MAP = np.sort(np.random.default_rng(1).uniform(-1, 1, 16)).astype("<f4")
STEPS = np.random.default_rng(2).uniform(-1, 1, 256).astype("<f4")


def layer(rng: np.random.Generator, rows: int, n: int, doubled: bool) -> Stored:
    """A random matrix "a.weight" in blocks of 64, magnitudes of which are in blocks of 4 (256 in published files)."""
    blocks = -(-rows * n // 64)
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [rows, n]}
    tensors: Stored = {"a.weight": ("U8", rng.integers(0, 256, (-(-rows * n // 2), 1), np.uint8))}
    if doubled:
        state |= {"nested_blocksize": 4, "nested_dtype": "float32", "nested_offset": 0.0625}
        tensors |= {
            "a.weight.absmax": ("U8", rng.integers(0, 256, blocks, np.uint8)),
            "a.weight.nested_absmax": ("F32", rng.uniform(0.01, 0.1, -(-blocks // 4)).astype("<f4")),
            "a.weight.nested_quant_map": ("F32", STEPS),
        }
    else:
        tensors["a.weight.absmax"] = ("F32", rng.uniform(0.01, 0.1, blocks).astype("<f4"))
    return tensors | {
        "a.weight.quant_map": ("F32", MAP),
        "a.weight.quant_state.bitsandbytes__nf4": ("U8", np.frombuffer(json.dumps(state).encode(), np.uint8)),
        "a.bias": ("F32", np.ones(rows, "<f4")),
    }


def decoded(tensors: Stored, rows: int, n: int) -> np.ndarray:
    """float32[rows, n], each value on its own."""
    codes, magnitudes = tensors["a.weight"][1].reshape(-1), tensors["a.weight.absmax"][1]
    values = np.empty(rows * n, np.float32)
    for i in range(rows * n):
        code = codes[i // 2] >> 4 if i % 2 == 0 else codes[i // 2] & 15
        largest = magnitudes[i // 64]
        if "a.weight.nested_absmax" in tensors:
            largest = STEPS[largest] * tensors["a.weight.nested_absmax"][1][i // 64 // 4] + np.float32(0.0625)
        values[i] = MAP[code] * largest
    return values.reshape(rows, n)


@pytest.mark.parametrize("doubled", [False, True])
@pytest.mark.parametrize(("rows", "n"), [(6, 128), (5, 48), (7, 33), (3, 200)])
def test_values(tmp_path: Path, rng: np.random.Generator, rows: int, n: int, doubled: bool) -> None:
    """Blocks in a row, and blocks that span rows."""
    tensors = layer(rng, rows, n, doubled)
    read = unscaled(written_in_shards(tmp_path / "c", tensors, 2), {"quantization_config": SETTINGS})
    assert list(read.tensors) == ["a.weight", "a.bias"]
    tensor: Any = read.tensors["a.weight"]
    assert (tensor.shape, tensor.dtype, tensor.float_type) == ((rows, n), "NF4", "bf16")
    expected = decoded(tensors, rows, n)
    np.testing.assert_array_equal(tensor.dequantize(), expected)
    for start, stop in ((0, 1), (1, 3), (rows - 1, rows), (2, 2)):
        np.testing.assert_array_equal(tensor.rows(start, stop), expected[start:stop])
    tensor.forget(1, 2)


STATE = "a.weight.quant_state.bitsandbytes__nf4"


def state(**changes: Any) -> tuple[str, np.ndarray]:
    found = {"quant_type": "nf4", "blocksize": 64, "dtype": "float16", "shape": [4, 64], "nested_blocksize": 4,
             "nested_offset": 0.5} | changes  # fmt: skip
    return "U8", np.frombuffer(json.dumps(found).encode(), np.uint8)


@pytest.mark.parametrize(
    ("settings", "tensors", "error", "message"),
    [
        ({"load_in_8bit": True}, {}, UnsupportedError, r"\(bitsandbytes, 8 bits\)"),
        ({"bnb_4bit_quant_type": "fp4"}, {}, UnsupportedError, r"\(bitsandbytes, fp4\)"),
        ({}, {STATE: None, STATE.replace("nf4", "fp4"): state()}, UnsupportedError, "a.weight is fp4"),
        ({}, {"a.weight.absmax": None}, FormatError, "a.weight has no a.weight.absmax"),
        ({}, {"a.weight.quant_map": None}, FormatError, "a.weight has no a.weight.quant_map"),
        ({}, {"a.weight.nested_absmax": None}, FormatError, "has no a.weight.nested_absmax"),
        ({}, {STATE: None}, FormatError, "a.weight.absmax has no codes that it scales"),
        ({}, {STATE: state(shape=[4, 66])}, FormatError, r"has 128 bytes; .* says \(4, 66\), which are 132"),
        ({}, {STATE: state(shape=[256])}, FormatError, r"the shape \[256\]; a matrix has two sizes"),
        ({}, {STATE: state(blocksize=0)}, FormatError, "has blocksize 0"),
        ({}, {STATE: state(blocksize=32)}, FormatError, r"absmax is \(4,\); .* blocks of 32 needs \(8,\)"),
        ({}, {STATE: ("U8", np.frombuffer(b"[1]", np.uint8))}, FormatError, "quant_state"),
        ({}, {"a.weight.nested_absmax": ("F32", np.full(1, np.nan, "<f4"))}, FormatError, "absmax has the scale nan"),
    ],
)  # fmt: skip
def test_what_does_not_hold_together(
    tmp_path: Path, rng: np.random.Generator, settings: Any, tensors: Any, error: type[QuantkitError], message: str
) -> None:
    changed = {name: x for name, x in {**layer(rng, 4, 64, True), **tensors}.items() if x is not None}
    stored = written_in_shards(tmp_path / "c", changed, 1)
    with pytest.raises(error, match=message):
        unscaled(stored, {"quantization_config": SETTINGS | settings}).tensors["a.weight"].dequantize()
