"""Q2_0 (id 42): blocks of 64, 18 bytes. A type of llama.cpp; ik_llama.cpp does not know it.

    offset  size     field
    0       f16      d
    2       16 x u8  qs   bits 2 k and 2 k + 1 of byte i: q of element 4 i + k

    y = d * (q - 1)       q in 0..3: -d, 0, d, 2 d

Files of PrismML's fork of llama.cpp from before it was merged have the same id for blocks of 128, 34 bytes. A reader
sees it by the offsets of tensors and refuses them (`formats/gguf/dialects.py`).

Encode: codes and the half d, of either sign, that minimise sum w (x - y)^2, w the importance of the column (1
without): candidates place the block's extreme element around 2 d, around -d or beyond; each is refit and rounded, as in
`families/block32/scale_search.py`. Weights that are ternary already keep their values. llama.cpp's encoder takes the
largest magnitude as d, which only suits those.
"""

from __future__ import annotations

import numpy as np

from quantkit.codegen.jit import kernel
from quantkit.types.base import QuantType
from quantkit.types.families.block32 import scale_search
from quantkit.types.families.block32.scale_search import LANES, code_of, half_at, halves_of, inverse_of, put_half

_LO, _HI = np.float32(-1), np.float32(2)
# The candidates, and how many of them each effort (fast, normal, best) tries.
_GRID, _COUNTS = scale_search.scale_grid((2, -1), 0.6, 9.0, 64), (12, 32, 64)
_STEPS = scale_search.refinement_steps(0.06, 2)


@kernel
def _decode(data: np.ndarray, out: np.ndarray) -> None:
    blocks, y = data.reshape(-1, 18), out.reshape(-1, 64)
    for b in range(len(y)):
        scale = half_at(blocks[b], 0)
        for i in range(16):
            byte = np.int32(blocks[b, 2 + i])
            for k in range(4):
                y[b, 4 * i + k] = scale * np.float32(np.int32((byte >> np.int32(2 * k) & 3) - 1))


@kernel
def _pack(x: np.ndarray, scales: np.ndarray, halves: np.ndarray, out: np.ndarray) -> None:
    """Write blocks, uint8[count, 18], of x float32[count, 64]: scales, given with their bits, and nearest codes."""
    for b in range(len(out)):
        put_half(halves[b], out[b], 0)
        inverse = inverse_of(scales[b])
        for i in range(16):
            byte = np.int32(0)
            for k in range(4):
                byte = np.int32(byte | np.int32(code_of(x[b, 4 * i + k], inverse, _LO, _HI) << np.int32(2 * k)))
            out[b, 2 + i] = np.uint8(byte)


@kernel
def _encode(x: np.ndarray, importance: np.ndarray, effort: int, out: np.ndarray) -> None:
    blocks, packed = x.reshape(-1, 64), out.reshape(-1, 18)
    data, state = np.empty(2 * 64 * LANES, np.float32), np.empty(scale_search.STATE_SIZE, np.float32)
    scales, halves = np.empty(LANES, np.float32), np.empty(LANES, np.uint16)
    weights = scale_search.relative_weights(importance, 64)
    for first in range(0, len(blocks), LANES):
        batch = blocks[first : first + LANES]
        scale_search.load_blocks(batch, weights, first, data, state)
        scale_search.find_scales(data, state, _GRID[: _COUNTS[effort]], _STEPS, _LO, _HI)
        scale_search.store_scales(state, scales)
        halves_of(scales, halves)
        _pack(batch, scales, halves, packed[first : first + LANES])


class Q2_0(QuantType):
    """Q2_0: blocks of 64, 18 bytes."""

    name, ggml_type, file_type = "q2_0", 42, 41
    block_size, block_bytes = 64, 18
    uses_imatrix = True
    encode_rows = staticmethod(_encode)
    decode_rows = staticmethod(_decode)
