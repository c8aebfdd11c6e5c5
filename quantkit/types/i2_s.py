"""I2_S (id 36): the ternary format of bitnet.cpp. A tensor of N elements, N a multiple of 128, is N / 4 + 32 bytes:

    offset     size       field
    0          N/4 x u8   codes  bits 6 - 2 k and 7 - 2 k of byte 32 g + j: t of element 128 g + 32 k + j
    N/4        f32        d
    N/4 + 4    28         padding

    y = d * (t - 1)       t = 0, 1, 2 (3 decodes to 2 d; writers do not use it)

The format has no rows. quantkit treats a row of n elements as a tensor of that one row, n / 4 + 32 bytes with the
tensor's d: `rows_of` extracts them from a tensor where n is a multiple of 128. There is no encoder, because only a
whole tensor could be written; IQ2_BN holds the same values in rows.
"""

from __future__ import annotations

import numpy as np

from quantkit.codegen.jit import kernel
from quantkit.types.base import QuantType

_TAIL = 32


@kernel
def _decode(data: np.ndarray, out: np.ndarray) -> None:
    rows, n = out.shape
    for row in range(rows):
        scale = data[row, n // 4 : n // 4 + 4].view(np.float32)[0]
        for g in range(n // 128):
            code, y = data[row, 32 * g : 32 * g + 32], out[row, 128 * g : 128 * g + 128]
            for k in range(4):
                for j in range(32):
                    t = np.int32(np.int32(code[j]) >> np.int32(6 - 2 * k)) & np.int32(3)
                    y[32 * k + j] = scale * np.float32(np.int32(t - np.int32(1)))


class I2_S(QuantType):
    """I2_S: a foreign ternary format. A tensor of N elements, N a multiple of 128, is N / 4 + 32 bytes."""

    name, ggml_type = "i2_s", 36
    block_size, block_bytes, row_meta_bytes = 128, 32, _TAIL  # behind the codes, not before them
    whole_tensor = True
    decode_rows = staticmethod(_decode)

    def rows_of(self, stored: np.ndarray, n: int, start: int, stop: int) -> np.ndarray:
        codes = stored[:-_TAIL].reshape(-1, n // 4)[start:stop]
        return np.hstack([codes, np.broadcast_to(stored[-_TAIL:], (len(codes), _TAIL))])
