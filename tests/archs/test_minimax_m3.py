"""MiniMax M3: published checkpoints have other names than what transformers saves; what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quantkit import archs
from quantkit.archs.common.tensors import Shape
from quantkit.errors import UnsupportedError
from quantkit.runtime.blocks.spans import Span
from quantkit.runtime.loading import load
from tests.archs.files import written

ARCH = archs.get("minimax-m3")
PUBLISHED: dict[str, Any] = {
    key: value
    for key, value in ARCH.EXAMPLE.items()
    if not key.startswith("index_") and key not in ("layer_types", "mlp_layer_types")
} | {
    "hidden_act": "swigluoai", "moe_layer_freq": [0, 1, 1], "n_shared_experts": 2,
    "sparse_attention_config": {
        "sparse_num_index_heads": 2, "sparse_index_dim": 32, "sparse_block_size": 16, "sparse_topk_blocks": 3,
        "sparse_local_block": 1, "sparse_attention_freq": [0, 1, 1],
    },
}  # fmt: skip


def published_shapes() -> dict[str, Shape]:
    found: dict[str, Shape] = {"lm_head.weight": (320, 64), "model.embed_tokens.weight": (320, 64)}
    found["model.norm.weight"] = (64,)
    for i in range(3):
        layer = f"model.layers.{i}"
        found |= {f"{layer}.{name}_layernorm.weight": (64,) for name in ("input", "post_attention")}
        for name, rows in (("q", 128), ("k", 64), ("v", 64)):
            found[f"{layer}.self_attn.{name}_proj.weight"] = (rows, 64)
        found[f"{layer}.self_attn.o_proj.weight"] = (64, 128)
        found |= {f"{layer}.self_attn.{name}_norm.weight": (32,) for name in "qk"}
        if not i:
            found |= gated(f"{layer}.mlp", ("gate_proj", "up_proj", "down_proj"), 96)
            continue
        found |= {f"{layer}.self_attn.index_{name}_norm.weight": (32,) for name in "qk"}
        found |= {f"{layer}.self_attn.index_{name}_proj.weight": (rows, 64) for name, rows in (("q", 64), ("k", 32))}
        moe = f"{layer}.block_sparse_moe"
        found |= {f"{moe}.gate.weight": (8, 64), f"{moe}.e_score_correction_bias": (8,)}
        found |= gated(f"{moe}.shared_experts", ("gate_proj", "up_proj", "down_proj"), 64)
        for expert in range(8):
            found |= gated(f"{moe}.experts.{expert}", ("w1", "w3", "w2"), 32)
    return found


def gated(prefix: str, names: tuple[str, str, str], ff: int) -> dict[str, Shape]:
    gate, up, down = (f"{prefix}.{name}.weight" for name in names)
    return {gate: (ff, 64), up: (ff, 64), down: (64, ff)}


def test_published_names_and_settings() -> None:
    assert ARCH.metadata(PUBLISHED) == ARCH.metadata(ARCH.EXAMPLE)
    shapes = {f"language_model.{name}": shape for name, shape in published_shapes().items()}
    found = {piece.name: piece.shape for piece in ARCH.to_gguf(PUBLISHED, shapes)}
    assert found == {t.name: t.shape for t in ARCH.tensors(ARCH.EXAMPLE)}
    with pytest.raises(UnsupportedError, match="swiglu_limit = 5"):
        ARCH.metadata(PUBLISHED | {"swiglu_limit": 5.0})
    with pytest.raises(UnsupportedError, match=r"an indexer in the layers with experts, \[2\]"):
        ARCH.metadata(PUBLISHED | {"moe_layer_freq": [0, 0, 1]})


def test_indexers_that_are_not_known(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"blk\.1: an indexer of 4 heads of 32 elements, for 2 KV heads"):
        load(written(tmp_path / "heads.gguf", "minimax-m3", index_n_heads=4))
    whole = {"rotary_dim": 32, "rope_parameters": {"rope_type": "default", "rope_theta": 5e6}}
    with pytest.raises(UnsupportedError, match="RoPE of 32 elements; known are as many heads, no shorter than RoPE"):
        load(written(tmp_path / "dim.gguf", "minimax-m3", index_head_dim=16, **whole))


def test_tensor_parallel_refuses_more_positions_than_are_selected(tmp_path: Path) -> None:
    path = written(tmp_path / "m.gguf", "minimax-m3")
    model, tokens = load(path, devices="cpu:0,cpu:1", split_mode="graph"), np.arange(44)
    assert model.n_ctx == 48
    np.testing.assert_allclose(model.logits(tokens), load(path).logits(tokens), atol=1e-5)
    cache = model.new_cache(80)
    model.forward(tokens, cache)
    for call in (
        lambda: model.forward(tokens[:5], cache),
        lambda: model.forward_batch([(tokens[:5], cache)]),
        lambda: model.forward_sequences(np.zeros((1, 49), np.int64), slice(None)),
        lambda: model.run_block(model.blocks[0], model.embed(np.arange(49)), [Span(0, 49, model.layer_cache(49))]),
    ):
        with pytest.raises(UnsupportedError, match=r"selected ones of more than 48 positions.* got 49: take -sm layer"):
            call()
