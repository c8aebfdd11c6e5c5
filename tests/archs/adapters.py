"""Tiny LoRA adapters, in the files that PEFT writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from quantkit.formats.safetensors import CheckpointSpec, CheckpointWriter

MODULES = ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")


def save_adapter(folder: Path, model: Any, changes: dict[str, Any] | None = None, modules: Any = MODULES) -> Path:
    """A random adapter of rank 4, in the files that PEFT's save_pretrained writes."""
    import torch

    torch.manual_seed(8)
    config: dict[str, Any] = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "bias": "none", "use_rslora": False} | (
        changes or {}
    )
    tensors = {}
    for name, module in model.named_modules():
        if name.endswith(tuple(modules)):
            rank = config.get("rank_pattern", {}).get("v_proj", 4) if name.endswith("v_proj") else 4
            rows, columns = module.weight.shape
            tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(rank, columns).numpy() / 8
            tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(rows, rank).numpy() / 8
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(config))
    with CheckpointWriter(folder, [CheckpointSpec(n, x.shape, "F32") for n, x in tensors.items()]) as writer:
        for name, x in tensors.items():
            writer.write(name, np.ascontiguousarray(x, "<f4").reshape(-1).view(np.uint8))
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
    return folder
