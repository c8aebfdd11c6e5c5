"""Write checkpoints of random weights of any size for benchmarks: the tensors of a config.json's model, in shards.

write(directory, config, "FP8" | "BF16" | "F32", shard_bytes) -> bytes of tensor data
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from quantkit import archs, types
from quantkit.formats.safetensors import CheckpointSpec, CheckpointWriter, open_checkpoint

_BLOCK = 128
_POOL = 1 << 24
_LARGEST, _RMS = 0x77, 51.68  # codes below this, of either sign, and the root of the mean of their squares


def tokenizer() -> dict[str, Any]:
    """tokenizer.json: the 256 bytes in GPT-2's alphabet, no merges."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    letters = [chr(byte if byte in printable else next(others)) for byte in range(256)]
    return {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": {letter: i for i, letter in enumerate(letters)}, "merges": []},
    }


def _is_coded(name: str) -> bool:
    return name.endswith("_proj.weight")


def plain_specs(config: dict[str, Any], dtype: str = "BF16") -> Iterator[CheckpointSpec]:
    """The tensors of a config.json's model, of one dtype."""
    arch = archs.from_hf(config)
    keys = {key: value for key, (value, _) in arch.metadata(config).items()} | {"general.architecture": arch.name}
    keys[f"{arch.name}.vocab_size"] = config["vocab_size"]
    tensors = {t.name: t.shape for t in arch.tensors(config)}
    for piece in arch.to_hf(arch.hparams(keys, tensors), tensors):
        yield CheckpointSpec(piece.name, piece.shape, dtype)


def _specs(config: dict[str, Any], dtype: str) -> Iterator[CheckpointSpec]:
    for spec in plain_specs(config, "F32" if dtype == "F32" else "BF16"):
        if dtype == "FP8" and _is_coded(spec.name):
            rows, n = spec.shape
            yield CheckpointSpec(spec.name, spec.shape, "F8_E4M3")
            yield CheckpointSpec(f"{spec.name}_scale_inv", (-(-rows // _BLOCK), -(-n // _BLOCK)), "F32")
        else:
            yield spec


def write(directory: Path, config: dict[str, Any], dtype: str, shard_bytes: int = 5 * 10**9) -> int:
    """Write a checkpoint whose activations are about 1: matrices with standard deviation columns^-0.5, norms near 1."""
    directory.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(1)
    normal = rng.standard_normal(_POOL, np.float32)
    codes = (rng.integers(0, _LARGEST, _POOL, np.uint8) | rng.integers(0, 2, _POOL, np.uint8) << 7).astype(np.uint8)
    specs = list(_specs(config, dtype))
    with CheckpointWriter(directory, specs, max_shard_bytes=shard_bytes) as writer:
        for spec in specs:
            for data in _pieces(spec, normal, codes, rng):
                writer.write(spec.name, data)
    settings = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [_BLOCK, _BLOCK]}
    stated = config | ({"quantization_config": settings} if dtype == "FP8" else {})
    (directory / "config.json").write_text(json.dumps(stated))
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer(), ensure_ascii=False), encoding="utf-8")
    return sum(tensor.nbytes for tensor in open_checkpoint(directory).tensors.values())


def _pieces(
    spec: CheckpointSpec, normal: np.ndarray, codes: np.ndarray, rng: np.random.Generator
) -> Iterator[np.ndarray]:
    left = int(np.prod(spec.shape))
    columns = spec.shape[-1]
    if spec.name.endswith("_scale_inv"):
        yield (rng.uniform(0.8, 1.2, left) / (_RMS * (columns * _BLOCK) ** 0.5)).astype("<f4").view(np.uint8)
        return
    while left:
        count = min(left, _POOL // 2)
        first = int(rng.integers(0, _POOL - count + 1))
        left -= count
        if spec.dtype == "F8_E4M3":
            yield codes[first : first + count]
            continue
        x = normal[first : first + count] * np.float32(columns**-0.5)
        if len(spec.shape) == 1:
            x = 1 + np.float32(0.1) * normal[first : first + count] if "norm" in spec.name else x
        yield types.get("bf16").quantize(x[None]).reshape(-1) if spec.dtype == "BF16" else x.view(np.uint8)
