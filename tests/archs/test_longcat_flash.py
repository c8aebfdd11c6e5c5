"""LongCat-Flash: its size, names of layers and halves, experts that give their input, what is refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quantkit import archs
from quantkit.archs.common.blocks import Experts
from quantkit.errors import FormatError, UnsupportedError
from quantkit.evaluate.layers.layer_by_layer import chunks_layer_by_layer
from quantkit.formats import gguf
from quantkit.pipelines.prune import plan_prune
from quantkit.runtime.blocks import experts
from quantkit.runtime.loading import load
from tests.archs.files import written
from tests.runtime.test_step import by_steps, spread

LONGCAT_FLASH: dict[str, Any] = {
    "architectures": ["LongcatFlashForCausalLM"], "model_type": "longcat_flash", "attention_bias": False,
    "vocab_size": 131072, "hidden_size": 6144, "ffn_hidden_size": 12288, "expert_ffn_hidden_size": 2048,
    "num_layers": 28, "num_attention_heads": 64, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "qk_nope_head_dim": 128, "mla_scale_q_lora": True, "mla_scale_kv_lora": True,
    "routed_scaling_factor": 6.0, "n_routed_experts": 512, "rms_norm_eps": 1e-5, "rope_theta": 10000000.0,
    "max_position_embeddings": 131072, "zero_expert_num": 256, "zero_expert_type": "identity", "moe_topk": 12,
}  # fmt: skip
ARCH = archs.get("longcat-flash")
TOKENS = np.random.default_rng(3).integers(2, 320, 120)


def test_the_published_size() -> None:
    """560.7 billion elements: transformers' model without gate and up of the zero experts."""
    import torch
    import transformers

    with torch.device("meta"):
        model = transformers.LongcatFlashForCausalLM(transformers.LongcatFlashConfig())
    theirs = sum(x.numel() for name, x in model.state_dict().items())
    unused = 28 * 256 * 2 * 2048 * 6144
    tensors = ARCH.tensors(LONGCAT_FLASH)
    assert sum(math.prod(t.shape) for t in tensors) == theirs - unused
    shapes = {t.name: t.shape for t in tensors}
    assert shapes["blk.54.ffn_gate_inp.weight"] == (768, 6144)
    assert shapes["blk.54.exp_probs_b.bias"] == (768,)
    assert shapes["blk.54.ffn_down_exps.weight"] == (512, 6144, 2048)
    assert "blk.55.ffn_down_exps.weight" not in shapes
    assert shapes["blk.55.attn_k_b.weight"] == (64, 512, 128)


def test_names_of_halves() -> None:
    for name, ours in (
        ("model.layers.3.self_attn.1.q_a_proj.weight", "model.layers.7.self_attn.q_a_proj.weight"),
        ("model.layers.3.mlps.0.up_proj.weight", "model.layers.6.mlps.up_proj.weight"),
        ("model.layers.3.post_attention_layernorm.1.weight", "model.layers.7.post_attention_layernorm.weight"),
        ("model.layers.3.mlp.experts.5.up_proj.weight", "model.layers.6.moe.experts.5.up_proj.weight"),
        ("model.layers.3.mlp.router.classifier.weight", "model.layers.6.moe.router.classifier.weight"),
    ):
        assert ARCH.canonical(name) == ours
    names = ["model.mtp.layers.0.eh_proj.weight", "model.layers.0.moe.experts.6.up_proj.weight", "model.norm.weight"]
    assert ARCH.dropped_tensors(ARCH.EXAMPLE, names) == {
        "MTP layers": names[:1],
        "matrices of zero experts": names[1:2],
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"router_bias": True}, "router_bias = True"),
        ({"zero_expert_type": "drop"}, "zero_expert_type = 'drop'"),
        ({"mla_scale_q_lora": False}, "mla_scale_q_lora = False"),
        ({"qk_head_dim": 48}, "qk_head_dim = 48"),
        ({"num_hidden_layers": 3}, "num_hidden_layers = 3"),
    ],
)
def test_what_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        ARCH.metadata(ARCH.EXAMPLE | change)


def test_files_that_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "m.gguf", "longcat-flash")
    metadata = dict(gguf.open(path).metadata) | {"longcat-flash.block_count": 3}
    with pytest.raises(FormatError, match=r"longcat-flash\.block_count = 3; .* has to be even"):
        ARCH.hparams(metadata)
    with pytest.raises(UnsupportedError, match="experts without matrices"):
        load(path, devices="cpu:0,cpu:1")
    with pytest.raises(UnsupportedError, match="a layer of longcat-flash is two blocks"):
        plan_prune(gguf.open(path), drop_layers=[0])


def test_experts_that_give_their_input(tmp_path: Path) -> None:
    """Tokens routed to them alone get their input times the weights, others the sum of both kinds."""
    model = load(written(tmp_path / "m.gguf", "longcat-flash"))
    part = next(p for p in model.blocks[0].parts if isinstance(p, Experts))
    assert (part.count, part.stacked, part.identity) == (9, 6, 3)
    x = np.random.default_rng(1).standard_normal((2, 64), np.float32)
    chosen, weights = np.array([[6, 8, -1], [0, 7, 2]]), np.array([[0.5, 0.25, 0], [1, 2, 3]], np.float32)
    out = experts.run(part, model.weights, x, chosen, weights, 1)
    np.testing.assert_allclose(out[0], 0.75 * x[0], rtol=1e-6)
    stacked = experts.run(part, model.weights, x[1:], np.array([[0, 2]]), np.array([[1, 3]], np.float32), 1)
    np.testing.assert_allclose(out[1], stacked[0] + 2 * x[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "options", [{"mla": 0}, {"mla": 1}, {"mla": 2}, {"threads": 3}, {"expert_reduction": (1, 0.5)}]
)
def test_modes_of_the_plans(tmp_path: Path, options: dict[str, Any]) -> None:
    path = written(tmp_path / "m.gguf", "longcat-flash")
    exact, fast = (load(path, numerics=numerics, cache_type="f32", **options) for numerics in ("exact", "fast"))
    assert fast.fallback_reason is None
    expected = exact.logits(TOKENS)
    assert spread(fast.logits(TOKENS), expected) < 1e-5
    assert spread(by_steps(fast, TOKENS), expected) < 1e-5


def test_layer_by_layer(tmp_path: Path) -> None:
    """A layer of two caches, for all chunks before the next one."""
    model = load(written(tmp_path / "m.gguf", "longcat-flash"), cache_type="f32")
    chunks = TOKENS.reshape(3, 40)
    expected = [model.logits(chunk) for chunk in chunks]
    found = dict(chunks_layer_by_layer(model, chunks, 512, rows=slice(None)))
    assert found.keys() == {0, 1, 2}
    assert all(spread(found[number], expected[number]) < 1e-5 for number in range(3))
