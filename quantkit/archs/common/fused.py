"""Blocks whose GGUF tensors hold several matrices, one after another: attn_qkv, ffn_up with the rows of gate first."""

from __future__ import annotations

from dataclasses import replace

from quantkit.archs.common.blocks import Attention, FeedForward, HParams


def gate_up(hp: HParams, i: int) -> FeedForward:
    """The feed-forward of layer `i`, whose ffn_up is [2 * ff, n_embd]: the rows of gate, then of up."""
    both, ff = hp.linear(f"blk.{i}.ffn_up"), hp.n_ff
    gate, up = replace(both, rows=(0, ff)), replace(both, rows=(ff, 2 * ff))
    return FeedForward(hp.norm(f"blk.{i}.ffn_norm"), gate, up, hp.linear(f"blk.{i}.ffn_down"))


def with_qkv(part: Attention, hp: HParams, i: int) -> Attention:
    """An attention whose q, k and v are rows of attn_qkv, in this order."""
    whole = hp.linear(f"blk.{i}.attn_qkv")
    widths = part.heads * part.head_dim_k, part.kv_heads * part.head_dim_k, part.kv_heads * part.head_dim_v
    q, k, v = widths
    return replace(
        part,
        q=replace(whole, rows=(0, q)),
        k=replace(whole, rows=(q, q + k)),
        v=replace(whole, rows=(q + k, q + k + v)),
    )
