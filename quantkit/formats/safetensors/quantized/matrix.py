"""`ScaledTensor`: a matrix that a checkpoint stores as codes and scales; its rows are decoded when they are asked for.

Values are float32: products of a code and its scale, rounded once. The modules beside this one derive a class for each
format. This one also has what several of them need: the scales as finite numbers, groups of columns, and tensors of a
module by name.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection

import numpy as np

from quantkit.errors import DataError, FormatError
from quantkit.formats.mapping import release
from quantkit.formats.safetensors.reader import Checkpoint, CheckpointTensor

Shape = tuple[int, ...]

FLOATS = ("F32", "F16", "BF16")

_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
E2M1 = np.concatenate([_E2M1, -_E2M1])
"""float32[16]: the value of each code of 4 bits: sign, 2 bits of exponent (bias 1), 1 of mantissa."""


class ScaledTensor(ABC):
    """A matrix, or a stack of them, that is stored as codes and scales. `dtype` is that of the codes.

    inputs      all tensors that its rows are read from
    float_type  the 16-bit type in which the format's own programs compute the values: "bf16" or "f16"
    """

    float_type = "bf16"

    def __init__(
        self,
        name: str,
        dtype: str,
        shape: Shape,
        codes: CheckpointTensor,
        scales: CheckpointTensor,
        *others: CheckpointTensor | None,
    ):
        self.name, self.dtype, self.shape = name, dtype, shape
        self.codes, self.scales = codes, scales
        self.inputs = [codes, scales, *(tensor for tensor in others if tensor is not None)]
        self.path = codes.path
        self.nbytes = codes.nbytes + scales.nbytes

    def __repr__(self) -> str:
        return f"<tensor {self.name} {self.dtype} {self.shape}>"

    @property
    def n_rows(self) -> int:
        """Product of all but the last axis."""
        return math.prod(self.shape[:-1])

    def rows(self, start: int, stop: int) -> np.ndarray:
        """float32[stop - start, shape[-1]]: the values of some rows; all leading axes count as one."""
        if not 0 <= start <= stop <= self.n_rows:
            raise DataError(f"{self.path}: tensor {self.name} has rows 0 to {self.n_rows}, not {start} to {stop}")
        return self._rows(start, stop)

    @abstractmethod
    def _rows(self, start: int, stop: int) -> np.ndarray: ...

    def dequantize(self) -> np.ndarray:
        """float32[shape]: the values of the whole tensor."""
        return self.rows(0, self.n_rows).reshape(self.shape)

    def forget(self, start: int, stop: int) -> None:
        """Release the mapped pages of some rows and of their scales."""
        for part in (self.codes, self.scales):
            release(part.raw()[part.nbytes * start // self.n_rows : part.nbytes * stop // self.n_rows])


class ColumnTensor(ScaledTensor):
    """A matrix whose codes and scales are stored column by column, as layers of torch with x @ W have them.

    A row of it is spread over the whole tensor, in pieces of a word.
    """

    def forget(self, start: int, stop: int) -> None:
        """As `ScaledTensor.forget`, of the whole matrix, since its rows lie side by side."""
        for part in self.inputs:
            release(part.raw())


def float_type_of(scales: CheckpointTensor) -> str:
    """The type of values whose scales have this dtype: programs of torch compute in it."""
    return "f16" if scales.dtype == "F16" else "bf16"


def finite(scales: CheckpointTensor, values: np.ndarray, first: int = 0) -> np.ndarray:
    """`values`, float32[rows, groups] of a tensor of scales from row `first` on. FormatError for NaN and Inf."""
    if np.isfinite(values).all():
        return values
    row, group = (int(i) for i in np.argwhere(~np.isfinite(values))[0])
    raise FormatError(
        f"{scales.path}: tensor {scales.name} has the scale {values[row, group]} at row {first + row}, group {group}; "
        "a scale is a finite number: fetch the file again or quantize the model anew"
    )


def by_group(x: np.ndarray, size: int, n: int, of_column: np.ndarray | None = None) -> np.ndarray:
    """Expand float32[rows, groups] to one number for each of n columns.

    Groups are runs of `size` columns, of which the last may be shorter, or `of_column`, int[n], names each column's.
    """
    if of_column is not None:
        return x[:, of_column]
    return x if x.shape[1] == 1 else np.repeat(x, size, axis=1)[:, :n]


def required(checkpoint: Checkpoint, codes: CheckpointTensor, name: str, dtypes: Collection[str]) -> CheckpointTensor:
    """The tensor `name`, which decoding `codes` needs. FormatError if it is missing or of another dtype."""
    found = checkpoint.tensors.get(name)
    if found is None:
        raise FormatError(
            f"{codes.path}: tensor {codes.name} has no {name}, without which it cannot be decoded; a shard is missing, "
            "or config.json names another quantization"
        )
    if found.dtype not in dtypes:
        raise FormatError(
            f"{found.path}: tensor {name} is {found.dtype}; with {codes.name}, {codes.dtype}, it has to be "
            f"{' or '.join(dtypes)}"
        )
    return found


def require_shape(tensor: CheckpointTensor, shape: Shape, why: str) -> None:
    """FormatError, with the reason `why`, unless a tensor has this shape."""
    if tensor.shape != shape:
        raise FormatError(f"{tensor.path}: tensor {tensor.name} is {tensor.shape}; {why} needs {shape}")


def require_group_sizes(order: CheckpointTensor, groups: np.ndarray, size: int) -> None:
    """FormatError unless each group, int[n] names that of each column, has `size` columns, the last one the rest."""
    n = len(groups)
    expected = np.bincount(np.arange(n) // size)
    found = np.bincount(groups, minlength=len(expected))
    if (found != expected).any():
        group = int(np.argmax(found != expected))
        raise FormatError(
            f"{order.path}: tensor {order.name} puts {found[group]} of {n} columns into group {group}, which has "
            f"{expected[group]}: fetch the file again, or remove the tensor if groups are runs of columns"
        )


def words(tensor: CheckpointTensor) -> np.ndarray:
    """uint32[shape]: a view of a tensor of words."""
    return tensor.raw().view("<u4").reshape(tensor.shape)
