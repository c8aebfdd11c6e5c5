"""MXFP4: codes of 4 bits (E2M1), 32 to a scale that is a power of two.

    gpt-oss                 NAME_blocks U8[..., rows, n / 32, 16] with NAME_scales U8[..., rows, n / 32]
    compressed-tensors      NAME.weight_packed U8[rows, n / 2] with NAME.weight_scale U8[rows, n / 32]
    (mxfp4-pack-quantized)
    DeepSeek-V4's experts   NAME.weight I8[rows, n / 2] with NAME.scale (or weight_scale_inv) F8_E8M0[rows, n / 32]

Byte j of a row holds elements 2j (low bits) and 2j + 1. A scale e means 2^(e - 127); 255 is NaN. The bytes are the same
in all three: a block of 32 columns is 16 bytes in a row. GGUF's MXFP4 has the same codes in another order.
"""

from __future__ import annotations

import numpy as np

from quantkit.errors import DataError, FormatError
from quantkit.formats.safetensors.quantized.matrix import E2M1, ScaledTensor, require_shape, required
from quantkit.formats.safetensors.quantized.packing import nibbles
from quantkit.formats.safetensors.reader import Checkpoint, CheckpointTensor
from quantkit.inputs.json_input import Json

_EXPONENTS = ("U8", "F8_E8M0")
_OF_EXPERTS = (".scale", ".weight_scale_inv", ".weight_scale")


class MXFP4Tensor(ScaledTensor):
    """Codes of 4 bits, 32 to a scale. `dtype` is "MXFP4"."""

    def __init__(self, name: str, codes: CheckpointTensor, scales: CheckpointTensor):
        super().__init__(name, "MXFP4", (*scales.shape[:-1], 32 * scales.shape[-1]), codes, scales)

    def _rows(self, start: int, stop: int) -> np.ndarray:
        blocks = self.shape[-1] // 32
        codes = self.codes.raw().reshape(-1, blocks, 16)[start:stop]
        exponents = self.scales.raw().reshape(-1, blocks)[start:stop].astype(np.int32)
        x = nibbles(codes.reshape(-1, 16), E2M1).reshape(stop - start, blocks, 32)
        with np.errstate(over="ignore"):
            np.ldexp(x, (exponents - 127)[:, :, None], out=x)
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


def of_blocks(checkpoint: Checkpoint, codes: CheckpointTensor, settings: Json) -> MXFP4Tensor | None:
    """The matrices of gpt-oss's experts, NAME_blocks; None for a tensor of another name."""
    if not codes.name.endswith("_blocks"):
        return None
    name = codes.name.removesuffix("_blocks")
    scales = checkpoint.tensors.get(f"{name}_scales")
    if scales is None:
        raise FormatError(f"{codes.path}: tensor {codes.name} has no scales, {name}_scales")
    if codes.dtype != "U8" or scales.dtype not in _EXPONENTS or len(codes.shape) < 3 or codes.shape[-1] != 16:
        raise FormatError(
            f"{codes.path}: tensor {codes.name} is {codes.dtype} of shape {codes.shape}, its scales {scales.dtype}; "
            "MXFP4 is U8 of shape […, rows, blocks, 16] with U8 scales"
        )
    if scales.shape != codes.shape[:-1]:
        raise FormatError(
            f"{scales.path}: tensor {scales.name} is {scales.shape}; the blocks of {codes.name} need {codes.shape[:-1]}"
        )
    return MXFP4Tensor(name, codes, scales)


def of_experts(checkpoint: Checkpoint, codes: CheckpointTensor, settings: Json) -> MXFP4Tensor | None:
    """A matrix of DeepSeek-V4's experts: I8 with scales that are powers of two; None for other tensors."""
    if codes.dtype != "I8" or not codes.name.endswith(".weight"):
        return None
    names = [codes.name.removesuffix(".weight") + ending for ending in _OF_EXPERTS]
    name = next((name for name in names if name in checkpoint.tensors), names[0])
    return _rows_of_bytes(codes.name, codes, required(checkpoint, codes, name, _EXPONENTS))


def of_pairs(checkpoint: Checkpoint, module: str, codes: CheckpointTensor) -> MXFP4Tensor:
    """The matrix of NAME.weight_packed as compressed-tensors has it."""
    return _rows_of_bytes(f"{module}.weight", codes, required(checkpoint, codes, f"{module}.weight_scale", _EXPONENTS))


def _rows_of_bytes(name: str, codes: CheckpointTensor, scales: CheckpointTensor) -> MXFP4Tensor:
    if len(codes.shape) < 2 or codes.shape[-1] % 16 or codes.dtype not in ("U8", "I8"):
        raise FormatError(
            f"{codes.path}: tensor {codes.name} is {codes.dtype} of shape {codes.shape}; MXFP4 has rows of whole "
            "blocks of 32 columns, 16 bytes each"
        )
    require_shape(scales, (*codes.shape[:-1], codes.shape[-1] // 16), f"{codes.name} of {codes.shape} bytes")
    return MXFP4Tensor(name, codes, scales)
