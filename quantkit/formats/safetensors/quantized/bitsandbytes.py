"""bitsandbytes: NF4, 16 values that are quantiles of a normal distribution, in blocks of 64 with a largest magnitude.

    NAME.weight                                 U8[rows * n / 2, 1]: two codes to a byte, the first in the high bits
    NAME.weight.absmax                          F32[blocks], or with double quantization U8[blocks]
    NAME.weight.quant_map                       F32[16]: the value of each code
    NAME.weight.nested_absmax, .nested_quant_map   F32[blocks / 256], F32[256], with double quantization
    NAME.weight.quant_state.bitsandbytes__nf4   U8: JSON with shape, blocksize, dtype, nested_blocksize, nested_offset

    absmax = nested_quant_map[code] * nested_absmax + nested_offset      weight = quant_map[code] * absmax

A matrix is a sequence of values without regard to rows, so a block may span two of them.
"""

from __future__ import annotations

import math
from functools import cached_property
from pathlib import Path

import numpy as np

from quantkit.errors import FormatError, UnsupportedError
from quantkit.formats.safetensors.quantized.matrix import ScaledTensor, finite, require_shape, required
from quantkit.formats.safetensors.quantized.packing import nibbles
from quantkit.formats.safetensors.reader import Checkpoint, CheckpointTensor
from quantkit.inputs import json_input
from quantkit.inputs.json_input import Json
from quantkit.inputs.settings import integer, real, sequence

PARTS = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map")
_STATE = ".quant_state.bitsandbytes__"
_NF4 = "nf4"


class NF4Tensor(ScaledTensor):
    """Codes of 4 bits that name one of 16 values, times the largest magnitude of their block.

    values  F32[16]
    block   values of a block; an even number
    nested  None, or how the magnitudes are stored: (F32 one a block of magnitudes, F32[256] values, size, offset)
    """

    def __init__(
        self,
        codes: CheckpointTensor,
        magnitudes: CheckpointTensor,
        values: CheckpointTensor,
        shape: tuple[int, int],
        block: int,
        nested: tuple[CheckpointTensor, CheckpointTensor, int, float] | None,
        float_type: str,
    ):
        super().__init__(codes.name, "NF4", shape, codes, magnitudes, values, *(nested or ())[:2])
        self.values, self.block, self.nested, self.float_type = values, block, nested, float_type

    def _rows(self, start: int, stop: int) -> np.ndarray:
        n, total = self.shape[1], math.prod(self.shape)
        first, last = start * n // self.block, -(-stop * n // self.block)
        begin, end = first * self.block, min(last * self.block, total)
        data = self.codes.raw()[begin // 2 : -(-end // 2)]
        x = nibbles(data.reshape(1, -1), self._table, high_first=True)[0, : end - begin]
        with np.errstate(over="ignore"):
            x *= np.repeat(self._magnitudes(first, last), self.block)[: end - begin]
        return np.asarray(x[start * n - begin : stop * n - begin].reshape(stop - start, n))

    @cached_property
    def _table(self) -> np.ndarray:
        return np.asarray(finite(self.values, self.values.dequantize().reshape(1, -1))[0])

    def _magnitudes(self, first: int, last: int) -> np.ndarray:
        """float32[last - first]: the largest magnitude of each block."""
        if self.nested is None:
            found = self.scales.raw().view("<f4")[first:last].astype(np.float32)
        else:
            largest, values, size, offset = self.nested
            codes = self.scales.raw()[first:last]
            of_block = np.arange(first, last) // size
            found = values.dequantize()[codes] * largest.dequantize()[of_block] + np.float32(offset)
        return np.asarray(finite(self.scales, found[None])[0])


def check(settings: Json, where: Path) -> None:
    """UnsupportedError for what is not NF4."""
    kind = settings.get("bnb_4bit_quant_type", "fp4")
    if settings.get("load_in_8bit") or kind != _NF4:
        raise UnsupportedError(
            f"{where}: the checkpoint is quantized already (bitsandbytes, "
            f"{'8 bits' if settings.get('load_in_8bit') else kind}); of this method quantkit reads {_NF4}"
        )


def matrix(checkpoint: Checkpoint, codes: CheckpointTensor, settings: Json) -> NF4Tensor | None:
    """The matrix of a tensor that has a quant_state; None for other tensors."""
    stored = next((t for kind in (_NF4, "fp4") if (t := checkpoint.tensors.get(codes.name + _STATE + kind))), None)
    if stored is None:
        return None
    if not stored.name.endswith(_NF4):
        raise UnsupportedError(f"{stored.path}: tensor {codes.name} is fp4 of bitsandbytes; quantkit reads {_NF4}")
    state = json_input.parse(stored.raw().tobytes(), f"{stored.path}: tensor {stored.name}")
    shape, block = _shape(state, codes, stored), _size(state, "blocksize", stored)
    doubled = "nested_blocksize" in state
    magnitudes = required(checkpoint, codes, f"{codes.name}.absmax", ("U8",) if doubled else ("F32",))
    values = required(checkpoint, codes, f"{codes.name}.quant_map", ("F32",))
    require_shape(values, (16,), f"{codes.name}, which is {_NF4},")
    block = min(block, math.prod(shape) + 1 & ~1)  # larger ones mean the same
    blocks = -(-math.prod(shape) // block)
    require_shape(magnitudes, (blocks,), f"{codes.name} of {shape} in blocks of {block}")
    nested = None
    if doubled:
        size = _size(state, "nested_blocksize", stored)
        largest = required(checkpoint, codes, f"{codes.name}.nested_absmax", ("F32",))
        steps = required(checkpoint, codes, f"{codes.name}.nested_quant_map", ("F32",))
        require_shape(largest, (-(-blocks // size),), f"{magnitudes.name} of {blocks} in blocks of {size}")
        size = min(size, blocks)
        require_shape(steps, (256,), f"{magnitudes.name} of 8 bits")
        nested = (largest, steps, size, real(state, "nested_offset"))
    return NF4Tensor(
        codes, magnitudes, values, shape, block, nested, "f16" if state.get("dtype") == "float16" else "bf16"
    )


def state_of(name: str) -> bool:
    """Whether a tensor is the quant_state of another, which is read when the checkpoint is opened."""
    return _STATE in name


def _shape(state: Json, codes: CheckpointTensor, stored: CheckpointTensor) -> tuple[int, int]:
    shape = sequence(state, "shape") if isinstance(state, dict) else ()
    if len(shape) != 2 or not all(type(size) is int and size > 0 for size in shape):
        raise FormatError(f"{stored.path}: tensor {stored.name} has the shape {list(shape)}; a matrix has two sizes")
    rows, n = shape
    assert isinstance(rows, int)
    assert isinstance(n, int)
    if -(-rows * n // 2) != codes.nbytes:
        raise FormatError(
            f"{codes.path}: tensor {codes.name} has {codes.nbytes} bytes; {stored.name} says {(rows, n)}, which are "
            f"{-(-rows * n // 2)}: the file is incomplete or not of this model"
        )
    return rows, n


def _size(state: Json, key: str, stored: CheckpointTensor) -> int:
    size = integer(state, key)
    if size < 2 or size % 2:
        raise FormatError(f"{stored.path}: tensor {stored.name} has {key} {size}; a block has an even number of values")
    return size
