"""LoRA adapters as PEFT saves them, and a checkpoint with one merged into its weights.

    adapter_config.json         r, lora_alpha, use_rslora, rank_pattern, alpha_pattern …
    adapter_model.safetensors   base_model.model.MODULE.lora_A.weight [r, n], ….lora_B.weight [rows, r]

    W' = W + s B A      s = alpha / r, with use_rslora alpha / sqrt(r)

rank_pattern and alpha_pattern have the values of single modules: a key is a regular expression that matches the end of
a module's name. What else an adapter can hold (DoRA, biases, embeddings, whole modules) is refused, and so are
adapters whose initialization subtracted s B A from W (PiSSA, OLoRA, CorDA, LoRA-GA) or quantized W (LoftQ): PEFT
changes W again when it loads them.
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
from quantkit.inputs.settings import flag, integer, mapping, real

MERGED = "LORA"  # the dtype of a merged matrix: its rows are computed, not stored

_PREFIX = "base_model.model."
_REMEDY = "merge the adapter in PEFT (merge_and_unload), and convert the result"
_FLOATS = ("F32", "F16", "BF16")
_NOT_PLAIN = ("use_dora", "fan_in_fan_out", "lora_bias", "modules_to_save", "target_parameters", "use_qalora",
              "alora_invocation_tokens", "trainable_token_indices", "layer_replication", "megatron_config",
              "use_bdlora")  # fmt: skip
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")  # beginnings of values of init_lora_weights


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


def files_of(directory: str | os.PathLike[str]) -> list[Path]:
    """The files that an adapter is read from."""
    return [Path(directory) / name for name in ("adapter_config.json", "adapter_model.safetensors")]


def open_adapter(directory: str | os.PathLike[str]) -> Adapter:
    """Open a PEFT adapter's directory. FormatError or UnsupportedError for what is no plain LoRA."""
    path = Path(directory)
    config = read_object(path / "adapter_config.json")
    if not config:
        raise FormatError(f"{path}: no adapter_config.json; a directory that PEFT's save_pretrained wrote is needed")
    if str(config.get("peft_type", "")).upper() != "LORA":
        raise UnsupportedError(f"{path}: peft_type is {config.get('peft_type')!r:.80}; only LORA adapters are read")
    for key in _NOT_PLAIN:
        if config.get(key):
            raise UnsupportedError(
                f"{path}: adapter_config.json: {key} = {config[key]!r:.80} is not supported; {_REMEDY}"
            )
    if config.get("bias", "none") != "none":
        raise UnsupportedError(
            f"{path}: adapter_config.json: bias = {config['bias']!r:.80}; only 'none' is supported; {_REMEDY}"
        )
    if isinstance(start := config.get("init_lora_weights"), str) and start.lower().startswith(_CHANGES_BASE):
        raise UnsupportedError(
            f"{path}: adapter_config.json: init_lora_weights = {start!r:.80} changed the weights of the base model, so "
            "the adapter does not fit the checkpoint; save it as a plain LoRA (save_pretrained with "
            f"path_initial_model_for_weight_conversion), or {_REMEDY}"
        )
    file = path / "adapter_model.safetensors"
    if not file.is_file():
        raise FormatError(f"{path}: no adapter_model.safetensors; save the adapter with safe_serialization=True")
    parts: dict[str, dict[str, CheckpointTensor]] = {}
    for name, tensor in open_checkpoint(file).tensors.items():
        module, _, part = name.removesuffix(".weight").rpartition(".")
        if part not in ("lora_A", "lora_B") or not name.startswith(_PREFIX) or len(tensor.shape) != 2:
            raise UnsupportedError(
                f"{file}: tensor {name} {tensor.shape} is not lora_A or lora_B of a matrix; {_REMEDY}"
            )
        if tensor.dtype not in _FLOATS:
            raise UnsupportedError(f"{file}: tensor {name} is {tensor.dtype}; adapters are {', '.join(_FLOATS)}")
        parts.setdefault(module.removeprefix(_PREFIX), {})[part] = tensor
    if not parts:
        raise FormatError(f"{file}: the adapter has no tensors")
    products = {f"{module}.weight": _low_rank(path, config, module, found) for module, found in parts.items()}
    return Adapter(path, _alpha(path, config, "lora_alpha", 8.0), products)


def _low_rank(path: Path, config: Mapping[str, object], module: str, parts: Mapping[str, CheckpointTensor]) -> LowRank:
    if len(parts) < 2:
        raise FormatError(f"{path}: {module} has only {next(iter(parts))}")
    a, b = parts["lora_A"], parts["lora_B"]
    file = f"{path}/adapter_config.json"
    own = {key: _of_module(file, config, key, module) for key in ("rank_pattern", "alpha_pattern")}
    rank = integer(own["rank_pattern"], "rank_pattern", integer(config, "r", 8, file), file)
    alpha = _alpha(path, own["alpha_pattern"], "alpha_pattern", _alpha(path, config, "lora_alpha", 8.0))
    if not a.shape[0] == b.shape[1] == rank > 0:
        raise FormatError(
            f"{path}: {module}: lora_A has shape {a.shape}, lora_B {b.shape}; adapter_config.json makes the rank {rank}"
        )
    return LowRank(a, b, alpha / (math.sqrt(rank) if flag(config, "use_rslora", file) else rank))


def _alpha(path: Path, config: Mapping[str, object], key: str, default: float) -> float:
    """A value of alpha. FormatError for one that float32 cannot hold, and for 0, which llama.cpp takes for no value."""
    file = f"{path}/adapter_config.json"
    value = real(config, key, default, file)
    if not 1e-30 < abs(value) < 1e30:
        raise FormatError(f"{file}: {key} = {value:g}; it has to be a number other than 0, from -1e30 to 1e30")
    return value


def _of_module(file: str, config: Mapping[str, object], key: str, module: str) -> dict[str, object]:
    """The value that a pattern of `key` has for a module, as {key: …}; {} if none matches."""
    for pattern, value in mapping(config, key, file).items():
        whole = rf"(^|.*\.)(?:{pattern})$"
        if safe_regex.compile(whole, f"{file}: {key}", error=FormatError, written=pattern).search(module):
            return {key: value}
    return {}


def check_fits(base: CheckpointTensor | ScaledTensor, product: LowRank) -> None:
    """FormatError unless a product has the shape of its matrix; UnsupportedError for a matrix of no float type."""
    if not isinstance(base, ScaledTensor) and base.dtype not in _FLOATS:
        raise UnsupportedError(
            f"{base.path}: tensor {base.name} is {base.dtype}; an adapter is added to {', '.join(_FLOATS)}, or to "
            "codes with scales where config.json has a quantization_config"
        )
    if base.shape != (product.b.shape[0], product.a.shape[1]):
        raise FormatError(
            f"{base.path}: tensor {base.name} has shape {base.shape}; {product.b.name} and {product.a.name} of "
            f"{product.b.path} make {(product.b.shape[0], product.a.shape[1])}: the adapter is of another model"
        )


class MergedTensor(ScaledTensor):
    """A matrix of a checkpoint with a product added: rows are float32 sums, rounded once.

    `float_type` is that of the matrix: "f32", "f16" or "bf16".
    """

    def __init__(self, base: CheckpointTensor | ScaledTensor, product: LowRank):
        super().__init__(base.name, MERGED, base.shape, product.b, product.a)
        check_fits(base, product)
        self._base, self._product = base, product
        self.inputs = base.inputs if isinstance(base, ScaledTensor) else [base]
        self.path, self.nbytes = base.path, base.nbytes
        self.float_type = base.float_type if isinstance(base, ScaledTensor) else base.dtype.lower()

    def _rows(self, start: int, stop: int) -> np.ndarray:
        b = self._product.b.rows(start, stop).astype(np.float64)
        with np.errstate(over="ignore", invalid="ignore"):  # the encoder names the values that are not finite
            added = (b @ self._product.a.dequantize().astype(np.float64)) * self._product.scale
            return (self._base.rows(start, stop) + added).astype(np.float32)

    def forget(self, start: int, stop: int) -> None:
        self._base.forget(start, stop)
