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
    tokens    T activations(E), logits, q, k, v, gate, up: small
    RoPE      8 bytes per position and pair, for both

`placement/kernel_sizes.py` has the sizes for this CPU. A test compares the prediction with the buffers of loaded
models.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from quantkit.placement import kernel_sizes
from quantkit.placement.kernel_sizes import BATCH_TOKENS, activation_bytes, whole_lines
from quantkit.placement.tensor_info import TensorInfo

_PANEL_RECORD = 640  # bytes of 16 rows of 32 columns, unpacked: 576 to 768, by the type's scales
_TRANSPOSED_ROWS = 8  # of a head's matrix, decoded at a time: 16 for the one type that interleaves 16 rows
_DECODED = 64 << 20
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

    None if a layer is not attention with q, k, v or over latents, followed by a gated feed-forward or experts: such
    models run layer by layer and allocate memory on demand.
    """
    arch = metadata.get("general.architecture")
    layers = {int(found[1]) for name in tensors if (found := re.match(r"blk\.(\d+)\.", name))}
    heads = int(metadata.get(f"{arch}.attention.head_count") or 0)
    used = int(metadata.get(f"{arch}.expert_used_count") or 0)
    if not heads or not layers or "token_embd.weight" not in tensors:
        return None
    vocab, embd = tensors["token_embd.weight"].shape
    prompt, step = _Buffers(), _Buffers()
    prompt.add("x", 4 * BATCH_TOKENS * embd)
    step.add("x and logits", 4 * (embd + vocab))
    head_dim = 0
    for layer in sorted(layers):
        own = {name[len(f"blk.{layer}.") :]: t for name, t in tensors.items() if name.startswith(f"blk.{layer}.")}
        if {"attn_kv_a_mqa.weight", "attn_kv_a_norm.weight", "attn_output.weight"} <= own.keys():
            sizes = _LatentSizes.of(own, metadata)
            if sizes is None:
                return None
            _latent_attention(prompt, step, own, sizes, threads, n_ctx, mla)
        elif {"attn_q.weight", "attn_k.weight", "attn_v.weight", "attn_output.weight"} <= own.keys():
            head_dim = own["attn_q.weight"].shape[0] // heads
            _attention(prompt, step, own, heads, threads)
        else:
            return None
        if "ffn_gate_exps.weight" in own and used:
            _experts(prompt, step, own, used, threads)
            if "ffn_gate_shexp.weight" in own:
                _feed_forward(prompt, step, own, threads, "_shexp")
        elif {"ffn_gate.weight", "ffn_up.weight", "ffn_down.weight"} <= own.keys():
            _feed_forward(prompt, step, own, threads)
        else:
            return None
    rope = int(metadata.get(f"{arch}.rope.dimension_count") or head_dim)
    return sum(prompt.values()) + sum(step.values()) + 2 * 8 * n_ctx * (rope // 2)


def device_bytes(shapes: Mapping[str, tuple[int, ...]], used: int, tokens: int = BATCH_TOKENS) -> int:
    """Upper estimate of a device's working memory in bytes for prompts of `tokens` tokens (CPU only: `work_bytes`).

    The sum of: inputs and outputs of all matrices of the largest layer, float32 for all tokens (of experts for `used`
    of them per token); twice the hidden state; the largest matrix decoded to 16 bits, at most 64 MiB at a time; the
    logits.
    """
    layers: dict[str, int] = {}
    largest = state = logits = 0
    for name, shape in shapes.items():
        if len(shape) < 2 or not shape[-1]:
            continue
        rows, columns = shape[-2:]
        largest = max(largest, min(_DECODED, 2 * rows * columns) * (name != "token_embd.weight"))
        if name == "output.weight":
            logits = 4 * tokens * rows
        elif name.startswith("blk."):
            times = max(1, used) if "_exps." in name else 1
            key = name.split(".")[1] + (" attention" if ".attn_" in name else "")
            layers[key] = layers.get(key, 0) + 4 * tokens * times * (rows + columns)
        state = max(state, 8 * tokens * columns * (".attn_norm" in name or ".attn_q" in name))
    return max(layers.values(), default=0) + state + largest + logits


def _read(buffers: _Buffers, tensors: list[TensorInfo], n: int, threads: int) -> None:
    """Add the buffers for products of a batch with matrices of `n` columns: tiles of the batch, panels of weights."""
    for t in tensors:
        if t.type.name in _FLOATS:
            buffers.private("panels", kernel_sizes.float_scratch_bytes(n), threads)
        else:
            buffers.add("tiles", kernel_sizes.tiles_bytes(n, BATCH_TOKENS))
            buffers.private("panels", kernel_sizes.panels_bytes(n, _PANEL_RECORD), threads)


def _attention(prompt: _Buffers, step: _Buffers, own: Mapping[str, TensorInfo], heads: int, threads: int) -> None:
    q, k, v, out = (own[f"attn_{name}.weight"] for name in ("q", "k", "v", "output"))
    embd = q.shape[1]
    dim_k = q.shape[0] // heads
    kv_heads = max(1, k.shape[0] // dim_k)
    dim_v, group = v.shape[0] // kv_heads, heads // kv_heads
    for name, t in (("q", q), ("k", k), ("v", v)):
        prompt.add(name, 4 * BATCH_TOKENS * t.shape[0])
        step.add(name, 4 * t.shape[0])
    prompt.add("normed", 4 * BATCH_TOKENS * embd)
    prompt.add("attended", 4 * BATCH_TOKENS * heads * dim_v)
    _read(prompt, [q, k, v], embd, threads)
    _read(prompt, [out], heads * dim_v, threads)
    pieces = kernel_sizes.prefill_attention_bytes(
        group, dim_k, dim_v, max(1, kernel_sizes.PIECE_QUERIES // group), kernel_sizes.KEY_BLOCK
    )
    prompt.private("pieces", pieces, threads)
    step.private("normed", activation_bytes(embd), threads)
    step.private("scratch", kernel_sizes.decode_attention_bytes(heads, dim_k, group, kernel_sizes.DECODE_SPAN), threads)
    step.add("partial", 4 * threads * heads * (dim_v + 2))
    step.private("merged", activation_bytes(heads * dim_v), threads)
    step.add("added", 4 * embd)


class _LatentSizes(NamedTuple):
    """The sizes of latent attention, see archs/deepseek2.py."""

    heads: int
    nope: int
    rope: int
    kv_lora: int
    dim_v: int

    @classmethod
    def of(cls, own: Mapping[str, TensorInfo], metadata: Mapping[str, Any]) -> _LatentSizes | None:
        """From a layer's tensors; None if some are missing."""
        arch = metadata.get("general.architecture")
        heads = int(metadata.get(f"{arch}.attention.head_count") or 0)
        q = own.get("attn_q_b.weight") or own.get("attn_q.weight")
        if q is None or ("attn_kv_b.weight" not in own and not {"attn_k_b.weight", "attn_v_b.weight"} <= own.keys()):
            return None
        kv_lora = own["attn_kv_a_norm.weight"].shape[0]
        rope = own["attn_kv_a_mqa.weight"].shape[0] - kv_lora
        return cls(heads, q.shape[0] // heads - rope, rope, kv_lora, own["attn_output.weight"].shape[1] // heads)


def _latent_attention(
    prompt: _Buffers, step: _Buffers, own: Mapping[str, TensorInfo], s: _LatentSizes, threads: int, n_ctx: int, mla: int
) -> None:
    """Flash attention, except for the absorbed tokens of `mla` 2."""
    latent, dim_k, width = s.kv_lora + s.rope, s.nope + s.rope, s.heads * s.dim_v
    embd = own["attn_kv_a_mqa.weight"].shape[1]
    tiled = 4 * kernel_sizes.whole_tiles(BATCH_TOKENS)
    prompt.add("normed", 4 * BATCH_TOKENS * embd)
    prompt.add("latent", tiled * latent)
    prompt.add("latent q", tiled * s.heads * dim_k)
    prompt.add("attended", 4 * BATCH_TOKENS * width)
    step.private("normed", activation_bytes(embd), threads)
    step.add("latent", 4 * latent)
    step.add("q", 4 * s.heads * dim_k)
    step.add("added", 4 * embd)
    scratch = kernel_sizes.latent_scratch_bytes(s.nope, s.kv_lora, _TRANSPOSED_ROWS)
    step.private("latent scratch", scratch, threads)
    if "attn_q_a.weight" in own:
        q_lora = own["attn_q_a.weight"].shape[0]
        _read(prompt, [own["attn_q_a.weight"], own["attn_kv_a_mqa.weight"]], embd, threads)
        _read(prompt, [own["attn_q_b.weight"]], q_lora, threads)
        prompt.add("query latent", 4 * BATCH_TOKENS * q_lora)
        step.add("query latent", 4 * q_lora)
        step.private("query latent normed", activation_bytes(q_lora), threads)
    else:
        _read(prompt, [own["attn_q.weight"], own["attn_kv_a_mqa.weight"]], embd, threads)
    _read(prompt, [own["attn_output.weight"]], width, threads)
    if not mla:
        _latent_heads(prompt, step, s, threads)
        return
    whole = -(-n_ctx // kernel_sizes.KEY_BLOCK) * kernel_sizes.KEY_BLOCK
    span, positions = (whole, whole) if mla == 2 else (kernel_sizes.LATENT_BLOCK, kernel_sizes.KEY_BLOCK)
    step.add("latent queries", 4 * s.heads * latent)
    step.add("partial", 4 * threads * s.heads * (s.kv_lora + 2))
    step.private("latents", kernel_sizes.latent_decode_bytes(s.heads, latent, span), threads)
    step.add("attended", activation_bytes(width))
    rows = kernel_sizes.LATENT_PIECE
    floats = kernel_sizes.latent_prefill_floats(s.nope, s.rope, s.kv_lora, s.dim_v, rows, positions)
    prompt.private("pieces", 4 * sum(floats), threads)


def _latent_heads(prompt: _Buffers, step: _Buffers, s: _LatentSizes, threads: int) -> None:
    """`mla` 0: keys and values of all heads."""
    dim_k, tiled = s.nope + s.rope, 4 * kernel_sizes.whole_tiles(BATCH_TOKENS)
    prompt.add("latent k", tiled * s.heads * dim_k)
    prompt.add("latent v", tiled * s.heads * s.dim_v)
    prompt.private("matrices", 8 * max(s.nope, s.dim_v) * s.kv_lora, threads)
    pieces = kernel_sizes.prefill_attention_bytes(1, dim_k, s.dim_v, kernel_sizes.PIECE_QUERIES, kernel_sizes.KEY_BLOCK)
    prompt.private("pieces", pieces, threads)
    step.private("latent normed", activation_bytes(s.kv_lora), threads)
    step.add("k", 4 * s.heads * dim_k)
    step.add("v", 4 * s.heads * s.dim_v)
    scratch = kernel_sizes.decode_attention_bytes(s.heads, dim_k, 1, kernel_sizes.DECODE_SPAN)
    step.private("scratch", scratch, threads)
    step.add("partial", 4 * threads * s.heads * (s.dim_v + 2))
    step.private("merged", activation_bytes(s.heads * s.dim_v), threads)


def _feed_forward(
    prompt: _Buffers, step: _Buffers, own: Mapping[str, TensorInfo], threads: int, suffix: str = ""
) -> None:
    gate, up, down = (own[f"ffn_{name}{suffix}.weight"] for name in ("gate", "up", "down"))
    ff, embd = gate.shape
    for name in ("gate", "up"):
        prompt.add(name, 4 * BATCH_TOKENS * ff)
        step.add(name, 4 * ff)
    step.add("hidden", activation_bytes(ff))
    _read(prompt, [gate, up], embd, threads)
    _read(prompt, [down], ff, threads)


def _experts(prompt: _Buffers, step: _Buffers, own: Mapping[str, TensorInfo], used: int, threads: int) -> None:
    router = own["ffn_gate_inp.weight"]
    gate, up, down = (own[f"ffn_{name}_exps.weight"] for name in ("gate", "up", "down"))
    count, ff, embd = gate.shape
    most = kernel_sizes.max_entries(BATCH_TOKENS, count, used, kernel_sizes.TILE_TOKENS)
    _read(prompt, [router], embd, threads)
    prompt.add("router", 4 * BATCH_TOKENS * count)
    prompt.add("assignment", kernel_sizes.assignment_bytes(BATCH_TOKENS, count, used, kernel_sizes.TILE_TOKENS))
    prompt.add("selected", 8 * BATCH_TOKENS * used)
    prompt.add("expert weights", 4 * BATCH_TOKENS * used)
    if not {gate.type.name, up.type.name} <= _FLOATS:
        prompt.add("gathered", most * kernel_sizes.RECORD_BYTES * (embd // 32))
    prompt.add("activated", most * (4 * ff if down.type.name in _FLOATS else kernel_sizes.RECORD_BYTES * (ff // 32)))
    for name, n in (("vectors", embd), ("activated vectors", ff)):
        prompt.add(name, count * kernel_sizes.FEW_TOKENS * whole_lines(activation_bytes(n)))
    if gate.type is not up.type:
        for i in range(2):
            prompt.add(f"product {i}", 4 * most * ff)
    for t in (gate, up, down):
        panel = 8 * kernel_sizes.EXPERT_ROWS * 32 if t.type.name in _FLOATS else 2 * _PANEL_RECORD
        prompt.private("panels", kernel_sizes.expert_panels_bytes(t.shape[2], kernel_sizes.TILE_TOKENS, panel), threads)
    step.add("router", 4 * count)
    step.private("selected", kernel_sizes.selected_experts_bytes(count, used), threads)
    step.add("experts", used * whole_lines(activation_bytes(ff)))
    step.add("products", 8 * used * ff)
