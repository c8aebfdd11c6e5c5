"""LoRA adapters as PEFT saves them, and a checkpoint with one merged into its weights.

    adapter_config.json         r, lora_alpha, use_rslora, rank_pattern, alpha_pattern …
    adapter_model.safetensors   base_model.model.MODULE.lora_A.weight [r, n], ….lora_B.weight [rows, r]

    W' = W + s B A      s = alpha / r, with use_rslora alpha / sqrt(r)

rank_pattern and alpha_pattern have the values of single modules: a key is a regular expression that matches the end of
a module's name. What else an adapter can hold (DoRA, biases, embeddings, whole modules) is refused.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from quantkit.errors import FormatError, UnsupportedError
from quantkit.formats.safetensors.quantized import ScaledTensor
from quantkit.formats.safetensors.reader import CheckpointTensor, open_checkpoint
from quantkit.inputs import safe_regex
from quantkit.inputs.json_input import read_object
from quantkit.inputs.settings import integer, mapping, real

MERGED = "LORA"  # the dtype of a merged matrix: its rows are computed, not stored

_PREFIX = "base_model.model."
_NOT_PLAIN = ("use_dora", "fan_in_fan_out", "lora_bias", "modules_to_save", "target_parameters", "use_qalora",
              "alora_invocation_tokens", "trainable_token_indices", "layer_replication", "megatron_config")  # fmt: skip


@dataclass(frozen=True)
class LowRank:
    """The product that is added to a matrix: scale * b @ a, with a [r, n] and b [rows, r]."""

    a: CheckpointTensor
    b: CheckpointTensor
    scale: float

    @property
    def rank(self) -> int:
        """r."""
        return self.a.shape[0]


@dataclass(frozen=True)
class Adapter:
    """An adapter: its directory, alpha, and by the name of each weight what is added to it."""

    path: Path
    alpha: float
    products: dict[str, LowRank]


def open_adapter(directory: str | os.PathLike[str]) -> Adapter:
    """Open a PEFT adapter's directory. FormatError or UnsupportedError for what is no plain LoRA."""
    path = Path(directory)
    config = read_object(path / "adapter_config.json")
    if not config:
        raise FormatError(f"{path}: no adapter_config.json; a directory that PEFT's save_pretrained wrote is needed")
    if str(config.get("peft_type", "")).upper() != "LORA":
        raise UnsupportedError(f"{path}: peft_type is {config.get('peft_type')!r}; only LORA adapters are read")
    for key in _NOT_PLAIN:
        if config.get(key):
            raise UnsupportedError(f"{path}: adapter_config.json: {key} = {config[key]!r} is not supported")
    if config.get("bias", "none") != "none":
        raise UnsupportedError(f"{path}: adapter_config.json: bias = {config['bias']!r}; only 'none' is supported")
    file = path / "adapter_model.safetensors"
    if not file.is_file():
        raise FormatError(f"{path}: no adapter_model.safetensors; save the adapter with safe_serialization=True")
    parts: dict[str, dict[str, CheckpointTensor]] = {}
    for name, tensor in open_checkpoint(file).tensors.items():
        module, _, part = name.removesuffix(".weight").rpartition(".")
        if part not in ("lora_A", "lora_B") or not name.startswith(_PREFIX) or len(tensor.shape) != 2:
            raise UnsupportedError(f"{file}: tensor {name} {tensor.shape} is not lora_A or lora_B of a matrix")
        parts.setdefault(module.removeprefix(_PREFIX), {})[part] = tensor
    if not parts:
        raise FormatError(f"{file}: the adapter has no tensors")
    products = {f"{module}.weight": _low_rank(path, config, module, found) for module, found in parts.items()}
    return Adapter(path, real(config, "lora_alpha", 8.0), products)


def _low_rank(path: Path, config: Mapping[str, object], module: str, parts: Mapping[str, CheckpointTensor]) -> LowRank:
    if len(parts) < 2:
        raise FormatError(f"{path}: {module} has only {next(iter(parts))}")
    a, b = parts["lora_A"], parts["lora_B"]
    rank = integer(_of_module(config, "rank_pattern", module), "value") or integer(config, "r", 8)
    alpha = real(_of_module(config, "alpha_pattern", module), "value") or real(config, "lora_alpha", 8.0)
    if not a.shape[0] == b.shape[1] == rank > 0:
        raise FormatError(
            f"{path}: {module}: lora_A has shape {a.shape}, lora_B {b.shape}; adapter_config.json makes the rank {rank}"
        )
    return LowRank(a, b, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))


def _of_module(config: Mapping[str, object], key: str, module: str) -> dict[str, object]:
    """The value that a pattern has for a module, as {"value": …}; {} if none matches."""
    for pattern, value in mapping(config, key).items():
        if safe_regex.compile(rf"(^|.*\.){pattern}$", f"adapter_config.json: {key}").search(module):
            return {"value": value}
    return {}


class MergedTensor(ScaledTensor):
    """A matrix of a checkpoint with a product added: rows are float32 sums, rounded once."""

    def __init__(self, base: CheckpointTensor | ScaledTensor, product: LowRank):
        super().__init__(base.name, MERGED, base.shape, product.b, product.a)
        if base.shape != (product.b.shape[0], product.a.shape[1]):
            raise FormatError(
                f"{base.path}: tensor {base.name} has shape {base.shape}; {product.b.name} and {product.a.name} of "
                f"{product.b.path} make {(product.b.shape[0], product.a.shape[1])}: the adapter is of another model"
            )
        self._base, self._product = base, product
        self.inputs = base.inputs if isinstance(base, ScaledTensor) else [base]
        self.path, self.nbytes = base.path, base.nbytes

    def _rows(self, start: int, stop: int) -> np.ndarray:
        b = self._product.b.rows(start, stop).astype(np.float64)
        added = (b @ self._product.a.dequantize().astype(np.float64)) * self._product.scale
        return (self._base.rows(start, stop) + added).astype(np.float32)

    def forget(self, start: int, stop: int) -> None:
        self._base.forget(start, stop)
