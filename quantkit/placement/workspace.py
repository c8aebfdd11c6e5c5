"""Predict the runtime's working memory, without weights and KV cache, from tensor names and shapes. Pure functions.

It is the memory of the buffers that `runtime/compiled` allocates for `fast` numerics: one op list for prompts,
BATCH tokens at a time, and one for single tokens. Operations that use a buffer of the same name and size share it, in
all layers, so the sum is over distinct buffers. With B = 512 tokens, T threads, and E, q, k, v and F the widths of the
hidden state, queries, keys, values and the feed-forward:

    prompts   4 B (2 E + 2 q + k + v + 2 F)     x, its norm, q, k, v, the attention output, gate and up
              RECORD_BYTES/32 B n for n of E, q, F    the same as integer tiles, if the weights are quantized
              T panels(n)                       unpacked rows of 32 weights, for each thread and width
              T pieces                          keys and values of 128 positions, queries, scores
              experts: most = B used + 5 count tile entries of E and F, three vectors per expert, lists
              recurrent layers: 4 B (c + 2 V), for the c channels of the convolution and the V elements of the values,
              and T chunks with the state of a head
    tokens    T activations(E), logits, q, k, v, gate, up: small
    RoPE      8 bytes per position and pair, for both

`placement/kernel_sizes.py` has the sizes for this CPU. A test compares the prediction with the buffers of loaded
models.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from quantkit.placement import kernel_sizes
from quantkit.placement.kernel_sizes import BATCH_TOKENS, activation_bytes, whole_lines
from quantkit.placement.tensor_info import TensorInfo

_PANEL_RECORD = 640  # bytes of 16 rows of 32 columns, unpacked: 576 to 768, by the type's scales
_DECODED = 64 << 20
_RECURRENT_MATRICES = {  # that read a recurrent layer's norm: the buffer of their output, unless all layers have it
    "attn_qkv": "", "attn_gate": "", "ssm_in": "projected", "ssm_ba": "ba", "ssm_beta": "beta", "ssm_alpha": "alpha",
}  # fmt: skip
_FLOATS = frozenset(("f32", "f16", "bf16"))


class _Buffers(dict[tuple[str, int], int]):
    """Bytes by buffer name and size, like those of an OpList."""

    def add(self, name: str, nbytes: int) -> None:
        self[name, nbytes] = nbytes

    def private(self, name: str, nbytes: int, threads: int) -> None:
        self[name, nbytes] = threads * -(-nbytes // 64) * 64


def work_bytes(tensors: Mapping[str, TensorInfo], metadata: Mapping[str, Any], n_ctx: int, threads: int) -> int | None:
    """Bytes of working memory of a model on the CPU, for caches of `n_ctx` tokens.

    None if a layer is not attention with q, k, v, or recurrent, followed by a gated feed-forward or experts: such
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
    head_dim = int(metadata.get(f"{arch}.attention.key_length") or 0)
    dim_k, value_heads = (int(metadata.get(f"{arch}.ssm.{key}") or 0) for key in ("state_size", "time_step_rank"))
    for layer in sorted(layers):
        own = {name[len(f"blk.{layer}.") :]: t for name, t in tensors.items() if name.startswith(f"blk.{layer}.")}
        if {"ssm_conv1d.weight", "ssm_out.weight"} <= own.keys() and dim_k and value_heads:
            _recurrent(prompt, step, own, dim_k, value_heads, threads)
        elif {"attn_q.weight", "attn_k.weight", "attn_v.weight", "attn_output.weight"} <= own.keys():
            head_dim = head_dim or own["attn_q.weight"].shape[0] // heads
            _attention(prompt, step, own, heads, head_dim, threads)
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


def _attention(
    prompt: _Buffers, step: _Buffers, own: Mapping[str, TensorInfo], heads: int, dim_k: int, threads: int
) -> None:
    q, k, v, out = (own[f"attn_{name}.weight"] for name in ("q", "k", "v", "output"))
    embd = q.shape[1]
    kv_heads = max(1, k.shape[0] // dim_k)
    dim_v, group = v.shape[0] // kv_heads, heads // kv_heads
    widths = {"q": heads * dim_k, "k": k.shape[0], "v": v.shape[0]}
    if q.shape[0] == 2 * heads * dim_k:  # with a gate of each head
        widths |= {"queries and gates": q.shape[0], "query gates": heads * dim_k}
    for name, width in widths.items():
        prompt.add(name, 4 * BATCH_TOKENS * width)
        step.add(name, 4 * width)
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


def _recurrent(
    prompt: _Buffers, step: _Buffers, own: Mapping[str, TensorInfo], dim_k: int, value_heads: int, threads: int
) -> None:
    out = own["ssm_out.weight"]
    embd, inner = out.shape
    readers = {name: own[f"{name}.weight"] for name in _RECURRENT_MATRICES if f"{name}.weight" in own}
    widths = {"qkv": own["ssm_conv1d.weight"].shape[0], "delta gates": inner, "delta": inner}
    widths |= {_RECURRENT_MATRICES[name]: t.shape[0] for name, t in readers.items() if _RECURRENT_MATRICES[name]}
    for name, width in widths.items():
        prompt.add(name, 4 * BATCH_TOKENS * width)
        step.add(name, 4 * width)
    prompt.add("normed", 4 * BATCH_TOKENS * embd)
    _read(prompt, list(readers.values()), embd, threads)
    _read(prompt, [out], inner, threads)
    prompt.private("chunk", kernel_sizes.delta_chunk_bytes(dim_k, inner // value_heads), threads)
    step.private("normed", activation_bytes(embd), threads)
    step.add("gated", activation_bytes(inner))
    step.add("added", 4 * embd)


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
