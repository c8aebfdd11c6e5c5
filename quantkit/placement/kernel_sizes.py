"""Block sizes that CPU kernels and plans share, and the bytes of working memory that follow from them.

Pure functions: `placement/workspace.py` predicts the memory of models that are not loaded, without numba. "Per thread"
sizes are for one thread's buffer.
"""

from __future__ import annotations

import functools

from quantkit.codegen import cpu_target

BATCH_TOKENS = 512  # prompt tokens per batch: weights are unpacked once for all of them
CACHE_LINE = 64

# gemm.py: integer products of batches
PANEL_ROWS = 16  # weight rows in a panel
PANELS = 2  # panels multiplied together
TILE_TOKENS = 6  # tokens in a tile: with VNNI, their sums with two panels stay in registers
RECORD_BYTES = 88  # bytes in a tile for 32 columns of one token

# float_gemm.py: float32 products of batches
FLOAT_TILE_TOKENS = 6

# attention of a batch: prefill_attention.py, compressed_attention.py, latent_batch.py (absorbed pieces)
# Query rows (tokens times the heads that share keys) of a piece: enough to make decoding keys cheap; whole tiles.
PIECE_QUERIES = 192

# decode_attention.py and prefill_attention.py
MIN_HEAD_DIM = 16  # of a key or value: one vector
DECODE_SPAN = 64  # positions per online-softmax step when decoding; a multiple of 16
KEY_BLOCK = 128  # positions decoded at a time in prefill; a multiple of 32

# hyper_connections.py, altup.py
STREAM_BLOCK = 64  # columns of all streams, copied before they are overwritten

# delta_net.py
DELTA_CHUNK = 64  # tokens of a chunk, a multiple of 32
DELTA_ROWS = -(-DELTA_CHUNK // FLOAT_TILE_TOKENS) * FLOAT_TILE_TOKENS  # of a chunk's matrices: whole tiles
DELTA_FEW_TOKENS = 4  # up to this many tokens of a sequence are computed one by one

# indexer.py
INDEX_BLOCK = 64  # keys of an indexer decoded at a time; a multiple of 8
INDEX_GROUP = 8  # tokens of a batch scored with a block of keys

# blocks/indexer.py, gpu_indexer.py
INDEX_ELEMENTS = 1 << 23  # scores, or on a GPU products of heads with keys, at a time

# latent_attention.py, latent_batch.py
LATENT_BLOCK = 64  # latents decoded at a time, in scratch of each thread; a multiple of 16
LATENT_QUERIES = 96  # tokens of an expanded piece multiplied with a block of keys at a time; whole tiles

# prefill_experts.py
EXPERT_ROWS = 32  # rows of an expert's matrix per unit of work
FEW_TOKENS = 3  # an expert with at most this many tokens multiplies them one by one
ASSIGNMENT_HEADER = 40  # bytes before the runs of an assignment of tokens to experts
RUN_BYTES = 24  # bytes of a run: one expert's entries


def whole_lines(nbytes: int) -> int:
    """Round a size up to whole cache lines."""
    return -(-nbytes // CACHE_LINE) * CACHE_LINE


def whole_vectors(dim: int) -> int:
    """Round elements of a head up to whole vectors of 16 floats."""
    return -(-dim // 16) * 16


def activation_bytes(n: int) -> int:
    """Activation buffer of n columns, with all forms that kernels read (activations.py)."""
    return 13 * n + n // 8


def tiles_bytes(n: int, tokens: int) -> int:
    """Integer tiles of a batch."""
    return -(-tokens // TILE_TOKENS) * RECORD_BYTES * TILE_TOKENS * (n // 32)


@functools.cache
def panel_code_bytes() -> int:
    """Codes of a panel for 32 columns: bytes with VNNI, 16-bit integers on other CPUs."""
    return PANEL_ROWS * 32 * (1 if cpu_target.isa() == "avx512vnni" else 2)


def panels_bytes(n: int, record: int) -> int:
    """Per thread: unpacked panels with `record` bytes per 32 columns, then a tile of results."""
    return PANELS * (n // 32 * record + 4 * PANEL_ROWS * TILE_TOKENS)


@functools.cache
def float_lanes() -> int:
    """Weight rows in a float32 panel: two vectors of this CPU."""
    return 32 if cpu_target.isa().startswith("avx512") else 16


def float_scratch_bytes(n: int) -> int:
    """Per thread: decoded rows, their panel, a tile of x, a tile of results."""
    return 4 * (2 * float_lanes() * n + FLOAT_TILE_TOKENS * n + FLOAT_TILE_TOKENS * float_lanes())


def decode_attention_bytes(heads: int, dim_k: int, group: int, span: int) -> int:
    """Per thread, when decoding: queries, and the scores of one group of heads for `span` positions."""
    return 4 * (heads * whole_vectors(dim_k) + group * span)


def partial_bytes(threads: int, heads: int, dim_v: int) -> int:
    """Partial results of attention when decoding: per thread and head the sum of values, a maximum, a denominator."""
    return 4 * threads * heads * (whole_vectors(dim_v) + 2)


def piece_rows(group: int, tokens: int) -> int:
    """Query rows of a piece of prefill attention, rounded up to whole tiles."""
    return -(-tokens * group // FLOAT_TILE_TOKENS) * FLOAT_TILE_TOKENS


def prefill_attention_bytes(group: int, dim_k: int, dim_v: int, tokens: int, span: int) -> int:
    """Per thread, in prefill: decoded and transposed keys, decoded values, queries, scores, results, softmax states.

    For pieces of `tokens` tokens and `span` positions per online-softmax step, a multiple of KEY_BLOCK.
    """
    rows, width = piece_rows(group, tokens), -(-dim_v // 32) * 32
    return 4 * (2 * KEY_BLOCK * whole_vectors(dim_k) + KEY_BLOCK * width + rows * (dim_k + span + width + 2))


def delta_widths(dim_k: int, dim_v: int) -> tuple[int, int, int]:
    """Of a chunk's matrices: elements in a row of keys, rows of the state, elements in a row of it (delta_net.py)."""
    width_k = -(-dim_k // 16) * 16
    return width_k, -(-width_k // FLOAT_TILE_TOKENS) * FLOAT_TILE_TOKENS, -(-dim_v // 32) * 32


def delta_chunk_bytes(dim_k: int, dim_v: int) -> int:
    """Per thread, in prefill of recurrent layers: the matrices of a head's chunk, its state, weights and rates."""
    width_k, rows_k, width_v = delta_widths(dim_k, dim_v)
    rows = 2 * DELTA_ROWS * (width_k + DELTA_CHUNK + width_v)
    return 4 * (rows + rows_k * (DELTA_CHUNK + width_v) + 4 * DELTA_CHUNK)


def whole_tiles(tokens: int) -> int:
    """Round a number of rows up to whole tiles of float_gemm.py."""
    return -(-tokens // FLOAT_TILE_TOKENS) * FLOAT_TILE_TOKENS


def latent_decode_bytes(heads: int, latent: int, span: int) -> int:
    """Per thread, for one token's attention over latents: decoded latents, and the scores of all heads for a span."""
    return 4 * (LATENT_BLOCK * latent + heads * span)


def index_block_bytes(heads: int, dim: int) -> int:
    """Per thread, for the scores of an indexer: a block of decoded keys, and the products of all heads with it."""
    return 4 * ((INDEX_BLOCK + 4) * dim + heads * INDEX_BLOCK + 16)


def selection_bytes(top_k: int) -> int:
    """The selected positions of a token."""
    return 8 + 8 * top_k


def stream_record_bytes(n: int) -> int:
    """The weights of n residual streams of a token, and scratch."""
    return 4 * ((2 + n) * n + STREAM_BLOCK * n)


def altup_record_bytes(n: int) -> int:
    """Per thread: the coefficients of a token's n streams of AltUp, and scratch."""
    return 4 * (n + n * n + STREAM_BLOCK * n)


def entry_rows(n_ctx: int, rate: int) -> int:
    """Entries that there is room for beside a cache: in fours, as scores are computed."""
    return -(-(n_ctx // rate) // 4) * 4 if rate else 0


def scored_entries(n_ctx: int, rate: int) -> int:
    """Entries that buffers of scores and ranks have room for: no buffer is empty, however short the context."""
    return max(4, entry_rows(n_ctx, rate))


def scored_blocks(n_ctx: int, rate: int) -> int:
    """Blocks of positions that buffers of scores and ranks have room for, the last one not whole."""
    return max(4, -(-n_ctx // rate))


def compressor_bytes(rate: int, kept: int, dim: int, overlapping: bool) -> int:
    """Per thread, to make an entry: the decoded rows of its window, and of the one before; maxima and totals."""
    return 4 * ((1 + overlapping) * rate * kept + 2 * dim)


def compressed_decode_bytes(heads: int, dim: int) -> int:
    """Per thread, for one token's compressed attention over some heads: keys, scores, results, softmax states."""
    return 4 * (LATENT_BLOCK * dim + heads * (LATENT_BLOCK + dim + 2))


def compressed_piece_tokens(heads: int) -> int:
    """Tokens of a piece of a batch in compressed attention."""
    return max(1, PIECE_QUERIES // heads)


def compressed_piece_bytes(heads: int, dim: int) -> int:
    """Per thread, for a piece: decoded and transposed keys, and per query row results, scores, a softmax state."""
    rows = whole_tiles(compressed_piece_tokens(heads) * heads)
    return 4 * (2 * KEY_BLOCK * dim + rows * (dim + KEY_BLOCK + 2) + KEY_BLOCK)


def latent_scratch_bytes(nope: int, kv_lora: int, rows: int) -> int:
    """Per thread: an activation buffer of nope or kv_lora columns, or `rows` decoded rows of a head's matrix."""
    return max(activation_bytes(max(nope, kv_lora)), 4 * rows * max(nope, kv_lora))


def latent_prefill_floats(nope: int, rope: int, kv_lora: int, dim_v: int, rows: int, step: int) -> tuple[int, int, int]:
    """Per thread, for latent attention of a batch, floats of: decoded and transposed latents; matrices of a head; work.

    `rows` and `step` are query rows and positions per softmax step of an absorbed piece. Work is the larger of an
    absorbed piece's queries, results, softmax states and scores, and an expanded piece's keys, values, results, states
    and scores.
    """
    latent, tokens, block = kv_lora + rope, whole_tiles(BATCH_TOKENS), whole_tiles(KEY_BLOCK)
    latents = max((block + KEY_BLOCK) * latent, max(nope, dim_v) * kv_lora)
    absorbed = rows * (max(latent, dim_v) + kv_lora + 2 + step)
    expanded = (nope + rope + FLOAT_TILE_TOKENS) * KEY_BLOCK + block * dim_v + tokens * (dim_v + 2)
    return latents, (nope + dim_v) * kv_lora, max(absorbed, expanded + LATENT_QUERIES * KEY_BLOCK)


def selected_experts_bytes(experts: int, used: int) -> int:
    """Per thread: the selected experts of one token, see decode_experts.py."""
    return 8 + 12 * used + 4 * experts


def max_entries(tokens: int, experts: int, used: int, multiple: int) -> int:
    """Entries of an assignment of tokens to experts, each expert's padded to a multiple."""
    return tokens * used + experts * (multiple - 1)


def row_addresses_offset(experts: int, entries: int) -> int:
    """Offset in an assignment of the addresses of the entries' rows."""
    return ASSIGNMENT_HEADER + RUN_BYTES * experts + 8 * entries


def assignment_bytes(tokens: int, experts: int, used: int, multiple: int) -> int:
    """Assignment of tokens to experts, see prefill_experts.py."""
    return ASSIGNMENT_HEADER + RUN_BYTES * experts + 20 * max_entries(tokens, experts, used, multiple)


def expert_panels_bytes(n: int, tokens: int, panel: int) -> int:
    """Per thread, in products of experts: panels of gate and up, tiles of their results, row addresses."""
    return 2 * (n // 32 * panel + 4 * tokens * EXPERT_ROWS) + 8 * tokens
