"""The qwen3 descriptions, dense and with experts: keys there and back, stacked experts, clear refusals."""

from __future__ import annotations

from typing import Any

import pytest

from quantkit import archs
from quantkit.archs import Arch
from quantkit.archs.common.blocks import Attention, Experts, FeedForward
from quantkit.archs.common.tensors import Stack, Unstack
from quantkit.errors import FormatError, UnsupportedError

DENSE, MOE = archs.get("qwen3"), archs.get("qwen3moe")


def values(arch: Arch, config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, (value, _) in arch.metadata(config).items()}


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Checkpoint tensors of an example, as transformers names them."""
    embd, dim = config["hidden_size"], config["head_dim"]
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (320, embd), "model.norm.weight": (embd,), "lm_head.weight": (320, embd),
    }  # fmt: skip
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
        sizes = {"q_proj": (q, embd), "k_proj": (kv, embd), "v_proj": (kv, embd), "o_proj": (embd, q)}
        found |= {f"{layer}.self_attn.{name}.weight": size for name, size in sizes.items()}
        found |= {f"{layer}.self_attn.{name}_norm.weight": (dim,) for name in "qk"}
        found |= {f"{layer}.{name}_layernorm.weight": (embd,) for name in ("input", "post_attention")}
        stems = [f"{layer}.mlp"]
        ff = config["intermediate_size"]
        if "num_experts" in config:
            ff = config["moe_intermediate_size"]
            stems = [f"{layer}.mlp.experts.{e}" for e in range(config["num_experts"])]
            found[f"{layer}.mlp.gate.weight"] = (config["num_experts"], embd)
        for stem in stems:
            found |= {f"{stem}.{name}_proj.weight": (ff, embd) for name in ("gate", "up")}
            found[f"{stem}.down_proj.weight"] = (embd, ff)
    return found


def gguf_shapes(arch: Arch) -> dict[str, tuple[int, ...]]:
    return {piece.name: piece.shape for piece in arch.to_gguf(arch.EXAMPLE, shapes(arch.EXAMPLE))}


@pytest.mark.parametrize("arch", [DENSE, MOE])
def test_config_comes_back(arch: Arch) -> None:
    for change in ({}, {"tie_word_embeddings": True}, {"head_dim": 16}):
        config = arch.EXAMPLE | change
        names = dict.fromkeys(gguf_shapes(arch))
        if config["tie_word_embeddings"]:
            del names["output.weight"]
        back = arch.config(values(arch, config), names)
        assert {key: back.get(key) for key in config} == config


def test_keys() -> None:
    entries = MOE.metadata(MOE.EXAMPLE)
    assert entries["qwen3moe.expert_count"] == (6, "u32")
    assert entries["qwen3moe.expert_used_count"] == (2, "u32")
    assert entries["qwen3moe.expert_feed_forward_length"] == (32, "u32")
    assert entries["qwen3moe.expert_weights_norm"] == (True, "bool")
    assert entries["qwen3moe.attention.key_length"] == (32, "u32")
    renamed = {key: value for key, value in MOE.EXAMPLE.items() if key != "num_experts"} | {"num_local_experts": 6}
    assert MOE.metadata(renamed) == entries
    silent = {key: value for key, value in MOE.EXAMPLE.items() if key not in ("head_dim", "norm_topk_prob")}
    assert values(MOE, silent)["qwen3moe.attention.key_length"] == 128
    assert values(MOE, silent)["qwen3moe.expert_weights_norm"] is False


def test_files_without_a_word_on_norming_the_weights_do_it() -> None:
    metadata = values(MOE, MOE.EXAMPLE)
    del metadata["qwen3moe.expert_weights_norm"]
    assert MOE.hparams(metadata).normalises


def test_blocks_tell_the_runtime_everything() -> None:
    for arch in (DENSE, MOE):
        hparams = arch.hparams(values(arch, arch.EXAMPLE), gguf_shapes(arch))
        attention, rest = arch.blocks(hparams)[1].parts
        assert isinstance(attention, Attention)
        assert attention.q_norm is not None
        assert (attention.q_norm.weight, attention.q_norm.eps) == ("blk.1.attn_q_norm.weight", 1e-6)
        assert (attention.rope.style, attention.rope.dim, attention.scale) == ("neox", 32, 32**-0.5)
        if arch is DENSE:
            assert isinstance(rest, FeedForward)
        else:
            assert isinstance(rest, Experts)
            assert (rest.count, rest.used, rest.ff, rest.normalise, rest.scale) == (6, 2, 32, True, 1.0)
            assert (rest.router.weight, rest.down.weight) == ("blk.1.ffn_gate_inp.weight", "blk.1.ffn_down_exps.weight")


def test_experts_are_stacked_and_come_apart() -> None:
    given = shapes(MOE.EXAMPLE)
    found = {piece.name: piece for piece in MOE.to_gguf(MOE.EXAMPLE, dict(reversed(given.items())))}
    down = found["blk.1.ffn_down_exps.weight"]
    assert down.shape == (6, 64, 32)
    assert down.sources == tuple(f"model.layers.1.mlp.experts.{e}.down_proj.weight" for e in range(6))
    assert isinstance(down.transform, Stack)
    assert found["blk.0.ffn_gate_inp.weight"].f32
    hparams = MOE.hparams(values(MOE, MOE.EXAMPLE), found)
    back = {piece.name: piece for piece in MOE.to_hf(hparams, {name: piece.shape for name, piece in found.items()})}
    assert {name: piece.shape for name, piece in back.items()} == given
    assert isinstance(back["model.layers.0.mlp.experts.3.up_proj.weight"].transform, Unstack)


def test_experts_that_are_missing_too_many_or_unlike() -> None:
    given = shapes(MOE.EXAMPLE)
    lacking = {name: shape for name, shape in given.items() if name != "model.layers.1.mlp.experts.4.up_proj.weight"}
    with pytest.raises(FormatError, match=r"lacks 1 tensor\(s\): model\.layers\.1\.mlp\.experts\.4\.up_proj\.weight"):
        MOE.to_gguf(MOE.EXAMPLE, lacking)
    with pytest.raises(FormatError, match=r"says 6 experts, the checkpoint has 7 \(numbers 0 to 6\)"):
        MOE.to_gguf(MOE.EXAMPLE, given | {"model.layers.0.mlp.experts.6.up_proj.weight": (32, 64)})
    with pytest.raises(
        FormatError, match=r"experts\.2\.up_proj\.weight is \(31, 64\).* experts must be matrices of one shape"
    ):
        MOE.to_gguf(MOE.EXAMPLE, given | {"model.layers.0.mlp.experts.2.up_proj.weight": (31, 64)})
    for count in (5, 7, 1 << 16):
        with pytest.raises(FormatError, match=rf"config.json says {count} experts, the checkpoint has 6"):
            MOE.to_gguf(MOE.EXAMPLE | {"num_experts": count}, given)
    with pytest.raises(FormatError, match="says 65536 experts, the checkpoint has 0;"):
        MOE.to_gguf(
            MOE.EXAMPLE | {"num_experts": 1 << 16, "num_hidden_layers": 4096},
            {name: shape for name, shape in given.items() if ".experts." not in name},
        )
    hparams = MOE.hparams(values(MOE, MOE.EXAMPLE))
    with pytest.raises(FormatError, match=r"blk\.0\.ffn_up_exps\.weight has shape \(5, 32, 64\).* 6 experts"):
        MOE.to_hf(hparams, gguf_shapes(MOE) | {"blk.0.ffn_up_exps.weight": (5, 32, 64)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_sliding_window": True}, "use_sliding_window = True"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step = 2"),
        ({"mlp_only_layers": [0]}, r"mlp_only_layers = \[0\]"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
    ],
)
def test_unsupported_features_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        MOE.metadata(MOE.EXAMPLE | change)


@pytest.mark.parametrize("used", [0, 7])
def test_more_experts_used_than_there_are(used: int) -> None:
    with pytest.raises(FormatError, match=f"expert_used_count is {used} of expert_count 6"):
        MOE.hparams(values(MOE, MOE.EXAMPLE) | {"qwen3moe.expert_used_count": used})
