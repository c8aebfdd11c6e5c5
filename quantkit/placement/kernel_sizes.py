"""Sizes that kernels and plans share: how many tokens, columns and rows are worked on together, and what that takes.

Pure: plans of models that are not here (placement/workspace.py) read these without loading a kernel. The kernels'
modules pass theirs on under their own names.
"""

from __future__ import annotations

import functools

from quantkit.codegen import cpu_target

BATCH_TOKENS = 512  # of a prompt at a time: the weights are unpacked once for all of them

# gemm: products of batches in integers
LANES = 16  # rows of a panel
PANELS = 2  # worked on together
TILE_TOKENS = 6  # of a tile: their sums stay in registers (on AVX2 those of one panel)
RECORD = 88  # bytes of 32 columns in a tile, times its tokens

# floats: the same in float32
FLOAT_ROWS = 6  # tokens worked on together

# attention
CHUNK = 64  # positions of one token's; a multiple of 16
QUERIES = 192  # rows of q (tokens times heads of a group) in a piece: decoding the keys for them is a small part
KEYS = 128  # positions of a prompt's decoded at a time; a multiple of 32

# experts
EXPERT_ROWS = 32  # of a unit of work
FEW = 3  # tokens of an expert for which vectors are multiplied one by one
LIST = 40  # byte offset in a plan of what is listed: three counters and two more stand before it


def activation_bytes(n: int) -> int:
    """Of a vector in all the forms that kernels read (activations.py)."""
    return 11 * n + n // 8


def tiles_bytes(n: int, tokens: int) -> int:
    """Of the tiles of so many tokens."""
    return -(-tokens // TILE_TOKENS) * RECORD * TILE_TOKENS * (n // 32)


def panels_bytes(n: int, record: int) -> int:
    """Of each thread: the panels, of records of so many bytes, then a tile of results."""
    return PANELS * (n // 32 * record + 4 * LANES * TILE_TOKENS)


@functools.cache
def float_lanes() -> int:
    """Two vectors of this CPU."""
    return 32 if cpu_target.isa().startswith("avx512") else 16


def float_scratch_bytes(n: int) -> int:
    """Of each thread: decoded rows, their panel, a tile of x, a tile of results."""
    return 4 * (2 * float_lanes() * n + FLOAT_ROWS * n + FLOAT_ROWS * float_lanes())


def step_scratch_bytes(heads: int, dim_k: int, group: int, span: int) -> int:
    """Of each thread in one token's attention: queries, and the scores of a group's."""
    return 4 * (heads * dim_k + group * span)


def piece_rows(group: int, tokens: int) -> int:
    """Rows of a piece of a prompt's attention, whole tiles."""
    return -(-tokens * group // FLOAT_ROWS) * FLOAT_ROWS


def piece_bytes(group: int, dim_k: int, dim_v: int, tokens: int, span: int) -> int:
    """Of each thread: keys decoded and transposed, values decoded, queries, scores, results, tops and sums.

    For pieces of `tokens` tokens and `span` positions at a time, a multiple of KEYS.
    """
    rows, wide = piece_rows(group, tokens), -(-dim_v // 32) * 32
    return 4 * (2 * KEYS * dim_k + KEYS * wide + rows * (dim_k + span + wide + 2))


def picked_bytes(experts: int, used: int) -> int:
    """Of the experts of one token."""
    return 8 + 12 * used + 4 * experts


def most_entries(tokens: int, experts: int, used: int, multiple: int) -> int:
    """Tokens of all experts, those of each filled up to a multiple."""
    return tokens * used + experts * (multiple - 1)


def rows_at(experts: int, most: int) -> int:
    """Where in a plan the addresses of rows begin."""
    return LIST + 24 * experts + 8 * most


def plan_bytes(tokens: int, experts: int, used: int, multiple: int) -> int:
    """Of the plan which expert gets which tokens."""
    return LIST + 24 * experts + 20 * most_entries(tokens, experts, used, multiple)


def unit_bytes(n: int, tokens: int, panel: int) -> int:
    """Of each thread in products of experts: panels of gate and up, tiles of their results, addresses."""
    return 2 * (n // 32 * panel + 4 * tokens * EXPERT_ROWS) + 8 * tokens
