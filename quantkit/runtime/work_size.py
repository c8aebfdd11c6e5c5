"""How much memory the runtime works in, beside weights and cache, told from names and shapes: pure, for plans.

It is what runtime/step.py lays out for `fast` numerics: one list of operations for prompts, BATCH tokens at a time, and
one for single tokens. Operations that name the same buffer of the same size share it, whatever their layer, so the sum
goes over distinct buffers. With B = 512 tokens, E, q, k, v and F the widths of the hidden state, of queries, keys,
values and of the feed-forward, T threads:

    prompts   4 B (2 E + 2 q + k + v + 2 F)     x, its norm, q, k, v, what attention gives, gate and up
              56/32 B n for n of E, q, F        the same as 8-bit tiles, where weights are quantized
              T panels(n)                       unpacked rows of 32 weights, for each thread and width
              T pieces                          keys and values of 128 positions, queries, scores
              experts: most = B used + 5 count entries of tiles of E and F, three vectors an expert, lists
    tokens    T activations(E), logits, q, k, v, gate, up: little
    rope      8 bytes a position and pair, for both

A test holds the prediction against the buffers of loaded models.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Protocol

from quantkit.types import QuantType

BATCH = 512  # tokens, step.BATCH_TOKENS
_TILE = 6  # tokens of a tile (gemm.tile_tokens with AVX-512), and entries of an expert are a multiple of them
_RECORD = 56  # bytes of a token's 32 activations in a tile
_PANEL_RECORD = 640  # bytes of 16 rows of 32 columns, unpacked: 576 to 768, by the type's scales
_LANES, _PANELS, _FLOAT_LANES = 16, 2, 32
_KEYS, _QUERIES, _CHUNK = 128, 192, 64  # of attention: positions at a time of prompts, rows of queries, of tokens
_FEW = 3  # tokens of an expert for which vectors are multiplied one by one
_FLOATS = frozenset(("f32", "f16", "bf16"))


class Weight(Protocol):
    """What is asked of a tensor."""

    @property
    def type(self) -> QuantType: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


class _Buffers(dict[tuple[str, int], int]):
    """Bytes by name and size, as an OpList keeps them."""

    def add(self, name: str, nbytes: int) -> None:
        self[name, nbytes] = nbytes

    def private(self, name: str, nbytes: int, threads: int) -> None:
        self[name, nbytes] = threads * -(-nbytes // 64) * 64


def work_bytes(tensors: Mapping[str, Weight], metadata: Mapping[str, Any], n_ctx: int, threads: int) -> int | None:
    """Bytes of working memory of a model on the CPU, for caches of `n_ctx` tokens; None for layers of another make
    than attention with q, k, v and gated feed-forwards or experts, which run layer by layer and allocate as they go."""
    arch = metadata.get("general.architecture")
    layers = {int(found[1]) for name in tensors if (found := re.match(r"blk\.(\d+)\.", name))}
    heads = int(metadata.get(f"{arch}.attention.head_count") or 0)
    used = int(metadata.get(f"{arch}.expert_used_count") or 0)
    if not heads or not layers or "token_embd.weight" not in tensors:
        return None
    vocab, embd = tensors["token_embd.weight"].shape
    prompt, step = _Buffers(), _Buffers()
    prompt.add("x", 4 * BATCH * embd)
    step.add("x and logits", 4 * (embd + vocab))
    head_dim = 0
    for layer in sorted(layers):
        own = {name[len(f"blk.{layer}.") :]: t for name, t in tensors.items() if name.startswith(f"blk.{layer}.")}
        if not {"attn_q.weight", "attn_k.weight", "attn_v.weight", "attn_output.weight"} <= own.keys():
            return None
        head_dim = own["attn_q.weight"].shape[0] // heads
        _attention(prompt, step, own, heads, threads)
        if "ffn_gate_exps.weight" in own and used and "ffn_gate_shexp.weight" not in own:
            _experts(prompt, step, own, used, threads)
        elif {"ffn_gate.weight", "ffn_up.weight", "ffn_down.weight"} <= own.keys():
            _feed_forward(prompt, step, own, threads)
        else:
            return None
    rope = int(metadata.get(f"{arch}.rope.dimension_count") or head_dim)
    return sum(prompt.values()) + sum(step.values()) + 2 * 8 * n_ctx * (rope // 2)


def _activation(n: int) -> int:
    """Of one vector, in all the forms that products with a vector read."""
    return 7 * n + n // 8


def _read(buffers: _Buffers, tensors: list[Weight], n: int, threads: int) -> None:
    """What products of a batch with matrices of `n` columns need: tiles of the batch, panels of the matrices."""
    for t in tensors:
        if t.type.name in _FLOATS:
            lanes = _FLOAT_LANES
            buffers.private("panels", 4 * (2 * lanes * n + _TILE * n + _TILE * lanes), threads)
        else:
            buffers.add("tiles", -(-BATCH // _TILE) * _TILE * _RECORD * (n // 32))
            buffers.private("panels", _PANELS * (n // 32 * _PANEL_RECORD + 4 * _LANES * _TILE), threads)


def _attention(prompt: _Buffers, step: _Buffers, own: Mapping[str, Weight], heads: int, threads: int) -> None:
    q, k, v, out = (own[f"attn_{name}.weight"] for name in ("q", "k", "v", "output"))
    embd = q.shape[1]
    dim_k = q.shape[0] // heads
    kv_heads = max(1, k.shape[0] // dim_k)
    dim_v, group = v.shape[0] // kv_heads, heads // kv_heads
    for name, t in (("q", q), ("k", k), ("v", v)):
        prompt.add(name, 4 * BATCH * t.shape[0])
        step.add(name, 4 * t.shape[0])
    prompt.add("normed", 4 * BATCH * embd)
    prompt.add("attended", 4 * BATCH * heads * dim_v)
    _read(prompt, [q, k, v], embd, threads)
    _read(prompt, [out], heads * dim_v, threads)
    rows = -(-max(1, _QUERIES // group) * group // 8) * 8
    wide = -(-dim_v // 32) * 32
    prompt.private("pieces", 4 * (2 * _KEYS * dim_k + _KEYS * wide + rows * (dim_k + _KEYS + wide + 2)), threads)
    step.private("normed", _activation(embd), threads)
    step.private("scratch", 4 * (heads * dim_k + group * _CHUNK), threads)
    step.add("partial", 4 * threads * heads * (dim_v + 2))
    step.private("joined", _activation(heads * dim_v), threads)
    step.add("added", 4 * embd)


def _feed_forward(prompt: _Buffers, step: _Buffers, own: Mapping[str, Weight], threads: int) -> None:
    gate, up, down = (own[f"ffn_{name}.weight"] for name in ("gate", "up", "down"))
    ff, embd = gate.shape
    for name in ("gate", "up"):
        prompt.add(name, 4 * BATCH * ff)
        step.add(name, 4 * ff)
    step.add("hidden", _activation(ff))
    _read(prompt, [gate, up], embd, threads)
    _read(prompt, [down], ff, threads)


def _experts(prompt: _Buffers, step: _Buffers, own: Mapping[str, Weight], used: int, threads: int) -> None:
    router = own["ffn_gate_inp.weight"]
    gate, up, down = (own[f"ffn_{name}_exps.weight"] for name in ("gate", "up", "down"))
    count, ff, embd = gate.shape
    most = BATCH * used + count * (_TILE - 1)
    _read(prompt, [router], embd, threads)
    prompt.add("router", 4 * BATCH * count)
    prompt.add("plan", 40 + 24 * count + 20 * most)
    prompt.add("chosen", 8 * BATCH * used)
    prompt.add("shares", 4 * BATCH * used)
    if not {gate.type.name, up.type.name} <= _FLOATS:
        prompt.add("gathered", most * _RECORD * (embd // 32))
    prompt.add("activated", most * (4 * ff if down.type.name in _FLOATS else _RECORD * (ff // 32)))
    for name, n in (("vectors", embd), ("activated vectors", ff)):
        prompt.add(name, count * _FEW * (-(-_activation(n) // 64) * 64))
    if gate.type is not up.type:
        for i in range(2):
            prompt.add(f"product {i}", 4 * most * ff)
    for t in (gate, up, down):
        panel = 8 * 32 * 32 if t.type.name in _FLOATS else 2 * _PANEL_RECORD
        size = 2 * (t.shape[2] // 32 * panel + 4 * _TILE * 32) + 8 * _TILE
        prompt.private("panels", size, threads)
    step.add("router", 4 * count)
    step.private("picked", 8 + 12 * used + 4 * count, threads)
    step.add("experts", used * (-(-_activation(ff) // 64) * 64))
    step.add("products", 8 * used * ff)
