"""gemma3n: Gemma 3n (E2B, E4B), its text model. It is planned only: tensors, sizes and caches, from config.json.

Beside what Gemma 4's E2B has (archs/gemma4.py), a token has several states (AltUp), of which one enters a layer, and a
product of low rank beside attention (LAuReL). Some layers keep only the largest gates of their feed-forward.

    altup_num_inputs               altup.num_inputs: states of a token; all but one are projected from the embedding
    altup_active_idx               altup.active_idx
    activation_sparsity_pattern    activation_sparsity_scale, of each layer: the quantile of a normal distribution
    num_kv_shared_layers           attention.shared_kv_layers
    hidden_size_per_layer_input    embedding_length_per_layer_input
    intermediate_size              feed_forward_length: one number, or one of each layer
    vocab_size_per_layer_input     vocab_size: llama.cpp's converter cuts the embedding to the tokens of the tokenizer

llama.cpp reads attn_k and attn_v of all layers, so files have them in layers that share them too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from statistics import NormalDist
from typing import Any, ClassVar

from quantkit.archs.common import windows
from quantkit.archs.common.base import EMBEDDING_RULES, OUTPUT_RULES, Config, Keys, need, refuse
from quantkit.archs.common.decoder import Decoder
from quantkit.archs.common.tensors import LazyTensor, TensorRule
from quantkit.errors import FormatError, UnsupportedError
from quantkit.formats.gguf.metadata import Entries
from quantkit.inputs.settings import integer, mapping, real, sequence

_EVERY = 5  # by default every fifth layer attends to all tokens
_ALTUP_INPUTS, _LAUREL_RANK = 4, 64  # llama.cpp has no others
_SPARSE, _SPARSITY = 10, 0.95  # layers that are sparse by default, and how much of their gates is left out


def _in_layers(*pairs: tuple[str, str], f32: bool = False, full_names: bool = False) -> tuple[TensorRule, ...]:
    """Rules of tensors of every layer, from their names in a layer on both sides."""
    return tuple(
        TensorRule(f"blk.N.{ours}", f"model.layers.N.{theirs}", f32=f32, full_names=full_names)
        for ours, theirs in pairs
    )


class Gemma3n(Decoder):
    """Gemma 3n, its text model."""

    name = "gemma3n"
    hf: ClassVar[tuple[str, ...]] = ("Gemma3nForCausalLM",)
    model_type = "gemma3n_text"
    rope_style = "neox"
    ties_by_default = True
    plans_only = True
    defaults: ClassVar[dict[str, Any]] = {  # those of transformers
        "vocab_size": 262400,
        "hidden_size": 2048,
        "intermediate_size": 16384,
        "num_hidden_layers": 35,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "sliding_window": 512,
        "final_logit_softcapping": 30.0,
        "vocab_size_per_layer_input": 262144,
        "hidden_size_per_layer_input": 256,
        "altup_active_idx": 0,
        "altup_num_inputs": _ALTUP_INPUTS,
        "num_kv_shared_layers": 15,
        "laurel_rank": _LAUREL_RANK,
    }
    size_overrides: ClassVar = {
        "altup_others": lambda s: s["altup"] - 1,
        "laurel": lambda s: _LAUREL_RANK,
    }
    rules: ClassVar[tuple[TensorRule, ...]] = (
        *EMBEDDING_RULES,
        TensorRule("per_layer_token_embd", "model.embed_tokens_per_layer"),
        TensorRule("per_layer_model_proj", "model.per_layer_model_projection"),
        TensorRule("per_layer_proj_norm", "model.per_layer_projection_norm", f32=True),
        TensorRule("altup_proj", "model.altup_projections"),
        TensorRule("altup_unembd_proj", "model.altup_unembed_projections"),
        *_in_layers(
            ("attn_norm", "input_layernorm"), ("attn_q_norm", "self_attn.q_norm"), ("attn_k_norm", "self_attn.k_norm"),
            ("post_attention_norm", "post_attention_layernorm"), ("ffn_norm", "pre_feedforward_layernorm"),
            ("post_ffw_norm", "post_feedforward_layernorm"), ("post_norm", "post_per_layer_input_norm"),
            ("altup_router_norm", "altup.router_norm"), ("laurel_post_norm", "laurel.post_laurel_norm"),
            f32=True,
        ),
        *_in_layers(
            ("attn_q", "self_attn.q_proj"), ("attn_k", "self_attn.k_proj"), ("attn_v", "self_attn.v_proj"),
            ("attn_output", "self_attn.o_proj"), ("ffn_gate", "mlp.gate_proj"), ("ffn_up", "mlp.up_proj"),
            ("ffn_down", "mlp.down_proj"), ("inp_gate", "per_layer_input_gate"), ("proj", "per_layer_projection"),
            ("altup_router", "altup.modality_router"), ("altup_predict_coef", "altup.prediction_coefs"),
            ("altup_correct_coef", "altup.correction_coefs"), ("laurel_l", "laurel.linear_left"),
            ("laurel_r", "laurel.linear_right"),
        ),
        *_in_layers(("altup_correct_scale.weight", "altup.correct_output_scale"), f32=True, full_names=True),
        *OUTPUT_RULES,
    )  # fmt: skip

    def metadata(self, config: Config) -> Entries:
        a = self.name
        refuse(config, "hidden_activation", ("gelu_pytorch_tanh",))
        refuse(config, "attention_bias", (False,))
        refuse(config, "altup_correct_scale", (True,))
        refuse(config, "altup_num_inputs", (_ALTUP_INPUTS,))
        refuse(config, "laurel_rank", (_LAUREL_RANK,))
        vocab, rows = (_whole(config, key) for key in ("vocab_size", "vocab_size_per_layer_input"))
        if rows > vocab:
            raise UnsupportedError(
                f"config.json: vocab_size_per_layer_input = {rows}, vocab_size = {vocab}; a token with a row of the "
                "first and none of the second cannot be read"
            )
        layers = _whole(config, "num_hidden_layers")
        shared = _whole(config, "num_kv_shared_layers")
        if shared >= layers:
            raise FormatError(f"config.json: num_kv_shared_layers = {shared} of {layers} layers; one has to have keys")
        parameters = mapping(config, "rope_parameters")
        whole, local = (mapping(parameters, kind) for kind in ("full_attention", "sliding_attention"))
        for part in (whole, local):
            refuse(part, "rope_type", ("default",))
        refuse(config, "rope_scaling", ())
        base = real(whole, "rope_theta") or real(config, "rope_theta") or 1000000.0
        local_base = real(local, "rope_theta") or real(config, "rope_local_base_freq") or 10000.0
        widths = _widths(config, layers)
        given = dict(config) | {"rope_parameters": None, "rope_theta": base, "intermediate_size": max(widths)}
        return super().metadata(given) | self.head_lengths(config) | {
            f"{a}.feed_forward_length": (widths if len(set(widths)) > 1 else widths[0], "u32"),
            f"{a}.vocab_size": (rows, "u32"),
            f"{a}.attention.sliding_window": (_whole(config, "sliding_window"), "u32"),
            f"{a}.attention.sliding_window_pattern": (list(windows.layers_of_config(config, _EVERY)), "bool"),
            f"{a}.attention.shared_kv_layers": (shared, "u32"),
            f"{a}.embedding_length_per_layer_input": (_whole(config, "hidden_size_per_layer_input"), "u32"),
            f"{a}.altup.num_inputs": (_whole(config, "altup_num_inputs"), "u32"),
            f"{a}.altup.active_idx": (_whole(config, "altup_active_idx"), "u32"),
            f"{a}.activation_sparsity_scale": (_scales(config, layers), "f32"),
            f"{a}.rope.freq_base_swa": (local_base, "f32"),
            f"{a}.final_logit_softcapping": (real(config, "final_logit_softcapping"), "f32"),
        }  # fmt: skip

    def config(self, metadata: Mapping[str, object], tensors: Mapping[str, LazyTensor]) -> dict[str, Any]:
        raise UnsupportedError(f"{self.name} is planned only: this version does not export it")

    def numbers(self, keys: Keys, tensors: Collection[str]) -> dict[str, Any]:
        key = f"{self.name}.feed_forward_length"
        widths = keys.per_layer("feed_forward_length", minimum=1)
        return super().numbers(Keys(self.name, {**keys.metadata, key: max(widths)}), tensors)


def _whole(config: Config, key: str) -> int:
    """A whole number of config.json that has to be there."""
    need(config, key)
    return integer(config, key)


def _widths(config: Config, layers: int) -> list[int]:
    """Rows of gate and up in each layer."""
    if not isinstance(config.get("intermediate_size"), (list, tuple)):
        return [_whole(config, "intermediate_size")] * layers
    given = sequence(config, "intermediate_size")
    widths = [n for n in given if type(n) is int and n > 0]
    if len(given) != layers or len(widths) != layers:
        raise FormatError(f"config.json: intermediate_size = {given!r:.80}; {layers} whole numbers are needed")
    return widths


def _scales(config: Config, layers: int) -> list[float]:
    """Standard deviations above the mean from which on gates are kept, of each layer; -inf where all are."""
    pattern = config.get("activation_sparsity_pattern")
    if pattern is None:
        sparse = _SPARSE if layers > _SPARSE else 0
        pattern = [_SPARSITY] * sparse + [0.0] * (layers - sparse)
    if not isinstance(pattern, (list, tuple)) or len(pattern) != layers:
        raise FormatError(f"config.json: activation_sparsity_pattern = {pattern!r:.80}; {layers} numbers are needed")
    if any(not isinstance(share, (int, float)) or not 0 <= share < 1 for share in pattern):
        raise FormatError(f"config.json: activation_sparsity_pattern = {pattern!r:.80}; shares are from 0 to below 1")
    return [NormalDist().inv_cdf(share) if share else -float("inf") for share in pattern]
