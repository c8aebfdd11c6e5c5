"""NVFP4: codes of 4 bits (E2M1), 16 to a scale of 8 bits (E4M3), and one float32 number for the matrix.

    compressed-tensors      NAME.weight_packed U8[rows, n / 2], NAME.weight_scale F8_E4M3[rows, n / 16],
    (nvfp4-pack-quantized)  NAME.weight_global_scale F32[1], by which scales are divided
    ModelOpt                NAME.weight U8[..., rows, n / 2], NAME.weight_scale F8_E4M3[..., rows, n / 16],
                            NAME.weight_scale_2 F32, of one number (or one a matrix of a stack), which multiplies scales

Byte j of a row holds elements 2j (low bits) and 2j + 1. The scale of a block, divided or multiplied, is rounded to
float32, and so is its product with a code, as both programs do.

GGUF's NVFP4 has the same codes in another order, the same scales without their sign, and no number for the matrix:
llama.cpp stores that beside it, as NAME.scale.
"""

from __future__ import annotations

import math

import numpy as np

from quantkit.errors import DataError, FormatError
from quantkit.formats.safetensors.quantized.matrix import E2M1, ScaledTensor, finite, require_shape, required
from quantkit.formats.safetensors.quantized.packing import nibbles
from quantkit.formats.safetensors.reader import Checkpoint, CheckpointTensor

BLOCK = 16  # columns to a scale
GGUF_BLOCK, GGUF_BYTES = 64, 36  # of GGUF's type: 4 scales, then 32 bytes of codes
_NAN = 0x7F  # the largest scale is the code before; those after are negative


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

    def packed(self, start: int, stop: int) -> np.ndarray:
        """uint8[rows, 36 * blocks of 64 columns] as GGUF has them, without the matrix's number (`global_scales`).

        A block has four scales, then for each 8 bytes: byte j with elements j (low bits) and j + 8. The columns have to
        be a multiple of 64. DataError for a scale that is negative or NaN, which GGUF's type cannot say.
        """
        rows, blocks = stop - start, self.shape[-1] // GGUF_BLOCK
        scales = self.scales.raw().reshape(self.n_rows, -1)[start:stop]
        if (scales >= _NAN).any():
            row, block = (int(i) for i in np.argwhere(scales >= _NAN)[0])
            raise DataError(
                f"row {row}, block {block} has the scale 0x{scales[row, block]:02X}, negative or nan, which GGUF's "
                "type cannot say: convert to bf16"
            )
        codes = self.codes.raw().reshape(self.n_rows, -1)[start:stop]
        halves = np.stack([codes & 15, codes >> 4], axis=-1).reshape(rows, blocks, 4, 2, 8)
        out = np.empty((rows, blocks, GGUF_BYTES), np.uint8)
        out[..., :4] = scales.reshape(rows, blocks, 4)
        out[..., 4:] = (halves[..., 0, :] | halves[..., 1, :] << 4).reshape(rows, blocks, 32)
        return out.reshape(rows, -1)

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

    def factors(self) -> np.ndarray:
        """float32[matrices]: what the values of `packed` are multiplied by. FormatError as of `global_scales`."""
        found = self.global_scales()
        if not self.divides:
            return found
        with np.errstate(over="ignore"):
            inverse = np.float32(1) / found
        return np.asarray(finite(self.whole, inverse[None])[0])


def of_pairs(checkpoint: Checkpoint, module: str, codes: CheckpointTensor) -> NVFP4Tensor:
    """The matrix of NAME.weight_packed as compressed-tensors has it."""
    _require_blocks(codes)
    scales = required(checkpoint, codes, f"{module}.weight_scale", ("F8_E4M3",))
    whole = required(checkpoint, codes, f"{module}.weight_global_scale", ("F32",))
    _require_fit(codes, scales, whole)
    return NVFP4Tensor(f"{module}.weight", codes, scales, whole, divides=True)


def of_modelopt(checkpoint: Checkpoint, module: str, codes: CheckpointTensor) -> NVFP4Tensor:
    """The matrix of NAME.weight, U8, as ModelOpt has it."""
    _require_blocks(codes)
    scales = required(checkpoint, codes, f"{module}.weight_scale", ("F8_E4M3",))
    whole = required(checkpoint, codes, f"{module}.weight_scale_2", ("F32",))
    _require_fit(codes, scales, whole)
    return NVFP4Tensor(codes.name, codes, scales, whole, divides=False)


def _require_blocks(codes: CheckpointTensor) -> None:
    shape = codes.shape
    if codes.dtype != "U8" or len(shape) < 2 or shape[-1] % (BLOCK // 2):
        raise FormatError(
            f"{codes.path}: tensor {codes.name} is {codes.dtype} of shape {shape}; NVFP4 is U8 with rows of whole "
            f"blocks of {BLOCK} columns, {BLOCK // 2} bytes each"
        )


def _require_fit(codes: CheckpointTensor, scales: CheckpointTensor, whole: CheckpointTensor) -> None:
    shape, matrices = codes.shape, math.prod(codes.shape[:-2])
    require_shape(scales, (*shape[:-1], 2 * shape[-1] // BLOCK), f"{codes.name} of {shape} bytes")
    if math.prod(whole.shape) not in (1, matrices):
        raise FormatError(
            f"{whole.path}: tensor {whole.name} is {whole.shape}; {codes.name} of {shape} bytes needs one number"
            f"{f', or {matrices}' if len(shape) > 2 else ''}"
        )
