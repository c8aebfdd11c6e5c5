"""Check the scales of quantized tensors for NaN, Inf, and values that no encoder writes.

A flipped bit in a code changes one weight a little; one in a scale makes 32 or 256 weights, or a row, huge or NaN.
Scales are a fiftieth of a file's bytes, so all of them are checked once, before a tensor is first used. A scale is
refused if it is more than 2^12 times the median magnitude of the tensor's scales, and at least 16.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from quantkit.codegen import jit, thread_pool
from quantkit.codegen.jit import kernel
from quantkit.errors import DataError
from quantkit.formats.gguf import Tensor

_STRIP_BYTES = 1 << 22
_ABOVE_MEDIAN = 12  # powers of two
_MIN_EXPONENT = 4  # 2^4
_BIAS = 127
_SAMPLE = 4096  # scales of a strip that the median is taken of

# Where a block holds its f16 scales, of types that have them elsewhere than in its first two bytes, or several.
_OFFSETS = {"q4_1": (0, 2), "q5_1": (0, 2), "q2_K": (80, 82), "q3_K": (108,), "q4_K": (0, 2), "q5_K": (0, 2),
            "q6_K": (208,), "tq1_0": (52,), "tq2_0": (64,)}  # fmt: skip
_AT_BYTE_0 = {
    "q4_0",
    "q5_0",
    "q6_0",
    "q8_0",
    "iq4_nl",
    "iq1_s",
    "iq2_xxs",
    "iq2_xs",
    "iq2_s",
    "iq3_xxs",
    "iq3_s",
    "iq4_xs",
    "iq2_k",
    "iq3_k",
    "iq4_k",
    "iq5_k",
    "iq6_k",
    "q1_0_g128",
    "q2_0",
}
_SCALES_FIRST = {"q4_0_4x4", "q4_0_4x8", "q4_0_8x8", "q8_k_r8", "q8_k_r16"}  # those of all rows, then the codes


def layer_of(name: str) -> int | None:
    """The layer of a tensor by its name; None for tensors outside the layers."""
    head, _, after_prefix = name.partition(".")
    number = after_prefix.partition(".")[0]
    return int(number) if head == "blk" and number.isdecimal() else None


class ScaleChecks:
    """Checks the scales of each tensor once, before its layer first runs."""

    def __init__(self, tensors: Mapping[str, Tensor], threads: int):
        self._threads = threads
        self._unchecked: dict[int | None, list[Tensor]] = {}
        for name, tensor in tensors.items():
            self._unchecked.setdefault(layer_of(name), []).append(tensor)

    def require(self, layer: int | None) -> None:
        """DataError for a bad scale in the tensors of a layer; None: in those that are not in a layer."""
        for tensor in self._unchecked.get(layer, ()):
            require_sound(tensor, self._threads)
        self._unchecked.pop(layer, None)

    def require_all(self) -> None:
        """`require` for every layer: before a model first runs as one list of operations."""
        for layer in list(self._unchecked):
            self.require(layer)


def require_sound(tensor: Tensor, threads: int | None = None) -> None:
    """DataError that names the first bad scale of a tensor: row, block, place in the file.

    Types whose values are stored one by one, and those whose scales are not known here, pass.
    """
    counts = _count_exponents(tensor, threads)
    largest = int(counts.nonzero()[0].max(initial=0))
    numbers = np.cumsum(counts[1:255])  # without zeros, and what is not a number
    median = 1 + int(np.searchsorted(numbers, (numbers[-1] + 1) // 2)) if numbers[-1] else 0
    limit = min(255, max(median + _ABOVE_MEDIAN, _BIAS + _MIN_EXPONENT))
    if largest >= limit:
        _raise_for(tensor, limit)


def _count_exponents(tensor: Tensor, threads: int | None) -> np.ndarray:
    """int64[256]: number of scales by biased exponent, from all scales or a sample that includes the largest."""
    counts = np.zeros(256, np.int64)
    if tensor.type.interleave == 1 and (offsets := _offsets(tensor.type.name)) and not tensor.type.row_meta_bytes:
        lock = threading.Lock()

        def task(a: int, b: int) -> None:
            rows = jit.readonly(np.ascontiguousarray(tensor.rows(a, b)))
            for offset in offsets:
                local_counts = np.zeros(32, np.int64)
                _count_halves(rows, tensor.type.block_bytes, offset, local_counts)
                with lock:
                    counts[0] += local_counts[0]
                    counts[_BIAS - 14 : _BIAS + 16] += local_counts[1:31]
                    counts[255] += local_counts[31]

        thread_pool.over_rows(task, tensor.n_rows, threads=threads)
        return counts
    for strip in _strips(tensor):
        flat = strip.reshape(-1)
        counts[_exponents(_largest(flat))[0]] += 1
        counts += np.bincount(_exponents(flat[:: 1 + flat.size // _SAMPLE]), minlength=256)
    return counts


@kernel
def _count_halves(data: np.ndarray, block: int, offset: int, counts: np.ndarray) -> None:
    """Count the f16 at the byte `at` of each block of uint8[rows, bytes] by exponent, into found[32]; 0: of zeros."""
    for r in range(data.shape[0]):
        for start in range(offset, data.shape[1], block):
            high = data[r, start + 1] & 0x7F
            counts[max(high >> 2, int((high | data[r, start]) != 0))] += 1


def _largest(flat: np.ndarray) -> np.ndarray:
    """[1]: the largest magnitude, NaN above all; by bits, which are in the order of magnitudes."""
    if flat.dtype == np.uint8:
        return np.asarray(flat.max(keepdims=True))
    half = flat.dtype == np.float16
    bits: np.ndarray = flat.view(np.uint16 if half else np.uint32)
    magnitudes = np.bitwise_and(bits, bits.dtype.type(0x7FFF if half else 0x7FFFFFFF))
    return np.asarray(magnitudes.max(keepdims=True)).view(flat.dtype)


def _exponents(strip: np.ndarray) -> np.ndarray:
    """Biased exponents, as of a float32; 255 for NaN and Inf. float16 or float32 of any shape, or uint8: themselves."""
    if strip.dtype == np.uint8:
        return strip.astype(np.int64)
    if strip.dtype == np.float32:
        return (strip.view(np.uint32).astype(np.int64) >> 23) & 255
    bits = strip.view(np.uint16).astype(np.int64)
    exponents = (bits >> 10) & 31
    zero = (bits & 0x7FFF) == 0
    return np.where(exponents == 31, 255, np.where(zero, 0, np.maximum(exponents, 1) - 15 + _BIAS))


def _strips(tensor: Tensor) -> Iterator[np.ndarray]:
    """The scales of some rows at a time, [rows, blocks, scales of a block]; of row headers one block."""
    fields = _fields(tensor)
    if fields is None:
        return
    step = max(1, _STRIP_BYTES // tensor.row_bytes // 16) * 16  # 16: the largest group of interleaved rows
    for start in range(0, tensor.n_rows, step):
        yield fields(tensor.rows(start, min(tensor.n_rows, start + step)))


def _fields(tensor: Tensor) -> Callable[[np.ndarray], np.ndarray] | None:
    """A function that extracts the scales from uint8[rows, row_bytes]; None where they are not known."""
    kind = tensor.type
    rows, meta = kind.interleave, kind.row_meta_bytes
    if meta:
        width = 2 if meta == 2 else 4
        dtype = np.float16 if width == 2 else np.float32
        return lambda data: _read_field(
            data.reshape(len(data) // rows, -1)[:, : rows * meta].reshape(-1, 1, meta), 0, dtype
        )
    if kind.name in _SCALES_FIRST:
        width = rows * kind.block_bytes
        return lambda data: _read_field(data.reshape(len(data) // rows, -1, width), 0, np.float16, rows)
    base = kind.base_type if kind.interleave > 1 else kind  # type: ignore[attr-defined]
    block_scales = _block_scales(base.name)
    if block_scales is None:
        return None
    size = base.block_bytes

    def take(data: np.ndarray) -> np.ndarray:
        if kind.interleave > 1:
            data = kind.deinterleave_rows(data)  # type: ignore[attr-defined]
        return block_scales(data.reshape(len(data), -1, size))

    return take


def _block_scales(name: str) -> Callable[[np.ndarray], np.ndarray] | None:
    """A function that extracts the scales from blocks uint8[rows, blocks, bytes] of a type that is not interleaved."""
    if name == "mxfp4":  # 2^(e - 128)
        return lambda blocks: blocks[:, :, :1]
    if name == "iq1_m":  # the top four bits of four words
        return _of_iq1_m
    offsets = _offsets(name)
    if not offsets:
        return None
    return lambda blocks: np.concatenate([_read_field(blocks, offset, np.float16) for offset in offsets], axis=2)


def _offsets(name: str) -> tuple[int, ...]:
    """Bytes of a block at which its f16 scales stand; none for types that are not in the tables above."""
    return _OFFSETS.get(name, (0,) if name in _AT_BYTE_0 else ())


def _read_field(blocks: np.ndarray, offset: int, dtype: type, count: int = 1) -> np.ndarray:
    width = np.dtype(dtype).itemsize
    return np.ascontiguousarray(blocks[:, :, offset : offset + count * width]).view(dtype)


def _of_iq1_m(blocks: np.ndarray) -> np.ndarray:
    words = _read_field(blocks, 48, np.uint16, 4) >> 12
    bits = words[..., 0] | (words[..., 1] << 4) | (words[..., 2] << 8) | (words[..., 3] << 12)
    return np.ascontiguousarray(bits[..., None]).view(np.float16)


def describe_nonfinite(tensor: Tensor | None) -> str:
    """The end of an error message about a product that is not finite: whether its weight is finite, and where not."""
    if tensor is None or not tensor.type.has_codec:
        return ""
    rows = tensor.dequantize().reshape(-1, tensor.shape[-1])
    bad_rows = np.flatnonzero(~np.isfinite(rows).all(1))
    if not len(bad_rows):
        return "; the tensor is finite, so the product is beyond float32"
    block = int(np.argmin(np.isfinite(rows[bad_rows[0]]))) // tensor.type.block_size
    return f"; the tensor itself is not finite in {len(bad_rows)} row(s), first {bad_rows[0]}, there from block {block}"


def _raise_for(tensor: Tensor, limit: int) -> None:
    """Raise DataError for the first scale whose biased exponent is `limit` or more."""
    rows_before = 0
    for strip in _strips(tensor):
        places = np.argwhere(_exponents(strip) >= limit)
        if len(places):
            break
        rows_before += len(strip)
    row, block, number = (int(i) for i in places[0])
    value = strip[row, block, number]
    shown = f"2^{int(value) - 128}" if strip.dtype == np.uint8 else f"{float(value):g}"
    kind = tensor.type
    if kind.name in _SCALES_FIRST:
        row, number = row * kind.interleave + number, 0
    row += rows_before
    location = f"row {row}, " + ("its header" if kind.row_meta_bytes else f"block {block}")
    if kind.interleave == 1:
        offset = tensor.offset + row * tensor.row_bytes + (0 if kind.row_meta_bytes else block * kind.block_bytes)
        location += f", offset {offset}"
    raise DataError(
        f"{tensor.path}: {tensor.name}: {location}: a scale of {kind.name} is {shown}; the file is damaged there: make "
        "or fetch it again (--tripwire off runs it all the same)"
    )
