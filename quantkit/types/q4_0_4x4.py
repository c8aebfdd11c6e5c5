"""Q4_0_4_4, Q4_0_4_8, Q4_0_8_8 (ids 31, 32, 33): the older interleaved forms of Q4_0, R rows in runs of L bytes.

    offset  size           field
    0       R x f16        d
    2 R     16 R x u8      qs   L bytes of each row in turn, every nibble q stored as q - 8 in two's complement

GGUF files for ARM of 2024 hold them. They are decoded and unpacked; nothing is repacked to them. ik_llama.cpp only
encodes them, so decoding is tested against the byte map alone.
"""

from __future__ import annotations

import functools

import numpy as np

from quantkit.types.families.interleave import Field, Interleaved, Permutation, Slots, packed
from quantkit.types.q4_0 import Q4_0


class _TwosComplement(Permutation):
    """The permutation of blocks whose nibbles are in two's complement in the group."""

    def forward(self, data: np.ndarray, out: np.ndarray) -> None:
        super().forward(_flip_top_bits(np.array(data)), out)

    def backward(self, data: np.ndarray, out: np.ndarray) -> None:
        super().backward(data, out)
        _flip_top_bits(out)


def _flip_top_bits(data: np.ndarray) -> np.ndarray:
    """Flip the top bits of all nibbles of contiguous Q4_0 rows, in place."""
    blocks = data.reshape(-1, Q4_0.block_bytes)
    blocks[:, 2:] ^= np.uint8(0x88)
    return data


class _Runs(Interleaved):
    base_class = Q4_0
    run: int

    @functools.cached_property
    def permutation(self) -> Permutation:
        rows = self.interleave
        runs = Field(8 * self.run, packed(8 * self.run, 16 // self.run, at=2), Slots(0, at=2 * rows))
        return _TwosComplement((Field(16, packed(16, 1, at=0), Slots(0, at=0)), runs), rows, self.block_bytes)


class Q4_0_4_4(_Runs):
    """Q4_0_4_4: Q4_0 with 4 rows interleaved in runs of 4 bytes."""

    name, ggml_type, file_type = "q4_0_4x4", 31, 33
    interleave, run = 4, 4


class Q4_0_4_8(_Runs):
    """Q4_0_4_8: Q4_0 with 4 rows interleaved in runs of 8 bytes."""

    name, ggml_type, file_type = "q4_0_4x8", 32, 34
    interleave, run = 4, 8


class Q4_0_8_8(_Runs):
    """Q4_0_8_8: Q4_0 with 8 rows interleaved in runs of 8 bytes."""

    name, ggml_type, file_type = "q4_0_8x8", 33, 35
    interleave, run = 8, 8
