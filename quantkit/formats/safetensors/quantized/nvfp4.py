"""NVFP4: codes of 4 bits (E2M1), 16 to a scale of 8 bits (E4M3), and one float32 number for the matrix.

    compressed-tensors      NAME.weight_packed U8[rows, n / 2], NAME.weight_scale F8_E4M3[rows, n / 16],
    (nvfp4-pack-quantized)  NAME.weight_global_scale F32[1], by which scales are divided
    ModelOpt                NAME.weight U8[..., rows, n / 2], NAME.weight_scale F8_E4M3[..., rows, n / 16],
                            NAME.weight_scale_2 F32, of one number (or one a matrix of a stack), which multiplies scales

Byte j of a row holds elements 2j (low bits) and 2j + 1. The scale of a block, divided or multiplied, is rounded to
float32, and so is its product with a code, as both programs do.
"""

from __future__ import annotations

import math

import numpy as np

from quantkit.errors import FormatError
from quantkit.formats.safetensors.quantized.matrix import E2M1, ScaledTensor, finite, require_shape, required
from quantkit.formats.safetensors.quantized.packing import nibbles
from quantkit.formats.safetensors.reader import Checkpoint, CheckpointTensor

BLOCK = 16  # columns to a scale


class NVFP4Tensor(ScaledTensor):
    """Codes of 4 bits, 16 to a scale. `dtype` is "NVFP4".

    whole   F32: one number, or one for each matrix of a stack
    divides scales are divided by it, not multiplied
    """

    def __init__(
        self, name: str, codes: CheckpointTensor, scales: CheckpointTensor, whole: CheckpointTensor, divides: bool
    ):
        super().__init__(name, "NVFP4", (*codes.shape[:-1], 2 * codes.shape[-1]), codes, scales, whole)
        self.whole, self.divides = whole, divides

    def _rows(self, start: int, stop: int) -> np.ndarray:
        codes = self.codes.raw().reshape(self.n_rows, -1)[start:stop]
        x = nibbles(codes, E2M1).reshape(stop - start, -1, BLOCK)
        with np.errstate(over="ignore"):  # values beyond float32 become Inf, which callers refuse
            x *= self._scales(start, stop)[:, :, None]
        return x.reshape(stop - start, -1)

    def _scales(self, start: int, stop: int) -> np.ndarray:
        """float32[rows, blocks]: the scale of each block."""
        scales = finite(self.scales, self.scales.rows(start, stop), start)
        whole = self.global_scales()[np.arange(start, stop) // self.shape[-2], None]
        with np.errstate(over="ignore"):
            return np.asarray(scales / whole if self.divides else scales * whole)

    def global_scales(self) -> np.ndarray:
        """float32[matrices]: the number of each matrix. FormatError unless it is finite and above 0."""
        matrices = math.prod(self.shape[:-2])
        found = finite(self.whole, self.whole.dequantize().reshape(1, -1))[0]
        if not (found > 0).all():
            raise FormatError(
                f"{self.whole.path}: tensor {self.whole.name} has the scale {found.min()}; it has to be above 0: "
                "fetch the file again or quantize the model anew"
            )
        return np.broadcast_to(found, matrices)


def of_pairs(checkpoint: Checkpoint, module: str, codes: CheckpointTensor) -> NVFP4Tensor:
    """The matrix of NAME.weight_packed as compressed-tensors has it."""
    scales = required(checkpoint, codes, f"{module}.weight_scale", ("F8_E4M3",))
    whole = required(checkpoint, codes, f"{module}.weight_global_scale", ("F32",))
    return _checked(NVFP4Tensor(f"{module}.weight", codes, scales, whole, divides=True))


def of_modelopt(checkpoint: Checkpoint, module: str, codes: CheckpointTensor) -> NVFP4Tensor:
    """The matrix of NAME.weight, U8, as ModelOpt has it."""
    scales = required(checkpoint, codes, f"{module}.weight_scale", ("F8_E4M3",))
    whole = required(checkpoint, codes, f"{module}.weight_scale_2", ("F32",))
    return _checked(NVFP4Tensor(codes.name, codes, scales, whole, divides=False))


def _checked(made: NVFP4Tensor) -> NVFP4Tensor:
    codes, shape = made.codes, made.codes.shape
    if codes.dtype != "U8" or len(shape) < 2 or shape[-1] % (BLOCK // 2):
        raise FormatError(
            f"{codes.path}: tensor {codes.name} is {codes.dtype} of shape {shape}; NVFP4 is U8 with rows of whole "
            f"blocks of {BLOCK} columns, {BLOCK // 2} bytes each"
        )
    require_shape(made.scales, (*shape[:-1], 2 * shape[-1] // BLOCK), f"{codes.name} of {shape} bytes")
    if math.prod(made.whole.shape) not in (1, math.prod(shape[:-2])):
        raise FormatError(
            f"{made.whole.path}: tensor {made.whole.name} is {made.whole.shape}; {codes.name} of {shape} bytes needs "
            f"one number{f', or {math.prod(shape[:-2])}' if len(shape) > 2 else ''}"
        )
    return made
