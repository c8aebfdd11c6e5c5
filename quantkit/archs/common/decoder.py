"""`Decoder`: the base of llama, qwen3 and related architectures. RMS norms before attention and feed-forward,
grouped-query attention with RoPE over whole heads, SwiGLU. An architecture derives from it and overrides what differs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from quantkit.archs.common import rope
from quantkit.archs.common.base import Arch, Config, Keys, need, refuse, rope_parameters
from quantkit.archs.common.blocks import Attention, Block, HParams, Part
from quantkit.archs.common.tensors import LazyTensor
from quantkit.errors import FormatError, UnsupportedError
from quantkit.formats.gguf.metadata import Entries, shortest
from quantkit.inputs.settings import integer, real


class Decoder(Arch):
    """The base of most architectures. `Arch` lists what to override."""

    rope_style: ClassVar[str]  # "norm" or "neox", see blocks.Rope
    layer_norm_eps: ClassVar[str] = ""  # of models with LayerNorm: the name of epsilon in config.json
    biased: ClassVar[tuple[str, ...]] = (
        "attn_q",
        "attn_k",
        "attn_v",
        "attn_output",
    )  # matrices that attention_bias gives a bias

    # ------------------------------------------------------------------------------------------------ checkpoint side

    def head_dim(self, config: Config) -> int:
        """Elements of a head, from config.json."""
        return integer(config, "head_dim") or int(need(config, "hidden_size") // need(config, "num_attention_heads"))

    def rope_dim(self, config: Config) -> int:
        """Elements of a head that get RoPE. As in transformers, rope_parameters come before a setting beside them."""
        part = real(rope_parameters(config), "partial_rotary_factor") or real(config, "partial_rotary_factor")
        return int(self.head_dim(config) * (part or self.rotary_fraction or 1))

    def head_lengths(self, config: Config) -> Entries:
        """The GGUF keys of the head size, needed if it is not n_embd / n_head."""
        width = (self.head_dim(config), "u32")
        return {f"{self.name}.attention.key_length": width, f"{self.name}.attention.value_length": width}

    def metadata(self, config: Config) -> Entries:
        refuse(config, "hidden_act", ("silu", "swish"))
        parameters = rope_parameters(config)
        if self.rotary_fraction is None:
            refuse(parameters, "partial_rotary_factor", (1, 1.0))
        heads = need(config, "num_attention_heads")
        values: Entries = {
            "block_count": (need(config, "num_hidden_layers") + self.n_mtp_layers(config), "u32"),
            "context_length": (need(config, "max_position_embeddings"), "u32"),
            "embedding_length": (need(config, "hidden_size"), "u32"),
            "feed_forward_length": (need(config, "intermediate_size"), "u32"),
            "attention.head_count": (heads, "u32"),
            "attention.head_count_kv": (config.get("num_key_value_heads") or heads, "u32"),
            "rope.freq_base": (float(parameters["rope_theta"]), "f32"),
            self._epsilon: (float(need(config, self.layer_norm_eps or "rms_norm_eps")), "f32"),
            "vocab_size": (need(config, "vocab_size"), "u32"),
        }
        if self.n_mtp_layers(config):
            values["nextn_predict_layers"] = (self.n_mtp_layers(config), "u32")
        if self.rotary_fraction is not None:
            values["rope.dimension_count"] = (self.rope_dim(config), "u32")
        entries = {f"{self.name}.{key}": entry for key, entry in values.items()}
        return entries | rope.scaling_entries(self.name, parameters)

    def generated(self, config: Config) -> dict[str, np.ndarray]:
        parameters = rope_parameters(config)
        if parameters["rope_type"] != "llama3":
            return {}
        return {rope.FREQ_FACTORS: rope.llama3_factors(parameters, self.rope_dim(config))}

    def is_generated(self, name: str) -> bool:
        return name == rope.FREQ_FACTORS

    def config(self, metadata: Mapping[str, object], tensors: Mapping[str, LazyTensor]) -> dict[str, Any]:
        hp, keys = self.hparams(metadata, tensors.keys()), Keys(self.name, metadata)
        if hp.head_dim_k != hp.head_dim_v or (hp.rope_dim != hp.head_dim_k and self.rotary_fraction is None):
            raise UnsupportedError(
                f"{self.name} with key length {hp.head_dim_k}, value length {hp.head_dim_v}, {hp.rope_dim} rotary "
                f"dims: {self.hf[0]} of transformers has one head_dim for all three"
            )
        found: dict[str, Any] = {
            "architectures": [self.hf[0]],
            "model_type": self.model_type,
            "vocab_size": hp.n_vocab,
            "hidden_size": hp.n_embd,
            "intermediate_size": hp.n_ff,
            "num_hidden_layers": hp.n_main,
            "num_attention_heads": hp.n_head,
            "num_key_value_heads": hp.n_head_kv,
            "max_position_embeddings": hp.n_ctx_train,
            "rope_theta": shortest(hp.rope_base),
            self.layer_norm_eps or "rms_norm_eps": shortest(hp.norm_eps),
            "hidden_act": "silu",
            "tie_word_embeddings": hp.tied,
            "attention_bias": all_or_none(hp, self.biased, self.hf[0]),
        }
        if self.mtp:
            found["num_nextn_predict_layers"] = hp.n_mtp_layers
        if self.rotary_fraction is not None:
            found["partial_rotary_factor"] = hp.rope_dim / hp.head_dim_k
        if hp.rope_freq_factors == rope.FREQ_FACTORS:
            factors = tensors[rope.FREQ_FACTORS].dequantize()
            found["rope_scaling"] = rope.llama3_parameters(factors, found["rope_theta"])
        elif scaling := rope.scaling_parameters(keys):
            found["rope_scaling"] = scaling
        return found

    # --------------------------------------------------------------------------------------------------- runtime side

    def hparams(self, metadata: Mapping[str, object], tensors: Collection[str] = ()) -> HParams:
        return HParams(**self.numbers(Keys(self.name, metadata), tensors))

    def numbers(self, keys: Keys, tensors: Collection[str]) -> dict[str, Any]:
        """The fields of HParams. An architecture adds its own to those of `super()`."""
        tokens = keys.metadata.get("tokenizer.ggml.tokens")
        n_tokens = len(tokens) if isinstance(tokens, list) else 0
        head_dim = head_length(keys, "attention.key_length")
        heads = keys.number("attention.head_count")
        return {
            "arch": self.name,
            "n_layer": keys.number("block_count"),
            "n_mtp_layers": keys.number("nextn_predict_layers", 0),
            "n_ctx_train": keys.number("context_length"),
            "n_embd": keys.number("embedding_length"),
            "n_ff": keys.number("feed_forward_length"),
            "n_head": heads,
            "n_head_kv": keys.number("attention.head_count_kv", heads),
            "head_dim_k": head_dim,
            "head_dim_v": head_length(keys, "attention.value_length"),
            "n_vocab": keys.number("vocab_size", n_tokens or None),
            "norm_eps": keys.real(self._epsilon),
            "centred_norms": bool(self.layer_norm_eps),
            "rope": rope.rope(keys, self.rope_style, self.rotary(keys, head_dim), tensors),
            "window": keys.number("attention.sliding_window", 0) or None,
            "tensors": frozenset(tensors),
        }

    @property
    def _epsilon(self) -> str:
        """The GGUF key of the norms' epsilon."""
        return "attention.layer_norm_epsilon" if self.layer_norm_eps else "attention.layer_norm_rms_epsilon"

    def rotary(self, keys: Keys, head_dim: int) -> int:
        """Elements of a head that get RoPE, from GGUF keys. The key is required if the default is less than all."""
        return keys.number("rope.dimension_count", head_dim if self.rotary_fraction in (None, 1.0) else None)

    def block(self, hp: HParams, i: int) -> Block:
        return Block(i, (self.attention(hp, i), self.feed_forward(hp, i)))

    def attention(self, hp: HParams, i: int) -> Attention:
        """The attention of layer `i`."""
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

    def feed_forward(self, hp: HParams, i: int) -> Part:
        """The feed-forward of layer `i`, dense or with experts."""
        return hp.feed_forward(i)


def head_length(keys: Keys, key: str) -> int:
    """Elements of a head's key or value; without a key, embedding_length / head_count."""
    if keys.get(key) is not None:
        return keys.number(key)
    embd, heads = keys.number("embedding_length"), keys.number("attention.head_count")
    if embd % heads:
        raise FormatError(
            f"{keys.arch}.embedding_length = {embd} is not a multiple of {keys.arch}.attention.head_count = {heads}, "
            f"and there is no {keys.arch}.{key}"
        )
    return embd // heads


def with_head_norms(part: Attention, hp: HParams, i: int) -> Attention:
    """An attention with RMS norms of queries and keys, per head."""
    return replace(part, q_norm=hp.norm(f"blk.{i}.attn_q_norm"), k_norm=hp.norm(f"blk.{i}.attn_k_norm"))


def all_or_none(hp: HParams, stems: tuple[str, ...], hf: str) -> bool:
    """Whether these tensors have biases in every layer. UnsupportedError if only some layers have."""
    names = [f"blk.{i}.{stem}.bias" for i in range(hp.n_layer) for stem in stems]
    present = [name for name in names if name in hp.tensors]
    if present and len(present) < len(names):
        absent = next(name for name in names if name not in hp.tensors)
        raise UnsupportedError(f"{present[0]} is there and {absent} is not; transformers' {hf} has both or neither")
    return bool(present)
