"""Formats of activations (q8_K and others): right-hand sides of products, quantized at run time. Files never hold them.

Blocks with one scale, b elements each; `sums` are of codes:

    q8_K     id 15   b 256   0 f32 d   4 f32 d * sum        8 256 x i8   264 16 x i16 sums of 16
    q8_KR8   id 149  b 256   as q8_K
    q8_K32   id 148  b 256   0 f32 d   4 f32 d * sum        8 256 x i8   264 8 x f32 d * sums of 32
    q8_K128  id 150  b 128   0 f32 d   4 4 x i16 sums of 32   12 128 x i8
    q8_1     id 9    b 32    0 f16 d   2 f16 d * sum        4 32 x i8

Four blocks side by side, their scales and sums before their codes; the last 1 to 3 blocks of a row stand alone:

    q8_0_x4  id 97   b 32    4 x f16 d                      128 x i8
    q8_1_x4  id 98   b 32    4 x f16 d   4 x f16 d * sum    128 x i8
    q8_2_x4  id 99   b 32    4 x bf16 d  4 x i16 sum        128 x i8

Rows with four scales: element j belongs to class (j // run) % 4:

    q8_K64   id 136  run 4   0 4 x f32 d   16 4 x f32 d * sums of the classes   32 n x i8
    q8_K16   id 147  run 16  0 4 x f32 d   16 f32 d * sums, all classes         20 n x i8

    y = d * code, code in -127..127

Encode: d = largest magnitude / 127; code = x * (127 / largest), but x * (1 / d) in q8_1_x4, q8_2_x4, q8_K64 and q8_K16,
to the nearest, ties to even. q8_2_x4 rounds d to bfloat16 before it divides. These are the bytes of ik_llama.cpp on
x86; on other CPUs it fills q8_K and q8_2_x4 differently. As there, d * sum of q8_1 and q8_1_x4 may be Inf as a half
where magnitudes exceed 2000; codes and d stay finite.
"""

from __future__ import annotations

import numpy as np

from quantkit.codegen.half import bfloat_to_float, float_to_half, half_to_float
from quantkit.codegen.jit import kernel
from quantkit.types.base import BEST, QuantType

_ZERO, _ONE, _MAX_CODE = np.float32(0), np.float32(1), np.float32(127)
_ROUND = np.float32(3 << 22)  # adding it rounds |t| < 2^22 to an integer, ties to even, in the sum's lowest bits
_ROUND_BITS = _ROUND.view(np.int32)
_MAGNITUDE = np.int32(0x7FFFFFFF)
_MIN_MAGNITUDE = np.float32(2.0**-118)  # below it the inverse scale may overflow: encoded as zeros

# The order in which ik_llama.cpp, as compiled and with fused multiplication, sums the products of q8_K16.
_SUM_ORDER = np.array([1, 0, 2, 3])

# Headers of blocks of 32: a half; a half and a half d * sum; a bfloat and an integer sum.
_SCALE_ONLY, _WITH_PRODUCT, _WITH_SUM = 0, 1, 2


@kernel
def _largest(x: np.ndarray) -> np.float32:
    """The largest magnitude; 0 where it is below _LEAST."""
    bits, max_bits = x.view(np.int32), np.int32(0)
    for j in range(bits.size):
        max_bits = np.int32(max(max_bits, np.int32(bits[j] & _MAGNITUDE)))
    largest = np.int32(max_bits).view(np.float32)
    return largest if largest >= _MIN_MAGNITUDE else _ZERO


@kernel
def _quantize(x: np.ndarray, inverse: np.float32, code: np.ndarray) -> None:
    """Fill int8[n] with the integers nearest to x * inverse."""
    for j in range(x.size):
        code[j] = np.int8(np.float32(x[j] * inverse + _ROUND).view(np.int32))


@kernel
def _sum(code: np.ndarray) -> np.int32:
    total = np.int32(0)
    for j in range(code.size):
        total = np.int32(total + np.int32(code[j]))
    return total


@kernel
def _multiply_codes(scale: np.float32, code: np.ndarray, y: np.ndarray) -> None:
    for j in range(code.size):
        y[j] = scale * np.float32(code[j])


# ------------------------------------------------------------------------------------------------------- blocks of 256


@kernel
def _encode_256(x: np.ndarray, float_sums: bool, out: np.ndarray) -> None:
    """q8_K and, with sums that are floats, q8_K32."""
    rows, n = x.shape
    for row in range(rows):
        for b in range(n // 256):
            part, block = x[row, 256 * b : 256 * b + 256], out[row, 296 * b : 296 * b + 296]
            head, code, tail = block[:8].view(np.float32), block[8:264].view(np.int8), block[264:]
            largest = _largest(part)
            scale = largest / _MAX_CODE
            _quantize(part, _MAX_CODE / largest if largest > _ZERO else _ZERO, code)
            head[0] = scale
            if float_sums:
                products = tail.view(np.float32)
                for i in range(8):
                    products[i] = scale * np.float32(_sum(code[32 * i : 32 * i + 32]))
                head[1] = _ZERO
                for i in range(8):
                    head[1] += products[i]
            else:
                sums = tail.view(np.int16)
                for i in range(16):
                    sums[i] = np.int16(_sum(code[16 * i : 16 * i + 16]))
                head[1] = scale * np.float32(_sum(sums))


@kernel
def _decode_256(data: np.ndarray, out: np.ndarray) -> None:
    rows, n = out.shape
    for row in range(rows):
        for b in range(n // 256):
            block = data[row, 296 * b : 296 * b + 264]
            _multiply_codes(block[:4].view(np.float32)[0], block[8:].view(np.int8), out[row, 256 * b : 256 * b + 256])


@kernel
def _encode_128(x: np.ndarray, importance: np.ndarray, effort: int, out: np.ndarray) -> None:
    rows, n = x.shape
    for row in range(rows):
        for b in range(n // 128):
            part, block = x[row, 128 * b : 128 * b + 128], out[row, 140 * b : 140 * b + 140]
            code, sums = block[12:].view(np.int8), block[4:12].view(np.int16)
            largest = _largest(part)
            block[:4].view(np.float32)[0] = largest / _MAX_CODE
            _quantize(part, _MAX_CODE / largest if largest > _ZERO else _ZERO, code)
            for i in range(4):
                sums[i] = np.int16(_sum(code[32 * i : 32 * i + 32]))


@kernel
def _decode_128(data: np.ndarray, out: np.ndarray) -> None:
    rows, n = out.shape
    for row in range(rows):
        for b in range(n // 128):
            block = data[row, 140 * b : 140 * b + 140]
            _multiply_codes(block[:4].view(np.float32)[0], block[12:].view(np.int8), out[row, 128 * b : 128 * b + 128])


# -------------------------------------------------------------------------------------------------------- blocks of 32


@kernel
def _block_offsets(b: int, blocks: int, width: int, side_by_side: int, size: int) -> tuple[int, int, int]:
    """Offsets of block b in a row: of its scale and its sum, in words of 2 bytes, and of its codes, in bytes."""
    run = side_by_side if b < blocks - blocks % side_by_side else 1
    first, i = size * (b - b % run), b % run
    return first // 2 + i, first // 2 + run + i, first + (size - width) * run + width * i


@kernel
def _float_to_bfloat(x: np.float32) -> np.uint16:
    """Bits of the bfloat16 nearest to a finite float32, ties to even."""
    bits = np.float32(x).view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    return np.uint16((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16))


@kernel
def _encode_heads(
    x: np.ndarray, width: int, head: int, side_by_side: int, by_scale: bool, size: int, out: np.ndarray
) -> None:
    rows, n = x.shape
    blocks = n // width
    for row in range(rows):
        words, sums, codes = out[row].view(np.uint16), out[row].view(np.int16), out[row].view(np.int8)
        for b in range(blocks):
            scale_at, sum_at, codes_at = _block_offsets(b, blocks, width, side_by_side, size)
            part, code = x[row, width * b : width * b + width], codes[codes_at : codes_at + width]
            largest = _largest(part)
            scale = largest / _MAX_CODE
            if head == _WITH_SUM:
                words[scale_at] = _float_to_bfloat(scale)
                scale = bfloat_to_float(words[scale_at])
            else:
                words[scale_at] = float_to_half(scale)
            inverse = _ZERO
            if largest > _ZERO:
                inverse = _ONE / scale if by_scale else _MAX_CODE / largest
            total = np.int32(0)
            for j in range(width):
                rounded = np.float32(part[j] * inverse + _ROUND).view(np.int32)
                code[j] = np.int8(rounded)
                total = np.int32(total + np.int32(rounded - _ROUND_BITS))
            if head == _WITH_SUM:
                sums[sum_at] = np.int16(total)
            elif head == _WITH_PRODUCT:
                words[sum_at] = float_to_half(scale * np.float32(total))


@kernel
def _decode_heads(data: np.ndarray, width: int, head: int, side_by_side: int, size: int, out: np.ndarray) -> None:
    rows, n = out.shape
    blocks = n // width
    for row in range(rows):
        words, codes = data[row].view(np.uint16), data[row].view(np.int8)
        for b in range(blocks):
            scale_at, _, codes_at = _block_offsets(b, blocks, width, side_by_side, size)
            scale = bfloat_to_float(words[scale_at]) if head == _WITH_SUM else half_to_float(words[scale_at])
            _multiply_codes(scale, codes[codes_at : codes_at + width], out[row, width * b : width * b + width])


# ------------------------------------------------------------------------------------------------ four scales of a row


@kernel
def _encode_classes(x: np.ndarray, run: int, one_product: bool, out: np.ndarray) -> None:
    rows, n = x.shape
    header = out.shape[1] - n
    period = 4 * run
    max_bits, totals, inverse = np.empty(period, np.int32), np.empty(period, np.int32), np.empty(period, np.float32)
    for row in range(rows):
        head, codes = out[row, :header].view(np.float32), out[row, header:].view(np.int8)
        max_bits[:] = totals[:] = 0
        head[:] = _ZERO
        for first in range(0, n, period):
            bits = x[row, first : first + period].view(np.int32)
            for j in range(period):
                max_bits[j] = np.int32(max(max_bits[j], np.int32(bits[j] & _MAGNITUDE)))
        for j in range(period):
            c = j // run
            head[c] = max(head[c], np.int32(max_bits[j]).view(np.float32) / _MAX_CODE)
        for c in range(4):
            head[c] = head[c] if head[c] >= _MIN_MAGNITUDE else _ZERO
        for j in range(period):
            scale = head[j // run]
            inverse[j] = _ONE / scale if scale > _ZERO else _ZERO
        for first in range(0, n, period):
            part, code = x[row, first : first + period], codes[first : first + period]
            for j in range(period):
                rounded = np.float32(part[j] * inverse[j] + _ROUND).view(np.int32)
                code[j] = np.int8(rounded)
                totals[j] = np.int32(totals[j] + np.int32(rounded - _ROUND_BITS))
        for c in _SUM_ORDER:
            total = np.int64(0)
            for j in range(period):
                total += totals[j] if j // run == c else 0
            index = 4 if one_product else 4 + c
            head[index] = np.float32(np.float64(head[c]) * np.float64(total) + np.float64(head[index]))


@kernel
def _decode_classes(data: np.ndarray, run: int, out: np.ndarray) -> None:
    rows, n = out.shape
    header = data.shape[1] - n
    period = 4 * run
    scale = np.empty(period, np.float32)
    for row in range(rows):
        head, codes = data[row, :16].view(np.float32), data[row, header:].view(np.int8)
        for j in range(period):
            scale[j] = head[j // run]
        for first in range(0, n, period):
            code, y = codes[first : first + period], out[row, first : first + period]
            for j in range(period):
                y[j] = scale[j] * np.float32(code[j])


# ----------------------------------------------------------------------------------------------------------- the types


class Activation(QuantType):
    """A format of activations."""

    activation = True


class Q8_K(Activation):
    name, ggml_type = "q8_K", 15
    block_size, block_bytes = 256, 296
    unwritten_code, moments_effort = 0x80, BEST  # -128
    decode_rows = staticmethod(_decode_256)

    @staticmethod
    def encode_rows(x: np.ndarray, importance: np.ndarray, effort: int, out: np.ndarray) -> None:
        """See `QuantType.encode_rows`."""
        _encode_256(x, False, out)


class Q8_KR8(Q8_K):
    name, ggml_type = "q8_KR8", 149


class Q8_K32(Q8_K):
    name, ggml_type = "q8_K32", 148

    @staticmethod
    def encode_rows(x: np.ndarray, importance: np.ndarray, effort: int, out: np.ndarray) -> None:
        """See `QuantType.encode_rows`."""
        _encode_256(x, True, out)


class Q8_K128(Activation):
    name, ggml_type = "q8_K128", 150
    block_size, block_bytes = 128, 140
    encode_rows = staticmethod(_encode_128)
    decode_rows = staticmethod(_decode_128)


class Blocks32(Activation):
    """Blocks of 32. `head` precedes the codes, `side_by_side` blocks share it; `by_scale`: codes are x * (1 / d)."""

    block_size = 32
    head = _WITH_PRODUCT
    side_by_side = 4
    by_scale = True
    overflow = 65519.0 * 127  # the scale would be no half

    def encode_rows(self, x: np.ndarray, importance: np.ndarray, effort: int, out: np.ndarray) -> None:
        """See `QuantType.encode_rows`."""
        _encode_heads(x, self.block_size, self.head, self.side_by_side, self.by_scale, self.block_bytes, out)

    def decode_rows(self, data: np.ndarray, out: np.ndarray) -> None:
        """See `QuantType.decode_rows`."""
        _decode_heads(data, self.block_size, self.head, self.side_by_side, self.block_bytes, out)


class Q8_1(Blocks32):
    name, ggml_type = "q8_1", 9
    block_bytes = 36
    side_by_side, by_scale = 1, False


class Q8_0_X4(Blocks32):
    name, ggml_type = "q8_0_x4", 97
    block_bytes = 34
    head, by_scale = _SCALE_ONLY, False


class Q8_1_X4(Blocks32):
    name, ggml_type = "q8_1_x4", 98
    block_bytes = 36


class Q8_2_X4(Blocks32):
    name, ggml_type = "q8_2_x4", 99
    block_bytes = 36
    head = _WITH_SUM
    overflow = np.inf


class Classes(Activation):
    """Rows with four scales: `run` neighbouring elements are of the same class."""

    block_size, block_bytes = 64, 64
    run = 0

    def encode_rows(self, x: np.ndarray, importance: np.ndarray, effort: int, out: np.ndarray) -> None:
        """See `QuantType.encode_rows`."""
        _encode_classes(x, self.run, self.row_meta_bytes == 20, out)

    def decode_rows(self, data: np.ndarray, out: np.ndarray) -> None:
        """See `QuantType.decode_rows`."""
        _decode_classes(data, self.run, out)


class Q8_K64(Classes):
    name, ggml_type = "q8_K64", 136
    row_meta_bytes, run = 32, 4


class Q8_K16(Classes):
    name, ggml_type = "q8_K16", 147
    row_meta_bytes, run = 20, 16
