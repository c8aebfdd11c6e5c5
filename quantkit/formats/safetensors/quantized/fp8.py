"""FP8: codes of 8 bits, each times the scale of its block of rows and columns.

    NAME.weight    F8_E4M3 or F8_E5M2 [..., rows, n]
    its scales     NAME.weight_scale_inv, NAME.weight_scale or NAME.scale (DeepSeek-V4), of floats or F8_E8M0: one
                   number, one a row, or one for each block of rows and columns

Blocks are 128 x 128 unless config.json gives a size. The last block of an axis may be incomplete. The same layout under
several methods: fp8 (DeepSeek, Qwen), compressed-tensors, modelopt.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from quantkit.errors import FormatError
from quantkit.formats.safetensors.quantized.matrix import FLOATS, ScaledTensor
from quantkit.formats.safetensors.reader import Checkpoint, CheckpointTensor
from quantkit.inputs.json_input import Json
from quantkit.inputs.settings import mapping

DTYPES = ("F8_E4M3", "F8_E5M2")
SCALES = (".weight_scale_inv", ".weight_scale", ".scale")
_BLOCK = (128, 128)
_OF_SCALES = (*FLOATS, "F8_E8M0")


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
            with np.errstate(over="ignore"):  # values beyond float32 become Inf, which callers refuse
                x[first - start : last - start] *= np.repeat(line, wide)[:n]
            first = last
        return x

    def encodes(self, kind: str) -> bool:
        """Whether `encoded` can give rows of type `kind`: the number of columns must suit the vectorized loop."""
        from quantkit.types.native import recode

        return kind in recode.TARGETS and self.shape[-1] % recode.LANES == 0 == self.block[1] % recode.LANES

    def encoded(self, kind: str, start: int, stop: int) -> tuple[np.ndarray, bool]:
        """(uint8[stop - start, bytes], fits): rows as f32, f16 or bf16, each product rounded, ties to even.

        `fits` is False if a value is not finite in that type; then the bytes must not be used.
        """
        from quantkit.types.native import recode

        out = np.empty((stop - start, self.shape[-1] * recode.ITEM_BYTES[kind]), np.uint8)
        source, fits = self.dtype.lower(), True
        for first, codes, scales, below in self._matrices(start, stop):
            part = out[first - start : first - start + len(codes)]
            fits &= recode.rescale(source, kind, codes, scales, self.block, below, part)
        return out, fits

    def send(self, kind: str, start: int, stop: int, descriptor: int, offset: int) -> bool:
        """Write the rows of `encoded` to an open file. False if a value did not fit, or if not all were written."""
        from quantkit.types.native import recode

        source, width = self.dtype.lower(), self.shape[-1] * recode.ITEM_BYTES[kind]
        for first, codes, scales, below in self._matrices(start, stop):
            place = descriptor, offset + (first - start) * width
            if not recode.write_rescaled(source, kind, codes, scales, self.block, below, *place):
                return False
        return True

    def _matrices(self, start: int, stop: int) -> Iterator[tuple[int, np.ndarray, np.ndarray, int]]:
        """Split rows by matrix; for each: its first row, its codes, its scales from the line of that row on, and how
        many rows that row is below the first row of the line."""
        (rows, n), (high, wide) = self.shape[-2:], self.block
        codes = self.codes.raw().reshape(self.n_rows, n)
        grid = self.scales.dequantize().reshape(-1, -(-n // wide))
        first = start
        while first < stop:
            matrix, row = divmod(first, rows)
            last = min(first + rows - row, stop)
            yield first, codes[first:last], grid[matrix * -(-rows // high) + row // high :], row % high
            first = last


def matrix(checkpoint: Checkpoint, codes: CheckpointTensor, settings: Json) -> FP8Tensor | None:
    """The matrix of a tensor of FP8 codes; None for a tensor of another dtype."""
    if codes.dtype not in DTYPES or codes.name.endswith(SCALES):
        return None
    block = _block_size(settings)
    names = [codes.name.removesuffix(".weight") + suffix for suffix in SCALES]
    scales = next((checkpoint.tensors[name] for name in names if name in checkpoint.tensors), None)
    if scales is None:
        raise FormatError(f"{codes.path}: tensor {codes.name} is {codes.dtype} and has no scales, {' or '.join(names)}")
    if len(codes.shape) < 2 or 0 in codes.shape:
        raise FormatError(f"{codes.path}: tensor {codes.name} is {codes.dtype} of shape {codes.shape}, not a matrix")
    if scales.dtype not in _OF_SCALES:
        raise FormatError(
            f"{scales.path}: tensor {scales.name} is {scales.dtype}; scales of FP8 are read as {', '.join(_OF_SCALES)}"
        )
    *lead, rows, n = codes.shape
    stack = math.prod(lead)
    block = min(block[0], rows), min(block[1], n)  # larger ones mean the same
    grid = (*lead, -(-rows // block[0]), -(-n // block[1]))
    if scales.shape == grid:
        return FP8Tensor(codes, scales, block)
    if math.prod(scales.shape) == stack:  # one a matrix
        return FP8Tensor(codes, scales, (rows, n))
    if scales.shape in ((*lead, rows), (*lead, rows, 1), (stack * rows,), (stack * rows, 1)):  # one a row
        return FP8Tensor(codes, scales, (1, n))
    raise FormatError(
        f"{scales.path}: tensor {scales.name} is {scales.shape}; {codes.name} is {codes.shape}, whose blocks of "
        f"{block[0]} x {block[1]} need {grid}"
    )


def _block_size(settings: Json) -> tuple[int, int]:
    """Rows and columns that share a scale; `_BLOCK` if config.json gives no size."""
    groups = mapping(settings, "config_groups")
    structures = [mapping(mapping(groups, name), "weights").get("block_structure") for name in groups]
    size: Any = settings.get("weight_block_size") or next(filter(None, structures), None) or _BLOCK
    if not isinstance(size, Sequence) or len(size) != 2 or not all(isinstance(n, int) and n > 0 for n in size):
        raise FormatError(f"config.json: weight_block_size is {size!r}; it has to be two numbers, such as [128, 128]")
    return size[0], size[1]
