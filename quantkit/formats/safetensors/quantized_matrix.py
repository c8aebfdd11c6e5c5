"""Matrices that checkpoints store as codes and scales; rows are decoded when asked for (see `quantized_checkpoint`).

    FP8Tensor      codes of 8 bits, each times the scale of its block of rows and columns, or of the matrix
    MXFP4Tensor    codes of 4 bits, 32 to a scale that is a power of two
    IntegerTensor  integers of 1 to 8 bits, minus a zero point, times the scale of their group of columns
    TernaryTensor  BitNet's packed -1, 0 and 1, times one scale
    Ternarized     floats rounded to ternary values: s clip(round(w / s), -1, 1), s the mean of |w|

Values are float32 products, rounded once. For MXFP4, and for integers with 16-bit scales, they are exact.
"""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import cache

import numpy as np

from quantkit.errors import DataError
from quantkit.formats.mapping import release
from quantkit.formats.safetensors.reader import CheckpointTensor

Shape = tuple[int, ...]

_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_E2M1 = np.concatenate([_E2M1, -_E2M1])


class ScaledTensor(ABC):
    """A matrix, or a stack of them, that is stored as codes and scales. `dtype` is that of the codes.

    `inputs` are all tensors that its rows are read from.
    """

    def __init__(self, name: str, dtype: str, shape: Shape, codes: CheckpointTensor, scales: CheckpointTensor):
        self.name, self.dtype, self.shape = name, dtype, shape
        self.codes, self.scales = codes, scales
        self.inputs = [codes, scales]
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


class IntegerTensor(ScaledTensor):
    """Integers of `bits` bits, as compressed-tensors has them: (code - zero point) * scale of the column's group.

    codes         I8[rows, n], signed; or packed I32[rows, ceil(n / k)] of k = 32 // bits codes a word, low bits first,
                  unsigned with an offset of 2^(bits - 1)
    scales        [rows, groups], one a row, or one for the matrix
    zero_points   function that reads int8[rows, groups], called once; None: 0
    groups        int[n], the group of each column; None: groups are runs of `size` columns, the last may be shorter
    """

    def __init__(
        self,
        name: str,
        shape: Shape,
        codes: CheckpointTensor,
        scales: CheckpointTensor,
        bits: int,
        size: int,
        zero_points: Callable[[], np.ndarray] | None = None,
        groups: np.ndarray | None = None,
    ):
        super().__init__(name, f"INT{bits}", shape, codes, scales)
        self.bits, self.size, self.groups = bits, size, groups
        self._zero_points = cache(zero_points) if zero_points is not None else None

    def _rows(self, start: int, stop: int) -> np.ndarray:
        x = self._codes(start, stop)
        if self._zero_points is not None:
            whole = self._zero_points()
            x -= self._wide((whole if len(whole) == 1 else whole[start:stop]).astype(np.float32))
        with np.errstate(over="ignore"):  # values beyond float32 become Inf, which callers refuse
            x *= self._wide(self._scales(start, stop))
        return x

    def _scales(self, start: int, stop: int) -> np.ndarray:
        """float32[rows, groups], or [1, 1] for one scale."""
        if len(self.scales.shape) == 2 and self.scales.shape[0] > 1:
            return self.scales.rows(start, stop)
        whole = self.scales.dequantize().reshape(-1, 1 if len(self.scales.shape) < 2 else self.scales.shape[1])
        return whole if len(whole) == 1 else whole[start:stop]

    def _codes(self, start: int, stop: int) -> np.ndarray:
        """float32[stop - start, n]: the integers."""
        n = self.shape[-1]
        if self.codes.dtype == "I8":
            return self.codes.rows(start, stop)
        data = self.codes.raw().reshape(self.n_rows, -1)[start:stop]
        return unpack(data, self.bits)[:, :n]

    def _wide(self, x: np.ndarray) -> np.ndarray:
        """Expand [rows, groups] to one number for each column."""
        n = self.shape[-1]
        if self.groups is not None:
            return x[:, self.groups]
        return x if x.shape[1] == 1 else np.repeat(x, self.size, axis=1)[:, :n]


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
        x = (packed[row % len(packed)] >> shift & 3).astype(np.float32) - 1
        scale = self.scales.dequantize().reshape(-1)[0]
        return np.asarray(x / scale if self.divides else x * scale)

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


@cache
def _fields(bits: int) -> np.ndarray:
    """float32[256, 8 // bits]: the codes of a byte, low bits first, less their offset."""
    byte = np.arange(256)[:, None]
    codes = byte >> np.arange(0, 8, bits) & (1 << bits) - 1
    return (codes - (1 << bits - 1)).astype(np.float32)


def unpack(data: np.ndarray, bits: int) -> np.ndarray:
    """float32[rows, k * words] of the codes in uint8[rows, 4 * words], k = 32 // bits to a little-endian word.

    Codes have `bits` bits and an offset of 2^(bits - 1), which is subtracted.
    """
    if 8 % bits == 0:  # no code spans two bytes
        codes: np.ndarray = _fields(bits)[data]
        return codes.reshape(len(data), -1)
    words = np.ascontiguousarray(data).view("<u4")
    shifts = np.arange(32 // bits, dtype=np.uint32) * np.uint32(bits)
    unsigned = words[:, :, None] >> shifts & np.uint32((1 << bits) - 1)
    return np.asarray(unsigned.reshape(len(data), -1).astype(np.float32) - np.float32(1 << bits - 1))
