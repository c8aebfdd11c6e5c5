"""Q8_K_R8 and Q8_K_R16 (ids 399, 397): rows of 8-bit codes, 8 or 16 of them interleaved, per 256 columns:

    offset  size         field
    0       R x f16      d
    2 R     256 R x u8   q   four codes of each row in turn; in R8 signed bytes, in R16 code + 128

    y = d * q

Encode: d = largest magnitude of the 256 / 127, codes nearest to x * (127 / largest magnitude), then d rounded to a
half. That is Q8_K (`activation.py`), which files do not hold, with rounded scales and without sums. Magnitudes of 127
times the largest half or more would become Inf and are refused. Deinterleaving gives Q8_K with the rounded scales.
"""

from __future__ import annotations

import numpy as np

from quantkit.types.activation import Q8_K
from quantkit.types.families.interleave import Interleaved


class _ByWords:
    """Interleaving of Q8_K rows to groups of R, and back; four codes are a 32-bit word, XORed with `flip`."""

    def __init__(self, rows: int, flip: int):
        self.rows, self.flip = rows, np.uint32(flip)

    def _groups(self, groups: np.ndarray, blocks: int) -> tuple[np.ndarray, np.ndarray]:
        """Scales uint16[groups, blocks, R] and words uint32[groups, blocks, 64, R] of uint8[rows, row bytes]."""
        grouped = groups.reshape(-1, blocks, self.rows * 258)
        scales = grouped[:, :, : 2 * self.rows].view("<u2")
        return scales, grouped[:, :, 2 * self.rows :].view("<u4").reshape(len(grouped), blocks, 64, self.rows)

    def forward(self, data: np.ndarray, out: np.ndarray) -> None:
        blocks = data.reshape(len(data) // self.rows, self.rows, -1, 296)
        scales, words = self._groups(out, blocks.shape[2])
        halves = np.ascontiguousarray(blocks[..., :4]).view("<f4")[..., 0].astype("<f2")
        scales[...] = halves.view("<u2").transpose(0, 2, 1)
        codes = np.ascontiguousarray(blocks[..., 8:264]).view("<u4")
        words[...] = codes.transpose(0, 2, 3, 1) ^ self.flip

    def backward(self, data: np.ndarray, out: np.ndarray) -> None:
        blocks = out.reshape(len(out) // self.rows, self.rows, -1, 296)
        scales, words = self._groups(data, blocks.shape[2])
        d = np.ascontiguousarray(scales.transpose(0, 2, 1)).view("<f2").astype("<f4")
        codes = np.ascontiguousarray((words ^ self.flip).transpose(0, 3, 1, 2)).view(np.int8)
        sums = codes.reshape(*codes.shape[:-1], 16, 16).sum(axis=-1, dtype=np.int16)
        with np.errstate(all="ignore"):  # of arbitrary bytes
            s = (d * sums.sum(axis=-1, dtype=np.int32)).astype("<f4")
        blocks[..., :4] = d[..., None].view(np.uint8)
        blocks[..., 4:8] = s[..., None].view(np.uint8)
        blocks[..., 8:264] = codes.view(np.uint8)
        blocks[..., 264:] = sums.astype("<i2").view(np.uint8)


class _Q8_K(Interleaved):
    """Rows whose codes second moments move under the rounded scale. Q8_K itself, for activations, does not."""

    base_class = Q8_K

    @property
    def uses_second_moments(self) -> bool:
        from quantkit.types.refine import applies_to  # not loaded without: it needs numba

        return applies_to(self.base_type)


class Q8_K_R8(_Q8_K):
    name, ggml_type, file_type = "q8_k_r8", 399, 399
    interleave, block_bytes = 8, 258
    overflow = 127 * 65520.0
    permutation = _ByWords(8, 0)


class Q8_K_R16(_Q8_K):
    name, ggml_type, file_type = "q8_k_r16", 397, None
    interleave, block_bytes = 16, 258
    overflow = 127 * 65520.0
    permutation = _ByWords(16, 0x80808080)
