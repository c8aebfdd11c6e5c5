"""llama: Llama 1 to 3.x, SmolLM2, Mistral 7B, Mixtral. RMS norm, grouped-query attention with "norm" RoPE, SwiGLU.

The rows of q and k (weights and biases) are reordered for "norm" RoPE: within each head of D rows, GGUF row 2j + s is
checkpoint row s * D/2 + j. Llama 3.1's RoPE scaling is stored as the tensor rope_freqs.weight
(`archs/common/rope.py`). Experts (Mixtral) are each as wide as a dense feed-forward.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from quantkit.archs.common import experts
from quantkit.archs.common.base import EMBEDDING_RULES, OUTPUT_RULES, Config, Keys, need, refuse
from quantkit.archs.common.blocks import HParams, Part
from quantkit.archs.common.decoder import Decoder, all_or_none
from quantkit.archs.common.tensors import LazyTensor, TensorRule, Transform, interleave_halves
from quantkit.formats.gguf.metadata import Entries

_CODE_VOCAB = 49152  # of SmolLM and Granite, whose tokenizers never add BOS although config.json has it


def rope_order(hparams: HParams) -> Transform:
    """The transform of q and k rows from checkpoint order to that of "norm" RoPE."""
    return interleave_halves(hparams.head_dim_k)


class Llama(Decoder):
    """Llama 1 to 3.x, SmolLM2, Mistral 7B, Mixtral."""

    name = "llama"
    hf: ClassVar[tuple[str, ...]] = ("LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM")
    model_type = "llama"
    defaults_of: ClassVar[dict[str, dict[str, Any]]] = {"MixtralForCausalLM": {"rope_theta": 1000000.0}}
    rope_style = "norm"
    size_overrides = {"eff": lambda s: s["ff"]}  # noqa: RUF012  data
    rules = (
        *EMBEDDING_RULES,
        TensorRule("blk.N.attn_norm", "model.layers.N.input_layernorm", f32=True),
        TensorRule("blk.N.attn_q", "model.layers.N.self_attn.q_proj", rope_order, bias=True),
        TensorRule("blk.N.attn_k", "model.layers.N.self_attn.k_proj", rope_order, bias=True),
        TensorRule("blk.N.attn_v", "model.layers.N.self_attn.v_proj", bias=True),
        TensorRule("blk.N.attn_output", "model.layers.N.self_attn.o_proj", bias=True),
        TensorRule("blk.N.ffn_norm", "model.layers.N.post_attention_layernorm", f32=True),
        *experts.dense_rules(bias=True),
        *experts.routed_rules("block_sparse_moe", experts.MIXTRAL),
        *OUTPUT_RULES,
    )
    EXAMPLE = {  # noqa: RUF012  data
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }

    def metadata(self, config: Config) -> Entries:
        refuse(config, "pretraining_tp", (1,))
        entries = super().metadata(config)
        if config.get("head_dim"):
            entries |= self.head_lengths(config)
        entries["llama.rope.dimension_count"] = (self.head_dim(config), "u32")
        if config.get("sliding_window") and config.get("model_type") in ("mistral", "mixtral"):
            entries["llama.attention.sliding_window"] = (config["sliding_window"], "u32")
        if config.get("num_local_experts"):
            entries["llama.expert_count"] = (config["num_local_experts"], "u32")
            entries["llama.expert_used_count"] = (need(config, "num_experts_per_tok"), "u32")
        if need(config, "vocab_size") == _CODE_VOCAB:
            entries["tokenizer.ggml.add_bos_token"] = (False, "bool")
        return entries

    def config(self, metadata: Mapping[str, object], tensors: Mapping[str, LazyTensor]) -> dict[str, Any]:
        found = super().config(metadata, tensors)
        hp, keys = self.hparams(metadata, tensors.keys()), Keys(self.name, metadata)
        if not hp.n_expert:
            found["mlp_bias"] = all_or_none(hp, ("ffn_gate", "ffn_up", "ffn_down"), self.hf[0])
        if keys.get("attention.key_length") is not None or hp.head_dim_k * hp.n_head != hp.n_embd:
            found["head_dim"] = hp.head_dim_k
        if hp.window is not None:
            found |= {"architectures": [self.hf[1]], "model_type": "mistral", "sliding_window": hp.window}
        if hp.n_expert:
            found |= {"architectures": [self.hf[2]], "model_type": "mixtral", "num_local_experts": hp.n_expert}
            found["num_experts_per_tok"] = hp.n_expert_used
        return found

    def numbers(self, keys: Keys, tensors: Collection[str]) -> dict[str, Any]:
        found = super().numbers(keys, tensors)
        if not keys.number("expert_count", 0):
            return found | {"n_leading_dense": found["n_layer"]}
        return found | experts.numbers(keys, tensors, ff=found["n_ff"])

    def feed_forward(self, hp: HParams, i: int) -> Part:
        return experts.feed_forward(hp, i)
