"""The numbers that the values of NVFP4 tensors are multiplied by, which llama.cpp stores in tensors of their own.

    NAME.weight       nvfp4 [rows, n], or of experts [matrices, rows, n]: codes with scales of blocks
    NAME.scale        f32 [matrices]: values of a matrix are multiplied by its number; without the tensor, by 1
    NAME.input_scale  f32 [matrices]: how llama.cpp's FP4 products scale activations; values do not depend on it

Some converters write NAME.weight.scale for NAME.scale. A file's Tensor multiplies where it decodes; `rows` and `data`
are the bytes of the file. Files whose .scale has another type or shape are refused.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from typing import Protocol

import numpy as np

from quantkit.errors import FormatError
from quantkit.types import QuantType

SCALED = "nvfp4"
ENCODED = 2.0**-7  # the number of tensors that are encoded with one
LARGEST = 2688.0  # magnitude of the type
_WEIGHT = ".weight"


class Scaled(Protocol):
    """What is asked of a tensor here."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows last but one, columns last."""

    @property
    def type(self) -> QuantType:
        """The type of its rows."""

    @property
    def scales(self) -> np.ndarray | None:
        """float32[matrices]: what the values of each matrix are multiplied by; None: 1."""


def scale_name(weight: str) -> str:
    """The name of the tensor with the numbers of a weight."""
    return f"{weight.removesuffix(_WEIGHT)}.scale"


def companions(weight: str) -> tuple[str, ...]:
    """Names of the tensors that only say how an NVFP4 weight is scaled."""
    stem = weight.removesuffix(_WEIGHT)
    return f"{stem}.scale", f"{stem}.input_scale", f"{weight}.scale", f"{weight}.input_scale"


def all_companions(tensors: Mapping[str, QuantType]) -> set[str]:
    """`companions` of all NVFP4 weights among the tensors with these types."""
    return {name for weight, kind in tensors.items() if kind.name == SCALED for name in companions(weight)}


def matrices(shape: Iterable[int]) -> int:
    """The number of matrices of a stack."""
    return math.prod(tuple(shape)[:-2])


def checked(values: np.ndarray, where: str) -> np.ndarray:
    """The numbers, float32[matrices]; FormatError, which begins with `where`, unless all are finite and above 0."""
    good = np.isfinite(values) & (values > 0)
    if good.all():
        return values
    at = int(np.argmin(good))
    raise FormatError(
        f"{where} has {values[at]} for matrix {at}; the values of an NVFP4 tensor are multiplied by it, so it has to "
        "be finite and above 0: get the file again"
    )


def _rows_of_matrix(tensor: Scaled) -> int:
    return tensor.shape[-2] if len(tensor.shape) > 1 else 1


def decode(tensor: Scaled, data: np.ndarray, start: int, threads: int | None = None) -> np.ndarray:
    """float32[rows, n]: the values of rows from `start` on, given their bytes."""
    x = tensor.type.dequantize(data, tensor.shape[-1], threads=threads)
    if tensor.scales is not None:
        with np.errstate(over="ignore"):  # values beyond float32 become Inf, which callers refuse
            x *= tensor.scales[np.arange(start, start + len(x)) // _rows_of_matrix(tensor), None]
    return x


def hash_of_piece(tensor: Scaled, data: np.ndarray, start: int) -> bytes:
    """SHA-256 of rows of one matrix, and of the number that they are multiplied by if there is one."""
    digest = hashlib.sha256(np.ascontiguousarray(data).data)
    if tensor.scales is not None:
        digest.update(np.ascontiguousarray(tensor.scales[start // _rows_of_matrix(tensor)], "<f4").tobytes())
    return digest.digest()
