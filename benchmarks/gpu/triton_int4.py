# mypy: ignore-errors
"""A plain product of a vector and 4-bit weights in Triton, to compare with. Imports triton, which comes with torch.

Row r holds columns / 2 bytes: byte j has the code of column 2 j in its low bits, that of 2 j + 1 in its high bits. A
weight is (code - 8) * scales[r, column // 32]. (mypy is off: the kernel's language is Triton's, not Python's.)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

GROUP = 32  # columns of a scale
CONFIGS = [triton.Config({"ROWS": rows, "GROUPS": groups}, num_warps=warps)
           for rows, groups, warps in ((4, 16, 2), (4, 32, 4), (8, 16, 4), (8, 32, 8), (16, 8, 4))]  # fmt: skip


@triton.autotune(CONFIGS, key=["rows", "n"])
@triton.jit
def _multiply(x, codes, scales, out, rows, n, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None, None]
    byte = tl.arange(0, 16)[None, None, :]  # of a group
    total = tl.zeros((ROWS, GROUPS), tl.float32)
    for first in range(0, n // 32, GROUPS):
        group = first + tl.arange(0, GROUPS)[None, :, None]
        inside = (row < rows) & (group < n // 32)
        packed = tl.load(codes + row * (n // 2) + group * 16 + byte, mask=inside, other=0)
        column = group * 32 + 2 * byte
        low = tl.load(x + column, mask=group < n // 32, other=0).to(tl.float32)
        high = tl.load(x + column + 1, mask=group < n // 32, other=0).to(tl.float32)
        weighted = ((packed & 15).to(tl.float32) - 8) * low + ((packed >> 4).to(tl.float32) - 8) * high
        scale = tl.load(scales + row * (n // 32) + group, mask=inside, other=0).to(tl.float32)
        total += tl.sum(weighted, axis=2) * tl.reshape(scale, (ROWS, GROUPS))
    end = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tl.store(out + end, tl.sum(total, axis=1), mask=end < rows)


def product(x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float32[rows] of x bfloat16[n], codes uint8[rows, n / 2] and scales float16[rows, n / 32]; n a multiple of 32."""
    rows, n = len(codes), len(x)
    out = torch.empty(rows, dtype=torch.float32, device=x.device)
    _multiply[lambda chosen: (triton.cdiv(rows, chosen["ROWS"]),)](x, codes, scales, out, rows, n)
    return out
