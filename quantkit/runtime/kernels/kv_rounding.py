"""Encode rows of a KV cache, in numpy: the reference implementation of runtime/kernels/cpu/kv_rows.py.

A row is one head's key or value. F16 and BF16 take the nearest number, ties to even. The quantized types derive the
scale from the largest magnitude, without a search, because rows are encoded for every token; so does ik_llama.cpp.
Of each block of 32, or of the whole row for Q8_KV, with `extreme` the element of largest magnitude, sign and all (the
positive one of two), and codes rounded to the nearest integer, ties to even:

    q8_0, q8_KV         d = |extreme| / 127          code = x / d                   -127 .. 127
    q6_0, q5_0, q4_0    d = extreme / -2^(bits - 1)  code = x / d + 2^(bits - 1)    0 .. 2^bits - 1
    q5_1, q4_1          m = smallest x, d = (largest x - m) / (2^bits - 1), code = (x - m) / d
    iq4_nl              the entries e nearest to x / d with d = extreme / -127; then d = sum x^3 e / sum x^2 e^2,
                        which is worth 4% of the squared error (of the others at most 1.3%)

d and m are stored as halves (Q8_KV: float32), codes are made with the unrounded ones. A block with a NaN or an Inf gets
a d of NaN, so that it shows in every result. The byte maps are in `quantkit/types`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from quantkit import types
from quantkit.types.families.codebooks import K4

FLOATS = ("f32", "f16", "bf16")
QUANTIZED = ("q8_0", "q8_KV", "q6_0", "q5_0", "q5_1", "q4_0", "q4_1", "iq4_nl")

CODEBOOK = K4.values[:16].astype(np.float32)
MIDPOINTS = (CODEBOOK[1:] + CODEBOOK[:-1]) / 2  # the entry nearest to y is that with the number of middles below y
MIN_SCALE = np.float32(2.0**-120)  # below, 1 / d may be Inf: such a d counts as 0


def encode(name: str, x: np.ndarray) -> np.ndarray:
    """uint8[rows, row_bytes(n)] of x float32[rows, n]; for quantized types n is a multiple of 32."""
    x = np.ascontiguousarray(x, np.float32)
    rows = len(x)
    with np.errstate(all="ignore"):
        if name == "f32":
            return x.view(np.uint8)
        if name == "f16":
            return x.astype(np.float16).view(np.uint8)
        if name == "bf16":
            return _bfloats(x).view(np.uint8)
        if name == "q8_KV":
            return _q8_kv(x)
        return _BLOCKS[name](x.reshape(-1, 32)).reshape(rows, types.get(name).row_bytes(x.shape[1]))


def _bfloats(x: np.ndarray) -> np.ndarray:
    bits = x.view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(x), 0x7FC0, rounded).astype(np.uint16)


def _inverse(d: np.ndarray) -> np.ndarray:
    return np.where(np.abs(d) < MIN_SCALE, np.float32(0), np.float32(1) / d)


def _nan_if_not_finite(x: np.ndarray) -> np.ndarray:
    """float32[rows, 1]: 0, or NaN where a row has an element that is not finite."""
    zero_or_nan: np.ndarray = (x - x).sum(1, keepdims=True)
    return zero_or_nan


def _extreme(x: np.ndarray) -> np.ndarray:
    """float32[rows, 1]."""
    high, low = x.max(1, keepdims=True), x.min(1, keepdims=True)
    largest: np.ndarray = np.where(high >= -low, high, low) + _nan_if_not_finite(x)
    return largest


def _codes(y: np.ndarray, offset: int, largest: int) -> np.ndarray:
    """Nearest integers + offset, at most `largest`; what a NaN becomes does not matter."""
    codes: np.ndarray = np.nan_to_num(np.minimum(np.rint(y) + offset, largest)).astype(np.int16)
    return codes


def _halves(*values: np.ndarray) -> np.ndarray:
    """uint8[rows, 2 * values]."""
    return np.concatenate(values, 1).astype(np.float16).view(np.uint8)


def _nibbles(codes: np.ndarray) -> np.ndarray:
    """uint8[rows, 16]: element j below element j + 16."""
    low = codes & 15
    return (low[:, :16] | low[:, 16:] << 4).astype(np.uint8)


def _q8(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """d float32[rows, 1], int8 codes."""
    d = np.abs(_extreme(x)) * np.float32(1 / 127)
    return d, _codes(x * _inverse(d), 0, 127).astype(np.int8)


def _q8_0(x: np.ndarray) -> np.ndarray:
    d, codes = _q8(x)
    return np.concatenate([_halves(d), codes.view(np.uint8)], 1)


def _q8_kv(x: np.ndarray) -> np.ndarray:
    d, codes = _q8(x)
    sums = codes.sum(1, keepdims=True, dtype=np.int32)
    return np.concatenate([d.view(np.uint8), sums.view(np.uint8), codes.view(np.uint8)], 1)


def _symmetric(bits: int, pack: Callable[[np.ndarray], np.ndarray]) -> Callable[[np.ndarray], np.ndarray]:
    offset = 1 << bits - 1

    def encode_blocks(x: np.ndarray) -> np.ndarray:
        d = _extreme(x) * np.float32(-1 / offset)
        return np.concatenate([_halves(d), pack(_codes(x * _inverse(d), offset, 2 * offset - 1))], 1)

    return encode_blocks


def _affine(bits: int, pack: Callable[[np.ndarray], np.ndarray]) -> Callable[[np.ndarray], np.ndarray]:
    levels = (1 << bits) - 1

    def encode_blocks(x: np.ndarray) -> np.ndarray:
        minimum = x.min(1, keepdims=True)
        d = (x.max(1, keepdims=True) - minimum) * np.float32(1 / levels) + _nan_if_not_finite(x)
        return np.concatenate([_halves(d, minimum), pack(_codes((x - minimum) * _inverse(d), 0, levels))], 1)

    return encode_blocks


def _five_bits(codes: np.ndarray) -> np.ndarray:
    """The fifth bits, element 0 the lowest, then nibbles."""
    return np.concatenate([np.packbits(codes > 15, axis=1, bitorder="little"), _nibbles(codes)], 1)


def _six_bits(codes: np.ndarray) -> np.ndarray:
    """Bits 4 and 5 of elements j, j + 16, j + 8, j + 24 in byte j, lowest first; then nibbles."""
    high = codes >> 4
    four = high[:, :8] | high[:, 16:24] << 2 | high[:, 8:16] << 4 | high[:, 24:] << 6
    return np.concatenate([four.astype(np.uint8), _nibbles(codes)], 1)


def _iq4_nl(x: np.ndarray) -> np.ndarray:
    first = _extreme(x) * np.float32(-1 / 127)
    codes = np.searchsorted(MIDPOINTS, x * _inverse(first), side="left")
    entries = CODEBOOK[np.minimum(codes, 15)]
    weighed = x * x * entries
    size = _halving_sum(weighed * entries)
    d = np.where(size == 0, np.float32(0), _halving_sum(weighed * x) / size)
    return np.concatenate([_halves(d), _nibbles(codes)], 1)


def _halving_sum(x: np.ndarray) -> np.ndarray:
    """float32[rows, 1]: the second half added to the first until one is left, as vector code adds."""
    while x.shape[1] > 1:
        half = x.shape[1] // 2
        x = x[:, :half] + x[:, half:]
    return x


_BLOCKS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "q8_0": _q8_0,
    "q6_0": _symmetric(6, _six_bits),
    "q5_0": _symmetric(5, _five_bits),
    "q5_1": _affine(5, _five_bits),
    "q4_0": _symmetric(4, _nibbles),
    "q4_1": _affine(4, _nibbles),
    "iq4_nl": _iq4_nl,
}


def rotation(n: int) -> np.ndarray:
    """float32[n, n], n a power of two: the Hadamard matrix, Sylvester's order, over sqrt(n). Its own inverse.

    Rotation spreads a row's large elements over all of them, so that one scale fits many elements better.
    """
    h = np.ones((1, 1), np.float32)
    while len(h) < n:
        h = np.block([[h, h], [h, -h]])
    scaled: np.ndarray = (h / np.sqrt(n)).astype(np.float32)
    return scaled


def rotation_block(dim: int) -> int | None:
    """How many elements of a head of `dim` are rotated together; None where the dimensions allow no rotation.

    All where `dim` is a power of two, else the largest of 512, 256, 128, 64 that divides it, as in ik_llama.cpp.
    """
    if dim & dim - 1 == 0:
        return dim
    return next((block for block in (512, 256, 128, 64) if dim % block == 0), None)


def rotate(x: np.ndarray, block: int) -> np.ndarray:
    """x float32[rows, n] with every `block` elements rotated; a fresh array."""
    rotated: np.ndarray = (x.reshape(-1, block) @ rotation(block)).reshape(x.shape)
    return rotated
