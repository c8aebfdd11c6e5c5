"""IQ2_BN (id 135): ternary rows, a header of 4 bytes and blocks of 64, 16 bytes.

    row header: f32 d
    offset  size     field
    0       16 x u8  qs   bits 2 k and 2 k + 1 of byte j: t of element j + 16 k

    y = d * (t - 1)       t = 0, 1, 2 (3 decodes to 2 d and is never written)

Encode: d and nearest codes that minimise sum w (x - y)^2, exact for ternary rows (`families/ternary.py`).
ik_llama.cpp's row decoder ignores the header and the scale; its matrix products, and this module, do not.
"""

from __future__ import annotations

import numpy as np

from quantkit.codegen.jit import kernel
from quantkit.types.families import ternary


@kernel
def _decode(data: np.ndarray, out: np.ndarray) -> None:
    rows, n = out.shape
    for row in range(rows):
        scale = data[row, :4].view(np.float32)[0]
        for b in range(n // 64):
            qs, y = data[row, 4 + 16 * b : 20 + 16 * b], out[row, 64 * b : 64 * b + 64]
            for k in range(4):
                for j in range(16):
                    t = np.int32(np.int32(qs[j]) >> np.int32(2 * k)) & np.int32(3)
                    y[16 * k + j] = scale * np.float32(np.int32(t - np.int32(1)))


@kernel
def _pack_blocks(codes: np.ndarray, out: np.ndarray) -> None:
    """Write codes uint8[n] into a row behind its header."""
    for b in range(codes.size // 64):
        t, qs = codes[64 * b : 64 * b + 64], out[4 + 16 * b : 20 + 16 * b]
        for j in range(16):
            qs[j] = np.uint8(t[j] | t[j + 16] << 2 | t[j + 32] << 4 | t[j + 48] << 6)


@kernel
def _pack_rows(codes: np.ndarray, out: np.ndarray) -> None:
    for row in range(len(out)):
        _pack_blocks(codes[row], out[row])


@kernel
def _encode(x: np.ndarray, importance: np.ndarray, effort: int, out: np.ndarray) -> None:
    rows, n = x.shape
    w = np.empty(n, np.float32)
    ternary.row_weights(importance, w)
    codes = np.empty(n, np.uint8)
    for row in range(rows):
        scale = ternary.find_scale(x[row], w, effort)
        out[row, :4].view(np.float32)[0] = scale
        ternary.nearest_codes(x[row], scale, codes)
        _pack_blocks(codes, out[row])


class IQ2_BN(ternary.TernaryType):
    name, ggml_type, file_type = "iq2_bn", 135, 137
    block_size, block_bytes, row_meta_bytes = 64, 16, 4
    unwritten_code, scale_dtype = 3, np.float32
    encode_rows = staticmethod(_encode)
    decode_rows = staticmethod(_decode)
    pack_rows = staticmethod(_pack_rows)
