"""Settings and tensors of any kind in place of the right ones: read, or refused by an error of quantkit's own."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quantkit.errors import QuantkitError
from quantkit.formats.safetensors.quantized import unscaled
from tests.formats.checkpoints import Stored, written_in_shards
from tests.formats.quantized import test_awq, test_bitsandbytes, test_fp4, test_gptq

JUNK: list[Any] = [None, True, -2, 0, 7, 10**30, 0.5, "x", "gptq_v2", [], ["x"], {}, {"x": 1}, {"(": {"bits": 4}}]


def checkpoints() -> dict[str, tuple[Stored, dict[str, Any]]]:
    rng = np.random.default_rng(4)
    layer = test_gptq.Layer(rng, 4, 64, 32, 32, symmetric=True)
    awq: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 32}
    settings = layer.settings | {"sym": True, "desc_act": False, "checkpoint_format": "gptq", "format": "gptq",
                                 "dynamic": {}, "meta": {}, "pack_dtype": "int32"}  # fmt: skip
    mixed, of_mixed = test_fp4.mixed(rng)
    return {
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
    """Decode all tensors; an error of quantkit's own is fine."""
    with contextlib.suppress(QuantkitError):
        for tensor in unscaled(stored, {"quantization_config": settings}).tensors.values():
            if hasattr(tensor, "inputs"):
                tensor.dequantize()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_settings(kind: str, tmp_path: Path) -> None:
    tensors, settings = KINDS[kind]
    stored = written_in_shards(tmp_path / "c", tensors, 1)
    unscaled(stored, {"quantization_config": settings})
    for key in settings:
        for value in JUNK:
            read(stored, settings | {key: value})
    group = settings.get("config_groups", {}).get("g", {})
    for key, inner in {**group, **group.get("weights", {})}.items():
        for value in JUNK:
            changed = group | (
                {key: value} if inner is group.get(key) else {"weights": group["weights"] | {key: value}}
            )
            read(stored, settings | {"config_groups": {"g": changed}})


SHAPES = [(), (0,), (1,), (0, 0), (0, 4), (4, 0), (1, 1), (3, 5), (16, 16), (2, 2, 2)]
DTYPES = {"U8": "u1", "I8": "i1", "F8_E4M3": "u1", "F8_E8M0": "u1", "I32": "<i4", "I64": "<i8", "F16": "<f2",
          "F32": "<f4", "BOOL": "u1"}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_tensors(kind: str, tmp_path: Path) -> None:
    """Each tensor left out, of another shape, of another dtype."""
    tensors, settings = KINDS[kind]
    rng, number = np.random.default_rng(6), 0
    for name, (dtype, x) in tensors.items():
        others: list[Any] = [None, *((dtype, np.zeros(shape, x.dtype)) for shape in SHAPES)]
        for other, numpy_dtype in DTYPES.items():
            size = x.size * np.dtype(numpy_dtype).itemsize
            others.append((other, rng.integers(0, 2, size, np.uint8).view(numpy_dtype).reshape(x.shape)))
        for changed in others:
            number += 1
            kept = {key: value for key, value in {**tensors, name: changed}.items() if value is not None}
            read(written_in_shards(tmp_path / str(number), kept, 1), settings)
