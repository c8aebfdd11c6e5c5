"""Weights of codes and scales: FP8 with every kind of scale, MXFP4, and what does not hold together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quantkit import types
from quantkit.errors import DataError, FormatError, QuantkitError, UnsupportedError
from quantkit.formats.safetensors.quantized import unscaled
from tests.formats.checkpoints import written

FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}


def fp8_values(codes: np.ndarray) -> np.ndarray:
    import torch

    return torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy()


@pytest.mark.parametrize(
    ("shape", "block", "scales"),
    [((300, 208), (128, 128), (3, 2)), ((128, 128), (128, 128), (1, 1)), ((7, 40), (2, 16), (4, 3)),
     ((7, 48), (2, 24), (4, 2)), ((3, 130, 48), (128, 32), (3, 2, 2)), ((9, 48), None, ()), ((9, 48), None, (1,)),
     ((9, 48), None, (9, 1)), ((9, 48), None, (9,)), ((9, 40), None, (9,)), ((2, 9, 48), None, (2, 1, 1)),
     ((2, 9, 48), None, (2, 9, 1))],
)  # fmt: skip
def test_fp8_is_code_times_scale(tmp_path: Path, rng: np.random.Generator, shape: Any, block: Any, scales: Any) -> None:
    """Any rows of it, blocks that are cut off, one scale a matrix or a row."""
    codes = rng.integers(0, 127, shape, np.uint8) | rng.integers(0, 2, shape, np.uint8) << 7
    factors = rng.uniform(0.5, 2, scales).astype("<f4")
    stored = written(tmp_path / "c", a__weight=("F8_E4M3", codes), a__weight_scale_inv=("F32", factors),
                     a__input_scale=("F32", np.ones(1, "<f4")), b__weight=("F32", np.ones((2, 3), "<f4")))  # fmt: skip
    settings: dict[str, Any] = {"quant_method": "fp8"} | ({"weight_block_size": list(block)} if block else {})
    read = unscaled(stored, {"quantization_config": settings})
    assert list(read.tensors) == ["a.weight", "b.weight"]
    tensor = read.tensors["a.weight"]
    if block:
        grid = factors.repeat(block[0], -2).repeat(block[1], -1)[..., : shape[-2], : shape[-1]]
    else:
        grid = factors if factors.ndim == len(shape) else factors.reshape((-1, 1) if factors.size > 1 else ())
    expected = (fp8_values(codes) * grid).reshape(-1, shape[-1])
    assert (tensor.shape, tensor.n_rows, tensor.dtype) == (shape, len(expected), "F8_E4M3")
    np.testing.assert_array_equal(tensor.dequantize().reshape(-1, shape[-1]), expected)
    for start in range(0, len(expected), 5):
        np.testing.assert_array_equal(
            tensor.rows(start, min(len(expected), start + 133)), expected[start : start + 133]
        )
    assert tensor.encodes("bf16") == all(n % 16 == 0 for n in (shape[-1], (block or shape)[-1]))
    for kind in ("f32", "f16", "bf16") if tensor.encodes("bf16") else ():
        encoded = types.get(kind).quantize(expected)  # the function against decoding and rounding
        made, fits = tensor.encoded(kind, 0, len(expected))
        np.testing.assert_array_equal(made, encoded)
        assert fits
        np.testing.assert_array_equal(tensor.encoded(kind, 1, len(expected) - 1)[0], encoded[1:-1])
    tensor.forget(0, len(expected))
    with pytest.raises(DataError, match="has rows 0 to"):
        tensor.rows(0, len(expected) + 1)


def test_fp8_of_compressed_tensors(tmp_path: Path, rng: np.random.Generator) -> None:
    """Scales have another name there, and the size of blocks another place."""
    codes = rng.integers(0, 127, (5, 40), np.uint8)
    scales = rng.uniform(0.5, 2, (3, 2)).astype("<f4")
    stored = written(tmp_path / "c", a__weight=("F8_E4M3", codes), a__weight_scale=("F32", scales))
    weights = {"type": "float", "num_bits": 8, "strategy": "block", "block_structure": [2, 32]}
    settings = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}}
    tensor = unscaled(stored, {"quantization_config": settings}).tensors["a.weight"]
    grid = scales.repeat(2, 0).repeat(32, 1)[:5, :40]
    np.testing.assert_array_equal(tensor.dequantize(), fp8_values(codes) * grid)


def packed(codes: np.ndarray, bits: int) -> np.ndarray:
    """int32[rows, words] by the definition of compressed-tensors' pack_to_int32, a code at a time."""
    each = 32 // bits
    words = np.zeros((len(codes), -(-codes.shape[1] // each)), np.uint32)
    for column in range(codes.shape[1]):
        code = (codes[:, column].astype(np.int64) + (1 << bits - 1)).astype(np.uint32)
        words[:, column // each] |= code << np.uint32(bits * (column % each))
    return words.view("<i4")


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("zero_points", [False, True])
@pytest.mark.parametrize(("bits", "n", "size"), [(4, 96, 32), (4, 100, 32), (8, 64, -1), (3, 70, 16), (2, 48, 16)])
def test_integers_of_compressed_tensors(
    tmp_path: Path, rng: np.random.Generator, bits: int, n: int, size: int, zero_points: bool, ordered: bool
) -> None:
    """(code - zero point) * scale of the column's group: packed, and as bytes."""
    rows, half = 11, 1 << bits - 1
    groups = 1 if size < 0 else -(-n // size)
    codes, zero = (rng.integers(-half, half, shape).astype(np.int8) for shape in ((rows, n), (rows, groups)))
    scales = rng.uniform(0.5, 2, (rows, groups)).astype("<f4").view("<u4") >> 16  # bf16
    runs = np.arange(n) // (n if size < 0 else size)
    of_column = rng.permutation(runs) if ordered else runs
    tensors: dict[str, Any] = {
        "a__weight_packed": ("I32", packed(codes, bits)),
        "a__weight_shape": ("I64", np.array([rows, n], "<i8")),
        "a__weight_scale": ("BF16", scales.astype("<u2")),
        "b__weight": ("I8", codes),
        "b__weight_scale": ("BF16", scales.astype("<u2")),
        "c__weight": ("F32", np.ones((2, 3), "<f4")),
    }
    if zero_points:
        tensors["a__weight_zero_point"] = ("I32", np.ascontiguousarray(packed(zero.T, bits).T))
        tensors["b__weight_zero_point"] = ("I8", zero)
    if ordered:
        tensors |= {f"{name}__weight_g_idx": ("I32", of_column.astype("<i4")) for name in "ab"}
    weights = {"type": "int", "num_bits": bits, "strategy": "group", "group_size": size, "symmetric": not zero_points}
    group = {"weights": weights, "targets": ["Linear"]}
    other = {"weights": weights | {"num_bits": 7, "group_size": 128}, "targets": ["re:x.*", "y"]}
    settings = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    settings["config_groups"] = {"g": group, "h": other}
    read = unscaled(written(tmp_path / "c", **tensors), {"quantization_config": settings})
    assert list(read.tensors) == ["a.weight", "b.weight", "c.weight"]
    factor = (scales << 16).astype("<u4").view("<f4")[:, of_column]
    whole = codes.astype(np.float32) - (zero[:, of_column] if zero_points else 0)
    for name in ("a.weight", "b.weight"):
        tensor = read.tensors[name]
        assert (tensor.shape, tensor.dtype) == ((rows, n), f"INT{bits}")
        np.testing.assert_array_equal(tensor.dequantize(), whole * factor)
        np.testing.assert_array_equal(tensor.rows(3, 8), (whole * factor)[3:8])


def test_bitnets_packed_and_online(tmp_path: Path, rng: np.random.Generator) -> None:
    """What transformers' layers make of them: its own packing, and its rounding of weights."""
    import torch
    from transformers.integrations import bitnet

    codes = torch.from_numpy(rng.integers(-1, 2, (24, 20)).astype(np.float32))
    packed_codes = bitnet.pack_weights(codes.clone()).numpy()
    x = rng.standard_normal((24, 20)).astype("<f4")
    scale = np.array([0.3], "<f4")
    stored = written(tmp_path / "c", a__up_proj__weight=("U8", packed_codes), a__up_proj__weight_scale=("F32", scale),
                     b__up_proj__weight=("F32", x), lm_head__weight=("F32", x))  # fmt: skip
    settings = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "online"}
    read = unscaled(stored, {"quantization_config": settings}).tensors
    assert list(read) == ["a.up_proj.weight", "b.up_proj.weight", "lm_head.weight"]
    np.testing.assert_array_equal(read["a.up_proj.weight"].dequantize(), codes.numpy() * scale)
    np.testing.assert_array_equal(read["a.up_proj.weight"].rows(5, 14), codes.numpy()[5:14] * scale)
    mean = np.float32(1) / np.abs(x).mean()
    found = read["b.up_proj.weight"].rows(3, 20)
    np.testing.assert_allclose(found, (np.rint(x * mean).clip(-1, 1) / mean)[3:20], rtol=1e-6)
    np.testing.assert_array_equal(read["lm_head.weight"].dequantize(), x)
    for pattern, stays in (("b.up_proj", True), ("up_proj", True), ("b.*", True), ("b.up", False), ("lm_head", False)):
        left = unscaled(stored, {"quantization_config": settings | {"modules_to_not_convert": [pattern]}}).tensors
        assert np.array_equal(left["b.up_proj.weight"].dequantize(), x) == stays, pattern
        np.testing.assert_array_equal(left["a.up_proj.weight"].dequantize(), codes.numpy() * scale)
    divided = unscaled(stored, {"quantization_config": settings | {"linear_class": "bitlinear"}}).tensors
    np.testing.assert_array_equal(divided["a.up_proj.weight"].dequantize(), codes.numpy() / scale)
    with pytest.raises(FormatError, match="has to be a matrix with one scale"):
        unscaled(written(tmp_path / "d", a__up_proj__weight=("U8", packed_codes)), {"quantization_config": settings})


@pytest.mark.parametrize("shape", [(11, 1), (11,), (1,), ()])
def test_integers_with_a_scale_a_row_or_one(tmp_path: Path, rng: np.random.Generator, shape: Any) -> None:
    codes, scales = rng.integers(-128, 128, (11, 20)).astype(np.int8), rng.uniform(0.5, 2, shape).astype("<f4")
    stored = written(tmp_path / "c", a__weight=("I8", codes), a__weight_scale=("F32", scales))
    settings = {"quant_method": "compressed-tensors", "format": "int-quantized"}
    settings |= {"config_groups": {"g": {"weights": {"type": "int", "num_bits": 8, "strategy": "channel"}}}}
    tensor = unscaled(stored, {"quantization_config": settings}).tensors["a.weight"]
    expected = codes * (scales.reshape(-1, 1) if scales.size > 1 else scales.reshape(()))
    np.testing.assert_array_equal(tensor.dequantize(), expected.astype(np.float32))
    np.testing.assert_array_equal(tensor.rows(4, 9), expected[4:9])


def test_mxfp4_as_gpt_oss_ships_it(tmp_path: Path, rng: np.random.Generator) -> None:
    """The values that transformers decodes, which it turns round: experts, columns, rows."""
    import torch
    from transformers.integrations import mxfp4

    blocks = rng.integers(0, 256, (3, 5, 4, 16), np.uint8)
    scales = rng.integers(100, 140, (3, 5, 4), np.uint8)
    stored = written(tmp_path / "c", e__down_proj_blocks=("U8", blocks), e__down_proj_scales=("U8", scales))
    read = unscaled(stored, {"quantization_config": {"quant_method": "mxfp4"}})
    assert list(read.tensors) == ["e.down_proj"]
    tensor = read.tensors["e.down_proj"]
    assert tensor.shape == (3, 5, 128)
    expected = mxfp4.convert_moe_packed_tensors(torch.from_numpy(blocks), torch.from_numpy(scales), dtype=torch.float32)
    np.testing.assert_array_equal(tensor.dequantize(), expected.numpy().swapaxes(1, 2))
    np.testing.assert_array_equal(tensor.rows(4, 9), tensor.dequantize().reshape(15, 128)[4:9])


def test_scales_that_are_nan_or_too_large_are_not_hidden(tmp_path: Path) -> None:
    blocks, scales = np.full((1, 4, 16), 0x77, np.uint8), np.array([[255, 254, 0, 127]], np.uint8)
    stored = written(tmp_path / "c", w_blocks=("U8", blocks), w_scales=("U8", scales))
    x = unscaled(stored, {"quantization_config": {"quant_method": "mxfp4"}}).tensors["w"].dequantize()[0, ::32]
    np.testing.assert_array_equal(x, [np.nan, np.inf, np.float32(6 * 2.0**-127), 6])


CODES = ("F8_E4M3", np.zeros((256, 256), np.uint8))
WORDS, SHAPE = ("I32", np.zeros((2, 8), "<i4")), ("I64", np.array([2, 64], "<i8"))
GROUPS = {"config_groups": {"g": {"weights": {"type": "int", "num_bits": 4, "group_size": 32}, "targets": ["Linear"]}}}
_UNEVEN = GROUPS["config_groups"]["g"]["weights"] | {"symmetric": False}
ASYMMETRIC = {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": _UNEVEN, "targets": ["Linear"]}}}


@pytest.mark.parametrize(
    ("settings", "tensors", "error", "message"),
    [
        ({"quant_method": "hqq"}, {}, UnsupportedError, r"quantized already \(hqq\)"),
        ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"} | GROUPS,
         {}, UnsupportedError, r"\(compressed-tensors, nvfp4-pack-quantized, int of 4"),
        ({"quant_method": "compressed-tensors"} | GROUPS, {"a__weight_packed": WORDS}, FormatError,
         "a.weight_packed needs a.weight_shape"),
        ({"quant_method": "compressed-tensors"} | GROUPS, {"a__weight_packed": WORDS, "a__weight_shape": SHAPE},
         FormatError, "holds integers and has no scales, a.weight_scale"),
        ({"quant_method": "compressed-tensors"} | GROUPS, {"a__weight_packed": WORDS, "a__weight_shape": SHAPE,
         "a__weight_scale": ("F32", np.ones((2, 3), "<f4"))}, FormatError, r"is \(2, 3\).* need \(2, 2\)"),
        ({"quant_method": "compressed-tensors"} | GROUPS, {"a__weight_packed": WORDS,
         "a__weight_shape": ("I64", np.array([2, 72], "<i8"))}, FormatError, r"says \(2, 72\)"),
        ({"quant_method": "compressed-tensors"} | GROUPS, {"a__weight_packed": WORDS, "a__weight_shape": SHAPE,
         "a__weight_scale": ("F32", np.ones((2, 2), "<f4")), "a__weight_zero_point": ("I32", np.ones((2, 2), "<i4"))},
         FormatError, "8 rows packed into one"),
        ({"quant_method": "compressed-tensors"} | GROUPS, {"a__weight_packed": WORDS, "a__weight_shape": SHAPE,
         "a__weight_scale": ("F32", np.ones((2, 2), "<f4")), "a__weight_g_idx": ("I32", np.full(64, 2, "<i4"))},
         FormatError, "one of 2 groups for each of 64 columns"),
        (ASYMMETRIC, {"a__weight_packed": WORDS, "a__weight_shape": SHAPE, "a__weight_scale": (
            "F32", np.ones((2, 2), "<f4"))}, FormatError, "a.weight_packed has no zero points, a.weight_zero_point"),
        ({}, {"a__weight": CODES}, FormatError, "a.weight is F8_E4M3 and has no scales, a.weight_scale_inv"),
        ({}, {"a__weight": CODES, "a__weight_scale_inv": ("F32", np.ones((2, 3), "<f4"))}, FormatError,
         r"is \(2, 3\); a.weight is \(256, 256\), whose blocks of 128 x 128 need \(2, 2\)"),
        ({}, {"a__weight_scale_inv": ("F32", np.ones((2, 3), "<f4"))}, FormatError, "has no codes that it scales"),
        ({"weight_block_size": [128]}, {"a__weight": CODES}, FormatError, r"weight_block_size is \[128\]"),
        ({"quant_method": "mxfp4"}, {"a_blocks": ("U8", np.zeros((3, 2, 16), np.uint8))}, FormatError, "a_scales"),
        ({"quant_method": "mxfp4"}, {"a_blocks": ("U8", np.zeros((3, 2, 16), np.uint8)),
         "a_scales": ("U8", np.zeros((3, 1), np.uint8))}, FormatError, r"is \(3, 1\); .* need \(3, 2\)"),
    ],
)  # fmt: skip
def test_what_does_not_hold_together(
    tmp_path: Path, settings: Any, tensors: Any, error: type[QuantkitError], message: str
) -> None:
    stored = written(tmp_path / "c", other=("U8", np.zeros(1, np.uint8)), **tensors)
    with pytest.raises(error, match=message):
        unscaled(stored, {"quantization_config": FP8["quantization_config"] | settings})


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"config_groups": 5}, "config_groups = 5; it has to be an object"),
        ({"config_groups": {"a": 5}}, "a = 5; it has to be an object"),
        ({"config_groups": {"a": {"weights": [4]}}}, r"weights = \[4\]; it has to be an object"),
        ({"config_groups": {"a": {"weights": {"num_bits": 4.0}}}}, "num_bits = 4.0; it has to be a whole number"),
        ({"config_groups": {"a": {"weights": {"num_bits": 8, "group_size": "x"}}}}, "group_size = 'x'; it has to be"),
        ({"config_groups": {"a": {"weights": {"num_bits": 8, "group_size": 2.5}}}}, "group_size = 2.5; it has to be"),
        ({"config_groups": {"a": {"weights": {"num_bits": 8}, "targets": 5}}}, "targets = 5; it has to be a list"),
    ],
)
def test_settings_of_other_types_are_named(tmp_path: Path, settings: dict[str, Any], match: str) -> None:
    stored = written(
        tmp_path / "c",
        a__weight=("I8", np.ones((4, 8), np.int8)),
        a__weight_scale=("F32", np.ones((4, 1), np.float32)),
    )
    stated = {"quant_method": "compressed-tensors", "format": "int-quantized"} | settings
    with pytest.raises(FormatError, match=match):
        unscaled(stored, {"quantization_config": stated})


def test_without_settings_nothing_changes(tmp_path: Path) -> None:
    stored = written(tmp_path / "c", a__weight=CODES)
    assert unscaled(stored, {}) is stored
