"""Numbers of a config.json: each of its kind and within bounds, before anything is made of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from quantkit.errors import FormatError

_COUNTS = {
    "hidden_size": 1 << 24, "num_hidden_layers": 1 << 12, "num_attention_heads": 1 << 16,
    "num_key_value_heads": 1 << 16, "head_dim": 1 << 16, "vocab_size": 1 << 26, "max_position_embeddings": 1 << 31,
}  # fmt: skip
_EXPERTS = dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 1 << 16)
_SIZES = dict.fromkeys((
    "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "num_experts_per_tok",
    "n_shared_experts", "first_k_dense_replace", "n_group", "topk_group", "q_lora_rank", "kv_lora_rank",
    "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "rotary_dim", "sliding_window", "num_nextn_predict_layers",
), 1 << 31)  # fmt: skip
_NUMBERS = ("rms_norm_eps", "rope_theta", "routed_scaling_factor", "partial_rotary_factor")
_OF_ROPE = (*_NUMBERS, "factor", "original_max_position_embeddings", "attention_factor", "mscale", "mscale_all_dim",
            "beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor", "alpha")  # fmt: skip
_ABOVE_ZERO = ("rope_theta", "factor", "original_max_position_embeddings")
_OBJECTS = ("rope_scaling", "rope_parameters", "quantization_config")


def check(config: Mapping[str, Any]) -> None:
    """FormatError naming the first key whose value cannot be one; null is as good as absent."""
    classes = config.get("architectures")
    if classes is not None and not (isinstance(classes, list) and all(isinstance(name, str) for name in classes)):
        raise FormatError(f"config.json: architectures = {classes!r}; it has to be a list of names of classes")
    for least, counts in ((1, _COUNTS), (0, _EXPERTS | _SIZES)):
        for key, most in counts.items():
            value = config.get(key)
            if isinstance(value, list) and key in _SIZES:  # one a layer, which some architectures know
                continue
            if value is not None and not (type(value) is int and least <= value <= most):
                raise FormatError(f"config.json: {key} = {value!r}; it has to be a whole number from {least} to {most}")
    heads, kv_heads = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if heads and kv_heads and heads % kv_heads:
        raise FormatError(
            f"config.json: num_attention_heads = {heads} is no multiple of num_key_value_heads = {kv_heads}; each of "
            "those serves as many"
        )
    for key in _OBJECTS:
        if not isinstance(config.get(key) or {}, dict):
            raise FormatError(f"config.json: {key} = {config[key]!r}; it has to be an object or null")
    _check_numbers(config, _NUMBERS, "")
    for part in _OBJECTS[:2]:
        _check_numbers(config.get(part) or {}, _OF_ROPE, f"{part}.")


def _check_numbers(values: Mapping[str, Any], names: tuple[str, ...], prefix: str) -> None:
    for name in names:
        value = values.get(name)
        if value is not None and not (type(value) in (int, float) and math.isfinite(value) and value >= 0):
            raise FormatError(f"config.json: {prefix}{name} = {value!r}; it has to be a number that is not negative")
        if value == 0 and name in _ABOVE_ZERO:
            raise FormatError(f"config.json: {prefix}{name} = {value!r}; it has to be above 0")
