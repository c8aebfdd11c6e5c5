"""Q8_KV_R8 (id 398): Q8_KV with eight rows interleaved: eight f32 row scales, then 256 bytes per 8 rows by 32 columns.

    offset  size       field
    0       8 x f32    d
    32      8 n x i8   q   four codes of each row in turn

The sums of the rows' codes are dropped, so a row takes 4 bytes less; deinterleaving computes them again.
ik_llama.cpp's in-place repacking leaves gaps of 32 bytes between groups, which its readers do not expect. Here groups
are as its direct quantization writes them.
"""

from __future__ import annotations

import numpy as np

from quantkit.types.families.interleave import Interleaved
from quantkit.types.q8_kv import Q8_KV


class _ByWords:
    """Interleaving of rows [d, sum, codes] to groups [8 d, codes by four], and back; four codes are a 32-bit word."""

    def forward(self, data: np.ndarray, out: np.ndarray) -> None:
        rows = data.view("<u4").reshape(-1, 8, data.shape[1] // 4)
        groups = out.reshape(len(rows), -1).view("<u4")
        groups[:, :8] = rows[:, :, 0]
        groups[:, 8:].reshape(len(rows), -1, 8)[...] = rows[:, :, 2:].transpose(0, 2, 1)

    def backward(self, data: np.ndarray, out: np.ndarray) -> None:
        rows = out.view("<u4").reshape(-1, 8, out.shape[1] // 4)
        groups = data.reshape(len(rows), -1).view("<u4")
        rows[:, :, 0] = groups[:, :8]
        rows[:, :, 2:] = groups[:, 8:].reshape(len(rows), -1, 8).transpose(0, 2, 1)
        out[:, 4:8].view("<i4")[:, 0] = out[:, 8:].view(np.int8).sum(axis=1, dtype=np.int32)


class Q8_KV_R8(Interleaved):
    name, ggml_type, file_type = "q8_KV_r8", 398, 398
    base_class, interleave, row_meta_bytes = Q8_KV, 8, 4
    permutation = _ByWords()
