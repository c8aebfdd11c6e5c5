"""kimi-linear: Kimi Linear. Layers of Kimi Delta Attention (KDA), some of latent attention without RoPE; experts.

Latent attention is DeepSeek V3's, without a latent of queries: the elements that all heads share are not rotated. Which
layers have it is said by linear_attn_config, whose layers count from 1, or by layer_types; in GGUF by
attention.head_count_kv, a list with 0 for each layer with KDA.

    config.json                                    GGUF
    linear_attn_config.head_dim                    kimi-linear.kda.head_dim
    linear_attn_config.short_conv_kernel_size      kimi-linear.ssm.conv_kernel
    linear_attn_config.num_heads                   none: KDA has as many heads as attention
    qk_nope_head_dim + qk_rope_head_dim            kimi-linear.attention.key_length_mla
    kv_lora_rank + qk_rope_head_dim                kimi-linear.attention.key_length: llama.cpp attends to latents

transformers also writes linear_attn_config's numbers as linear_head_dim, linear_conv_kernel_dim and linear_num_heads.
It saves the matrices of a dense layer under block_sparse_moe, where published checkpoints have mlp. A_log is ln(-a).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from quantkit.archs.common import experts
from quantkit.archs.common.base import EMBEDDING_RULES, OUTPUT_RULES, Config, Keys, need, refuse
from quantkit.archs.common.blocks import Block, HParams, KimiDelta, Recurrence
from quantkit.archs.common.hybrid import is_attention, is_recurrent, log_negative, negative_exp, recurrence_of
from quantkit.archs.common.shapes import Sizes
from quantkit.archs.common.tensors import LazyTensor, TensorRule, Transform
from quantkit.archs.common.transforms import Chain, Elementwise, LeadingOnes
from quantkit.archs.deepseek2 import DeepSeek2, half_rules, split_rules
from quantkit.errors import FormatError, UnsupportedError
from quantkit.formats.gguf.metadata import Entries
from quantkit.inputs.settings import integer, mapping, sequence

_FULL, _KDA = "full_attention", "linear_attention"
_KV_HEADS = "attention.head_count_kv"
_LINEAR = "linear_attn_config"
_OF_DEEPSEEK = {
    "model_max_length": "max_position_embeddings", "moe_renormalize": "norm_topk_prob", "num_expert_group": "n_group",
    "num_experts": "n_routed_experts", "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts", "moe_router_activation_func": "scoring_func",
}  # fmt: skip
_OF_LINEAR = {  # names in linear_attn_config, and those of transformers beside it
    "head_dim": "linear_head_dim", "num_heads": "linear_num_heads", "short_conv_kernel_size": "linear_conv_kernel_dim",
}  # fmt: skip
_LISTS = ("full_attn_layers", "kda_layers")
_DENSE_BY_TRANSFORMERS = re.compile(r"\.block_sparse_moe\.(?=(gate|up|down)_proj\.)")


def _conv(hp: HParams) -> Transform:
    return LeadingOnes(3, 3)  # of checkpoints (inner, 1, kernel), of llama.cpp's converter (1, inner, 1, kernel)


def _rates(hp: HParams) -> Transform:
    return Chain(LeadingOnes(2, 4), Elementwise(negative_exp, log_negative))


def _kda_rule(
    ours: str, theirs: str, transform: Callable[[HParams], Transform] | None = None, **given: Any
) -> TensorRule:
    return TensorRule(f"blk.N.{ours}", f"model.layers.N.self_attn.{theirs}", transform, layers=is_recurrent, **given)


KDA_RULES = (
    _kda_rule("attn_k", "k_proj"),
    _kda_rule("attn_v", "v_proj"),
    *(_kda_rule(f"ssm_conv1d_{name}", f"{name}_conv1d", _conv, f32=True) for name in "qkv"),
    *(_kda_rule(f"ssm_{name}", f"{name}_proj") for name in ("f_a", "f_b", "g_a", "g_b")),
    _kda_rule("ssm_beta", "b_proj"),
    _kda_rule("ssm_a", "A_log", _rates, full_names=True, f32=True),
    _kda_rule("ssm_dt.bias", "dt_bias", full_names=True, f32=True),
    _kda_rule("ssm_norm", "o_norm", f32=True),
)
LATENT_RULES = tuple(
    replace(rule, layers=is_attention)
    for rule in (
        TensorRule("blk.N.attn_kv_a_mqa", "model.layers.N.self_attn.kv_a_proj_with_mqa"),
        TensorRule("blk.N.attn_kv_a_norm", "model.layers.N.self_attn.kv_a_layernorm", f32=True),
        TensorRule("blk.N.attn_kv_b", "model.layers.N.self_attn.kv_b_proj"),
        *half_rules(),
    )
)


def _of_layer(kda: str, latent: str) -> Callable[[Sizes], int]:
    """A dimension that differs between layers with KDA and those with latent attention."""
    return lambda sizes: sizes[latent if sizes.key(_KV_HEADS) else kda]


class KimiLinear(DeepSeek2):
    """Kimi Linear."""

    name = "kimi-linear"
    hf: ClassVar[tuple[str, ...]] = ("KimiLinearForCausalLM",)
    model_type = "kimi_linear"
    defaults: ClassVar[Mapping[str, object]] = {"routed_scaling_factor": 2.446}
    mtp = ""
    rules: ClassVar[tuple[TensorRule, ...]] = (
        *EMBEDDING_RULES,
        TensorRule("blk.N.attn_norm", "model.layers.N.input_layernorm", f32=True),
        TensorRule("blk.N.attn_q", "model.layers.N.self_attn.q_proj"),
        *KDA_RULES,
        *LATENT_RULES,
        TensorRule("blk.N.attn_output", "model.layers.N.self_attn.o_proj"),
        TensorRule("blk.N.ffn_norm", "model.layers.N.post_attention_layernorm", f32=True),
        *experts.dense_rules(),
        experts.choice_rule("block_sparse_moe.gate.e_score_correction_bias"),
        *experts.routed_rules("block_sparse_moe", experts.MIXTRAL),
        *experts.shared_rules("block_sparse_moe.shared_experts"),
        *OUTPUT_RULES,
    )
    size_overrides: ClassVar[Mapping[str, Callable[[Sizes], int]]] = {
        "key": lambda s: s.need("attention.key_length_mla"),
        "value": lambda s: s.need("attention.value_length_mla"),
        "rank": lambda s: s["heads"],
        "head_v": lambda s: s.need("kda.head_dim"),
        "inner": lambda s: s["heads*head_v"],
        "q": _of_layer("inner", "heads*key"),
        "k": lambda s: s["inner"],
        "v": lambda s: s["inner"],
        "o": _of_layer("inner", "heads*value"),
    }
    shape_overrides: ClassVar[Mapping[str, str]] = {
        "ssm_a": "rank 1",
        "ssm_dt": "inner",
        "attn_k_b": "heads kv_lora nope",
        "attn_v_b": "heads value kv_lora",
    }
    EXAMPLE: ClassVar[dict[str, Any]] = {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": None,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 32,
        "v_head_dim": 32,
        "mla_use_nope": True,
        "num_experts": 8,
        "num_experts_per_token": 3,
        "num_shared_experts": 1,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "routed_scaling_factor": 2.446,
        "num_expert_group": 1,
        "topk_group": 1,
        "use_grouped_topk": True,
        "num_nextn_predict_layers": 0,
        "model_max_length": 256,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "linear_attn_config": {
            "head_dim": 32,
            "num_heads": 4,
            "short_conv_kernel_size": 4,
            "full_attn_layers": [4],
            "kda_layers": [1, 2, 3, 5],
        },
    }

    # ------------------------------------------------------------------------------------------------ checkpoint side

    def canonical(self, name: str) -> str:
        return _DENSE_BY_TRANSFORMERS.sub(".mlp.", super().canonical(name))

    def rules_of(self, config: Config) -> tuple[TensorRule, ...]:
        return split_rules(self.rules)

    def metadata(self, config: Config) -> Entries:
        a, linear = self.name, _linear_numbers(config)
        self._refuse(config, linear["num_heads"])
        given = {_OF_DEEPSEEK.get(key, key): value for key, value in config.items() if value is not None}
        for key, other in _OF_DEEPSEEK.items():
            if config.get(key) is not None and config.get(other) not in (None, config[key]):
                raise FormatError(
                    f"config.json: {key} = {config[key]!r:.80} and {other} = {config[other]!r:.80}; give one"
                )
        given |= {"rope_theta": None, "rope_parameters": None, "rope_scaling": None}
        entries = super().metadata({"scoring_func": "sigmoid", **given})
        del entries[f"{a}.rope.freq_base"]
        latent = need(config, "kv_lora_rank")
        return entries | {
            f"{a}.{_KV_HEADS}": ([int(kind == _FULL) for kind in _kinds(config)], "u32"),
            f"{a}.attention.key_length": (latent + entries[f"{a}.rope.dimension_count"][0], "u32"),
            f"{a}.attention.value_length": (latent, "u32"),
            f"{a}.attention.key_length_mla": entries[f"{a}.attention.key_length"],
            f"{a}.attention.value_length_mla": entries[f"{a}.attention.value_length"],
            f"{a}.kda.head_dim": (linear["head_dim"], "u32"),
            f"{a}.ssm.conv_kernel": (linear["short_conv_kernel_size"], "u32"),
        }

    def _refuse(self, config: Config, kda_heads: int) -> None:
        """UnsupportedError for settings of other models of the class, such as Kimi K3, which files do not express."""
        for key, accepted in (
            ("q_lora_rank", ()), ("attention_bias", (False,)), ("mla_use_nope", (True,)),
            ("mla_use_output_gate", (False,)), ("moe_router_activation_func", ("sigmoid",)),
            ("routed_expert_hidden_size", ()), ("latent_moe_use_norm", (False,)), ("attn_res_block_size", ()),
            ("num_key_value_heads", (need(config, "num_attention_heads"),)),
        ):  # fmt: skip
            refuse(config, key, accepted)
        if integer(config, "num_expert_group", 1) > 1:
            refuse(config, "use_grouped_topk", (True,))
        if kda_heads != config["num_attention_heads"]:
            raise UnsupportedError(
                f"config.json: {_LINEAR}.num_heads = {kda_heads}, num_attention_heads = "
                f"{config['num_attention_heads']}; files of {self.name} have one number for both"
            )
        known = (*_OF_LINEAR, *_LISTS)
        for key, value in mapping(config, _LINEAR).items():
            if key not in known and value not in (None, False):
                raise UnsupportedError(
                    f"config.json: {_LINEAR}.{key} = {value!r:.80} is not supported by quantkit; known: "
                    f"{', '.join(known)}"
                )

    def config(self, metadata: Mapping[str, object], tensors: Mapping[str, LazyTensor]) -> dict[str, Any]:
        hp, found = self.hparams(metadata, tensors.keys()), super().config(metadata, tensors)
        for key in ("rope_theta", "rope_scaling", "attention_bias", "topk_method"):
            found.pop(key, None)
        ours = {theirs: key for key, theirs in _OF_DEEPSEEK.items()}
        sizes, layers = recurrence_of(hp), range(1, hp.n_layer + 1)
        return {ours.get(key, key): value for key, value in found.items()} | {
            "mla_use_nope": True,
            "moe_layer_freq": 1,
            "use_grouped_topk": True,
            _LINEAR: {
                "head_dim": sizes.head_dim_k,
                "num_heads": sizes.key_heads,
                "short_conv_kernel_size": sizes.kernel,
                "full_attn_layers": [i for i in layers if i - 1 not in hp.recurrent],
                "kda_layers": [i for i in layers if i - 1 in hp.recurrent],
            },
        }

    # --------------------------------------------------------------------------------------------------- runtime side

    def numbers(self, keys: Keys, tensors: Collection[str]) -> dict[str, Any]:
        kv_heads, heads = keys.per_layer(_KV_HEADS), keys.number("attention.head_count")
        if not (set(kv_heads) <= {0, 1} or set(kv_heads) <= {0, heads}) or len(set(kv_heads)) == 1:
            raise UnsupportedError(
                f"{self.name}.{_KV_HEADS} = {kv_heads!r:.80}; quantkit supports 0 for layers with KDA, and 1 or "
                f"attention.head_count = {heads} for those with latent attention; a model has both"
            )
        for key in ("attention.key_length_mla", "attention.value_length_mla"):
            keys.need(key)  # without it `attention.key_length` is a head's, which it is not here
        given = Keys(self.name, {**keys.metadata, f"{self.name}.{_KV_HEADS}": heads})
        found, dim = super().numbers(given, tensors), keys.number("kda.head_dim")
        return found | {
            "recurrence": Recurrence(keys.number("ssm.conv_kernel"), heads, heads, dim, dim),
            "recurrent": frozenset(i for i, count in enumerate(kv_heads) if not count),
            "rope": replace(found["rope"], scale=0.0, yarn=None, factors=None),  # every angle is 0
        }

    def block(self, hp: HParams, i: int) -> Block:
        if i not in hp.recurrent:
            return super().block(hp, i)
        return Block(i, (self.kimi_delta(hp, i), self.feed_forward(hp, i)))

    def kimi_delta(self, hp: HParams, i: int) -> KimiDelta:
        """The KDA of layer `i`."""
        b = f"blk.{i}"
        return KimiDelta(
            norm=hp.norm(f"{b}.attn_norm"),
            q=hp.linear(f"{b}.attn_q"),
            k=hp.linear(f"{b}.attn_k"),
            v=hp.linear(f"{b}.attn_v"),
            convs=(f"{b}.ssm_conv1d_q.weight", f"{b}.ssm_conv1d_k.weight", f"{b}.ssm_conv1d_v.weight"),
            f_a=hp.linear(f"{b}.ssm_f_a"),
            f_b=hp.linear(f"{b}.ssm_f_b"),
            beta=hp.linear(f"{b}.ssm_beta"),
            a=f"{b}.ssm_a",
            dt=f"{b}.ssm_dt.bias",
            g_a=hp.linear(f"{b}.ssm_g_a"),
            g_b=hp.linear(f"{b}.ssm_g_b"),
            out_norm=hp.norm(f"{b}.ssm_norm"),
            out=hp.linear(f"{b}.attn_output"),
            sizes=recurrence_of(hp),
        )


def _linear_numbers(config: Config) -> dict[str, int]:
    """The numbers of linear_attn_config, which transformers writes beside it as well. FormatError if the two differ."""
    linear, found = mapping(config, _LINEAR), {}
    for key, beside in _OF_LINEAR.items():
        values = {f"{_LINEAR}.{key}": integer(linear, key), beside: integer(config, beside)}
        given = {name: value for name, value in values.items() if value}
        if len(set(given.values())) != 1:
            shown = " and ".join(f"{name} = {value}" for name, value in values.items())
            raise FormatError(f"config.json: {shown}; one of them has to be there, or both with one value")
        found[key] = next(iter(given.values()))
    return found


def _kinds(config: Config) -> list[str]:
    """What each layer has, "linear_attention" or "full_attention"."""
    layers = int(need(config, "num_hidden_layers"))
    linear, kinds = mapping(config, _LINEAR), list(sequence(config, "layer_types"))
    if kinds and (len(kinds) != layers or any(kind not in (_FULL, _KDA) for kind in kinds)):
        raise FormatError(
            f"config.json: layer_types = {kinds!r:.80}; it has to have {layers} entries (num_hidden_layers), each "
            f"{_FULL} or {_KDA}"
        )
    full, kda = ([i for i in sequence(linear, key) if type(i) is int] for key in _LISTS)
    listed = [_FULL if i in full else _KDA for i in range(1, layers + 1)]
    if not any(linear.get(key) for key in _LISTS):
        if not kinds:
            raise FormatError(f"config.json has neither layer_types nor {_LINEAR}.full_attn_layers: give one of them")
        return [str(kind) for kind in kinds]
    if sorted([*full, *kda]) != list(range(1, layers + 1)) or (kinds and kinds != listed):
        raise FormatError(
            f"config.json: {_LINEAR}.full_attn_layers = {linear.get(_LISTS[0])!r:.80}, kda_layers = "
            f"{linear.get(_LISTS[1])!r:.80}; together they have to list the layers 1 to {layers}, each once"
            f"{', as layer_types has them' if kinds else ''}"
        )
    return listed
