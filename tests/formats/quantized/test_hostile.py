"""Settings and tensors of any kind in place of the right ones: read, or refused by an error of quantkit's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quantkit.errors import FormatError, UnsupportedError
from quantkit.formats.safetensors.quantized import unscaled
from tests.formats.checkpoints import Stored, written_in_shards
from tests.formats.quantized import test_awq, test_bitsandbytes, test_fp4, test_gptq
from tests.refusals import Refusals

JUNK: list[Any] = [None, True, -2, -1, 0, 7, 10**9, 10**30, 10**400, 0.5, float("nan"), float("inf"), "x", "gptq_v2",
                   [], ["x"], [-1, 4], [10**30, 10**30], {}, {"x": 1}, {"(": {"bits": 4}}]  # fmt: skip


def checkpoints() -> dict[str, tuple[Stored, dict[str, Any]]]:
    rng = np.random.default_rng(4)
    layer = test_gptq.Layer(rng, 4, 64, 32, 32, symmetric=True)
    awq: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 32}
    settings = layer.settings | {"sym": True, "desc_act": False, "checkpoint_format": "gptq", "format": "gptq",
                                 "dynamic": {}, "meta": {}, "pack_dtype": "int32"}  # fmt: skip
    mixed, of_mixed = test_fp4.mixed(rng)
    packed = {
        "num_bits": 4,
        "type": "int",
        "symmetric": False,
        "group_size": 16,
        "strategy": "group",
        "actorder": "group",
    }
    integers: Stored = {
        "a.weight_packed": ("I32", rng.integers(-(2**31), 2**31, (8, 4)).astype("<i4")),
        "a.weight_scale": ("F16", rng.uniform(0.1, 1, (8, 2)).astype("<f2")),
        "a.weight_zero_point": ("I32", rng.integers(-(2**31), 2**31, (1, 2)).astype("<i4")),
        "a.weight_g_idx": ("I32", rng.permutation(np.arange(32) // 16).astype("<i4")),
        "a.weight_shape": ("I64", np.array([8, 32], "<i8")),
    }
    fp8: Stored = {
        "a.weight": ("F8_E4M3", rng.integers(0, 127, (8, 32), np.uint8)),
        "a.weight_scale_inv": ("F32", rng.uniform(0.1, 1, (1, 1)).astype("<f4")),
    }
    ternary: Stored = {
        "a.q_proj.weight": ("U8", rng.integers(0, 3, (2, 16), np.uint8) * np.uint8(0x55)),
        "a.q_proj.weight_scale": ("BF16", np.full(1, 0x3F00, "<u2")),
    }
    compressed = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    return {
        "packed": (integers, compressed | {"config_groups": {"g": {"targets": ["Linear"], "weights": packed}}}),
        "fp8": (fp8, {"quant_method": "fp8", "weight_block_size": [8, 32]}),
        "bitnet": (ternary, {"quant_method": "bitnet", "quantization_mode": "offline", "linear_class": "bitlinear"}),
        "gptq": (layer.tensors("a", test_gptq.FIELDS[4]), settings),
        "gemm": (test_awq.layer(rng, "gemm", 16, 64, 32)[0], awq | {"version": "gemm"}),
        "gemv": (test_awq.layer(rng, "gemv", 16, 64, 32)[0], awq | {"version": "gemv"}),
        "nvfp4": (test_fp4.NV, dict(test_fp4.CT_NVFP4)),
        "mxfp4": (test_fp4.MX, dict(test_fp4.CT_MXFP4)),
        "modelopt": (mixed, of_mixed | {"group_size": 16}),
        "nf4": (test_bitsandbytes.layer(rng, 4, 64, True), dict(test_bitsandbytes.SETTINGS)),
    }


KINDS = checkpoints()


def read(stored: Any, settings: Any) -> None:
    """Decode all tensors."""
    for tensor in unscaled(stored, {"quantization_config": settings}).tensors.values():
        if hasattr(tensor, "inputs"):
            tensor.dequantize()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_settings(kind: str, tmp_path: Path) -> None:
    tensors, settings = KINDS[kind]
    stored = written_in_shards(tmp_path / "c", tensors, 1)
    read(stored, settings)
    tried = Refusals()
    for key in settings:
        for value in JUNK:
            tried.call(read, stored, settings | {key: value})
    group = settings.get("config_groups", {}).get("g", {})
    for key, inner in {**group, **group.get("weights", {})}.items():
        for value in JUNK:
            changed = group | (
                {key: value} if inner is group.get(key) else {"weights": group["weights"] | {key: value}}
            )
            tried.call(read, stored, settings | {"config_groups": {"g": changed}})
    tried.check_both()


def test_states_of_bitsandbytes(tmp_path: Path) -> None:
    """The JSON of a matrix: each key left out, or of another value. One that does not matter is read."""
    tensors, settings = KINDS["nf4"]
    name = "a.weight.quant_state.bitsandbytes__nf4"
    state, tried = json.loads(tensors[name][1].tobytes()), Refusals()
    for number, (key, value) in enumerate((key, value) for key in state for value in JUNK):
        text = json.dumps({**state, key: value} if value is not None else {k: v for k, v in state.items() if k != key})
        changed = {**tensors, name: ("U8", np.frombuffer(text.encode(), np.uint8))}
        tried.call(read, written_in_shards(tmp_path / str(number), changed, 1), settings)
    tried.check_both()


SHAPES = [(), (0,), (1,), (0, 0), (0, 4), (4, 0), (1, 1), (3, 5), (16, 16), (2, 2, 2)]
DTYPES = {"U8": "u1", "I8": "i1", "F8_E4M3": "u1", "F8_E8M0": "u1", "I32": "<i4", "I64": "<i8", "F16": "<f2",
          "F32": "<f4", "BOOL": "u1"}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_tensors(kind: str, tmp_path: Path) -> None:
    """Each tensor left out, of another shape, of another dtype."""
    tensors, settings = KINDS[kind]
    rng, number, tried = np.random.default_rng(6), 0, Refusals()
    for name, (dtype, x) in tensors.items():
        others: list[Any] = [None, *((dtype, np.zeros(shape, x.dtype)) for shape in SHAPES)]
        for other, numpy_dtype in DTYPES.items():
            size = x.size * np.dtype(numpy_dtype).itemsize
            others.append((other, rng.integers(0, 2, size, np.uint8).view(numpy_dtype).reshape(x.shape)))
        for changed in others:
            number += 1
            kept = {key: value for key, value in {**tensors, name: changed}.items() if value is not None}
            tried.call(read, written_in_shards(tmp_path / str(number), kept, 1), settings)
    tried.check_both()


def changed(kind: str, tmp_path: Path, tensors: dict[str, Any], **settings: Any) -> Any:
    """The checkpoint with other tensors (None: without) and settings, as it is read."""
    stored, stated = KINDS[kind]
    kept = {name: x for name, x in {**stored, **tensors}.items() if x is not None}
    return unscaled(written_in_shards(tmp_path / "c", kept, 1), {"quantization_config": stated | settings}).tensors


def weights_of(**weights: Any) -> dict[str, Any]:
    group = KINDS["packed"][1]["config_groups"]["g"]
    return {"g": group | {"weights": group["weights"] | weights}}


@pytest.mark.parametrize(
    ("kind", "tensors", "settings", "message"),
    [
        ("packed", {}, {"config_groups": weights_of(group_size=0)}, "groups of group_size 0"),
        ("packed", {}, {"config_groups": weights_of(group_size=-16)}, "groups of group_size -16"),
        ("packed", {"a.weight_g_idx": None}, {}, "has no a.weight_g_idx, .* says actorder group"),
        ("gptq", {"a.g_idx": None}, {"desc_act": True}, "has no a.g_idx, .* with 2 groups"),
        ("packed", {"a.weight_g_idx": ("I32", np.zeros(32, "<i4"))}, {}, "puts 32 of 32 columns into group 0"),
        ("gptq", {"a.g_idx": ("I32", np.zeros(64, "<i4"))}, {}, "puts 64 of 64 columns into group 0, which has 32"),
        ("gptq", {"a.weight": ("F16", np.ones((32, 64), "<f2"))}, {}, "a.weight, which is there already: INT4"),
        ("nvfp4", {"a.weight": ("F32", np.ones((2, 3), "<f4"))}, {}, "a.weight, which is there already: NVFP4"),
        ("fp8", {"a.weight": ("F8_E4M3", np.ones((32, 32), np.uint8)),
                 "a.weight_scale_inv": ("F32", np.ones((1, 32), "<f4"))}, {}, r"scale_inv is \(1, 32\); a.weight"),
        ("bitnet", {"a.q_proj.weight": ("U8", np.full((2, 16), 0xC0, np.uint8))}, {}, "code 3 at row 6, column 0"),
        ("bitnet", {"a.q_proj.weight_scale": ("BF16", np.zeros(1, "<u2"))}, {}, "weight_scale is 0"),
        ("bitnet", {"a.q_proj.weight_scale": ("BF16", np.full(1, 0x7FC0, "<u2"))}, {}, "has the scale nan"),
    ],
)  # fmt: skip
def test_what_would_be_silently_wrong_is_refused(
    kind: str, tensors: dict[str, Any], settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(FormatError, match=rf"model.*safetensors: tensor .*{message}"):
        _ = [tensor.dequantize() for tensor in changed(kind, tmp_path, tensors, **settings).values()]


def test_rotations_of_running_layers_are_refused(tmp_path: Path) -> None:
    """compressed-tensors has those of weights in the weights; others are not in the file."""

    def rotated(*places: str) -> dict[str, Any]:
        apply = [{"targets": ["Linear"], "location": place} for place in places]
        return {"transform_config": {"config_groups": {"R4": {"type": "hadamard", "apply": apply}}}}

    (tmp_path / "0").mkdir()
    assert "a.weight" in changed("packed", tmp_path / "0", {}, **rotated("weight_input", "weight_output"))
    with pytest.raises(UnsupportedError, match=r"/c: transform_config of compressed-tensors has R4, .* the input of"):
        changed("packed", tmp_path, {}, **rotated("weight_input", "input"))


@pytest.mark.parametrize("settings", [{"linear_class": "other"}, {"quantization_mode": "ONLINE"}])
def test_other_layers_of_bitnet_are_refused(tmp_path: Path, settings: dict[str, Any]) -> None:
    (key, value) = next(iter(settings.items()))
    with pytest.raises(UnsupportedError, match=rf"/c: quantization_config has {key} '{value}'; of bitnet"):
        changed("bitnet", tmp_path, {}, **settings)


@pytest.mark.parametrize(("kind", "name"), [("fp8", "a.weight"), ("packed", "a.weight"), ("gptq", "a.weight")])
def test_groups_larger_than_a_row_are_the_row(kind: str, name: str, tmp_path: Path) -> None:
    """Also those beyond 64 bits."""
    large, whole = 10**30, {"fp8": [8, 32], "packed": -1, "gptq": -1}[kind]
    one = {"packed": {"a.weight_scale": ("F16", np.full((8, 1), 0.5, "<f2")),
                      "a.weight_zero_point": ("I32", np.zeros((1, 1), "<i4")),
                      "a.weight_g_idx": ("I32", np.zeros(32, "<i4"))},
           "gptq": {"a.scales": ("F16", np.full((1, 32), 0.5, "<f2")),
                    "a.qzeros": ("I32", np.full((1, 4), 0x77777777, "<i4")),
                    "a.g_idx": ("I32", np.zeros(64, "<i4"))}}.get(kind, {})  # fmt: skip

    def values(size: Any, number: int) -> np.ndarray:
        key = {"fp8": "weight_block_size", "packed": "config_groups", "gptq": "group_size"}[kind]
        value = weights_of(group_size=size) if kind == "packed" else size
        (tmp_path / str(number)).mkdir()
        return np.asarray(changed(kind, tmp_path / str(number), one, **{key: value})[name].dequantize())

    assert np.array_equal(values([large, large] if kind == "fp8" else large, 0), values(whole, 1))
