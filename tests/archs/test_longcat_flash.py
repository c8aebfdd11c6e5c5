"""LongCat-Flash: its size, names of layers and halves, experts that give their input, what is refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quantkit import archs
from quantkit.archs.common import checked
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
    for layers in (4, 1):  # of the first blocks only the last one is on the devices
        with pytest.raises(UnsupportedError, match=r"-sm graph: blk\.[02] has experts without matrices.*ffn_gate_inp"):
            load(path, devices="cpu:0,cpu:1", split_mode="graph", gpu_layers=layers)
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


WAYS: dict[str, dict[str, Any]] = {
    "layers": {},
    "a layer on two devices": {"tensor_split": (3, 4)},
    "half a layer on the CPU": {"gpu_layers": 4},
    "experts elsewhere": {"override_tensor": "_exps=CPU"},
    "down elsewhere": {"override_tensor": "down_exps=cpu:1"},
    "half of a block elsewhere": {"override_tensor": r"blk\.1\.=CPU,blk\.2.*attn_k=cpu:1"},
    "caches on the CPU": {"kv_on_cpu": True, "gpu_layers": 4},
    "profile": {"profile": True},
    "profile of the CPU": {"profile": True, "devices": ""},
    "fewer experts": {"expert_reduction": (1, 0.5), "override_tensor": "_exps=CPU"},
}


@pytest.mark.parametrize("mla", [0, 3])
@pytest.mark.parametrize("way", WAYS)
def test_devices_give_the_logits_of_one(tmp_path: Path, way: str, mla: int) -> None:
    path, how = written(tmp_path / "m.gguf", "longcat-flash", num_layers=3), {"devices": "cpu:0,cpu:1"} | WAYS[way]
    same: dict[str, Any] = {"mla": mla, "cache_type": "f32", "expert_reduction": how.get("expert_reduction")}
    one = load(path, **same)
    expected = one.logits(TOKENS[:60])
    for numerics in ("exact", "fast"):
        model = load(path, numerics=numerics, **same | how)
        assert model.new_cache(64).nbytes == one.new_cache(64).nbytes
        assert spread(model.logits(TOKENS[:60]), expected) < 1e-5
        cache = model.new_cache(64)
        parts = [model.forward(part, cache) for part in np.split(TOKENS[:60], [20, *range(21, 27), 50])]
        assert spread(np.concatenate(parts), expected) < 1e-5


def test_a_layer_that_is_cut_moves_its_state_twice(tmp_path: Path) -> None:
    """Once for the attention of its second half and once for the feed-forward there, and back."""
    model = load(written(tmp_path / "m.gguf", "longcat-flash"), devices="cpu:0,cpu:1", tensor_split=(3, 2))
    assert [model.placement.of_cache(layer).name for layer in range(4)] == ["cpu:0"] * 3 + ["cpu:1"]
    model.logits(TOKENS)
    assert model.split is not None
    state, ledger = len(TOKENS) * 4 * model.hparams.n_embd, model.split.ledger
    assert ledger.bytes["cpu:0", "cpu:1"] == 3 * state  # and to the head
    assert ledger.bytes["cpu:1", "cpu:0"] == 2 * state


def test_experts_on_another_device_are_those_with_matrices(tmp_path: Path) -> None:
    """They are counted, and prepared ones give the same bits, also of a token without any."""
    path = written(tmp_path / "m.gguf", "longcat-flash")
    model = load(path, devices="cpu:0", override_tensor="_exps=CPU", numerics="fast")
    part = next(p for p in model.blocks[0].parts if isinstance(p, Experts))
    assert model.split is not None
    worker, ledger, rng = model.split._workers["CPU"], model.split.ledger, np.random.default_rng(5)
    x, out = np.empty((1, 64), np.float32), np.empty((1, 64), np.float32)
    chosen, weights = np.empty((1, 3), np.int32), rng.random((1, 3), np.float32)
    call = worker.prepared_experts(part, x, chosen, weights, out)
    for ids, count in (([0, 5, 3], 3), ([7, 2, 8], 1), ([6, 7, 8], 0), ([1, 4, 6], 2)):
        x[:], chosen[:] = rng.standard_normal(x.shape), ids
        right = experts.run(part, model.weights, x, chosen, weights, 1)
        ledger.clear()
        found = worker.run_experts(part, x, chosen, weights)
        np.testing.assert_allclose(found, right, rtol=1e-4, atol=1e-5)
        nbytes = count * 3 * 4 * 32 * 64
        assert ledger.weights["CPU"] == nbytes
        ledger.clear()
        call()
        np.testing.assert_array_equal(out, found)
        assert ledger.weights["CPU"] == nbytes
    chosen[0, 1] = part.count
    with pytest.raises(AssertionError, match="an expert that is none of 9"):
        call()


def test_what_enters_experts_on_devices(tmp_path: Path) -> None:
    """An observer sees what it sees on one device."""
    path, found = written(tmp_path / "m.gguf", "longcat-flash"), []
    for how in ({}, {"devices": "cpu:0,cpu:1"}, {"devices": "cpu:0,cpu:1", "override_tensor": "_exps=CPU"}):
        model, seen = load(path, **how), dict[tuple[Any, ...], np.ndarray]()  # type: ignore[arg-type]
        model.observer = lambda name, x, *which, seen=seen: seen.setdefault((name, *which), np.array(x))
        model.logits(TOKENS[:40])
        found.append(seen)
    assert ("blk.0.ffn_up_exps.weight", 5, 6) in found[0]
    for seen in found[1:]:
        assert seen.keys() == found[0].keys()
        assert all(np.abs(x - found[0][key]).max() < 1e-4 for key, x in seen.items())


def test_what_is_read_on_average() -> None:
    """Of 12 experts of a token 8 have matrices, as 512 of 768 have."""
    metadata = {key: value for key, (value, _) in ARCH.metadata(LONGCAT_FLASH).items()}
    assert checked.routed_experts({"general.architecture": ARCH.name} | metadata) == (768, 12)


@pytest.mark.parametrize("how", [{}, {"devices": "cpu:0,cpu:1", "tensor_split": (3, 2)}], ids=["one", "two"])
def test_layer_by_layer(tmp_path: Path, how: dict[str, Any]) -> None:
    """A layer of two caches, for all chunks before the next one."""
    model = load(written(tmp_path / "m.gguf", "longcat-flash"), cache_type="f32", **how)
    chunks = TOKENS.reshape(3, 40)
    expected = [model.logits(chunk) for chunk in chunks]
    found = dict(chunks_layer_by_layer(model, chunks, 512, rows=slice(None)))
    assert found.keys() == {0, 1, 2}
    assert all(spread(found[number], expected[number]) < 1e-5 for number in range(3))
