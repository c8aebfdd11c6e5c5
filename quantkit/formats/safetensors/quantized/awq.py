"""AWQ: integers of 4 bits, as AutoAWQ writes them, in two layouts.

    gemm  NAME.qweight I32[n, rows / 8], NAME.qzeros I32[groups, rows / 8], NAME.scales F16[groups, rows]: 8 rows to a
          word, from the low bits up rows 0, 2, 4, 6, 1, 3, 5, 7
    gemv  NAME.qweight I32[rows, n / 8], NAME.qzeros I32[rows, words], NAME.scales F16[rows, 8 * words]: 8 columns, or
          zero points of 8 groups, to a word, in order. There may be more words than groups need.

    weight[r, c] = scales[g] * (code - zero[g]),   g = c // group_size

The layout is `version` in the settings (or `format`), gemm if they have none.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from quantkit.errors import FormatError, UnsupportedError
from quantkit.formats.safetensors.quantized.gptq import group_size
from quantkit.formats.safetensors.quantized.matrix import (
    FLOATS,
    ColumnTensor,
    ScaledTensor,
    by_group,
    finite,
    float_type_of,
    require_shape,
    required,
    words,
)
from quantkit.formats.safetensors.quantized.packing import in_stream
from quantkit.formats.safetensors.reader import Checkpoint, CheckpointTensor
from quantkit.inputs.json_input import Json
from quantkit.inputs.settings import integer

PARTS = (".qzeros",)
_CODES = ".qweight"
_BITS = 4
_EACH = 32 // _BITS  # codes of a word
_PLACES = np.array([0, 4, 1, 5, 2, 6, 3, 7])  # in a word of gemm, of rows 0 to 7
_GEMM, _GEMV = "gemm", "gemv"
_WORDS = ("I32", "U32")


class GemmTensor(ColumnTensor):
    """The gemm layout: 8 rows to a word."""

    def __init__(
        self, module: str, codes: CheckpointTensor, scales: CheckpointTensor, zeros: CheckpointTensor, size: int
    ):
        shape = (codes.shape[1] * _EACH, codes.shape[0])
        super().__init__(f"{module}.weight", f"INT{_BITS}", shape, codes, scales, zeros)
        self.zeros, self.size, self.float_type = zeros, size, float_type_of(scales)

    def _rows(self, start: int, stop: int) -> np.ndarray:
        x = self._fields(self.codes, start, stop)
        scales = finite(self.scales, self.scales.columns(start, stop).T, start)
        x -= by_group(self._fields(self.zeros, start, stop), self.size, self.shape[1])
        with np.errstate(over="ignore"):  # values beyond float32 become Inf, which callers refuse
            x *= by_group(scales, self.size, self.shape[1])
        return x

    def _fields(self, tensor: CheckpointTensor, start: int, stop: int) -> np.ndarray:
        """float32[stop - start, tensor.shape[0]]: the codes of some rows."""
        first = start // _EACH
        packed = np.ascontiguousarray(words(tensor)[:, first : -(-stop // _EACH)].T)
        lanes, count = packed.shape
        nibbles = in_stream(packed.view(np.uint8).reshape(lanes, -1), _BITS).reshape(lanes, count, _EACH)
        rows = nibbles.transpose(0, 2, 1)[:, _PLACES].reshape(lanes * _EACH, count)
        return rows[start - first * _EACH : stop - first * _EACH]


class GemvTensor(ScaledTensor):
    """The gemv layout: 8 columns to a word."""

    def __init__(
        self, module: str, codes: CheckpointTensor, scales: CheckpointTensor, zeros: CheckpointTensor, size: int
    ):
        shape = (codes.shape[0], codes.shape[1] * _EACH)
        super().__init__(f"{module}.weight", f"INT{_BITS}", shape, codes, scales, zeros)
        self.zeros, self.size, self.float_type = zeros, size, float_type_of(scales)

    def _rows(self, start: int, stop: int) -> np.ndarray:
        n = self.shape[1]
        groups = -(-n // self.size)
        x = in_stream(words(self.codes)[start:stop].view(np.uint8), _BITS)
        zeros = in_stream(words(self.zeros)[start:stop].view(np.uint8), _BITS)[:, :groups]
        scales = finite(self.scales, self.scales.rows(start, stop)[:, :groups], start)
        x -= by_group(zeros, self.size, n)
        with np.errstate(over="ignore"):
            x *= by_group(scales, self.size, n)
        return x


def check(settings: Json, where: Path) -> None:
    """UnsupportedError for a layout that is not read; FormatError for bits that AWQ does not have."""
    form = _layout(settings)
    if form not in (_GEMM, _GEMV):
        raise UnsupportedError(
            f"{where}: the checkpoint is quantized already (awq, {form}); of this method quantkit reads the layouts "
            f"{_GEMM} and {_GEMV}: save it as one of them with AutoAWQ"
        )
    if (bits := integer(settings, "bits", _BITS)) != _BITS:
        raise FormatError(
            f"{where}: quantization_config has bits {bits}; codes of AWQ have {_BITS}: correct it in config.json"
        )


def _layout(settings: Json) -> str:
    return str(settings.get("version") or settings.get("format") or _GEMM).lower()


def matrix(checkpoint: Checkpoint, codes: CheckpointTensor, settings: Json) -> ScaledTensor | None:
    """The matrix of NAME.qweight; None for a tensor of another name."""
    if not codes.name.endswith(_CODES):
        return None
    module = codes.name.removesuffix(_CODES)
    if len(codes.shape) != 2 or codes.dtype not in _WORDS:
        raise FormatError(
            f"{codes.path}: tensor {codes.name} is {codes.dtype} of shape {codes.shape}; codes of AWQ are a "
            "matrix of I32"
        )
    scales = required(checkpoint, codes, f"{module}.scales", FLOATS)
    zeros = required(checkpoint, codes, f"{module}.qzeros", _WORDS)
    return (_gemm if _layout(settings) == _GEMM else _gemv)(module, codes, scales, zeros, settings)


def _gemm(
    module: str, codes: CheckpointTensor, scales: CheckpointTensor, zeros: CheckpointTensor, settings: Json
) -> GemmTensor:
    n, packed = codes.shape
    size = group_size(settings, codes, scales, n)
    why = f"{module} of {packed * _EACH} x {n}, layout {_GEMM}, with groups of {size} columns"
    require_shape(scales, (-(-n // size), packed * _EACH), why)
    require_shape(zeros, (-(-n // size), packed), why)
    return GemmTensor(module, codes, scales, zeros, size)


def _gemv(
    module: str, codes: CheckpointTensor, scales: CheckpointTensor, zeros: CheckpointTensor, settings: Json
) -> GemvTensor:
    rows, n = codes.shape[0], codes.shape[1] * _EACH
    size = group_size(settings, codes, scales, n)
    groups = -(-n // size)
    if len(zeros.shape) != 2 or zeros.shape[0] != rows or zeros.shape[1] * _EACH < groups:
        raise FormatError(
            f"{zeros.path}: tensor {zeros.name} is {zeros.shape}; {module} of {rows} x {n}, layout {_GEMV}, with "
            f"groups of {size} columns needs {(rows, -(-groups // _EACH))}, or more words in a row"
        )
    require_shape(scales, (rows, zeros.shape[1] * _EACH), f"{zeros.name} of {zeros.shape} words")
    return GemvTensor(module, codes, scales, zeros, size)
