"""The scale fields of a file: NaN, Inf, and values that no encoder writes.

A flipped bit in a quant moves one weight a little; one in a scale makes 32 or 256 weights, or a row, huge or not
numbers at all. Scales are a fiftieth of a file's bytes, so they are all looked at once, before a tensor is first used.
What a scale should be is taken from the others of the tensor: one of more than 2^12 times the median magnitude, and of
16 at the least, is no weight's of any model.
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
_LEAST = 4  # 2^4
_BIAS = 127
_SAMPLE = 4096  # scales of a strip that the median is taken of

# Where a block holds its f16 scales, of types that have them elsewhere than in its first two bytes, or several.
_OFFSETS = {"q4_1": (0, 2), "q5_1": (0, 2), "q2_K": (80, 82), "q3_K": (108,), "q4_K": (0, 2), "q5_K": (0, 2),
            "q6_K": (208,)}  # fmt: skip
_FIRST = {"q4_0", "q5_0", "q6_0", "q8_0", "iq4_nl", "iq1_s", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "iq4_xs",
          "iq2_k", "iq3_k", "iq4_k", "iq5_k", "iq6_k", "q1_0_g128"}  # fmt: skip
_LEADING = {"q4_0_4x4", "q4_0_4x8", "q4_0_8x8", "q8_k_r8", "q8_k_r16"}  # those of all rows, then the codes


def layer_of(name: str) -> int | None:
    """The layer that a tensor is of, None for those around the layers."""
    head, _, rest = name.partition(".")
    number = rest.partition(".")[0]
    return int(number) if head == "blk" and number.isdigit() else None


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
    seen = _counted(tensor, threads)
    top = int(seen.nonzero()[0].max(initial=0))
    numbers = np.cumsum(seen[1:255])  # without zeros, and what is not a number
    median = 1 + int(np.searchsorted(numbers, (numbers[-1] + 1) // 2)) if numbers[-1] else 0
    limit = min(255, max(median + _ABOVE_MEDIAN, _BIAS + _LEAST))
    if top >= limit:
        _name(tensor, limit)


def _counted(tensor: Tensor, threads: int | None) -> np.ndarray:
    """int64[256]: scales by their exponent, all of the largest one, of others at least a sample."""
    seen = np.zeros(256, np.int64)
    if tensor.type.interleave == 1 and (offsets := _offsets(tensor.type.name)) and not tensor.type.row_meta_bytes:
        lock = threading.Lock()

        def task(a: int, b: int) -> None:
            rows = jit.readonly(np.ascontiguousarray(tensor.rows(a, b)))
            for at in offsets:
                found = np.zeros(32, np.int64)
                _count_halves(rows, tensor.type.block_bytes, at, found)
                with lock:
                    seen[0] += found[0]
                    seen[_BIAS - 14 : _BIAS + 16] += found[1:31]
                    seen[255] += found[31]

        thread_pool.over_rows(task, tensor.n_rows, threads=threads)
        return seen
    for strip in _strips(tensor):
        flat = strip.reshape(-1)
        seen[_exponents(_largest(flat))[0]] += 1
        seen += np.bincount(_exponents(flat[:: 1 + flat.size // _SAMPLE]), minlength=256)
    return seen


@kernel
def _count_halves(data: np.ndarray, block: int, at: int, found: np.ndarray) -> None:
    """Count the f16 at the byte `at` of each block of uint8[rows, bytes] by exponent, into found[32]; 0: of zeros."""
    for r in range(data.shape[0]):
        for start in range(at, data.shape[1], block):
            high = data[r, start + 1] & 0x7F
            found[max(high >> 2, int((high | data[r, start]) != 0))] += 1


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
    """What takes the scales out of uint8[rows, row_bytes], or None."""
    kind = tensor.type
    rows, meta = kind.interleave, kind.row_meta_bytes
    if meta:
        width = 2 if meta == 2 else 4
        form = np.float16 if width == 2 else np.float32
        return lambda data: _cut(data.reshape(len(data) // rows, -1)[:, : rows * meta].reshape(-1, 1, meta), 0, form)
    if kind.name in _LEADING:
        width = rows * kind.block_bytes
        return lambda data: _cut(data.reshape(len(data) // rows, -1, width), 0, np.float16, rows)
    base = kind.base_type if kind.interleave > 1 else kind  # type: ignore[attr-defined]
    parted = _parted(base.name)
    if parted is None:
        return None
    size = base.block_bytes

    def take(data: np.ndarray) -> np.ndarray:
        if kind.interleave > 1:
            data = kind.deinterleave_rows(data)  # type: ignore[attr-defined]
        return parted(data.reshape(len(data), -1, size))

    return take


def _parted(name: str) -> Callable[[np.ndarray], np.ndarray] | None:
    """What takes the scales out of blocks uint8[rows, blocks, bytes] of a type that is not interleaved."""
    if name == "mxfp4":  # 2^(e - 128)
        return lambda blocks: blocks[:, :, :1]
    if name == "iq1_m":  # the top four bits of four words
        return _of_iq1_m
    offsets = _offsets(name)
    if not offsets:
        return None
    return lambda blocks: np.concatenate([_cut(blocks, at, np.float16) for at in offsets], axis=2)


def _offsets(name: str) -> tuple[int, ...]:
    """Bytes of a block at which its f16 scales stand; none for types that are not in the tables above."""
    return _OFFSETS.get(name, (0,) if name in _FIRST else ())


def _cut(blocks: np.ndarray, at: int, form: type, count: int = 1) -> np.ndarray:
    width = np.dtype(form).itemsize
    return np.ascontiguousarray(blocks[:, :, at : at + count * width]).view(form)


def _of_iq1_m(blocks: np.ndarray) -> np.ndarray:
    words = _cut(blocks, 48, np.uint16, 4) >> 12
    found = words[..., 0] | (words[..., 1] << 4) | (words[..., 2] << 8) | (words[..., 3] << 12)
    return np.ascontiguousarray(found[..., None]).view(np.float16)


def describe_nonfinite(tensor: Tensor | None) -> str:
    """What to say of a weight whose product is not finite."""
    if tensor is None or not tensor.type.has_codec:
        return ""
    rows = tensor.dequantize().reshape(-1, tensor.shape[-1])
    bad = np.flatnonzero(~np.isfinite(rows).all(1))
    if not len(bad):
        return "; the tensor is finite, so the product is beyond float32"
    block = int(np.argmin(np.isfinite(rows[bad[0]]))) // tensor.type.block_size
    return f"; the tensor itself is not finite in {len(bad)} row(s), first {bad[0]}, there from block {block}"


def _name(tensor: Tensor, limit: int) -> None:
    """Raise for the first scale of at least this exponent."""
    done = 0
    for strip in _strips(tensor):
        bad = np.argwhere(_exponents(strip) >= limit)
        if len(bad):
            break
        done += len(strip)
    row, block, which = (int(i) for i in bad[0])
    value = strip[row, block, which]
    shown = f"2^{int(value) - 128}" if strip.dtype == np.uint8 else f"{float(value):g}"
    kind = tensor.type
    if kind.name in _LEADING:
        row, which = row * kind.interleave + which, 0
    row += done
    where = f"row {row}, " + ("its header" if kind.row_meta_bytes else f"block {block}")
    if kind.interleave == 1:
        at = tensor.offset + row * tensor.row_bytes + (0 if kind.row_meta_bytes else block * kind.block_bytes)
        where += f", offset {at}"
    raise DataError(
        f"{tensor.path}: {tensor.name}: {where}: a scale of {kind.name} is {shown}; the file is damaged there, make or "
        "fetch it again (--tripwire off runs it all the same)"
    )
