"""Predict the runtime's working memory, without weights and KV cache, from tensor names and shapes. Pure functions.

It is the memory of the buffers that `runtime/compiled` allocates for `fast` numerics: one op list for prompts,
BATCH tokens at a time, and one for single tokens. Operations that use a buffer of the same name and size share it, in
all layers, so the sum is over distinct buffers. With B = 512 tokens, T threads, and E, q, k, v and F the widths of the
hidden state, queries, keys, values and the feed-forward:

    prompts   4 B (2 E + 2 q + k + v + 2 F)     x, its norm, q, k, v, the attention output, gate and up
              RECORD_BYTES/32 B n for n of E, q, F    the same as integer tiles, if the weights are quantized
              T panels(n)                       unpacked rows of 32 weights, for each thread and width
              T pieces                          keys and values of 128 positions, queries, scores
              latents: the query latent, one latent, and for each thread a head's matrices and a block of latents
              experts: most = B used + 5 count tile entries of E and F, three vectors per expert, lists
              compressed attention: 4 B (compressors' products + results of groups), and for each thread the rows of
              a window, a block of keys, and the query rows of a piece; streams: 4 B 2 n E for n of them
              recurrent layers: 4 B (c + 2 V), for the c channels of the convolution and the V elements of the values,
              and T chunks with the state of a head
    tokens    T activations(E), logits, q, k, v, gate, up: small
    RoPE      8 bytes per position and pair, for both; 4 bytes per position if queries are scaled by it

`placement/kernel_sizes.py` has the sizes for this CPU. A test compares the prediction with the buffers of loaded
models.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from quantkit import archs
from quantkit.archs.common import blocks, required_tensors
from quantkit.errors import QuantkitError
from quantkit.placement import kernel_sizes
from quantkit.placement.kernel_sizes import BATCH_TOKENS, activation_bytes, whole_lines
from quantkit.placement.tensor_info import TensorInfo
from quantkit.repack.eligible import EMBEDDINGS

_PANEL_SCALES = 128  # bytes of the scales and minimums of 16 rows of 32 columns, unpacked: 64 to 256, by the type
_BATCH_RECORDS = 24 * (1 + BATCH_TOKENS)  # bytes of the record of a batch, and of its sequences: at most one a token
_TRANSPOSED_ROWS = 8  # of a head's matrix, decoded at a time: 16 for the one type that interleaves 16 rows
_DECODED = 64 << 20
_SELECTING = re.compile(r"\.indexer\.|\.attn_compressor")
_FLOATS = frozenset(("f32", "f16", "bf16"))


class _Buffers(dict[tuple[str, int], int]):
    """Bytes by buffer name and size, like those of an OpList."""

    def add(self, name: str, nbytes: int) -> None:
        self[name, nbytes] = nbytes

    def private(self, name: str, nbytes: int, threads: int) -> None:
        self[name, nbytes] = threads * -(-nbytes // 64) * 64


def work_bytes(
    tensors: Mapping[str, TensorInfo], metadata: Mapping[str, Any], n_ctx: int, threads: int, mla: int = 3
) -> int | None:
    """Bytes of working memory of a model on the CPU, for caches of `n_ctx` tokens and latent attention as `mla` says.

    None if the architecture is not known or a tensor is missing.
    """
    described = _described(tensors, metadata)
    if described is None or "token_embd.weight" not in tensors:
        return None
    parts, streams = described
    vocab, embd = tensors["token_embd.weight"].shape
    prompt, step = _Buffers(), _Buffers()
    tables: set[tuple[object, int]] = set()  # what they are of, and bytes for each position
    prompt.add("x", 4 * BATCH_TOKENS * embd)
    prompt.add("batch", _BATCH_RECORDS)
    step.add("x and logits", 4 * (embd + vocab))
    for part in parts:
        if isinstance(part, blocks.Attention):
            _attention(prompt, step, tensors, part, threads)
            if part.indexer is not None:
                _indexer_of_blocks(prompt, step, tensors, part.indexer, threads, n_ctx)
            tables.add((part.rope, 8 * (part.rope.dim // 2)))
            tables.add((part.temperature, 4 if part.temperature else 0))
        elif isinstance(part, blocks.LatentAttention):
            _latent_attention(prompt, step, tensors, part, threads, n_ctx, mla)
            tables.add((part.rope, 8 * (part.rope.dim // 2)))
            tables.add((part.temperature, 4 if part.temperature else 0))
            tables.add((blocks.HeadScaling, 4 if part.scaling else 0))  # of logarithms
        elif isinstance(part, blocks.CompressedAttention):
            _compressed_attention(prompt, step, tensors, part, threads, n_ctx)
            tables.add((part.rope, 8 * (part.rope.dim // 2)))
        elif isinstance(part, blocks.DeltaNet):
            _recurrent(prompt, step, tensors, part, threads)
        elif isinstance(part, blocks.KimiDelta):
            _kimi_delta(prompt, step, tensors, part, threads)
        elif isinstance(part, blocks.Mamba2):
            _mamba2(prompt, step, tensors, part, threads)
        elif isinstance(part, blocks.ShortConv):
            _short_conv(prompt, step, tensors, part, threads)
        elif isinstance(part, blocks.LayerInput):
            _layer_input(prompt, step, tensors, part, threads)
        elif isinstance(part, blocks.Laurel):
            _laurel(prompt, step, tensors, part, threads)
        elif isinstance(part, blocks.NGrams):
            _ngrams(prompt, step, tensors, part, threads)
        elif isinstance(part, blocks.Experts):
            _experts(prompt, step, tensors, part, threads)
        elif isinstance(part, blocks.FeedForward):
            _feed_forward(prompt, step, tensors, part, threads)
        else:
            return None
    if isinstance(streams, blocks.AltUpHead):
        _altup(prompt, step, tensors, streams, embd, threads)
    elif isinstance(streams, blocks.StreamMixer):
        _mixers(prompt, step, tensors, streams, embd, threads)
    elif streams is not None:
        _streams(prompt, step, tensors, streams, embd, threads)
    return sum(prompt.values()) + sum(step.values()) + 2 * n_ctx * sum(nbytes for _, nbytes in tables)


def _described(
    tensors: Mapping[str, TensorInfo], metadata: Mapping[str, Any]
) -> tuple[list[blocks.Part], blocks.StreamHead | blocks.StreamMixer | blocks.AltUpHead | None] | None:
    """The parts of all blocks, whose matrices are all in `tensors`, and the residual streams if there are several.

    None if they are not or cannot be known.
    """
    try:
        arch = archs.get(str(metadata.get("general.architecture")))
        hparams = arch.hparams(metadata, tensors.keys())
        required = required_tensors.required(hparams, arch.blocks(hparams), arch.head(hparams), tensors)
        if not all(name in tensors for name, _ in required):
            return None
        parts = [part for block in arch.blocks(hparams) for part in block.parts]
        shared = (part for part in parts if isinstance(part, blocks.Attention))
        return None if any(part.heads % part.kv_heads for part in shared) else (parts, arch.head(hparams).streams)
    except QuantkitError:
        return None


def device_bytes(shapes: Mapping[str, tuple[int, ...]], used: int, tokens: int = BATCH_TOKENS) -> int:
    """Upper estimate of a device's working memory in bytes for prompts of `tokens` tokens (CPU only: `work_bytes`).

    On the CPU it is enough for the plans of `compiled/worker_plans.py`, and on a GPU for what torch allocates.

    The sum of: inputs and outputs of all matrices of the largest layer, float32 for all tokens (of experts for `used`
    of them per token); twice the hidden state; the largest matrix decoded to 16 bits, at most 64 MiB at a time; the
    logits; with an indexer its scores, of which 40 bytes each are held while they are ranked, and with compressed
    attention as many of its scores. Residual streams are as wide as the matrices that read them.
    """
    layers: dict[str, int] = {}
    selecting = 40 * kernel_sizes.INDEX_ELEMENTS if any(map(_SELECTING.search, shapes)) else 0
    largest = state = logits = 0
    for name, shape in shapes.items():
        if len(shape) < 2 or not shape[-1]:
            continue
        rows, columns = shape[-2:]
        largest = max(largest, min(_DECODED, 2 * rows * columns) * (name not in EMBEDDINGS))
        if name == "output.weight":
            logits = 4 * tokens * rows
        elif name.startswith("blk."):
            times = max(1, used) if "_exps." in name else 1
            key = name.split(".")[1] + (" attention" if ".attn_" in name else "")
            layers[key] = layers.get(key, 0) + 4 * tokens * times * (rows + columns)
        state = max(state, 8 * tokens * columns * any(part in name for part in (".attn_norm", ".attn_q", ".hc_")))
    return max(layers.values(), default=0) + state + largest + logits + selecting


def _panel_record() -> int:
    return kernel_sizes.panel_code_bytes() + _PANEL_SCALES


def _rows(tensors: Mapping[str, TensorInfo], linear: blocks.Linear) -> int:
    """Rows of a matrix."""
    return tensors[linear.weight].shape[0] if linear.rows is None else linear.rows[1] - linear.rows[0]


def _read(buffers: _Buffers, tensors: list[TensorInfo], n: int, threads: int) -> None:
    """Add the buffers for products of a batch with matrices of `n` columns: tiles of the batch, panels of weights."""
    for t in tensors:
        if t.type.name in _FLOATS:
            buffers.private("panels", kernel_sizes.float_scratch_bytes(n), threads)
        else:
            buffers.add("tiles", kernel_sizes.tiles_bytes(n, BATCH_TOKENS))
            buffers.private("panels", kernel_sizes.panels_bytes(n, _panel_record()), threads)


def _attention(
    prompt: _Buffers, step: _Buffers, tensors: Mapping[str, TensorInfo], part: blocks.Attention, threads: int
) -> None:
    q, k, v, out = (tensors[linear.weight] for linear in (part.q, part.k, part.v, part.out))
    embd = q.shape[1]
    heads, dim_k, dim_v, group = part.heads, part.head_dim_k, part.head_dim_v, part.heads // part.kv_heads
    widths = {"q": heads * dim_k, "k": _rows(tensors, part.k), "v": _rows(tensors, part.v)}
    if part.gated:
        widths |= {"queries and gates": q.shape[0], "query gates": heads * dim_k}
    for name, width in widths.items():
        prompt.add(name, 4 * BATCH_TOKENS * width)
        step.add(name, 4 * width)
    if part.head_gate is not None:
        prompt.add("head gates", 4 * BATCH_TOKENS * heads)
        step.add("head gates", 4 * heads)
    prompt.add("normed", 4 * BATCH_TOKENS * embd if part.norm else 0)
    prompt.add("attended", 4 * BATCH_TOKENS * heads * dim_v)
    _read(prompt, [q, k, v], embd, threads)
    _read(prompt, [out], heads * dim_v, threads)
    pieces = kernel_sizes.prefill_attention_bytes(
        group, dim_k, dim_v, max(1, kernel_sizes.PIECE_QUERIES // group), kernel_sizes.KEY_BLOCK
    )
    prompt.private("pieces", pieces, threads)
    step.private("normed", activation_bytes(embd), threads)
    step.private("scratch", kernel_sizes.decode_attention_bytes(heads, dim_k, group, kernel_sizes.DECODE_SPAN), threads)
    step.add("partial", kernel_sizes.partial_bytes(threads, heads, dim_v))
    step.private("merged", activation_bytes(heads * dim_v), threads)
    step.add("added", 4 * embd)
    if part.norms_across_heads:
        for name, norm, linear in (("q normed", part.q_norm, part.q), ("k normed", part.k_norm, part.k)):
            step.add(name, 4 * _rows(tensors, linear) if norm else 0)
    after = part.post_norm or (part.out.is_scaled or None)
    _result_norms(prompt, step, part.sub_norm, heads * dim_v, after, embd, threads)


def _recurrent(
    prompt: _Buffers, step: _Buffers, tensors: Mapping[str, TensorInfo], part: blocks.DeltaNet, threads: int
) -> None:
    embd, sizes = tensors[part.out.weight].shape[0], part.sizes
    widths = {"qkv": sizes.channels, "delta gates": sizes.inner, "delta": sizes.inner}
    if part.gate is None:
        widths["projected"] = tensors[part.qkv.weight].shape[0]
    rates = {"ba": part.ba, "beta": part.beta, "alpha": part.alpha}
    widths |= {name: tensors[linear.weight].shape[0] for name, linear in rates.items() if linear is not None}
    for name, width in widths.items():
        prompt.add(name, 4 * BATCH_TOKENS * width)
        step.add(name, 4 * width)
    readers = [linear for linear in (part.qkv, part.gate, *rates.values()) if linear is not None]
    prompt.add("normed", 4 * BATCH_TOKENS * embd if part.norm else 0)
    _read(prompt, [tensors[linear.weight] for linear in readers], embd, threads)
    _read(prompt, [tensors[part.out.weight]], sizes.inner, threads)
    prompt.private("chunk", kernel_sizes.delta_chunk_bytes(sizes.head_dim_k, sizes.head_dim_v), threads)
    step.private("normed", activation_bytes(embd), threads)
    step.add("gated", activation_bytes(sizes.inner))
    step.add("added", 4 * embd)


def _kimi_delta(
    prompt: _Buffers, step: _Buffers, tensors: Mapping[str, TensorInfo], part: blocks.KimiDelta, threads: int
) -> None:
    embd, sizes = tensors[part.out.weight].shape[0], part.sizes
    dim, inner = sizes.head_dim_k, sizes.inner
    widths = {
        "qkv": sizes.channels, "kda rates": inner, "kda gates": inner, "beta": sizes.value_heads, "low rates": dim,
        "low gates": dim, "delta": inner,
    }  # fmt: skip
    for name, width in widths.items():
        prompt.add(name, 4 * BATCH_TOKENS * width)
        step.add(name, 4 * width)
    for name in ("kda q", "kda k", "kda v"):
        prompt.add(name, 4 * BATCH_TOKENS * inner)
    prompt.add("normed", 4 * BATCH_TOKENS * embd)
    for n, linears in (
        (embd, (part.q, part.k, part.v, part.f_a, part.g_a, part.beta)), (dim, (part.f_b, part.g_b)),
        (inner, (part.out,)),
    ):  # fmt: skip
        _read(prompt, [tensors[linear.weight] for linear in linears], n, threads)
    step.private("normed", activation_bytes(embd), threads)
    step.private("low rank", activation_bytes(dim), threads)
    step.add("gated", activation_bytes(inner))
    step.add("added", 4 * embd)


def _mamba2(
    prompt: _Buffers, step: _Buffers, tensors: Mapping[str, TensorInfo], part: blocks.Mamba2, threads: int
) -> None:
    embd, sizes = tensors[part.out.weight].shape[0], part.sizes
    widths = {
        "mixer inputs": sizes.channels, "mixer gates": sizes.inner, "mixer steps": sizes.value_heads,
        "mixer out": sizes.inner,
    }  # fmt: skip
    for name, width in widths.items():
        prompt.add(name, 4 * BATCH_TOKENS * width)
        step.add(name, 4 * width)
    prompt.add("normed", 4 * BATCH_TOKENS * embd)
    _read(prompt, [tensors[part.entering.weight]], embd, threads)
    _read(prompt, [tensors[part.out.weight]], sizes.inner, threads)
    step.private("normed", activation_bytes(embd), threads)
    step.add("mixed", activation_bytes(sizes.inner))
    step.add("added", 4 * embd)


def _short_conv(
    prompt: _Buffers, step: _Buffers, tensors: Mapping[str, TensorInfo], part: blocks.ShortConv, threads: int
) -> None:
    channels = part.sizes.channels
    prompt.add("normed", 4 * BATCH_TOKENS * channels)
    prompt.add("projected", 4 * BATCH_TOKENS * 3 * channels)
    prompt.add("convolved", 4 * BATCH_TOKENS * channels)
    _read(prompt, [tensors[linear.weight] for linear in (part.in_proj, part.out)], channels, threads)
    step.private("normed", activation_bytes(channels), threads)
    step.add("projected", 4 * 3 * channels)
    step.add("gated", activation_bytes(channels))
    step.add("added", 4 * channels)


def _layer_input(
    prompt: _Buffers, step: _Buffers, tensors: Mapping[str, TensorInfo], part: blocks.LayerInput, threads: int
) -> None:
    embd, width, every = tensors[part.gate.weight].shape[1], part.width, tensors[part.table].shape[1]
    prompt.add("embedded", 4 * BATCH_TOKENS * embd)
    for buffers, tokens in ((prompt, BATCH_TOKENS), (step, 1)):
        buffers.add("layer rows", 4 * tokens * every)
        buffers.add("gate", 4 * tokens * width)
        buffers.add("added", 4 * tokens * embd)
    prompt.add("layer input", 4 * BATCH_TOKENS * width)
    _read(prompt, [tensors[part.project.weight], tensors[part.gate.weight]], embd, threads)
    _read(prompt, [tensors[part.out.weight]], width, threads)
    step.add("embedded", 4 * embd)
    step.add("layer inputs", 4 * every)
    step.add("hidden", activation_bytes(width))
    step.private("normed", activation_bytes(embd), threads)


def _latent_attention(
    prompt: _Buffers, step: _Buffers, tensors: Mapping[str, TensorInfo], part: blocks.LatentAttention, threads: int,
    n_ctx: int, mla: int,
) -> None:  # fmt: skip
    """Flash attention, except for the absorbed tokens of `mla` 2."""
    latent, dim_k, width = part.latent, part.head_dim_k, part.heads * part.head_dim_v
    embd = tensors[part.kv_a.weight].shape[1]
    tiled = 4 * kernel_sizes.whole_tiles(BATCH_TOKENS)
    prompt.add("normed", 4 * BATCH_TOKENS * embd)
    prompt.add("latent", tiled * latent)
    prompt.add("latent q", tiled * part.heads * dim_k)
    prompt.add("attended", 4 * BATCH_TOKENS * width)
    step.private("normed", activation_bytes(embd), threads)
    step.add("latent", 4 * latent)
    step.add("q", 4 * part.heads * dim_k)
    step.add("added", 4 * embd)
    scratch = kernel_sizes.latent_scratch_bytes(part.nope, part.kv_lora, _TRANSPOSED_ROWS)
    step.private("latent scratch", scratch, threads)
    _read(prompt, [tensors[(part.q_a or part.q).weight], tensors[part.kv_a.weight]], embd, threads)
    if part.q_a is not None:
        q_lora = tensors[part.q_a.weight].shape[0]
        _read(prompt, [tensors[part.q.weight]], q_lora, threads)
        prompt.add("query latent", 4 * BATCH_TOKENS * q_lora)
        step.add("query latent", 4 * q_lora)
        step.private("query latent normed", activation_bytes(q_lora), threads)
    _read(prompt, [tensors[part.out.weight]], width, threads)
    if not mla:
        _latent_heads(prompt, step, part, threads)
        return
    whole = -(-n_ctx // kernel_sizes.KEY_BLOCK) * kernel_sizes.KEY_BLOCK
    span, positions = (whole, whole) if mla == 2 else (kernel_sizes.LATENT_BLOCK, kernel_sizes.KEY_BLOCK)
    step.add("latent queries", 4 * part.heads * latent)
    step.add("partial", 4 * threads * part.heads * (part.kv_lora + 2))
    step.private("latents", kernel_sizes.latent_decode_bytes(part.heads, latent, span), threads)
    step.add("attended", activation_bytes(width))
    rows = kernel_sizes.PIECE_QUERIES
    floats = kernel_sizes.latent_prefill_floats(
        part.nope, part.rope.dim, part.kv_lora, part.head_dim_v, rows, positions
    )
    prompt.private("pieces", 4 * sum(floats), threads)
    if part.indexer is not None:
        if part.indexer.q_norm is not None:
            entering = tensors[part.indexer.q_b.weight].shape[1]
            prompt.add("index query normed", 4 * BATCH_TOKENS * entering)
            step.private("index query normed", activation_bytes(entering), threads)
        _indexer(prompt, step, part.indexer, threads, max(n_ctx, part.indexer.top_k))


def _indexer(prompt: _Buffers, step: _Buffers, part: blocks.Indexer, threads: int, n_ctx: int) -> None:
    """Keys, queries and scores of an indexer, and what it selects."""
    for buffers, tokens in ((prompt, BATCH_TOKENS), (step, 1)):
        buffers.add("selection", tokens * kernel_sizes.selection_bytes(part.top_k))
        for name, n in (("index key", part.dim), ("index weights", part.heads), ("index q", part.heads * part.dim)):
            buffers.add(name, 4 * tokens * n)
        buffers.private("index ranks", 4 * n_ctx, threads)
        buffers.private("index block", kernel_sizes.index_block_bytes(part.heads, part.dim), threads)
    step.add("index scores", 4 * n_ctx)
    prompt.private("index scores", 4 * n_ctx * kernel_sizes.INDEX_GROUP, threads)


def _compressed_attention(
    prompt: _Buffers, step: _Buffers, tensors: Mapping[str, TensorInfo], part: blocks.CompressedAttention,
    threads: int, n_ctx: int,
) -> None:  # fmt: skip
    embd, width, rank = tensors[part.kv.weight].shape[1], part.heads // part.groups * part.dim, part.groups * part.rank
    widths = {"k": part.dim, "query latent": part.q_lora, "group outputs": rank}
    for name, n in widths.items():
        prompt.add(name, 4 * BATCH_TOKENS * n)
        step.add(name, 4 * n)
    prompt.add("q", 4 * (BATCH_TOKENS * part.heads + kernel_sizes.FLOAT_TILE_TOKENS) * part.dim)
    of_compressors = [linear for each in part.compressors for linear in (each.kv, each.gate)]
    for i, linear in enumerate(of_compressors):
        prompt.add(f"compressor {i}", 4 * BATCH_TOKENS * tensors[linear.weight].shape[0])
    for name, n in (("normed", embd), ("attended", part.groups * width), ("joined", rank)):
        prompt.add(name, 4 * BATCH_TOKENS * n)
    _read(prompt, [tensors[linear.weight] for linear in (part.q_a, part.kv, *of_compressors)], embd, threads)
    for linear, n in ((part.q_b, part.q_lora), (part.out_a, width), (part.out_b, rank)):
        _read(prompt, [tensors[linear.weight]], n, threads)
    step.add("q", 4 * part.heads * part.dim)
    step.add("kept", 4 * part.kept)
    step.add("group results", part.groups * whole_lines(activation_bytes(width)))
    step.add("added", 4 * embd)
    for name, n in (("normed", embd), ("query latent normed", part.q_lora), ("joined", rank)):
        step.private(name, activation_bytes(n), threads)
    prompt.private("pieces", kernel_sizes.compressed_piece_bytes(part.heads, part.dim), threads)
    step.private("pieces", kernel_sizes.compressed_decode_bytes(-(-part.heads // threads), part.dim), threads)
    for buffers, tokens in ((prompt, BATCH_TOKENS), (step, 1)):
        _entries(buffers, part, tokens, threads, n_ctx)


def _entries(buffers: _Buffers, part: blocks.CompressedAttention, tokens: int, threads: int, n_ctx: int) -> None:
    """What makes entries, and the indexer that selects some."""
    buffers.private("kept row", 4 * max(part.kept, part.dim), threads)
    if part.compressor is not None:
        c = part.compressor
        nbytes = kernel_sizes.compressor_bytes(c.rate, part.kept, part.widest, c.overlapping)
        buffers.private("windows", nbytes, threads)
    if part.indexer is None:
        return
    indexer = part.indexer
    room = kernel_sizes.scored_entries(n_ctx, indexer.compressor.rate)
    buffers.add("index q", 4 * tokens * indexer.heads * indexer.dim)
    buffers.add("index weights", 4 * tokens * indexer.heads)
    buffers.add("selection", tokens * kernel_sizes.selection_bytes(indexer.top_k))
    if tokens == 1:
        buffers.add("index scores", 4 * room)
    else:
        buffers.private("index scores", 4 * room * kernel_sizes.INDEX_GROUP, threads)
        buffers.private("selected by any", 8 * room, threads)
    buffers.private("index ranks", 4 * room, threads)
    buffers.private("index products", 4 * indexer.heads * kernel_sizes.INDEX_BLOCK, threads)


def _streams(
    prompt: _Buffers, step: _Buffers, tensors: Mapping[str, TensorInfo], head: blocks.StreamHead, embd: int,
    threads: int,
) -> None:  # fmt: skip
    """The residual streams of hyper-connections, their norms and weights."""
    n, wide, record = head.streams, head.streams * embd, kernel_sizes.stream_record_bytes(head.streams)
    for buffers, tokens in ((prompt, BATCH_TOKENS), (step, 1)):
        for name, width in (("streams", wide), ("mixing", (2 + n) * n), ("entering", embd)):
            buffers.add(name, 4 * tokens * width)
    prompt.add("streams normed", 4 * BATCH_TOKENS * wide)
    prompt.add("stream weights", BATCH_TOKENS * record)
    _read(prompt, [tensors[head.fn.weight]], wide, threads)
    step.private("streams normed", activation_bytes(wide), threads)
    step.private("stream weights", record, threads)


def _altup(
    prompt: _Buffers, step: _Buffers, tensors: Mapping[str, TensorInfo], head: blocks.AltUpHead, embd: int,
    threads: int,
) -> None:  # fmt: skip
    """The residual streams of AltUp, products with the matrices of the head, coefficients."""
    n = head.streams
    for buffers, tokens in ((prompt, BATCH_TOKENS), (step, 1)):
        for name, width in (("streams", n * embd), ("products", n * embd), ("router", n), ("entering", embd)):
            buffers.add(name, 4 * tokens * width)
        buffers.private("stream weights", kernel_sizes.altup_record_bytes(n), threads)
    _read(prompt, [tensors[linear.weight] for linear in head.matrices], embd, threads)


def _laurel(
    prompt: _Buffers, step: _Buffers, tensors: Mapping[str, TensorInfo], part: blocks.Laurel, threads: int
) -> None:
    left, right = tensors[part.left.weight], tensors[part.right.weight]
    prompt.add("laurel", 4 * BATCH_TOKENS * part.rank)
    step.add("laurel", 4 * part.rank)
    step.private("laurel quantized", activation_bytes(part.rank), threads)
    _read(prompt, [left], left.shape[1], threads)
    _read(prompt, [right], part.rank, threads)


def _mixers(
    prompt: _Buffers, step: _Buffers, tensors: Mapping[str, TensorInfo], head: blocks.StreamMixer, embd: int,
    threads: int,
) -> None:  # fmt: skip
    """The residual streams that gates of low rank mix, their norms and gates."""
    wide = head.streams * embd
    widths = {"streams": wide, "entering": embd, "low rank": head.rank, "stream gates": wide,
              "stream shares": head.streams}  # fmt: skip
    for buffers, tokens in ((prompt, BATCH_TOKENS), (step, 1)):
        for name, width in widths.items():
            buffers.add(name, 4 * tokens * width)
    prompt.add("streams normed", 4 * BATCH_TOKENS * wide)
    _read(prompt, [tensors[head.down.weight]], wide, threads)
    _read(prompt, [tensors[head.up.weight]], head.rank, threads)
    step.private("streams normed", activation_bytes(wide), threads)
    step.add("low rank activated", activation_bytes(head.rank))


def _ngrams(
    prompt: _Buffers, step: _Buffers, tensors: Mapping[str, TensorInfo], part: blocks.NGrams, threads: int
) -> None:
    """Embeddings of n-grams and their products."""
    (embd, width), wide = tensors[part.value.weight].shape, tensors[part.key.weight].shape[0]
    for buffers, tokens in ((prompt, BATCH_TOKENS), (step, 1)):
        for name, n in (("ngram rows", width), ("ngram keys", wide), ("ngram value", embd)):
            buffers.add(name, 4 * tokens * n)
    _read(prompt, [tensors[linear.weight] for linear in (part.key, part.value)], width, threads)
    step.private("ngrams", activation_bytes(width), threads)


def _indexer_of_blocks(
    prompt: _Buffers, step: _Buffers, tensors: Mapping[str, TensorInfo],
    part: blocks.PooledIndexer | blocks.BlockIndexer, threads: int, n_ctx: int,
) -> None:  # fmt: skip
    """Keys, queries and scores of an indexer of blocks, and what it selects: for all heads, or for each KV head."""
    records, rows, room = 1, part.rate, kernel_sizes.scored_entries(n_ctx, part.rate)
    if isinstance(part, blocks.BlockIndexer):
        records, rows = part.heads, kernel_sizes.INDEX_BLOCK + 4
        room = kernel_sizes.scored_blocks(n_ctx, part.rate)
    _read(prompt, [tensors[linear.weight] for linear in (part.q, part.k)], tensors[part.q.weight].shape[1], threads)
    for buffers, tokens in ((prompt, BATCH_TOKENS), (step, 1)):
        buffers.add("index key", 4 * tokens * part.dim)
        buffers.add("index q", 4 * tokens * part.heads * part.dim)
        buffers.add("selection", tokens * records * kernel_sizes.selection_bytes(part.top_blocks))
        buffers.private("index rows", 4 * rows * part.dim, threads)
        buffers.private("index ranks", 4 * room, threads)
        buffers.private("index products", 4 * part.heads * kernel_sizes.INDEX_BLOCK, threads)
    step.add("index scores", 4 * records * room)
    prompt.private("index scores", 4 * records * room * kernel_sizes.INDEX_GROUP, threads)


def _latent_heads(prompt: _Buffers, step: _Buffers, part: blocks.LatentAttention, threads: int) -> None:
    """`mla` 0: keys and values of all heads."""
    dim_k, tiled = part.head_dim_k, 4 * kernel_sizes.whole_tiles(BATCH_TOKENS)
    prompt.add("latent k", tiled * part.heads * dim_k)
    prompt.add("latent v", tiled * part.heads * part.head_dim_v)
    prompt.private("matrices", 8 * max(part.nope, part.head_dim_v) * part.kv_lora, threads)
    pieces = kernel_sizes.prefill_attention_bytes(
        1, dim_k, part.head_dim_v, kernel_sizes.PIECE_QUERIES, kernel_sizes.KEY_BLOCK
    )
    prompt.private("pieces", pieces, threads)
    step.private("latent normed", activation_bytes(part.kv_lora), threads)
    step.add("k", 4 * part.heads * dim_k)
    step.add("v", 4 * part.heads * part.head_dim_v)
    scratch = kernel_sizes.decode_attention_bytes(part.heads, dim_k, 1, kernel_sizes.DECODE_SPAN)
    step.private("scratch", scratch, threads)
    step.add("partial", 4 * threads * part.heads * (part.head_dim_v + 2))
    step.private("merged", activation_bytes(part.heads * part.head_dim_v), threads)


def _result_norms(
    prompt: _Buffers, step: _Buffers, sub_norm: blocks.Norm | None, n: int, after: object, embd: int, threads: int
) -> None:
    """Add the buffers for a norm of n elements before the last product, and for a norm or scale after it."""
    if sub_norm is not None:
        step.private("sub normed", activation_bytes(n), threads)
    if after is not None:
        prompt.add("added", 4 * BATCH_TOKENS * embd)


def _feed_forward(
    prompt: _Buffers, step: _Buffers, tensors: Mapping[str, TensorInfo], part: blocks.FeedForward, threads: int
) -> None:
    gate, up, down = (tensors[linear.weight] for linear in (part.gate, part.up, part.down))
    ff, embd = _rows(tensors, part.gate), gate.shape[1]
    for name in ("gate",) if part.gate == part.up else ("gate", "up"):
        prompt.add(name, 4 * BATCH_TOKENS * ff)
        step.add(name, 4 * ff)
    if part.cutoff is not None:
        step.add("largest gates", 4 * ff)
    step.add("hidden", activation_bytes(ff))
    _read(prompt, [gate, up], embd, threads)
    _read(prompt, [down], ff, threads)
    after = part.post_norm or (part.down.is_scaled or None)
    _result_norms(prompt, step, part.sub_norm, ff, after, embd, threads)


def _experts(
    prompt: _Buffers, step: _Buffers, tensors: Mapping[str, TensorInfo], part: blocks.Experts, threads: int
) -> None:
    router, gate, up, down = (tensors[linear.weight] for linear in (part.router, part.gate, part.up, part.down))
    count, ff, embd, used, width = part.stacked, part.ff, router.shape[1], part.used, gate.shape[2]
    if part.shared is not None:
        _feed_forward(prompt, step, tensors, part.shared, threads)
    if part.table is not None:
        prompt.add(part.table, 8 * BATCH_TOKENS * used)
        step.add(part.table, 8 * used)
    most = kernel_sizes.max_entries(BATCH_TOKENS, count, used, kernel_sizes.TILE_TOKENS)
    _read(prompt, [router], embd, threads)
    prompt.add("router", 4 * BATCH_TOKENS * part.count)
    prompt.add("assignment", kernel_sizes.assignment_bytes(BATCH_TOKENS, count, used, kernel_sizes.TILE_TOKENS))
    prompt.add("selected", 8 * BATCH_TOKENS * used)
    prompt.add("expert weights", 4 * BATCH_TOKENS * used)
    if not {gate.type.name, up.type.name} <= _FLOATS:
        prompt.add("gathered", most * kernel_sizes.RECORD_BYTES * (width // 32))
    prompt.add("activated", most * (4 * ff if down.type.name in _FLOATS else kernel_sizes.RECORD_BYTES * (ff // 32)))
    for name, n in (("vectors", width), ("activated vectors", ff)):
        prompt.add(name, count * kernel_sizes.FEW_TOKENS * whole_lines(activation_bytes(n)))
    if gate.type is not up.type:
        for i in range(2):
            prompt.add(f"product {i}", 4 * most * ff)
    for t in (gate, up, down):
        panel = 8 * kernel_sizes.EXPERT_ROWS * 32 if t.type.name in _FLOATS else 2 * _panel_record()
        prompt.private("panels", kernel_sizes.expert_panels_bytes(t.shape[2], kernel_sizes.TILE_TOKENS, panel), threads)
    if part.post_norm is not None:
        for name in ("both", "routed", "router normed"):
            prompt.add(name, 4 * BATCH_TOKENS * embd)
        for name in ("both", "routed"):
            step.add(name, 4 * embd)
        step.private("router normed", activation_bytes(embd), threads)
    if part.latent_down is not None and part.latent_up is not None:
        _read(prompt, [tensors[part.latent_down.weight]], embd, threads)
        _read(prompt, [tensors[part.latent_up.weight]], width, threads)
        for name in ("latents", "routed latents"):
            prompt.add(name, 4 * BATCH_TOKENS * width)
            step.add(name, 4 * width)
        step.add("added", 4 * width)
        step.private("quantized latents", activation_bytes(width), threads)
        if part.latent_up.is_scaled:
            prompt.add("added", 4 * BATCH_TOKENS * embd)
    if part.deferred:
        prompt.add("deferred", 4 * BATCH_TOKENS * embd)
        step.add("deferred", 4 * embd)
    step.add("router", 4 * part.count)
    step.private("selected", kernel_sizes.selected_experts_bytes(part.count, used), threads)
    step.add("experts", used * whole_lines(activation_bytes(ff)))
    step.add("products", 8 * used * ff)
