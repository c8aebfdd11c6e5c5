"""Check the values of config.json and of GGUF keys: type and bounds, before any of them is used.

Both spellings share one table of bounds, `_TABLE`. Whether the numbers agree with each other and with the tensors is
checked by archs/common/validate.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from quantkit.errors import FormatError
from quantkit.inputs.settings import mapping


class Bound(Protocol):
    """A condition on a value. Its text completes "it has to be …"."""

    def holds(self, value: object) -> bool:
        """Whether the value meets the condition."""
        ...


@dataclass(frozen=True)
class Count:
    """A whole number. `per_layer` also allows a list of one for each layer, in which 0 means none, `real` a number of
    type float that is whole."""

    minimum: int
    maximum: int
    per_layer: bool = False
    real: bool = False

    def holds(self, value: object) -> bool:
        """Whether a value is within the bounds."""
        if self.per_layer and isinstance(value, (list, tuple)) and value:
            return all(type(v) is int and 0 <= v <= self.maximum for v in value)
        if self.real and isinstance(value, float) and value.is_integer():
            value = int(value)
        return type(value) is int and self.minimum <= value <= self.maximum

    def __str__(self) -> str:
        return f"a whole number from {self.minimum} to {self.maximum}"


_ROUNDED = 2.0**-23  # a bound of config.json may be above itself in a GGUF, where it is a float32


@dataclass(frozen=True)
class Real:
    """A finite number. `open_below` excludes `minimum` itself."""

    minimum: float
    maximum: float
    open_below: bool = False

    def holds(self, value: Any) -> bool:
        """Whether a value is within the bounds."""
        if type(value) not in (int, float):  # NaN, infinities and integers beyond floats compare as out of bounds
            return False
        most = self.maximum + abs(self.maximum) * _ROUNDED
        return self.minimum <= value <= most and not (self.open_below and value == self.minimum)

    def __str__(self) -> str:
        if self.open_below:
            return f"a number above {self.minimum:g}, at most {self.maximum:g}"
        return f"a number from {self.minimum:g} to {self.maximum:g}"


@dataclass(frozen=True)
class Flag:
    """True or false; some writers store 1 and 0."""

    def holds(self, value: object) -> bool:
        """Whether a value is true, false, 1 or 0."""
        return type(value) in (bool, int) and value in (0, 1)

    def __str__(self) -> str:
        return "true or false"


@dataclass(frozen=True)
class Flags:
    """A list of `Flag`."""

    def holds(self, value: object) -> bool:
        """Whether `value` is a list of true, false, 1 or 0."""
        return isinstance(value, list) and all(map(Flag().holds, value))

    def __str__(self) -> str:
        return "a list of true or false, one for each layer"


@dataclass(frozen=True)
class Text:
    """A string."""

    def holds(self, value: object) -> bool:
        """Whether a value is a string."""
        return isinstance(value, str)

    def __str__(self) -> str:
        return "a string"


@dataclass(frozen=True)
class Words:
    """A list of strings. Every entry is checked, because callers also pass lists that no GGUF file could hold."""

    def holds(self, value: object) -> bool:
        """Whether `value` is a list of strings."""
        return isinstance(value, list) and set(map(type, value)) <= {str}

    def __str__(self) -> str:
        return "a list of strings"


@dataclass(frozen=True)
class Numbers:
    """A list of numbers. The type and finiteness of every entry are checked, and the bounds of the extremes."""

    each: Count | Real

    def holds(self, value: object) -> bool:
        """Whether `value` is a list of numbers, each within the bounds of `each`."""
        if not isinstance(value, list) or not set(map(type, value)) <= {int, float}:
            return False
        if not value:
            return True
        return not any(v != v for v in value) and all(map(self.each.holds, (min(value), max(value))))

    def __str__(self) -> str:
        return f"a list of numbers, each {self.each}"


@dataclass(frozen=True)
class Pattern:
    """Which layers have a sliding window: all but every n-th one, or a list of one flag for each layer."""

    def holds(self, value: object) -> bool:
        """Whether `value` is a whole number of 1 or more, or a list of flags."""
        if isinstance(value, (list, tuple)):
            return len(value) > 0 and all(map(Flag().holds, value))
        return Count(1, 1 << 16).holds(value)

    def __str__(self) -> str:
        return "a whole number from 1 to 65536, or a list of true and false"


@dataclass(frozen=True)
class EachLayer:
    """A number for all layers, or a list of one for each."""

    each: Real

    def holds(self, value: object) -> bool:
        """Whether `value` is a number within the bounds of `each`, or a list of such numbers."""
        if isinstance(value, (list, tuple)):
            return len(value) > 0 and all(map(self.each.holds, value))
        return self.each.holds(value)

    def __str__(self) -> str:
        return f"{self.each}, or a list of such numbers"


_LAYERS = Count(1, 1 << 12)
_WIDTH = Count(1, 1 << 24)
_SIZE = Count(0, 1 << 24, per_layer=True)
_EXPERTS = Count(0, 1 << 16)
_TOKENS = Count(1, 1 << 26)
_POSITIONS = Count(1, 1 << 31)
_PART = Real(0, 1, open_below=True)
_FACTOR = Real(0, 1e6, open_below=True)
_STRENGTH = Real(0, 1e3)
_BASE = Real(1, 1e30, open_below=True)

# Keys of config.json, GGUF keys without the architecture's name, and the bound of both.
_TABLE: tuple[tuple[str, str, Bound], ...] = (
    ("num_hidden_layers num_layers", "block_count", _LAYERS),
    ("hidden_size", "embedding_length", _WIDTH),
    ("num_attention_heads num_key_value_heads head_dim attention_head_dim", "", Count(1, 1 << 16)),
    ("", "attention.head_count attention.head_count_kv attention.key_length attention.value_length "
     "rope.dimension_count", Count(1, 1 << 16, per_layer=True)),
    ("num_global_key_value_heads global_head_dim", "attention.key_length_swa attention.value_length_swa "
     "rope.dimension_count_swa", Count(1, 1 << 16)),
    ("hidden_size_per_layer_input num_kv_shared_layers", "embedding_length_per_layer_input", Count(0, 1 << 24)),
    ("", "attention.shared_kv_layers", Count(0, 1 << 12, real=True)),  # gguf 0.17 wrote a float
    ("altup_num_inputs", "altup.num_inputs", Count(2, 64)),
    ("altup_active_idx", "altup.active_idx", Count(0, 63)),
    ("laurel_rank", "", _WIDTH),
    ("", "activation_sparsity_scale", Numbers(Real(-math.inf, 100))),
    ("vocab_size vocab_size_per_layer_input", "vocab_size", _TOKENS),
    ("max_position_embeddings model_max_length",
     "context_length rope.scaling.original_context_length attention.temperature_length",
     _POSITIONS),
    ("num_experts n_routed_experts num_local_experts moe_num_experts", "expert_count", _EXPERTS),
    ("num_experts_per_tok top_k_experts n_shared_experts n_group topk_group first_k_dense_replace "
     "num_nextn_predict_layers num_mtp_layers mtp_num_hidden_layers moe_num_shared_experts moe_layer_start_index "
     "num_dense_layers num_experts_per_token num_shared_experts num_expert_group moe_topk zero_expert_num",
     "expert_used_count expert_shared_count expert_group_count expert_group_used_count leading_dense_block_count "
     "nextn_predict_layers expert_gating_func expert_zero_count",
     Count(0, 1 << 16, per_layer=True)),
    ("intermediate_size intermediate_size_mlp moe_intermediate_size shared_expert_intermediate_size "
     "dense_intermediate_size ffn_hidden_size expert_ffn_hidden_size "
     "shared_intermediate_size moe_shared_expert_intermediate_size block_ff_dim",
     "feed_forward_length expert_feed_forward_length expert_shared_feed_forward_length", _SIZE),
    ("moe_latent_size", "moe_latent_size", _WIDTH),
    ("o_lora_rank o_groups", "attention.output_lora_rank attention.output_group_count", _WIDTH),
    ("", "attention.compress_ratios", _SIZE),
    ("num_hash_layers", "hash_layer_count", Count(0, 1 << 12)),
    ("hc_mult hc_count", "hyper_connection.count", Count(1, 64)),
    ("hc_lowrank", "hyper_connection.low_rank", _WIDTH),
    ("ngram_size", "ple.ngram_size", Count(2, 16)),
    ("heads_per_ngram ple_conv_kernel_size", "ple.heads_per_ngram ple.conv_kernel", Count(1, 64)),
    ("ple_embed_dim", "", _WIDTH),
    ("ngram_vocab_size_base", "", _POSITIONS),
    ("", "ple.layers", Numbers(Count(0, 1 << 12))),
    ("", "ple.layer_multipliers", Numbers(Count(1, (1 << 63) - 1))),
    ("", "ple.head_vocab_sizes", Numbers(Count(1, 1 << 32))),
    ("", "ple.head_offsets", Numbers(Count(0, 1 << 40))),
    ("", "ple.eos_token_id", Count(0, (1 << 32) - 1)),
    ("split_ngram_parts", "", Count(1, 1 << 16)),
    ("hc_sinkhorn_iters", "hyper_connection.sinkhorn_iterations", Count(1, 1 << 10)),
    ("hc_eps", "hyper_connection.epsilon", Real(0, 0.1)),
    ("compress_rope_theta", "attention.compress_rope_freq_base", _BASE),
    ("swiglu_limit", "", Real(0, 1e6)),
    ("q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim rotary_dim", "", Count(0, 1 << 24)),
    ("", "attention.q_lora_rank attention.kv_lora_rank attention.key_length_mla attention.value_length_mla", _SIZE),
    ("index_n_heads index_head_dim index_topk index_topk_blocks index_block_size "
     "indexer_n_heads indexer_head_dim indexer_budget indexer_compress_ratio",
     "attention.indexer.head_count attention.indexer.key_length attention.indexer.top_k attention.indexer.block_size",
     _WIDTH),
    ("index_local_blocks", "attention.indexer.local_blocks", Count(0, 1 << 24)),
    ("", "attention.indexer.types", Flags()),
    ("n_deepstack_layers", "n_deepstack_layers", Count(0, 1 << 12)),
    ("full_attention_interval", "full_attention_interval", Count(1, 1 << 16)),
    ("", "attention.sliding_window_pattern", Pattern()),
    ("num_sliding_attention_heads share_expert_dim", "", Count(1, 1 << 24)),
    ("moe_router_scaling_factor", "", _FACTOR),
    ("", "swiglu_clamp_exp swiglu_clamp_shexp swiglu_limits swiglu_limits_shared", EachLayer(Real(0, 1e6))),
    ("", "rope.dimension_count_per_layer", Count(0, 1 << 16, per_layer=True)),
    ("", "rope.freq_base_per_layer", EachLayer(_BASE)),
    ("attention_value_scale", "attention.value_scale", _STRENGTH),
    ("sliding_window attention_chunk_size", "attention.sliding_window", Count(0, 1 << 31)),
    ("interleave_moe_layer_step", "interleave_moe_layer_step", Count(1, 1 << 12)),
    ("floor_scale", "", _POSITIONS),
    ("linear_key_head_dim linear_value_head_dim linear_num_key_heads linear_num_value_heads linear_conv_kernel_dim "
     "linear_num_heads linear_head_dim "
     "mamba_num_heads mamba_head_dim ssm_state_size n_groups mamba_n_groups conv_kernel mamba_d_conv",
     "kda.head_dim ssm.conv_kernel ssm.state_size ssm.group_count ssm.time_step_rank ssm.inner_size", _WIDTH),
    ("conv_L_cache", "shortconv.l_cache", Count(2, 64)),
    ("block_multiple_of", "", _WIDTH),
    ("block_ffn_dim_multiplier", "", _FACTOR),
    ("block_auto_adjust_ff_dim", "", Flag()),
    ("", "rope.dimension_sections", Numbers(Count(0, 1 << 16))),
    ("rms_norm_eps layer_norm_eps norm_eps layernorm_epsilon layer_norm_epsilon",
     "attention.layer_norm_rms_epsilon attention.layer_norm_epsilon",
     Real(0, 0.1, open_below=True)),
    ("rope_theta", "", EachLayer(_BASE)),
    ("", "rope.freq_base rope.freq_base_swa", _BASE),
    ("partial_rotary_factor", "", _PART),
    ("routed_scaling_factor", "", _FACTOR),
    ("", "expert_weights_scale", _STRENGTH),  # 0 stands for none
    ("", "attention.scale embedding_scale residual_scale logit_scale", _FACTOR),
    ("attn_logit_softcapping final_logit_softcapping", "attn_logit_softcapping final_logit_softcapping",
     Real(0, 1e6)),
    ("attn_scale", "attention.temperature_scale", _STRENGTH),
    ("tie_word_embeddings attention_bias mlp_bias norm_topk_prob use_grouped_topk attention_k_eq_v enable_moe_block",
     "", Flag()),
    ("moe_renormalize", "attention.head_norm expert_weights_norm rope.scaling.yarn_truncate", Flag()),
    ("", "rope.scaling.type", Text()),
    ("", "rope.scaling.yarn_log_multiplier rope.scaling.yarn_ext_factor", _STRENGTH),
    ("", "rope.scaling.factor rope.scaling.attn_factor rope.scaling.yarn_attn_factor rope.scaling.yarn_beta_fast "
     "rope.scaling.yarn_beta_slow", _FACTOR),
)  # fmt: skip
_OF_CONFIG = {name: bound for names, _, bound in _TABLE for name in names.split()}
_OF_KEY = {key: bound for _, keys, bound in _TABLE for key in keys.split()}
_OF_ROPE: dict[str, Bound] = {
    **{name: _OF_CONFIG[name] for name in ("rms_norm_eps", "partial_rotary_factor")},
    "rope_theta": _BASE,
    **dict.fromkeys(("factor", "attention_factor", "beta_fast", "beta_slow"), _FACTOR),
    **dict.fromkeys(("low_freq_factor", "high_freq_factor", "mscale", "mscale_all_dim", "alpha"), Real(0, 1e9)),
    "original_max_position_embeddings": Real(1, 1 << 31),
    **dict.fromkeys(("rope_type", "type"), Text()),
}
_ID, _WORDS, _FLAG = Count(-1, (1 << 32) - 1), Words(), Flag()
_SCORES = Numbers(Real(-1e38, 1e38))
_OF_TOKENIZER: dict[str, Bound] = {
    **dict.fromkeys(("tokenizer.ggml.model", "tokenizer.ggml.pre"), Text()),
    **dict.fromkeys(("tokenizer.ggml.tokens", "tokenizer.ggml.merges"), _WORDS),
    **dict.fromkeys(("tokenizer.ggml.scores", "quantkit.tokenizer.scores"), _SCORES),
    "tokenizer.ggml.token_type": Numbers(Count(0, 1 << 16)),
    "tokenizer.ggml.precompiled_charsmap": Numbers(Count(0, 255)),
    **{f"tokenizer.ggml.add_{name}": _FLAG for name in ("bos_token", "eos_token", "sep_token", "space_prefix")},
    "tokenizer.ggml.remove_extra_whitespaces": _FLAG,
}
_OBJECTS = ("rope_scaling", "rope_parameters", "quantization_config")


def largest(metadata: Mapping[str, Any], key: str) -> int:
    """The whole number in a key of a file's architecture, the largest of a list of one for each layer; 0 without it."""
    value = metadata.get(f"{metadata.get('general.architecture')}.{key}") or 0
    return int(max(value, default=0) if isinstance(value, (list, tuple)) else value)


def routed_experts(metadata: Mapping[str, Any]) -> tuple[int, int]:
    """How many experts a token's are selected among, those without matrices included, and how many are selected."""
    count, without, used = (largest(metadata, f"expert_{key}") for key in ("count", "zero_count", "used_count"))
    return count + without, used


# ---------------------------------------------------------------------------------------------------------- config.json


def check_config(config: Mapping[str, object]) -> None:
    """FormatError naming the first key whose value has a wrong type or is out of bounds. null counts as absent."""
    classes = config.get("architectures")
    if classes is not None and not (isinstance(classes, list) and all(isinstance(name, str) for name in classes)):
        raise FormatError(f"config.json: architectures = {classes!r}; it has to be a list of class names")
    _check_settings(config, _OF_CONFIG, "")
    heads, kv_heads = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if isinstance(heads, int) and isinstance(kv_heads, int) and heads % kv_heads:
        raise FormatError(
            f"config.json: num_attention_heads = {heads} is not a multiple of num_key_value_heads = {kv_heads}; "
            "each KV head serves the same number of query heads"
        )
    for key in _OBJECTS:
        mapping(config, key)
    for part in _OBJECTS[:2]:
        parameters = mapping(config, part)
        _check_settings(parameters, _OF_ROPE, f"{part}.")
        for kind, own in parameters.items():  # of each kind of layers
            if isinstance(own, dict):
                _check_settings(own, _OF_ROPE, f"{part}.{kind}.")


def _check_settings(values: Mapping[str, object], bounds: Mapping[str, Bound], prefix: str) -> None:
    for name, bound in bounds.items():
        value = values.get(name)
        if value is not None and not bound.holds(value):
            raise FormatError(f"config.json: {prefix}{name} = {brief(value)}; it has to be {bound}")


# ------------------------------------------------------------------------------------------------------------ GGUF keys


def check_keys(arch: str, metadata: Mapping[str, object], *, zeros: bool = False) -> None:
    """FormatError naming the first key of an architecture whose value is invalid. With `zeros`, 0 means none."""
    for name, bound in _OF_KEY.items():
        value = metadata.get(f"{arch}.{name}")
        if not (zeros and type(value) in (int, float) and value == 0):
            check_key(f"{arch}.{name}", value, bound)


def check_tokenizer(metadata: Mapping[str, object]) -> None:
    """FormatError naming the first tokenizer key whose value has a wrong type or is out of bounds.

    The length of tokens and the steps of `quantkit.tokenizer` are checked by `tokenizers.checks`.
    """
    for key, bound in _OF_TOKENIZER.items():
        check_key(key, metadata.get(key), bound)
    for key, value in metadata.items():
        if key.startswith("tokenizer.ggml.") and key.endswith("_token_id"):
            check_key(key, value, _ID)


def bound_of(key: str) -> Bound:
    """The bound of a key, given without the architecture's name. The table has every key that is read."""
    return _OF_KEY[key]


def check_key(key: str, value: Any, bound: Bound) -> None:
    """FormatError unless the value of a key is within bounds, or absent."""
    if isinstance(value, (np.ndarray, np.generic)):
        value = value.tolist()
    if value is not None and not bound.holds(value):
        entry = _wrong_entry(value, bound)
        shown = brief(value) if entry is None else f"{brief(value)}, entry {entry} is {brief(value[entry])}"
        raise FormatError(f"metadata key {key} = {shown}; it has to be {bound}")


def _wrong_entry(value: Any, bound: Bound) -> int | None:
    """The index of the first invalid entry of a long list; None for a short list and for other values."""
    if not isinstance(value, list) or len(value) <= 8 or not isinstance(bound, (Words, Numbers)):
        return None
    each = Text() if isinstance(bound, Words) else bound.each
    return next((i for i, entry in enumerate(value) if not each.holds(entry)), None)


def brief(value: Any) -> str:
    """A value for a message; a long list or string is cut off."""
    text = repr(value[:8])[:-1] + ", …]" if isinstance(value, list) and len(value) > 8 else repr(value)
    return text if len(text) <= 80 else text[:79] + "…"
