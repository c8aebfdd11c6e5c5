"""Checkpoints in published quantized formats: random codes in place of a model's projections."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.archs.checkpoints import Coded, coded_checkpoint

Make = Callable[[np.random.Generator, str, int, int], Coded]
GROUP = 32


def _words(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.integers(-(2**31), 2**31, shape).astype("<i4")


def _halves(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.uniform(0.001, 0.01, shape).astype("<f2")


def gptq(rng: np.random.Generator, name: str, rows: int, n: int) -> Coded:
    """4 bits, groups out of order, and the bias of zeros that AutoGPTQ adds."""
    module, groups = name.removesuffix(".weight"), n // GROUP
    return [
        (f"{module}.qweight", "I32", _words(rng, n // 8, rows)),
        (f"{module}.qzeros", "I32", _words(rng, groups, rows // 8)),
        (f"{module}.scales", "F16", _halves(rng, groups, rows)),
        (f"{module}.g_idx", "I32", rng.permutation(np.arange(n) // GROUP).astype("<i4")),
        (f"{module}.bias", "F16", np.zeros(rows, "<f2")),
    ]


def awq(rng: np.random.Generator, name: str, rows: int, n: int) -> Coded:
    module = name.removesuffix(".weight")
    return [
        (f"{module}.qweight", "I32", _words(rng, n, rows // 8)),
        (f"{module}.qzeros", "I32", _words(rng, n // GROUP, rows // 8)),
        (f"{module}.scales", "F16", _halves(rng, n // GROUP, rows)),
    ]


def nvfp4(rng: np.random.Generator, name: str, rows: int, n: int) -> Coded:
    return [
        (f"{name}_packed", "U8", rng.integers(0, 256, (rows, n // 2), np.uint8)),
        (f"{name}_scale", "F8_E4M3", rng.integers(0, 0x7F, (rows, n // 16), np.uint8)),
        (f"{name}_global_scale", "F32", np.array([30000], "<f4")),
    ]


def modelopt(rng: np.random.Generator, name: str, rows: int, n: int) -> Coded:
    """NVFP4 in the feed-forward, FP8 in attention."""
    if ".self_attn." in name:
        codes = rng.integers(0, 0x7F, (rows, n), np.uint8)
        return [(name, "F8_E4M3", codes), (f"{name}_scale", "F32", np.array(0.001, "<f4"))]
    return [
        (name, "U8", rng.integers(0, 256, (rows, n // 2), np.uint8)),
        (f"{name}_scale", "F8_E4M3", rng.integers(0, 0x7F, (rows, n // 16), np.uint8)),
        (f"{name}_scale_2", "F32", np.array(3e-5, "<f4")),
    ]


def mxfp4(rng: np.random.Generator, name: str, rows: int, n: int) -> Coded:
    return [
        (f"{name}_packed", "U8", rng.integers(0, 256, (rows, n // 2), np.uint8)),
        (f"{name}_scale", "U8", rng.integers(110, 122, (rows, n // 32), np.uint8)),
    ]


def nf4(rng: np.random.Generator, name: str, rows: int, n: int) -> Coded:
    state = {"blocksize": 64, "shape": [rows, n], "dtype": "bfloat16", "quant_type": "nf4", "nested_blocksize": 256,
             "nested_offset": 0.03125, "nested_dtype": "float32"}  # fmt: skip
    blocks = rows * n // 64
    return [
        (name, "U8", rng.integers(0, 256, (rows * n // 2, 1), np.uint8)),
        (f"{name}.absmax", "U8", rng.integers(0, 256, blocks, np.uint8)),
        (f"{name}.nested_absmax", "F32", rng.uniform(0.01, 0.02, -(-blocks // 256)).astype("<f4")),
        (f"{name}.nested_quant_map", "F32", np.linspace(-1, 1, 256).astype("<f4")),
        (f"{name}.quant_map", "F32", np.linspace(-1, 1, 16).astype("<f4")),
        (f"{name}.quant_state.bitsandbytes__nf4", "U8", np.frombuffer(json.dumps(state).encode(), np.uint8)),
    ]


def groups_of(form: str, size: int) -> dict[str, Any]:
    weights = {"type": "float", "num_bits": 4, "group_size": size}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"g": {"targets": ["Linear"], "weights": weights}},
    }


KINDS: dict[str, tuple[Make, dict[str, Any]]] = {
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True, "sym": False}),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}),
    "nvfp4": (nvfp4, groups_of("nvfp4-pack-quantized", 16)),
    "modelopt": (modelopt, {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}),
    "mxfp4": (mxfp4, groups_of("mxfp4-pack-quantized", 32)),
    "nf4": (nf4, {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}),
}


def quantized(kind: str, plain: Path, target: Path, **settings: Any) -> Path:
    """The model with random codes in place of its projections."""
    make, stated = KINDS[kind]
    rng = np.random.default_rng(3)

    def coded(name: str, rows: int, n: int) -> Coded:
        made = make(rng, name, rows, n)
        keeps_bias = name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))
        return [part for part in made if not (part[0].endswith(".bias") and keeps_bias)]

    return coded_checkpoint(plain, target, "_proj.weight", coded, stated | settings)
