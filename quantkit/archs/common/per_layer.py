"""What Gemma 3n and Gemma 4 share: per-layer embeddings, and layers that read keys and values of earlier ones."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from quantkit.archs.common.blocks import Attention, Head, HParams, LayerInput

_KV_STEMS = ("attn_k", "attn_v", "attn_k_norm")


def layer_input(hp: HParams, i: int, width: int, head: Head) -> LayerInput:
    """The per-layer embedding of layer `i`, `width` elements of a token."""
    project = replace(hp.linear("per_layer_model_proj"), factor=hp.n_embd**-0.5)
    return LayerInput(
        gate=hp.linear(f"blk.{i}.inp_gate"),
        out=hp.linear(f"blk.{i}.proj"),
        post_norm=hp.norm(f"blk.{i}.post_norm"),
        table="per_layer_token_embd.weight",
        first=i * width,
        table_scale=width**0.5,
        project=replace(project, rows=(i * width, (i + 1) * width)),
        project_norm=hp.norm("per_layer_proj_norm"),
        width=width,
        embedding=head.embedding,
        embedding_scale=head.embedding_scale,
        embedding_factor=head.embedding_factor,
    )


def reading(own: Attention, keys: Attention, source: int) -> Attention:
    """The attention of a layer with the keys and values of layer `source`, whose attention is `keys`."""
    return replace(keys, norm=own.norm, q=own.q, q_norm=own.q_norm, out=own.out, post_norm=own.post_norm, source=source)


def unread_keys(layers: Iterable[int]) -> frozenset[str]:
    """The keys and values of layers that read those of others: files may have them."""
    return frozenset(f"blk.{i}.{stem}.weight" for i in layers for stem in _KV_STEMS)
