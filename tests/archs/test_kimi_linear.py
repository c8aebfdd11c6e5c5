"""Kimi Linear: checkpoints to GGUF and back, keys as llama.cpp writes them, and settings that are refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quantkit import archs
from quantkit.archs.common import validate
from quantkit.archs.common.transforms import LeadingOnes
from quantkit.errors import FormatError, QuantkitError
from quantkit.formats import gguf
from quantkit.formats.safetensors import open_checkpoint
from quantkit.pipelines.conversion.convert import convert_checkpoint
from quantkit.pipelines.export import export_gguf
from quantkit.recipe import from_config, read_config
from quantkit.runtime.loading import load
from tests.archs.checkpoints import tiny
from tests.archs.files import changed, written
from tests.test_architectures import OTHERS

TOKENS = np.random.default_rng(3).integers(2, 320, (1, 40))
EXAMPLE = archs.get("kimi-linear").EXAMPLE
LINEAR = EXAMPLE["linear_attn_config"]
KIMI_LINEAR_48B: dict[str, Any] = EXAMPLE | {
    "vocab_size": 163840, "hidden_size": 2304, "intermediate_size": 9216, "moe_intermediate_size": 1024,
    "num_hidden_layers": 27, "num_attention_heads": 32, "num_key_value_heads": 32, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "head_dim": 72, "num_experts": 256,
    "num_experts_per_token": 8, "model_max_length": 1048576, "rope_theta": 10000.0, "rope_scaling": None,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "head_dim": 128, "num_heads": 32, "short_conv_kernel_size": 4,
        "kda_layers": [i for i in range(1, 27) if i % 4],
    },
}  # fmt: skip


def as_converted_by_llama_cpp(source: Path, target: Path) -> Path:
    """A copy whose convolutions and rates have four dimensions, the first of which are 1."""
    file = gguf.open(source)
    shapes = {t.name: t.shape for t in file.tensors.values()}
    for name, shape in shapes.items():
        if ".ssm_conv1d_" in name or name.endswith(".ssm_a"):
            shapes[name] = (1,) * (4 - len(shape)) + shape
    specs = [gguf.TensorSpec(t.name, shapes[t.name], t.type) for t in file.tensors.values()]
    with gguf.Writer(target, file.metadata, specs) as writer:
        for t in file.tensors.values():
            writer.write(t.name, t.data)
    return target


@pytest.mark.parametrize(
    "change", [{}, OTHERS["kimi-linear"] | {"linear_head_dim": 24, "v_head_dim": 48}], ids=["example", "other"]
)
def test_checkpoints_come_back(tmp_path: Path, change: dict[str, Any]) -> None:
    import torch
    import transformers

    model = tiny(tmp_path / "hf", arch="kimi-linear", **change)
    convert_checkpoint(tmp_path / "hf", tmp_path / "m.gguf", "f32")
    other = as_converted_by_llama_cpp(tmp_path / "m.gguf", tmp_path / "l.gguf")
    wanted = load(tmp_path / "m.gguf").logits(TOKENS[0])
    np.testing.assert_array_equal(load(other).logits(TOKENS[0]), wanted)
    with torch.no_grad():
        assert np.abs(model(torch.tensor(TOKENS)).logits.numpy()[0] - wanted).max() < 1e-4
    before = open_checkpoint(tmp_path / "hf").tensors
    published = {
        name.replace("block_sparse_moe", "mlp") if ".experts." not in name and "_proj" in name
        and "shared" not in name else name: t for name, t in before.items()
    }  # fmt: skip
    assert published.keys() != before.keys()  # of the dense layers
    for source in (tmp_path / "m.gguf", other):
        back = tmp_path / f"{source.stem}-back"
        export_gguf(source, back)
        after = open_checkpoint(back).tensors
        assert {name: t.shape for name, t in published.items()} == {name: t.shape for name, t in after.items()}
        for name, tensor in published.items():
            exact = not name.endswith("A_log")
            close = np.allclose(
                after[name].dequantize(), tensor.dequantize(), rtol=0 if exact else 1e-5, atol=0 if exact else 1e-6
            )
            assert close, name
        again = transformers.AutoModelForCausalLM.from_pretrained(back, dtype=torch.float32).eval()
        with torch.no_grad():
            logits = [m(torch.tensor(TOKENS)).logits.numpy() for m in (model, again)]
        assert np.abs(logits[0] - logits[1]).max() < 1e-4


def test_keys_and_tensors_are_those_of_llama_cpp() -> None:
    arch = archs.get("kimi-linear")
    keys = {key.removeprefix("kimi-linear."): value for key, (value, _) in arch.metadata(KIMI_LINEAR_48B).items()}
    assert keys["attention.head_count_kv"] == [0, 0, 0, 1] * 6 + [0, 0, 1]
    lengths = [keys[f"attention.{name}"] for name in ("key_length", "key_length_mla", "value_length_mla")]
    assert lengths == [576, 192, 128]
    assert (keys["kda.head_dim"], keys["ssm.conv_kernel"], keys["rope.dimension_count"]) == (128, 4, 64)
    assert (keys["expert_gating_func"], keys["leading_dense_block_count"], keys["expert_shared_count"]) == (2, 1, 1)
    assert "rope.freq_base" not in keys
    tensors = {t.name: (t.shape, t.f32) for t in arch.tensors(KIMI_LINEAR_48B)}
    assert tensors["blk.0.ssm_conv1d_q.weight"] == ((4096, 1, 4), True)
    assert tensors["blk.0.ssm_a"] == ((32, 1), True)
    assert tensors["blk.0.ssm_dt.bias"] == ((4096,), True)
    assert tensors["blk.0.ssm_f_b.weight"] == ((4096, 128), False)
    assert tensors["blk.0.attn_v.weight"] == ((4096, 2304), False)
    assert tensors["blk.3.attn_q.weight"] == ((6144, 2304), False)
    assert tensors["blk.3.attn_k_b.weight"] == ((32, 512, 128), False)
    assert not {"blk.3.attn_k.weight", "blk.3.attn_kv_b.weight", "blk.0.attn_kv_a_mqa.weight"} & tensors.keys()
    assert abs(sum(math.prod(shape) for shape, _ in tensors.values()) / 49.12e9 - 1) < 1e-3


def test_axes_of_length_one_are_added_and_left_out() -> None:
    there = LeadingOnes(2, 4)
    assert there.shape((1, 1, 5, 1)) == there.shape((5, 1)) == (5, 1)
    assert there.inverse().shape((5, 1)) == there.inverse().shape((1, 1, 5, 1)) == (1, 1, 5, 1)
    with pytest.raises(FormatError, match=r"shape \(2, 5, 1\); 2 dimensions"):
        there.shape((2, 5, 1))


def linear(**change: Any) -> dict[str, Any]:
    """linear_attn_config, changed; None leaves a setting out."""
    return {"linear_attn_config": {key: v for key, v in (LINEAR | change).items() if v is not None}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q_lora_rank": 32}, "q_lora_rank = 32"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mla_use_nope": False}, "mla_use_nope"),
        ({"mla_use_output_gate": True}, "mla_use_output_gate"),
        ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func"),
        ({"routed_expert_hidden_size": 48}, "routed_expert_hidden_size"),
        ({"attn_res_block_size": 12}, "attn_res_block_size"),
        ({"hidden_act": "situ"}, "hidden_act"),
        ({"moe_layer_freq": 2}, "moe_layer_freq"),
        ({"num_key_value_heads": 2}, "num_key_value_heads"),
        ({"num_expert_group": 4, "topk_group": 2, "use_grouped_topk": False}, "use_grouped_topk"),
        ({"num_experts_per_token": 9}, "expert_used_count"),
        ({"num_experts_per_token": "3"}, "num_experts_per_token"),
        ({"num_shared_experts": -1}, "num_shared_experts"),
        ({"num_experts_per_tok": 2}, "num_experts_per_token = 3 and num_experts_per_tok = 2"),
        ({"moe_renormalize": "yes"}, "moe_renormalize"),
        ({"model_max_length": 0}, "model_max_length"),
        ({"kv_lora_rank": None}, "kv_lora_rank"),
        ({"kv_lora_rank": -64}, "kv_lora_rank"),
        (linear(head_dim=None), "linear_attn_config.head_dim = 0"),
        (linear(head_dim="32"), "head_dim"),
        (linear(head_dim=10**9), "kda.head_dim"),
        (linear(head_dim=-1), "kda.head_dim"),
        (linear(short_conv_kernel_size=10**30), "ssm.conv_kernel"),
        (linear(num_heads=2), "num_heads = 2"),
        ({"linear_head_dim": 64}, "linear_attn_config.head_dim = 32 and linear_head_dim = 64"),
        (linear(gate_lower_bound=-5.0), "gate_lower_bound"),
        (linear(use_full_rank_gate=True), "use_full_rank_gate"),
        (linear(full_attn_layers=[4, 5]), "each once"),
        (linear(full_attn_layers=[9]), "each once"),
        (linear(full_attn_layers=["4"]), "each once"),
        (linear(full_attn_layers=4), "full_attn_layers"),
        (linear(full_attn_layers=[], kda_layers=[1, 2, 3, 4, 5]), "head_count_kv"),
        (linear(full_attn_layers=None, kda_layers=None), "neither layer_types nor"),
        ({"linear_attn_config": [4]}, "linear_attn_config"),
        ({"layer_types": ["full_attention"] * 5}, "as layer_types has them"),
        ({"layer_types": ["full_attention"] * 4}, "layer_types"),
        ({"layer_types": ["mamba"] * 5}, "layer_types"),
        ({"layer_types": [["full_attention"]] * 5}, "layer_types"),
    ],
)  # fmt: skip
def test_what_cannot_be_expressed_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**EXAMPLE, **change}), encoding="utf-8")
    with pytest.raises(QuantkitError, match=message):
        from_config(read_config(tmp_path))


@pytest.mark.parametrize(
    ("key", "entry", "message"),
    [
        ("kda.head_dim", None, "kda.head_dim is missing"),
        ("kda.head_dim", (64, "u32"), "attn_q.weight"),
        ("kda.head_dim", (0, "u32"), "kda.head_dim = 0"),
        ("ssm.conv_kernel", None, "ssm.conv_kernel is missing"),
        ("ssm.conv_kernel", (5, "u32"), "ssm_conv1d"),
        ("attention.head_count_kv", None, "head_count_kv is missing"),
        ("attention.head_count_kv", ([0, 0, 1], "u32"), "has 3 entries"),
        ("attention.head_count_kv", ([0, 0, 0, 2, 0], "u32"), "head_count_kv"),
        ("attention.head_count_kv", ([0, 0, 1, 1, 0], "u32"), "blk.2.attn_k"),
        ("attention.head_count_kv", (1, "u32"), "head_count_kv"),
        ("attention.key_length_mla", None, "key_length_mla is missing"),
        ("attention.key_length_mla", (32, "u32"), "key_length"),
        ("attention.kv_lora_rank", (32, "u32"), "attn_kv_a_mqa"),
    ],
)
def test_files_that_contradict_themselves_are_refused(
    tmp_path: Path, key: str, entry: tuple[Any, str] | None, message: str
) -> None:
    path = changed(written(tmp_path / "m.gguf", "kimi-linear"), tmp_path / "x.gguf", {f"kimi-linear.{key}": entry})
    file = gguf.open(path)
    with pytest.raises(QuantkitError, match=message):
        validate.describe(file.metadata, file.tensors, path)
