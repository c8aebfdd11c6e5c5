"""Llama 1 to 3.x, SmolLM2, Mistral 7B: RMS norm, grouped-query attention with rope in "norm" order, SwiGLU.

Rows of q and k (weights and biases) are stored in the order of "norm" rope: within each head, GGUF row 2j + s is
checkpoint row s * D/2 + j. Llama 3.1's rope scaling is the tensor rope_freqs.weight (archs/rope.py).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from quantkit.archs import rope
from quantkit.archs.base import (
    EMBEDDING_RULES,
    OUTPUT_RULES,
    SWIGLU_RULES,
    Arch,
    Config,
    Entries,
    Keys,
    need,
    refuse,
    rope_parameters,
    shortest,
)
from quantkit.archs.blocks import Attention, Block, FeedForward, HParams
from quantkit.archs.tensors import Rule, Transform, interleave_halves
from quantkit.errors import UnsupportedError

_CODE_VOCAB = 49152  # SmolLM's and Granite's: their tokenizers never add BOS, whatever their config says


def _rope_order(hparams: HParams) -> Transform:
    return interleave_halves(hparams.head_dim_k)


class Llama(Arch):
    name = "llama"
    hf = ("LlamaForCausalLM", "MistralForCausalLM")
    model_type = "llama"
    rules = (
        *EMBEDDING_RULES,
        Rule("blk.N.attn_norm", "model.layers.N.input_layernorm", f32=True),
        Rule("blk.N.attn_q", "model.layers.N.self_attn.q_proj", _rope_order, bias=True),
        Rule("blk.N.attn_k", "model.layers.N.self_attn.k_proj", _rope_order, bias=True),
        Rule("blk.N.attn_v", "model.layers.N.self_attn.v_proj", bias=True),
        Rule("blk.N.attn_output", "model.layers.N.self_attn.o_proj", bias=True),
        *SWIGLU_RULES,
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

    # ------------------------------------------------------------------------------------------------ checkpoint side

    def metadata(self, config: Config) -> Entries:
        refuse(config, "hidden_act", ("silu", "swish"))
        refuse(config, "pretraining_tp", (1,))
        parameters = rope_parameters(config)
        refuse(parameters, "partial_rotary_factor", (1, 1.0))
        heads, embd = need(config, "num_attention_heads"), need(config, "hidden_size")
        entries: Entries = {
            "llama.block_count": (need(config, "num_hidden_layers"), "u32"),
            "llama.context_length": (need(config, "max_position_embeddings"), "u32"),
            "llama.embedding_length": (embd, "u32"),
            "llama.feed_forward_length": (need(config, "intermediate_size"), "u32"),
            "llama.attention.head_count": (heads, "u32"),
            "llama.attention.head_count_kv": (config.get("num_key_value_heads") or heads, "u32"),
            "llama.rope.freq_base": (float(parameters["rope_theta"]), "f32"),
            "llama.attention.layer_norm_rms_epsilon": (float(need(config, "rms_norm_eps")), "f32"),
            "llama.vocab_size": (need(config, "vocab_size"), "u32"),
        }
        head_dim = config.get("head_dim")
        if head_dim:
            entries["llama.attention.key_length"] = (head_dim, "u32")
            entries["llama.attention.value_length"] = (head_dim, "u32")
        entries["llama.rope.dimension_count"] = (head_dim or embd // heads, "u32")
        if config.get("sliding_window") and config.get("model_type") == "mistral":
            entries["llama.attention.sliding_window"] = (config["sliding_window"], "u32")
        if need(config, "vocab_size") == _CODE_VOCAB:
            entries["tokenizer.ggml.add_bos_token"] = (False, "bool")
        return entries | rope.scaling_entries("llama", parameters)

    def generated(self, config: Config) -> dict[str, np.ndarray]:
        parameters = rope_parameters(config)
        if parameters["rope_type"] != "llama3":
            return {}
        dim = config.get("head_dim") or need(config, "hidden_size") // need(config, "num_attention_heads")
        return {rope.FACTORS: rope.llama3_factors(parameters, dim)}

    def rebuilt(self, name: str) -> bool:
        return name == rope.FACTORS

    def config(self, metadata: Mapping[str, Any], tensors: Mapping[str, Any]) -> dict[str, Any]:
        hp, keys = self.hparams(metadata, tensors.keys()), Keys(self.name, metadata)
        mistral = hp.window is not None
        found: dict[str, Any] = {
            "architectures": [self.hf[1] if mistral else self.hf[0]],
            "model_type": "mistral" if mistral else self.model_type,
            "vocab_size": hp.n_vocab,
            "hidden_size": hp.n_embd,
            "intermediate_size": hp.n_ff,
            "num_hidden_layers": hp.n_layer,
            "num_attention_heads": hp.n_head,
            "num_key_value_heads": hp.n_head_kv,
            "max_position_embeddings": hp.n_ctx_train,
            "rope_theta": shortest(hp.rope_base),
            "rms_norm_eps": shortest(hp.norm_eps),
            "hidden_act": "silu",
            "tie_word_embeddings": hp.tied,
            "attention_bias": _all_or_none(hp, ("attn_q", "attn_k", "attn_v", "attn_output")),
            "mlp_bias": _all_or_none(hp, ("ffn_gate", "ffn_up", "ffn_down")),
        }
        if hp.head_dim_k != hp.head_dim_v or hp.rope_dim != hp.head_dim_k:
            raise UnsupportedError(
                f"llama with key length {hp.head_dim_k}, value length {hp.head_dim_v}, {hp.rope_dim} rotary dims: "
                "transformers' Llama has one head_dim for all three"
            )
        if keys.get("attention.key_length") is not None or hp.head_dim_k * hp.n_head != hp.n_embd:
            found["head_dim"] = hp.head_dim_k
        if mistral:
            found["sliding_window"] = hp.window
        if hp.rope_freq_factors:
            factors = tensors[hp.rope_freq_factors].dequantize()
            found["rope_scaling"] = rope.llama3_parameters(factors, found["rope_theta"])
        elif scaling := rope.scaling_parameters(keys):
            found["rope_scaling"] = scaling
        return found

    # --------------------------------------------------------------------------------------------------- runtime side

    def hparams(self, metadata: Mapping[str, Any], tensors: Collection[str] = ()) -> HParams:
        keys = Keys(self.name, metadata)
        embd, heads = keys.number("embedding_length"), keys.number("attention.head_count")
        if keys.get("expert_count"):
            raise UnsupportedError(f"llama with {keys.get('expert_count')} experts (Mixtral) is not handled yet")
        head_dim = keys.number("attention.key_length", embd // heads)
        tokens = metadata.get("tokenizer.ggml.tokens", ())
        return HParams(
            arch=self.name,
            n_layer=keys.number("block_count"),
            n_ctx_train=keys.number("context_length"),
            n_embd=embd,
            n_ff=keys.number("feed_forward_length"),
            n_head=heads,
            n_head_kv=keys.number("attention.head_count_kv", heads),
            head_dim_k=head_dim,
            head_dim_v=keys.number("attention.value_length", embd // heads),
            n_vocab=keys.number("vocab_size", len(tokens) or None),
            norm_eps=float(keys.need("attention.layer_norm_rms_epsilon")),
            rope=rope.rope(keys, "norm", keys.number("rope.dimension_count", head_dim), tensors),
            window=keys.get("attention.sliding_window"),
            tensors=frozenset(tensors),
        )

    def blocks(self, hparams: HParams) -> list[Block]:
        return [Block(i, (self._attention(hparams, i), self._feed_forward(hparams, i))) for i in range(hparams.n_layer)]

    def _attention(self, hp: HParams, i: int) -> Attention:
        return Attention(
            norm=hp.norm(f"blk.{i}.attn_norm"),
            q=hp.linear(f"blk.{i}.attn_q"),
            k=hp.linear(f"blk.{i}.attn_k"),
            v=hp.linear(f"blk.{i}.attn_v"),
            out=hp.linear(f"blk.{i}.attn_output"),
            heads=hp.n_head,
            kv_heads=hp.n_head_kv,
            head_dim_k=hp.head_dim_k,
            head_dim_v=hp.head_dim_v,
            scale=hp.head_dim_k**-0.5,
            rope=hp.rope,
            window=hp.window,
        )

    def _feed_forward(self, hp: HParams, i: int) -> FeedForward:
        return FeedForward(
            norm=hp.norm(f"blk.{i}.ffn_norm"),
            gate=hp.linear(f"blk.{i}.ffn_gate"),
            up=hp.linear(f"blk.{i}.ffn_up"),
            down=hp.linear(f"blk.{i}.ffn_down"),
        )


def _all_or_none(hp: HParams, stems: tuple[str, ...]) -> bool:
    """Whether these tensors have biases in every layer; some of them only is more than config.json can say."""
    names = [f"blk.{i}.{stem}.bias" for i in range(hp.n_layer) for stem in stems]
    present = [name for name in names if name in hp.tensors]
    if present and len(present) < len(names):
        absent = next(name for name in names if name not in hp.tensors)
        raise UnsupportedError(f"{present[0]} is there and {absent} is not; transformers' Llama has both or neither")
    return bool(present)
