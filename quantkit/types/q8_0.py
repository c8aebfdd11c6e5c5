"""Q8_0 (id 8): blocks of 32, 34 bytes.

    offset  size     field
    0       f16      d
    2       32 x i8  q    -127..127 (-128 decodes, but is not written: kernels negate codes)

    y = d * q

Encode: the half d and nearest codes that minimise sum w (x - y)^2; see `families/block32/scale_search.py`. Without
importance w = 1, and below effort "best" d is one of four in closed form; see `families/block32/closed_form.py`.
"""

from __future__ import annotations

import numpy as np

from quantkit.codegen.jit import kernel
from quantkit.types.base import BEST, QuantType
from quantkit.types.families.block32 import closed_form, scale_search
from quantkit.types.families.block32.scale_search import LANES, code_of, half_at, halves_of, inverse_of, put_half

_LO, _HI = np.float32(-127), np.float32(127)
# The candidates, and how many of them each effort (fast, normal, best) tries.
_GRID, _COUNTS = scale_search.scale_grid((127,), 0.9, 1.003, 64), (2, 5, 64)
_STEPS = np.empty(0, np.float32)
# Starts of the closed form; the later ones clip the largest element, which may lower the error of the others.
_STARTS = (1 / (127 * np.array([1, 0.985, 0.97, 0.955]))).astype(np.float32)


@kernel
def _decode(data: np.ndarray, out: np.ndarray) -> None:
    blocks, y = data.reshape(-1, 34), out.reshape(-1, 32)
    for b in range(len(y)):
        scale = half_at(blocks[b], 0)
        for j in range(32):
            y[b, j] = scale * np.float32(np.int32(np.int8(blocks[b, 2 + j])))


@kernel
def _pack(x: np.ndarray, scales: np.ndarray, halves: np.ndarray, out: np.ndarray) -> None:
    """Write blocks, uint8[count, 34], of x float32[count, 32]: scales, given with their bits, and nearest codes."""
    for b in range(len(out)):
        put_half(halves[b], out[b], 0)
        inverse = inverse_of(scales[b])
        for j in range(32):  # codes count from -127; modulo 256 this is two's complement
            out[b, 2 + j] = np.uint8(code_of(x[b, j], inverse, _LO, _HI) - 127)


@kernel
def _encode(x: np.ndarray, importance: np.ndarray, effort: int, out: np.ndarray) -> None:
    blocks, packed = x.reshape(-1, 32), out.reshape(-1, 34)
    data, state = np.empty(scale_search.DATA_SIZE, np.float32), np.empty(scale_search.STATE_SIZE, np.float32)
    space, scales = np.empty((6, LANES), np.float32), np.empty(LANES, np.float32)
    halves, weights = np.empty(LANES, np.uint16), scale_search.relative_weights(importance)
    for first in range(0, len(blocks), LANES):
        batch = blocks[first : first + LANES]
        if len(weights) == 0 and effort != BEST:
            closed_form.find_scales(batch, _STARTS, _LO, _HI, space, scales)
        else:
            scale_search.load_blocks(batch, weights, first, data, state)
            scale_search.find_scales(data, state, _GRID[: _COUNTS[effort]], _STEPS, _LO, _HI)
            scale_search.store_scales(state, scales)
        halves_of(scales, halves)
        _pack(batch, scales, halves, packed[first : first + LANES])


class Q8_0(QuantType):
    name, ggml_type, file_type = "q8_0", 8, 7
    block_size, block_bytes = 32, 34
    uses_imatrix = True
    unwritten_code, moments_effort = 0x80, BEST  # -128
    encode_rows = staticmethod(_encode)
    decode_rows = staticmethod(_decode)
