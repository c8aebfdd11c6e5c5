"""AWQ in both layouts against integers that are packed here one by one, and what does not hold together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quantkit.errors import FormatError, QuantkitError, UnsupportedError
from quantkit.formats.safetensors.quantized import unscaled
from tests.formats.checkpoints import Stored, written_in_shards

# Which of 8 neighbours the bits 4 k of a word hold, k from 0 to 7.
GEMM, GEMV = (0, 2, 4, 6, 1, 3, 5, 7), tuple(range(8))


def along(codes: np.ndarray, neighbours: tuple[int, ...]) -> np.ndarray:
    """int32[rows, columns / 8]: eight columns to a word."""
    words = np.zeros((len(codes), codes.shape[1] // 8), np.uint32)
    for word in range(words.shape[1]):
        for k, neighbour in enumerate(neighbours):
            words[:, word] |= codes[:, 8 * word + neighbour].astype(np.uint32) << np.uint32(4 * k)
    return words.view("<i4")


def layer(rng: np.random.Generator, layout: str, rows: int, n: int, size: int) -> tuple[Stored, np.ndarray]:
    """A random layer "a" and its float64 values."""
    groups = 1 if size == -1 else -(-n // size)
    codes, zeros = rng.integers(0, 16, (rows, n)), rng.integers(0, 16, (rows, groups))
    codes[:, 0], codes[:, -1], zeros[0] = 0, 15, 0
    scales = rng.uniform(1e-3, 0.1, (rows, groups)).astype("<f2")
    scales[1] = 0
    of_column = np.arange(n) // (n if size == -1 else size)
    values = (codes - zeros[:, of_column]) * scales.astype(np.float64)[:, of_column]
    if layout == "gemm":
        stored = along(codes.T, GEMM), along(zeros.T, GEMM), np.ascontiguousarray(scales.T)
    else:
        wide = -(-groups // 8) * 8 + 8  # more words than needed
        padded = np.zeros((2, rows, wide))
        padded[0, :, :groups], padded[1, :, :groups] = zeros, scales
        stored = along(codes, GEMV), along(padded[0].astype(int), GEMV), padded[1].astype("<f2")
    dtypes = {"qweight": "I32", "qzeros": "I32", "scales": "F16"}
    return {f"a.{name}": (dtype, x) for (name, dtype), x in zip(dtypes.items(), stored)}, values


@pytest.mark.parametrize("layout", ["gemm", "gemv"])
@pytest.mark.parametrize(("rows", "n", "size"), [(48, 64, 32), (24, 72, 32), (16, 256, 16), (8, 40, -1)])
def test_values(tmp_path: Path, rng: np.random.Generator, layout: str, rows: int, n: int, size: int) -> None:
    tensors, values = layer(rng, layout, rows, n, size)
    settings = {"quant_method": "awq", "bits": 4, "group_size": size, "zero_point": True, "version": layout.upper()}
    read = unscaled(written_in_shards(tmp_path / "c", tensors, 2), {"quantization_config": settings})
    assert list(read.tensors) == ["a.weight"]
    tensor: Any = read.tensors["a.weight"]
    assert (tensor.shape, tensor.dtype, tensor.float_type) == ((rows, n), "INT4", "f16")
    assert {part.name for part in tensor.inputs} == tensors.keys()
    np.testing.assert_array_equal(tensor.dequantize(), values)
    for start, stop in ((0, 1), (3, 7), (7, 8), (rows - 1, rows)):
        np.testing.assert_array_equal(tensor.rows(start, stop), values[start:stop])
    tensor.forget(0, rows)


@pytest.mark.parametrize("name", ["quant_config.json", "quantize_config.json"])
def test_settings_of_early_checkpoints(tmp_path: Path, rng: np.random.Generator, name: str) -> None:
    """In a file of their own, under other names."""
    tensors, values = layer(rng, "gemm", 16, 64, 32)
    stored = written_in_shards(tmp_path / "c", tensors, 1)
    early = {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}
    (tmp_path / "c" / name).write_text(json.dumps(early))
    np.testing.assert_array_equal(unscaled(stored, {}).tensors["a.weight"].dequantize(), values)


@pytest.mark.parametrize(
    ("settings", "tensors", "error", "message"),
    [
        ({"version": "gemv_fast"}, {}, UnsupportedError, r"\(awq, gemv_fast\); .* the layouts gemm and gemv"),
        ({"bits": 8}, {}, FormatError, "has bits 8; codes of AWQ have 4"),
        ({"version": "GEMV"}, {}, FormatError, r"a.qzeros is \(2, 2\); a of 64 x 16, layout gemv.* needs \(64, 1\)"),
        ({"group_size": 64}, {}, FormatError, r"a.scales is \(2, 16\); .* groups of 64 columns needs \(1, 16\)"),
        ({"group_size": None}, {}, FormatError, "unknown size: .* group_size may be 32"),
        ({}, {"a.qzeros": None}, FormatError, "a.qweight has no a.qzeros"),
        ({}, {"a.scales": None}, FormatError, "a.qweight has no a.scales"),
        ({}, {"a.qweight": None}, FormatError, "a.qzeros has no codes"),
        ({}, {"a.qweight": ("U8", np.zeros((64, 2), np.uint8))}, FormatError, "a.qweight is U8"),
        ({}, {"a.scales": ("F16", np.full((2, 16), np.inf, "<f2"))}, FormatError, "a.scales has the scale inf"),
    ],
)  # fmt: skip
def test_what_does_not_hold_together(
    tmp_path: Path, rng: np.random.Generator, settings: Any, tensors: Any, error: type[QuantkitError], message: str
) -> None:
    good, _ = layer(rng, "gemm", 16, 64, 32)
    stored = written_in_shards(tmp_path / "c", {k: v for k, v in {**good, **tensors}.items() if v is not None}, 1)
    stated = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "GEMM"} | settings
    with pytest.raises(error, match=message) as raised:
        unscaled(stored, {"quantization_config": stated}).tensors["a.weight"].dequantize()
    assert str(tmp_path / "c") in str(raised.value)
