"""Integers packed into bytes and words, unpacked as float32.

    in_words   codes of `bits` bits, 32 // bits to a little-endian word, the lowest bits first; other bits are unused
    in_stream  codes of `bits` bits one after another, across bytes and words, the lowest bits first
    nibbles    codes of 4 bits that name values of a table

The values of a byte, or of 12 bits, are looked up in a table.
"""

from __future__ import annotations

from functools import cache

import numpy as np


@cache
def _fields(bits: int, offset: int) -> np.ndarray:
    """float32[256, 8 // bits]: the codes of a byte, low bits first, less `offset`."""
    byte = np.arange(256)[:, None]
    codes = byte >> np.arange(0, 8, bits) & (1 << bits) - 1
    return (codes - offset).astype(np.float32)


@cache
def _fields_of_12() -> np.ndarray:
    """float32[4096, 4]: the 4 codes of 3 bits in 12 bits, low bits first."""
    codes = np.arange(4096)[:, None] >> np.arange(0, 12, 3) & 7
    return codes.astype(np.float32)


def in_words(data: np.ndarray, bits: int) -> np.ndarray:
    """float32[rows, k * words] of the codes in uint8[rows, 4 * words], k = 32 // bits to a word.

    Codes have an offset of 2^(bits - 1), which is subtracted.
    """
    offset = 1 << bits - 1
    if 8 % bits == 0:  # no code spans two bytes
        return np.asarray(_fields(bits, offset)[data].reshape(len(data), -1))
    packed = np.ascontiguousarray(data).view("<u4")
    shifts = np.arange(32 // bits, dtype=np.uint32) * np.uint32(bits)
    unsigned = packed[:, :, None] >> shifts & np.uint32((1 << bits) - 1)
    return np.asarray(unsigned.reshape(len(data), -1).astype(np.float32) - np.float32(offset))


def in_stream(data: np.ndarray, bits: int) -> np.ndarray:
    """float32[rows, 8 * bytes / bits] of the codes in uint8[rows, bytes], for 2, 3, 4 or 8 bits; from 0 on.

    With 3 bits the bytes come in threes, which hold 8 codes.
    """
    if bits != 3:
        return np.asarray(_fields(bits, 0)[data].reshape(len(data), -1))
    low, middle, high = (data[:, i::3].astype(np.uint16) for i in range(3))
    halves = np.stack([low | (middle & 15) << 8, middle >> 4 | high << 4], axis=-1)
    return np.asarray(_fields_of_12()[halves].reshape(len(data), -1))


def nibbles(data: np.ndarray, table: np.ndarray, high_first: bool = False) -> np.ndarray:
    """float32[rows, 2 * bytes] of uint8[rows, bytes]: the entry of `table`, float32[16], of each 4 bits.

    Low bits are first, or high ones.
    """
    return np.asarray(_pairs(table.tobytes(), high_first)[data].reshape(len(data), -1))


@cache
def _pairs(table: bytes, high_first: bool) -> np.ndarray:
    """float32[256, 2]: the two values of each byte."""
    values, byte = np.frombuffer(table, np.float32), np.arange(256)
    halves = [values[byte & 15], values[byte >> 4]]
    return np.stack(halves[::-1] if high_first else halves, axis=-1)
