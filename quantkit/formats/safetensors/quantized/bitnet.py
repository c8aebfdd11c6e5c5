"""BitNet: ternary matrices, packed, or floats that the layers round to ternary values when they run.

    NAME.weight    U8[rows / 4, n], packed, with NAME.weight_scale of one number
    NAME.weight    floats: rounded if config.json says quantization_mode "online", except `modules_to_not_convert`

`weight_bits` 1 in config.json without further settings means the second: the first BitNets have it.
"""

from __future__ import annotations

import math
import threading
from pathlib import Path

import numpy as np

from quantkit.errors import FormatError, UnsupportedError
from quantkit.formats.mapping import release
from quantkit.formats.safetensors.quantized.matrix import ScaledTensor, finite
from quantkit.formats.safetensors.reader import Checkpoint, CheckpointTensor
from quantkit.inputs.json_input import Json
from quantkit.inputs.safe_regex import compile
from quantkit.inputs.settings import sequence

_NO_CODE = 3
_LEFT = "modules_to_not_convert"
_KINDS = {"linear_class": ("bitlinear", "autobitlinear"), "quantization_mode": ("offline", "online")}


class TernaryTensor(ScaledTensor):
    """-1, 0 and 1 times one scale, or divided by it. codes U8[rows / 4, n]: plane k, bits 2k and 2k + 1, has a quarter
    of the rows, one after another, as code + 1."""

    def __init__(self, codes: CheckpointTensor, scales: CheckpointTensor, divides: bool):
        super().__init__(codes.name, "TERNARY", (4 * codes.shape[0], codes.shape[1]), codes, scales)
        self.divides = divides

    def _rows(self, start: int, stop: int) -> np.ndarray:
        packed = self.codes.raw().reshape(self.codes.shape)
        row = np.arange(start, stop)
        shift = (2 * (row // len(packed))).astype(np.uint8)[:, None]
        codes = packed[row % len(packed)] >> shift & 3
        if (codes == _NO_CODE).any():
            at, column = (int(i) for i in np.argwhere(codes == _NO_CODE)[0])
            raise FormatError(
                f"{self.path}: tensor {self.codes.name} has the code {_NO_CODE} at row {start + at}, column {column}; "
                "ternary codes are 0, 1 and 2: fetch the file again"
            )
        x = codes.astype(np.float32) - 1
        with np.errstate(over="ignore"):  # values beyond float32 become Inf, which callers refuse
            return np.asarray(x / self._scale if self.divides else x * self._scale)

    @property
    def _scale(self) -> np.float32:
        scale = np.float32(finite(self.scales, self.scales.dequantize().reshape(1, 1))[0, 0])
        if scale == 0:
            raise FormatError(
                f"{self.scales.path}: tensor {self.scales.name} is 0; a scale is another number: fetch the file again"
            )
        return scale

    def forget(self, start: int, stop: int) -> None:
        """As `ScaledTensor.forget`, of the whole matrix: neighbouring rows lie a quarter of it apart."""
        release(self.codes.raw())


class Ternarized(ScaledTensor):
    """A matrix of floats, rounded to ternary values as an online BitNet does when it runs. `scales` is `codes`."""

    def __init__(self, weights: CheckpointTensor):
        super().__init__(weights.name, "TERNARY", weights.shape, weights, weights)
        self._lock = threading.Lock()
        self._scale = 0.0  # not known yet

    def _rows(self, start: int, stop: int) -> np.ndarray:
        with self._lock:
            self._scale = self._scale or self._mean()
        scale = np.float32(1) / np.float32(self._scale)
        return np.clip(np.rint(self.codes.rows(start, stop) * scale), -1, 1) / scale

    def _mean(self) -> float:
        """The mean of |w|, at least 1e-5."""
        step, total = max(1, (1 << 20) // self.shape[-1]), 0.0
        for start in range(0, self.n_rows, step):
            total += float(np.abs(self.codes.rows(start, min(self.n_rows, start + step))).sum(dtype=np.float64))
        return max(total / math.prod(self.shape), 1e-5)


def check(settings: Json, where: Path) -> None:
    """UnsupportedError for another kind of layer than transformers has: its scale may mean something else."""
    for key, known in _KINDS.items():
        if (value := settings.get(key, known[0])) not in known:
            raise UnsupportedError(
                f"{where}: quantization_config has {key} {value!r}; of bitnet quantkit reads {' and '.join(known)}: "
                "correct it in config.json, or convert the model with the program that wrote it"
            )


def matrix(checkpoint: Checkpoint, tensor: CheckpointTensor, settings: Json) -> ScaledTensor | None:
    """A projection's ternary matrix: packed, or floats that the layers round ("online"). None for other tensors."""
    if not tensor.name.endswith("_proj.weight"):
        return None
    name = f"{tensor.name}_scale"
    scales = checkpoint.tensors.get(name)
    if tensor.dtype != "U8":
        if scales is not None:
            raise UnsupportedError(
                f"{tensor.path}: tensor {tensor.name} is {tensor.dtype} with a scale; U8 can have one"
            )
        online = settings.get("quantization_mode") == "online"
        return Ternarized(tensor) if online and not _stays(tensor.name.removesuffix(".weight"), settings) else None
    if scales is None or math.prod(scales.shape) != 1 or len(tensor.shape) != 2:
        raise FormatError(
            f"{tensor.path}: tensor {tensor.name} is packed and has to be a matrix with one scale, {name}"
        )
    return TernaryTensor(tensor, scales, settings.get("linear_class", "bitlinear") != "autobitlinear")


def _stays(module: str, settings: Json) -> bool:
    """Whether config.json says that a module is not converted: patterns of names, or of their ends, as transformers."""
    for pattern in sequence(settings, _LEFT):
        if not isinstance(pattern, str):
            raise FormatError(f"config.json: {_LEFT} has {pattern!r}; it lists names of modules, or patterns of them")
        regex = compile(rf"(?:{pattern})(?:(?<=\.)|(?=\.|$))", f"config.json: {_LEFT}", error=FormatError)
        if module.endswith(pattern) or regex.match(module) is not None:
            return True
    return False
