"""Floats of 4 bits, MXFP4 and NVFP4, and ModelOpt's mixtures: torch's dtypes and transformers' decoder as oracles."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quantkit import types
from quantkit.errors import DataError, FormatError, QuantkitError, UnsupportedError
from quantkit.formats.safetensors.quantized import unscaled
from tests.formats.checkpoints import Stored, written_in_shards

U8, F32, E4M3 = "U8", "F32", "F8_E4M3"


def e2m1(data: np.ndarray) -> np.ndarray:
    """float64[..., 2 * bytes]: by the definition, from sign, exponent and mantissa of each 4 bits."""
    codes = np.stack([data & 15, data >> 4], axis=-1).reshape(*data.shape[:-1], -1).astype(int)
    exponent, mantissa = codes >> 1 & 3, codes & 1
    value = np.where(exponent > 0, (1 + mantissa / 2) * 2.0 ** (exponent - 1), mantissa / 2)
    return np.where(codes & 8, -value, value)


def e4m3(data: np.ndarray) -> np.ndarray:
    import torch

    return torch.from_numpy(data).view(torch.float8_e4m3fn).float().numpy()


def random_nvfp4(rng: np.random.Generator, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales with the largest, zero and subnormal ones."""
    codes = rng.integers(0, 256, (*shape[:-1], shape[-1] // 2), np.uint8)
    scales = rng.integers(0, 0x7F, (*shape[:-1], shape[-1] // 16), np.uint8)
    codes.reshape(-1)[:4], scales.reshape(-1)[:3] = (0x77, 0xFF, 0x80, 0x00), (0x7E, 0, 1)
    return codes, scales


CT_NVFP4 = {
    "quant_method": "compressed-tensors",
    "format": "nvfp4-pack-quantized",
    "config_groups": {
        "g": {
            "targets": ["Linear"],
            "weights": {"type": "float", "num_bits": 4, "group_size": 16, "strategy": "tensor_group"},
        }
    },
}
CT_MXFP4 = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized", "config_groups": {"g": {
    "targets": ["Linear"], "weights": {"type": "float", "num_bits": 4, "group_size": 32}}}}  # fmt: skip


@pytest.mark.parametrize("shape", [(5, 64), (1, 144), (32, 48)])
@pytest.mark.parametrize("whole", [3.7e-4, 1.0, 2688.0])
def test_nvfp4_of_compressed_tensors(
    tmp_path: Path, rng: np.random.Generator, shape: tuple[int, int], whole: float
) -> None:
    """code * float32(scale / global), rounded once more."""
    codes, scales = random_nvfp4(rng, shape)
    tensors: Stored = {
        "a.weight_packed": (U8, codes),
        "a.weight_scale": (E4M3, scales),
        "a.weight_global_scale": (F32, np.array([whole], "<f4")),
        "a.input_global_scale": (F32, np.array([2], "<f4")),
    }
    read = unscaled(written_in_shards(tmp_path / "c", tensors, 2), {"quantization_config": CT_NVFP4})
    assert list(read.tensors) == ["a.weight"]
    tensor: Any = read.tensors["a.weight"]
    assert (tensor.shape, tensor.dtype) == (shape, "NVFP4")
    factor = (e4m3(scales) / np.float32(whole)).astype(np.float64).repeat(16, 1)
    expected = (e2m1(codes) * factor).astype(np.float32)
    np.testing.assert_array_equal(tensor.dequantize(), expected)
    np.testing.assert_array_equal(tensor.rows(shape[0] - 1, shape[0]), expected[-1:])
    assert {part.name for part in tensor.inputs} == tensors.keys() - {"a.input_global_scale"}


@pytest.mark.parametrize(("shape", "wholes"), [((5, 64), ()), ((3, 16), (1,)), ((3, 4, 32), (3,)), ((3, 4, 32), ())])
def test_nvfp4_of_modelopt(tmp_path: Path, rng: np.random.Generator, shape: Any, wholes: Any) -> None:
    """code * float32(scale * scale_2), also a stack of matrices with a number each."""
    codes, scales = random_nvfp4(rng, shape)
    whole = np.asarray(rng.uniform(1e-4, 1e-3, wholes), "<f4")
    tensors: Stored = {
        "a.weight": (U8, codes),
        "a.weight_scale": (E4M3, scales),
        "a.weight_scale_2": (F32, whole),
        "a.input_scale": (F32, np.ones((), "<f4")),
    }
    stored = written_in_shards(tmp_path / "c", tensors, 1)
    settings = {"quantization": {"quant_algo": "NVFP4", "group_size": 16, "kv_cache_quant_algo": "FP8"}}
    (tmp_path / "c" / "hf_quant_config.json").write_text(json.dumps({"producer": {"name": "modelopt"}} | settings))
    read = unscaled(stored, {})
    assert list(read.tensors) == ["a.weight"]
    each = whole.reshape(-1, 1, 1) if len(shape) == 3 else whole.reshape(())
    factor = (e4m3(scales) * each).astype(np.float64).repeat(16, -1)
    expected = (e2m1(codes) * factor).astype(np.float32)
    np.testing.assert_array_equal(read.tensors["a.weight"].dequantize(), expected)
    np.testing.assert_array_equal(read.tensors["a.weight"].rows(2, 3), expected.reshape(-1, shape[-1])[2:3])


def test_nvfp4_as_gguf_has_it(tmp_path: Path, rng: np.random.Generator) -> None:
    """The blocks of llama.cpp's type: the gguf package decodes them to code times block scale."""
    import gguf

    codes, scales = random_nvfp4(rng, (5, 192))
    whole = np.array(0.375, "<f4")
    tensors: Stored = {
        "a.weight": (U8, codes),
        "a.weight_scale": (E4M3, scales),
        "a.weight_scale_2": (F32, whole),
    }
    settings = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}
    read: Any = unscaled(written_in_shards(tmp_path / "c", tensors, 1), settings).tensors["a.weight"]
    packed = read.packed(1, 5)
    assert packed.shape == (4, 3 * 36)
    decoded = gguf.quants.dequantize(packed, gguf.GGMLQuantizationType.NVFP4)
    np.testing.assert_array_equal(decoded * read.global_scales(), read.rows(1, 5))
    for code in (0x7F, 0x80, 0xB8):
        scales[2, 5] = code
        tensors["a.weight_scale"] = (E4M3, scales)
        read = unscaled(written_in_shards(tmp_path / str(code), tensors, 1), settings).tensors["a.weight"]
        with pytest.raises(DataError, match=f"row 1, block 5 has the scale 0x{code:02X}"):
            read.packed(1, 5)


def mixed(rng: np.random.Generator) -> tuple[Stored, dict[str, Any]]:
    """An FP8 matrix and an NVFP4 one, and settings for each module."""
    codes, scales = random_nvfp4(rng, (4, 32))
    tensors: Stored = {
        "model.a.weight": (E4M3, rng.integers(0, 0x7F, (8, 32), np.uint8)),
        "model.a.weight_scale": (F32, np.array(0.25, "<f4")),
        "model.mlp.experts.0.up.weight": (U8, codes),
        "model.mlp.experts.0.up.weight_scale": (E4M3, scales),
        "model.mlp.experts.0.up.weight_scale_2": (F32, np.array(0.5, "<f4")),
        "model.head.weight": ("F16", np.ones((2, 4), "<f2")),
    }
    layers = {
        "model.a": {"quant_algo": "FP8"},
        "model.mlp.experts": {"quant_algo": "NVFP4", "group_size": 16},
        "model.c": {"quant_algo": "W4A16_NVFP4"},
    }
    return tensors, {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}


def test_modelopt_of_mixed_precision(tmp_path: Path, rng: np.random.Generator) -> None:
    tensors, settings = mixed(rng)
    read = unscaled(written_in_shards(tmp_path / "c", tensors, 1), {"quantization_config": settings}).tensors
    assert list(read) == ["model.a.weight", "model.mlp.experts.0.up.weight", "model.head.weight"]
    np.testing.assert_array_equal(
        read["model.a.weight"].dequantize(), e4m3(tensors["model.a.weight"][1]) * np.float32(0.25)
    )
    up = "model.mlp.experts.0.up.weight"
    factor = (e4m3(tensors[f"{up}_scale"][1]) * np.float32(0.5)).repeat(16, 1)
    np.testing.assert_array_equal(read[up].dequantize(), (e2m1(tensors[up][1]) * factor).astype(np.float32))


def random_mxfp4(rng: np.random.Generator, shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    codes = rng.integers(0, 256, (shape[0], shape[1] // 2), np.uint8)
    exponents = rng.integers(90, 150, (shape[0], shape[1] // 32), np.uint8)
    exponents[0, 0], codes[0, :2] = 0, (0x77, 0x88)
    return codes, exponents


@pytest.mark.parametrize("scales", ["scale", "weight_scale_inv"])
def test_mxfp4_of_deepseek_v4(tmp_path: Path, rng: np.random.Generator, scales: str) -> None:
    """Experts beside FP8 matrices, whose scales are powers of two as well: what transformers decodes."""
    import torch
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    codes, exponents = random_mxfp4(rng, (6, 96))
    dense, of_blocks = rng.integers(0, 0x7F, (4, 64), np.uint8), rng.integers(100, 130, (2, 2), np.uint8)
    tensors: Stored = {
        "experts.0.w1.weight": ("I8", codes.view(np.int8)),
        f"experts.0.w1.{scales}": ("F8_E8M0", exponents),
        "wq.weight": (E4M3, dense),
        f"wq.{scales}": ("F8_E8M0", of_blocks),
    }
    settings = {"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [2, 32]}
    read: Any = unscaled(written_in_shards(tmp_path / "c", tensors, 1), {"quantization_config": settings}).tensors
    assert [(name, tensor.dtype) for name, tensor in read.items()] == [
        ("experts.0.w1.weight", "MXFP4"),
        ("wq.weight", E4M3),
    ]
    decoder = Fp8Dequantize(None)
    for name, x, e in (
        ("experts.0.w1.weight", torch.from_numpy(codes.view(np.int8)), exponents),
        ("wq.weight", torch.from_numpy(dense).view(torch.float8_e4m3fn), of_blocks),
    ):
        expected = decoder._dequantize_one(x, torch.from_numpy(e).view(torch.float8_e8m0fnu), torch.float32)
        np.testing.assert_array_equal(read[name].dequantize(), expected.numpy())


def test_mxfp4_of_compressed_tensors(tmp_path: Path, rng: np.random.Generator) -> None:
    """Values, and the bytes of GGUF's type, which decode to the same."""
    codes, exponents = random_mxfp4(rng, (7, 160))
    tensors: Stored = {"a.weight_packed": (U8, codes), "a.weight_scale": (U8, exponents)}
    read: Any = unscaled(written_in_shards(tmp_path / "c", tensors, 1), {"quantization_config": CT_MXFP4}).tensors
    expected = e2m1(codes) * 2.0 ** (exponents.astype(int) - 127).repeat(32, 1)
    np.testing.assert_array_equal(read["a.weight"].dequantize(), expected.astype(np.float32))
    packed = read["a.weight"].packed(2, 7)
    np.testing.assert_array_equal(types.get("mxfp4").dequantize(packed, 160), expected[2:].astype(np.float32))
    exponents[3, 1] = 255
    tensors["a.weight_scale"] = (U8, exponents)
    read = unscaled(written_in_shards(tmp_path / "d", tensors, 1), {"quantization_config": CT_MXFP4}).tensors
    with pytest.raises(DataError, match="row 3, block 1 has the scale 255"):
        read["a.weight"].packed(0, 7)


ZEROS = np.zeros((4, 16), np.uint8)
NV: Stored = {
    "a.weight_packed": (U8, ZEROS),
    "a.weight_scale": (E4M3, ZEROS[:, :2]),
    "a.weight_global_scale": (F32, np.ones(1, "<f4")),
}
MX: Stored = {"a.weight_packed": (U8, ZEROS), "a.weight_scale": (U8, ZEROS[:, :1])}
OPT: Stored = {"a.weight": (U8, ZEROS), "a.weight_scale": (E4M3, ZEROS[:, :2]), "a.weight_scale_2": (F32, np.ones(()))}
OPT["a.weight_scale_2"] = (F32, np.ones((), "<f4"))
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4"}


def with_weights(settings: Any, **weights: Any) -> Any:
    group = settings["config_groups"]["g"]
    return settings | {"config_groups": {"g": group | {"weights": group["weights"] | weights}}}


@pytest.mark.parametrize(
    ("settings", "tensors", "changes", "error", "message"),
    [
        (with_weights(CT_NVFP4, group_size=32), NV, {}, FormatError, "nvfp4.* group_size 32; blocks of .* 16 columns"),
        (with_weights(CT_MXFP4, group_size=None), MX, {}, FormatError, "mxfp4.* has group_size 0"),
        (with_weights(CT_NVFP4, num_bits=6), NV, {}, UnsupportedError, "float of 6 bits"),
        (with_weights(CT_NVFP4, type="int"), NV, {}, UnsupportedError, "nvfp4-pack-quantized, int of 4"),
        (CT_NVFP4, NV, {"a.weight_global_scale": None}, FormatError, "a.weight_packed has no a.weight_global_scale"),
        (CT_NVFP4, NV, {"a.weight_scale": None}, FormatError, "a.weight_packed has no a.weight_scale"),
        (CT_NVFP4, NV, {"a.weight_packed": None}, FormatError, "a.weight_scale has no codes"),
        (CT_NVFP4, NV, {"a.weight_scale": (U8, ZEROS[:, :2])}, FormatError, "a.weight_scale is U8; .* to be F8_E4M3"),
        (CT_NVFP4, NV, {"a.weight_scale": (E4M3, ZEROS[:, :1])}, FormatError, r"is \(4, 1\); .* needs \(4, 2\)"),
        (CT_NVFP4, NV, {"a.weight_packed": (U8, ZEROS[:, :12])}, FormatError, r"of shape \(4, 12\); NVFP4 is U8"),
        (CT_NVFP4, NV, {"a.weight_scale": (E4M3, ZEROS[:, :2] + 0x7F)}, FormatError, "a.weight_scale has .* nan"),
        (CT_NVFP4, NV, {"a.weight_global_scale": (F32, np.zeros(1, "<f4"))}, FormatError, "the scale 0.0; .* above"),
        (CT_NVFP4, NV, {"a.weight_global_scale": (F32, np.ones(2, "<f4"))}, FormatError, r"\(2,\).* needs one number"),
        (CT_MXFP4, MX, {"a.weight_scale": (U8, ZEROS[:, :2])}, FormatError, r"is \(4, 2\); .* needs \(4, 1\)"),
        (CT_MXFP4, MX, {"a.weight_packed": (U8, ZEROS[:, :8])}, FormatError, "whole blocks of 32 columns"),
        (with_weights(CT_MXFP4, num_bits=8) | {"format": "float-quantized"}, MX, {}, FormatError, "floats of 8 bits"),
        (MODELOPT | {"quant_algo": "W4A8_AWQ"}, OPT, {}, UnsupportedError, r"\(modelopt, W4A8_AWQ for all layers\)"),
        (MODELOPT | {"group_size": 32}, OPT, {}, FormatError, "group_size of all layers is 32; .* 16 columns"),
        (MODELOPT | {"quantized_layers": {"a": {"quant_algo": "INT8"}}}, OPT, {}, UnsupportedError, "INT8 for a"),
        (MODELOPT | {"quant_algo": "FP8"}, OPT, {}, FormatError, "a.weight is U8, as NVFP4 has it; .* say FP8"),
        (MODELOPT | {"quantized_layers": {"a": {"quant_algo": "FP8"}}}, OPT, {}, FormatError, "say FP8 for a"),
        (MODELOPT, OPT, {"a.weight_scale_2": None}, FormatError, "a.weight has no a.weight_scale_2"),
        (MODELOPT, OPT, {"a.weight": (E4M3, ZEROS)}, FormatError, "a.weight_scale is F8_E4M3; scales of FP8 are"),
        (MODELOPT, OPT, {"a.pre_quant_scale": (F32, np.ones(32, "<f4"))}, UnsupportedError, "without AWQ"),
        ({"quant_method": "fp8"}, {"a.weight": ("I8", ZEROS.view(np.int8))}, {}, FormatError, "has no a.scale"),
    ],
)  # fmt: skip
def test_what_does_not_hold_together(
    tmp_path: Path, settings: Any, tensors: Any, changes: Any, error: type[QuantkitError], message: str
) -> None:
    changed = {name: x for name, x in {**tensors, **changes}.items() if x is not None}
    stored = written_in_shards(tmp_path / "c", changed, 1)
    with pytest.raises(error, match=message) as raised:
        unscaled(stored, {"quantization_config": settings}).tensors["a.weight"].dequantize()
    assert str(tmp_path / "c") in str(raised.value)
