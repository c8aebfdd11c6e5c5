"""GPTQ against integers that are packed here bit by bit, and what does not hold together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quantkit.errors import DataError, FormatError, QuantkitError, UnsupportedError
from quantkit.formats.safetensors.quantized import unscaled
from tests.formats.checkpoints import Stored, written_in_shards


def stream(codes: np.ndarray, bits: int) -> np.ndarray:
    """int32 words of a sequence of codes: one number of many bits, the first code lowest."""
    number = sum(int(code) << bits * i for i, code in enumerate(codes))
    return np.frombuffer(number.to_bytes(len(codes) * bits // 8, "little"), "<i4")


def down(codes: np.ndarray, bits: int) -> np.ndarray:
    """int32[n * bits / 32, columns]: each column a stream."""
    return np.stack([stream(column, bits) for column in codes.T], axis=1)


def along(codes: np.ndarray, bits: int) -> np.ndarray:
    """int32[rows, columns * bits / 32]: each row a stream."""
    return np.stack([stream(row, bits) for row in codes])


# What version 1 subtracts from words of zero points; GPTQModel before 5.0 with 3 bits has two of three words swapped.
FIELDS = {2: [0x55555555], 4: [0x11111111], 8: [0x01010101]}
SWAPPED = [0x24924924, 0x92492492, 0x49249249]


def less(words: np.ndarray, ones: list[int]) -> np.ndarray:
    """Words minus the given ones, which repeat along a row, modulo 2^32."""
    found = [[(int(word) - ones[j % len(ones)]) % 2**32 for j, word in enumerate(row)] for row in words.view("<u4")]
    return np.array(found, "<u4").view("<i4")


class Layer:
    """A random layer of `n` inputs and `rows` outputs, and its float64 values."""

    def __init__(self, rng: np.random.Generator, bits: int, n: int, rows: int, size: int, **kind: bool):
        self.bits, self.n, self.rows, self.size = bits, n, rows, size
        runs = np.arange(n) // (n if size == -1 else size)
        groups = int(runs[-1]) + 1
        self.codes = rng.integers(0, 1 << bits, (n, rows))
        self.codes[0], self.codes[-1] = 0, (1 << bits) - 1
        symmetric = kind.get("symmetric", False)
        self.zeros = np.full((groups, rows), 1 << bits - 1) if symmetric else rng.integers(0, 1 << bits, (groups, rows))
        if not symmetric:
            self.zeros[0, :3] = 0, (1 << bits) - 1, 0
        self.scales = rng.uniform(1e-3, 0.1, (groups, rows)).astype("<f2")
        self.scales[0, 1] = 0
        self.order = rng.permutation(runs) if kind.get("ordered") else runs
        self.values = (self.codes - self.zeros[self.order]) * self.scales.astype(np.float64)[self.order]

    def tensors(self, name: str, ones: list[int]) -> Stored:
        """`ones` are subtracted from words; with 3 bits and [1], from each zero point."""
        if ones == [1]:
            zeros, ones = along((self.zeros - 1) % 8, 3), []
        else:
            zeros = along(self.zeros, self.bits)
        return {
            f"{name}.qweight": ("I32", down(self.codes, self.bits)),
            f"{name}.qzeros": ("I32", less(zeros, ones) if ones else zeros),
            f"{name}.scales": ("F16", self.scales),
            f"{name}.g_idx": ("I32", self.order.astype("<i4")),
        }

    @property
    def settings(self) -> dict[str, Any]:
        return {"quant_method": "gptq", "bits": self.bits, "group_size": self.size, "sym": False}


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2", "gptqmodel"])
@pytest.mark.parametrize(
    ("bits", "n", "rows", "size"), [(4, 96, 64, 32), (4, 72, 40, 32), (8, 64, 36, -1), (3, 96, 64, 32), (2, 80, 48, 16)]
)
def test_values(
    tmp_path: Path, rng: np.random.Generator, bits: int, n: int, rows: int, size: int, version: str, ordered: bool
) -> None:
    """Every kind of zero points, of 0 too, which borrow in words; groups in order and out of it; several shards."""
    layer = Layer(rng, bits, n, rows, size, ordered=ordered)
    ones = [] if version == "gptq_v2" else FIELDS.get(bits) or (SWAPPED if version == "gptqmodel" else [1])
    tensors = layer.tensors("a", ones) | {"a.bias": ("F16", np.zeros(rows, "<f2"))}
    settings = layer.settings | {"checkpoint_format": version.removesuffix("model")}
    if version == "gptqmodel":
        settings |= {"meta": {"quantizer": ["gptqmodel:1.9.0"]}}
    stored = written_in_shards(tmp_path / "c", tensors, 3)
    assert len(stored.paths) > 1
    read = unscaled(stored, {"quantization_config": settings})
    assert list(read.tensors) == ["a.weight", "a.bias"]
    tensor: Any = read.tensors["a.weight"]
    assert (tensor.shape, tensor.dtype, tensor.float_type) == ((rows, n), f"INT{bits}", "f16")
    assert {part.name for part in tensor.inputs} == tensors.keys() - {"a.bias"}
    np.testing.assert_array_equal(tensor.dequantize(), layer.values.T)
    for start, stop in ((0, 1), (3, 11), (31, 33), (rows - 5, rows)):
        np.testing.assert_array_equal(tensor.rows(start, stop), layer.values.T[start:stop])
    tensor.forget(0, rows)
    with pytest.raises(DataError, match="has rows 0 to"):
        tensor.rows(0, rows + 1)


def test_a_group_size_that_does_not_divide(tmp_path: Path, rng: np.random.Generator) -> None:
    """The last group is shorter; scales are bf16; no g_idx; settings from quantize_config.json."""
    layer = Layer(rng, 4, 80, 32, 48, symmetric=True)
    tensors = layer.tensors("a", FIELDS[4])
    del tensors["a.g_idx"]
    scales = layer.scales.astype("<f4").view("<u4") >> 16
    tensors["a.scales"] = ("BF16", scales.astype("<u2"))
    stored = written_in_shards(tmp_path / "c", tensors, 1)
    settings = layer.settings | {"sym": True, "desc_act": False}
    del settings["quant_method"]
    (tmp_path / "c" / "quantize_config.json").write_text(json.dumps(settings))
    tensor: Any = unscaled(stored, {}).tensors["a.weight"]
    assert tensor.float_type == "bf16"
    factor = (scales << 16).astype("<u4").view("<f4")[layer.order]
    np.testing.assert_array_equal(tensor.dequantize(), ((layer.codes - 8) * factor).T)


@pytest.mark.parametrize(("version", "ones"), [("6.0.0", SWAPPED), ("6.0.0", [1]), ("7.7.0", [1])])
def test_zero_points_of_3_bits_by_gptqmodel(
    tmp_path: Path, rng: np.random.Generator, version: str, ones: list[int]
) -> None:
    """Where the version does not tell how they are stored, symmetric codes do; others are refused."""
    layer = Layer(rng, 3, 64, 32, 32, symmetric=True)
    stored = written_in_shards(tmp_path / "c", layer.tensors("a", ones), 1)
    settings = layer.settings | {"sym": True, "meta": {"quantizer": f"gptqmodel:{version}"}}
    read = unscaled(stored, {"quantization_config": settings})
    np.testing.assert_array_equal(read.tensors["a.weight"].dequantize(), layer.values.T)
    if version == "6.0.0":
        with pytest.raises(UnsupportedError, match=r"a.qzeros is of version gptq .* GPTQModel 6.0; .* as gptq_v2"):
            unscaled(stored, {"quantization_config": settings | {"sym": False}})


def test_dynamic_overrides(tmp_path: Path, rng: np.random.Generator) -> None:
    """The first pattern that matches counts."""
    layers = {"model.a": Layer(rng, 8, 64, 32, 64), "model.b": Layer(rng, 4, 64, 32, 32)}
    tensors = {k: v for name, layer in layers.items() for k, v in layer.tensors(name, FIELDS[layer.bits]).items()}
    stored = written_in_shards(tmp_path / "c", tensors, 1)
    dynamic = {r"-:model\.c": {}, r"+:.*\.a": {"bits": 8, "group_size": 64}, r".*\.a": {"bits": 2}}
    settings = layers["model.b"].settings | {"dynamic": dynamic}
    read = unscaled(stored, {"quantization_config": settings}).tensors
    for name, layer in layers.items():
        np.testing.assert_array_equal(read[f"{name}.weight"].dequantize(), layer.values.T)
    with pytest.raises(FormatError, match=r"a.qweight holds codes; .*says with '-:.*' that model.a is not quantized"):
        unscaled(stored, {"quantization_config": settings | {"dynamic": {"-:model": {}}}})


def test_settings_beside_config_json(tmp_path: Path, rng: np.random.Generator) -> None:
    """What config.json leaves out is taken from quantize_config.json; what the two contradict is an error."""
    layer = Layer(rng, 4, 64, 32, 32)
    stored = written_in_shards(tmp_path / "c", layer.tensors("a", []), 1)
    beside = tmp_path / "c" / "quantize_config.json"
    beside.write_text(json.dumps({"bits": 4, "group_size": 32, "sym": False, "checkpoint_format": "gptq_v2"}))
    read = unscaled(stored, {"quantization_config": layer.settings})
    np.testing.assert_array_equal(read.tensors["a.weight"].dequantize(), layer.values.T)
    beside.write_text(json.dumps({"bits": 4, "group_size": 128}))
    with pytest.raises(FormatError, match=r"quantize_config.json: group_size is 128; .* config.json says 32: correct"):
        unscaled(stored, {"quantization_config": layer.settings})


I32, F16 = "I32", "F16"


@pytest.mark.parametrize(
    ("settings", "tensors", "error", "message"),
    [
        ({"checkpoint_format": "marlin"}, {}, UnsupportedError, "checkpoint_format marlin"),
        ({"is_marlin_format": True}, {}, UnsupportedError, "checkpoint_format marlin"),
        ({"pack_dtype": "int8"}, {}, UnsupportedError, "pack_dtype is int8"),
        ({"bits": 5}, {}, FormatError, "a.qweight is quantized with bits 5.*GPTQ has 2, 3, 4, 8"),
        ({"bits": None}, {}, FormatError, "with bits None"),
        ({"bits": 3}, {}, FormatError, r"a.qweight is I32 of shape \(8, 32\); GPTQ with 3 bits"),
        ({"bits": 8}, {}, FormatError, r"a.scales is \(2, 32\); a of 32 x 32 with 8 bits .* needs \(1, 32\)"),
        ({"group_size": None}, {}, FormatError, r"unknown size: .* is \(2, 32\), so that group_size may be 32"),
        ({"group_size": -3}, {}, FormatError, "has group_size -3"),
        ({"group_size": 64}, {}, FormatError, r"a.scales is \(2, 32\); .* groups of 64 columns needs \(1, 32\)"),
        ({"sym": True}, {}, FormatError, r"zero point 0 at row 0, group 0; config.json says sym, for which it is 8"),
        ({}, {"a.scales": None}, FormatError, "a.qweight has no a.scales, without which"),
        ({}, {"a.qzeros": None}, FormatError, "a.qweight has no a.qzeros, without which"),
        ({}, {"a.qweight": None}, FormatError, "a.qzeros has no codes that it scales"),
        ({}, {"a.qzeros": (I32, np.zeros((2, 3), "<i4"))}, FormatError, r"a.qzeros is \(2, 3\); .* needs \(2, 4\)"),
        ({}, {"a.qweight": ("F32", np.zeros((8, 32), "<f4"))}, FormatError, "a.qweight is F32"),
        ({}, {"a.scales": (I32, np.zeros((2, 32), "<i4"))}, FormatError, "a.scales is I32; .* has to be F32 or F16"),
        ({}, {"a.g_idx": (I32, np.zeros(63, "<i4"))}, FormatError, r"a.g_idx is I32 of shape \(63,\).*\(64,\)"),
        ({}, {"a.g_idx": (I32, np.full(64, 2, "<i4"))}, FormatError, "column 0 into group 2; a.scales has 2 groups"),
        ({}, {"a.g_idx": (I32, np.full(64, -1, "<i4"))}, FormatError, "column 0 into group -1"),
        ({}, {"a.scales": (F16, np.full((2, 32), np.nan, "<f2"))}, FormatError, "a.scales has the scale nan at row 0"),
    ],
)  # fmt: skip
def test_what_does_not_hold_together(
    tmp_path: Path, rng: np.random.Generator, settings: Any, tensors: Any, error: type[QuantkitError], message: str
) -> None:
    layer = Layer(rng, 4, 64, 32, 32)
    changed = {**layer.tensors("a", FIELDS[4]), **tensors}
    stored = written_in_shards(tmp_path / "c", {name: x for name, x in changed.items() if x is not None}, 1)
    with pytest.raises(error, match=message) as raised:
        unscaled(stored, {"quantization_config": layer.settings | settings}).tensors["a.weight"].dequantize()
    assert str(tmp_path / "c") in str(raised.value)
