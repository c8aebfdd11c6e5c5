"""The llama architecture: round trip of keys, RoPE scaling against transformers, messages of refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quantkit import archs
from quantkit.archs.common import rope
from quantkit.archs.common.base import rope_parameters
from quantkit.archs.common.blocks import Attention, FeedForward
from quantkit.errors import FormatError, UnknownNameError, UnsupportedError

LLAMA = archs.get("llama")
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16.0}


def values(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, (value, _) in LLAMA.metadata(config).items()}


def names(config: dict[str, Any]) -> list[str]:
    """The tensor names of a model with this config."""
    layers = range(config["num_hidden_layers"])
    stems = ["attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down"]
    found = [f"blk.{i}.{stem}.weight" for i in layers for stem in stems] + ["token_embd.weight", "output_norm.weight"]
    if config.get("attention_bias"):
        found += [
            f"blk.{i}.{stem}.bias" for i in layers for stem in stems if stem.startswith("attn_") and "norm" not in stem
        ]
    return found + ([] if config["tie_word_embeddings"] else ["output.weight"])


def test_keys_and_kinds() -> None:
    entries = LLAMA.metadata(LLAMA.EXAMPLE)
    assert entries["llama.block_count"] == (2, "u32")
    assert entries["llama.attention.head_count_kv"] == (2, "u32")
    assert entries["llama.rope.dimension_count"] == (16, "u32")
    assert entries["llama.attention.layer_norm_rms_epsilon"] == (1e-5, "f32")
    assert "llama.attention.key_length" not in entries
    assert {kind for _, kind in entries.values()} == {"u32", "f32"}


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"head_dim": 32},
        {"tie_word_embeddings": True},
        {"attention_bias": True},
        {"rope_theta": 500000.0, "rms_norm_eps": 1e-6},
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        {"rope_scaling": YARN},
        {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 64},
    ],
    ids=lambda change: ",".join(change) or "plain",
)
def test_config_comes_back(change: dict[str, Any]) -> None:
    config = LLAMA.EXAMPLE | change
    back = LLAMA.config(values(config), dict.fromkeys(names(config)))
    assert {key: back.get(key) for key in config} == config
    assert back["attention_bias"] == config.get("attention_bias", False)


def test_new_form_of_rope_parameters() -> None:
    """transformers 5 writes rope_parameters where there were rope_theta and rope_scaling."""
    old = LLAMA.EXAMPLE | {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}
    new = {key: value for key, value in LLAMA.EXAMPLE.items() if key != "rope_theta"}
    new["rope_parameters"] = {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}
    assert LLAMA.metadata(old) == LLAMA.metadata(new)
    assert values(new)["llama.rope.scaling.factor"] == 2.0


@pytest.mark.parametrize("factor", [8.0, 32.0])
@pytest.mark.parametrize("dim", [64, 128])
def test_llama3_factors_are_those_of_transformers(factor: float, dim: int) -> None:
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = LLAMA3 | {"factor": factor, "rope_theta": 500000.0}
    config = transformers.LlamaConfig(hidden_size=4 * dim, num_attention_heads=4, rope_parameters=scaling)
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 500000.0 ** (-np.arange(0, dim, 2) / dim)
    factors = rope.llama3_factors(scaling, dim)
    assert factors.dtype == np.float32
    assert factors.min() == 1
    assert factors.max() == factor
    np.testing.assert_allclose(plain / factors, expected.numpy(), rtol=1e-5)


def test_llama3_scaling_comes_back_from_the_factors() -> None:
    class Factors:
        def dequantize(self) -> np.ndarray:
            return LLAMA.generated(config)[rope.FREQ_FACTORS]

    config = LLAMA.EXAMPLE | {"head_dim": 64, "rope_theta": 500000.0, "rope_scaling": LLAMA3}
    tensors = {**dict.fromkeys(names(config)), rope.FREQ_FACTORS: Factors()}
    back = LLAMA.config(values(config), tensors)
    assert back["rope_scaling"] == LLAMA3
    assert rope_parameters(back) == rope_parameters(config)
    assert LLAMA.hparams(values(config), tensors).rope.factors == rope.FREQ_FACTORS


def test_factors_that_no_scaling_gives_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"rope_freqs\.weight"):
        rope.llama3_parameters(np.linspace(1, 8, 32, dtype=np.float32), 10000.0)


def test_blocks_tell_the_runtime_everything() -> None:
    config = LLAMA.EXAMPLE | {"attention_bias": True, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}
    hparams = LLAMA.hparams(values(config), names(config))
    blocks = LLAMA.blocks(hparams)
    assert [block.layer for block in blocks] == [0, 1]
    attention, feed_forward = blocks[1].parts
    assert isinstance(attention, Attention)
    assert isinstance(feed_forward, FeedForward)
    assert (attention.q.weight, attention.q.bias) == ("blk.1.attn_q.weight", "blk.1.attn_q.bias")
    assert (attention.heads, attention.kv_heads, attention.head_dim_k, attention.scale) == (4, 2, 16, 0.25)
    assert (attention.rope.style, attention.rope.dim, attention.rope.scale) == ("norm", 16, 0.25)
    assert (feed_forward.down.weight, feed_forward.down.bias) == ("blk.1.ffn_down.weight", None)
    assert not hparams.tied
    assert LLAMA.head(hparams).output.weight == "output.weight"
    tied = LLAMA.hparams(values(config), ["token_embd.weight"])
    assert LLAMA.head(tied).output.weight == "token_embd.weight"


def test_vocabulary_of_49152_never_adds_bos() -> None:
    assert LLAMA.metadata(LLAMA.EXAMPLE | {"vocab_size": 49152})["tokenizer.ggml.add_bos_token"] == (False, "bool")
    assert "tokenizer.ggml.add_bos_token" not in LLAMA.metadata(LLAMA.EXAMPLE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
    ],
)
def test_unsupported_features_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        LLAMA.metadata(LLAMA.EXAMPLE | change)


def test_missing_settings_are_named() -> None:
    config = {key: value for key, value in LLAMA.EXAMPLE.items() if key != "rms_norm_eps"}
    with pytest.raises(FormatError, match="rms_norm_eps"):
        LLAMA.metadata(config)
    metadata = values(LLAMA.EXAMPLE)
    del metadata["llama.embedding_length"]
    with pytest.raises(FormatError, match=r"llama\.embedding_length"):
        LLAMA.hparams(metadata)


def test_architectures_are_found_by_either_name() -> None:
    assert archs.from_hf({"architectures": ["MistralForCausalLM"]}) is LLAMA
    with pytest.raises(UnsupportedError, match=r"FooForCausalLM.*LlamaForCausalLM"):
        archs.from_hf({"architectures": ["FooForCausalLM"]})
    with pytest.raises(UnknownNameError, match="did you mean llama"):
        archs.get("lama")
    with pytest.raises(FormatError, match="architectures"):
        archs.from_hf({})


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Checkpoint tensors of the example, as transformers names them."""
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (320, 64),
        "model.norm.weight": (64,),
        "lm_head.weight": (320, 64),
    }
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        rows = {"q": 64, "k": 32, "v": 32, "o": 64}
        found |= {f"{layer}.self_attn.{name}_proj.weight": (n, 64) for name, n in rows.items()}
        found |= {f"{layer}.mlp.{name}_proj.weight": (96, 64) for name in ("gate", "up")}
        found |= {f"{layer}.mlp.down_proj.weight": (64, 96)}
        found |= {f"{layer}.{name}_layernorm.weight": (64,) for name in ("input", "post_attention")}
    return found


def test_every_tensor_must_be_known_and_present() -> None:
    given = shapes(LLAMA.EXAMPLE)
    assert len(LLAMA.to_gguf(LLAMA.EXAMPLE, given)) == len(given)
    with pytest.raises(UnsupportedError, match=r"model\.layers\.0\.self_attn\.q_norm\.weight"):
        LLAMA.to_gguf(LLAMA.EXAMPLE, given | {"model.layers.0.self_attn.q_norm.weight": (16,)})
    lacking = {name: shape for name, shape in given.items() if name != "model.layers.1.mlp.up_proj.weight"}
    with pytest.raises(FormatError, match=r"lacks 1 tensor\(s\): model\.layers\.1\.mlp\.up_proj\.weight"):
        LLAMA.to_gguf(LLAMA.EXAMPLE, lacking)
    headless = {name: shape for name, shape in given.items() if name != "lm_head.weight"}
    with pytest.raises(FormatError, match=r"lm_head\.weight"):
        LLAMA.to_gguf(LLAMA.EXAMPLE, headless)


def test_tied_heads_and_buffers_are_left_out() -> None:
    given = shapes(LLAMA.EXAMPLE) | {"model.layers.0.self_attn.rotary_emb.inv_freq": (8,)}
    found = LLAMA.to_gguf(LLAMA.EXAMPLE | {"tie_word_embeddings": True}, given)
    assert "output.weight" not in {piece.name for piece in found}
    assert len(found) == len(given) - 2


def test_bare_models_have_names_without_model() -> None:
    given = {name.removeprefix("model."): shape for name, shape in shapes(LLAMA.EXAMPLE).items()}
    found = {piece.name: piece.sources for piece in LLAMA.to_gguf(LLAMA.EXAMPLE, given)}
    assert found["blk.1.attn_q.weight"] == ("layers.1.self_attn.q_proj.weight",)


def test_half_a_set_of_biases_is_refused() -> None:
    partly = [*names(LLAMA.EXAMPLE), "blk.0.attn_q.bias"]
    with pytest.raises(UnsupportedError, match=r"blk\.0\.attn_q\.bias is there and blk\.0\.attn_k\.bias is not"):
        LLAMA.config(values(LLAMA.EXAMPLE), dict.fromkeys(partly))
