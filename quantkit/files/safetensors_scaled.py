"""Checkpoints whose weights are stored as codes and scales, read as the matrices they stand for.

    fp8     NAME.weight F8_E4M3 or F8_E5M2 with NAME.weight_scale_inv (also weight_scale), by which it is multiplied:
            one number, one a row, or one for each block of rows and columns, 128 x 128 where config.json says no other
            size. The last block of an axis may be cut off.
    mxfp4   NAME_blocks U8[…, rows, n / 32, 16] with NAME_scales U8[…, rows, n / 32], as gpt-oss has its experts: byte j
            of a block holds elements 2j (low bits) and 2j + 1, of the values of E2M1; a scale e is 2^(e - 127).

`unscaled` hides codes and scales and shows `ScaledTensor`s in their place, which have what a CheckpointTensor has but
for `raw`. Values are float32 products, rounded once: of MXFP4 they are exact. No more is decoded than is asked for.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from quantkit.errors import DataError, FormatError, UnsupportedError
from quantkit.files.mapping import release
from quantkit.files.safetensors import Checkpoint, CheckpointTensor

Shape = tuple[int, ...]

FP8 = ("F8_E4M3", "F8_E5M2")
_BLOCK = (128, 128)
_SCALES = (".weight_scale_inv", ".weight_scale")
# Scales of activations and caches, which weights do not need.
_OF_ACTIVATIONS = (".activation_scale", ".input_scale", ".output_scale", ".k_scale", ".v_scale", ".kv_scale")
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_E2M1 = np.concatenate([_E2M1, -_E2M1])
_METHODS = ("fp8", "mxfp4", "compressed-tensors")


class ScaledTensor(ABC):
    """A matrix, or a stack of them, that is stored as codes and scales. `dtype` is that of the codes."""

    def __init__(self, name: str, dtype: str, shape: Shape, codes: CheckpointTensor, scales: CheckpointTensor):
        self.name, self.dtype, self.shape = name, dtype, shape
        self.codes, self.scales = codes, scales
        self.path = codes.path
        self.nbytes = codes.nbytes + scales.nbytes

    def __repr__(self) -> str:
        return f"<tensor {self.name} {self.dtype} {self.shape}>"

    @property
    def n_rows(self) -> int:
        """Product of all but the last axis."""
        return math.prod(self.shape[:-1])

    def rows(self, start: int, stop: int) -> np.ndarray:
        """float32[stop - start, shape[-1]]: some rows; all leading axes count as one."""
        if not 0 <= start <= stop <= self.n_rows:
            raise DataError(f"{self.path}: tensor {self.name} has rows 0 to {self.n_rows}, not {start} to {stop}")
        return self._rows(start, stop)

    @abstractmethod
    def _rows(self, start: int, stop: int) -> np.ndarray: ...

    def dequantize(self) -> np.ndarray:
        """float32[shape]."""
        return self.rows(0, self.n_rows).reshape(self.shape)

    def forget(self, start: int, stop: int) -> None:
        """Let go of the memory behind some rows."""
        width = self.codes.nbytes // self.n_rows
        release(self.codes.raw()[start * width : stop * width])


class FP8Tensor(ScaledTensor):
    """Codes of 8 bits, each times the scale of its block of `block` rows and columns."""

    def __init__(self, codes: CheckpointTensor, scales: CheckpointTensor, block: tuple[int, int]):
        super().__init__(codes.name, codes.dtype, codes.shape, codes, scales)
        self.block = block

    def _rows(self, start: int, stop: int) -> np.ndarray:
        x = self.codes.rows(start, stop)
        (rows, n), (high, wide) = self.shape[-2:], self.block
        grid = self.scales.dequantize().reshape(-1, -(-n // wide))
        first = start
        while first < stop:  # rows of one line of blocks at a time
            matrix, row = divmod(first, rows)
            last = min(first + high - row % high, first + rows - row, stop)
            line = grid[matrix * -(-rows // high) + row // high]
            with np.errstate(over="ignore"):  # what float32 cannot hold is Inf, which whoever reads it refuses
                x[first - start : last - start] *= np.repeat(line, wide)[:n]
            first = last
        return x


class MXFP4Tensor(ScaledTensor):
    """Codes of 4 bits, 32 to a scale."""

    def __init__(self, name: str, codes: CheckpointTensor, scales: CheckpointTensor):
        super().__init__(name, "MXFP4", (*codes.shape[:-2], 32 * codes.shape[-2]), codes, scales)

    def _rows(self, start: int, stop: int) -> np.ndarray:
        blocks = self.shape[-1] // 32
        codes = self.codes.raw().reshape(-1, blocks, 16)[start:stop]
        exponents = self.scales.raw().reshape(-1, blocks)[start:stop].astype(np.int32)
        x = np.empty((stop - start, blocks, 16, 2), np.float32)
        x[..., 0] = _E2M1[codes & 15]
        x[..., 1] = _E2M1[codes >> 4]
        with np.errstate(over="ignore"):
            np.ldexp(x, (exponents - 127)[:, :, None, None], out=x)
        x[exponents == 255] = np.nan
        return x.reshape(stop - start, -1)

    def packed(self, start: int, stop: int) -> np.ndarray:
        """uint8[rows, 17 * blocks] as GGUF has them: the scale, then byte j with elements j (low bits) and j + 16.

        DataError for a scale that is NaN, which GGUF's type cannot say.
        """
        blocks = self.shape[-1] // 32
        codes = self.codes.raw().reshape(-1, blocks, 16)[start:stop]
        scales = self.scales.raw().reshape(-1, blocks)[start:stop]
        if (scales == 255).any():
            row, block = (int(i) for i in np.argwhere(scales == 255)[0])
            raise DataError(f"row {row}, block {block} has the scale 255, which is nan")
        elements = np.stack([codes & 15, codes >> 4], axis=-1).reshape(stop - start, blocks, 2, 16)
        out = np.empty((stop - start, blocks, 17), np.uint8)
        out[..., 0] = scales
        out[..., 1:] = elements[:, :, 0] | elements[:, :, 1] << 4
        return out.reshape(stop - start, -1)


# -------------------------------------------------------------------------------------------------------- which is what


def unscaled(checkpoint: Checkpoint, config: Mapping[str, Any]) -> Checkpoint:
    """The checkpoint with its weights as matrices, read as the `quantization_config` of its config.json says.

    Without one it is as it was. UnsupportedError for other methods; FormatError where scales are missing or do not fit.
    """
    settings = config.get("quantization_config") or {}
    method = settings.get("quant_method")
    if not method:
        return checkpoint
    _refuse_other_methods(settings, checkpoint.path)
    tensors: dict[str, Any] = {}
    used: set[str] = set()
    for name, tensor in checkpoint.tensors.items():
        if name.endswith("_blocks"):
            made: Any = _mxfp4(checkpoint, name.removesuffix("_blocks"), tensor)
        elif tensor.dtype in FP8:
            made = _fp8(checkpoint, tensor, _block_size(settings))
        else:
            continue
        tensors[name] = made
        used.add(made.scales.name)
    for name in checkpoint.tensors:
        if name.endswith(_SCALES) and name not in used:
            raise FormatError(f"{checkpoint.path}: {name} scales nothing: there is no tensor of FP8 codes of that name")
    dropped = used.union(name for name in checkpoint.tensors if name.endswith(_OF_ACTIVATIONS))
    kept = [tensors.get(name, tensor) for name, tensor in checkpoint.tensors.items() if name not in dropped]
    return replace(checkpoint, tensors={tensor.name: tensor for tensor in kept})


def _refuse_other_methods(settings: Mapping[str, Any], where: Path) -> None:
    """UnsupportedError for a quantization_config whose weights are read by other rules."""
    method = settings.get("quant_method")
    if method not in _METHODS:
        raise UnsupportedError(
            f"{where}: the checkpoint is quantized already ({method}); quantkit reads {' and '.join(_METHODS[:2])}, "
            "and bf16, f16 and f32"
        )
    for group in _groups(settings) if method == _METHODS[2] else ():
        weights = group.get("weights") or {}
        if weights.get("type") != "float" or weights.get("num_bits") != 8:
            raise UnsupportedError(
                f"{where}: the checkpoint is quantized already ({method}, {weights.get('type')} of "
                f"{weights.get('num_bits')} bits); of this method quantkit reads float of 8 bits"
            )


def _block_size(settings: Mapping[str, Any]) -> tuple[int, int]:
    """Rows and columns that share a scale; `_BLOCK` where nothing is said."""
    structures = [(group.get("weights") or {}).get("block_structure") for group in _groups(settings)]
    size: Any = settings.get("weight_block_size") or next(filter(None, structures), None) or _BLOCK
    if not isinstance(size, Sequence) or len(size) != 2 or not all(isinstance(n, int) and n > 0 for n in size):
        raise FormatError(f"config.json: weight_block_size is {size!r}; it has to be two numbers, as [128, 128]")
    return size[0], size[1]


def _groups(settings: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    return (settings.get("config_groups") or {}).values()


def _fp8(checkpoint: Checkpoint, codes: CheckpointTensor, block: tuple[int, int]) -> FP8Tensor:
    names = [codes.name.removesuffix(".weight") + suffix for suffix in _SCALES]
    scales = next((checkpoint.tensors[name] for name in names if name in checkpoint.tensors), None)
    if scales is None:
        raise FormatError(f"{codes.path}: tensor {codes.name} is {codes.dtype} and has no scales, {' or '.join(names)}")
    if len(codes.shape) < 2:
        raise FormatError(f"{codes.path}: tensor {codes.name} is {codes.dtype} of shape {codes.shape}, not a matrix")
    *lead, rows, n = codes.shape
    stack = math.prod(lead)
    grid = (*lead, -(-rows // block[0]), -(-n // block[1]))
    if scales.shape == grid:
        return FP8Tensor(codes, scales, block)
    if math.prod(scales.shape) == stack:  # one a matrix
        return FP8Tensor(codes, scales, (rows, n))
    if math.prod(scales.shape) == stack * rows:  # one a row
        return FP8Tensor(codes, scales, (1, n))
    raise FormatError(
        f"{scales.path}: tensor {scales.name} is {scales.shape}; {codes.name} is {codes.shape}, whose blocks of "
        f"{block[0]} x {block[1]} need {grid}"
    )


def _mxfp4(checkpoint: Checkpoint, name: str, codes: CheckpointTensor) -> MXFP4Tensor:
    scales = checkpoint.tensors.get(f"{name}_scales")
    if scales is None:
        raise FormatError(f"{codes.path}: tensor {codes.name} has no scales, {name}_scales")
    if codes.dtype != "U8" or scales.dtype not in ("U8", "F8_E8M0") or len(codes.shape) < 3 or codes.shape[-1] != 16:
        raise FormatError(
            f"{codes.path}: tensor {codes.name} is {codes.dtype} of shape {codes.shape}, its scales {scales.dtype}; "
            "MXFP4 is U8 of shape […, rows, blocks, 16] with U8 scales"
        )
    if scales.shape != codes.shape[:-1]:
        raise FormatError(
            f"{scales.path}: tensor {scales.name} is {scales.shape}; the blocks of {codes.name} need {codes.shape[:-1]}"
        )
    return MXFP4Tensor(name, codes, scales)
