"""What qwen3next, qwen35 and qwen35moe share: three layers of four are recurrent (a gated delta rule, blocks.DeltaNet),
every fourth attends with gated heads and rope of part of each.

    config.json                 GGUF, after the architecture's name
    linear_conv_kernel_dim      ssm.conv_kernel
    linear_key_head_dim         ssm.state_size
    linear_num_key_heads        ssm.group_count
    linear_num_value_heads      ssm.time_step_rank
    linear_value_head_dim       ssm.inner_size, times the value heads
    full_attention_interval     full_attention_interval; newer configs list layer_types instead

Checkpoints store norm weights less 1, but for that of a recurrent layer's heads, and the logarithm of -a.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from quantkit.archs.common import experts
from quantkit.archs.common.base import Config, Keys, need, refuse
from quantkit.archs.common.blocks import Attention, Block, DeltaNet, HParams, Part, Recurrence
from quantkit.archs.common.decoder import Decoder, with_head_norms
from quantkit.archs.common.tensors import LazyTensor, Piece, Rule, Shape, Transform
from quantkit.archs.common.transforms import Chain, Elementwise, Flat, Gather, OneRow, add
from quantkit.errors import FormatError, UnsupportedError
from quantkit.formats.gguf.metadata import Entries
from quantkit.inputs.settings import integer, sequence

Runs = list[tuple[int, int, int]]

_INTERVAL, _KERNEL = 4, 4
_STACKED = "experts stacked"  # our own entry in a config


def norm(ours: str, theirs: str, **given: Any) -> Rule:
    """Of a norm whose weight is stored less 1."""
    return Rule(ours, theirs, lambda hp: add(1), f32=True, **given)


def is_recurrent(hp: HParams, layer: int) -> bool:
    return layer in hp.recurrent


def attends(hp: HParams, layer: int) -> bool:
    return layer not in hp.recurrent


def of_recurrent(ours: str, theirs: str, transform: Callable[[HParams], Transform] | None = None, **given: Any) -> Rule:
    """Of a tensor that recurrent layers have, `theirs` as it stands in linear_attn."""
    return Rule(f"blk.N.{ours}", f"model.layers.N.linear_attn.{theirs}", transform, layers=is_recurrent, **given)


def _attending(ours: str, theirs: str) -> Rule:
    return Rule(f"blk.N.{ours}", f"model.layers.N.self_attn.{theirs}", bias=True, layers=attends)


ATTENTION_RULES = (
    norm("blk.N.attn_norm", "model.layers.N.input_layernorm"),
    _attending("attn_q", "q_proj"),
    norm("blk.N.attn_q_norm", "model.layers.N.self_attn.q_norm", layers=attends),
    _attending("attn_k", "k_proj"),
    norm("blk.N.attn_k_norm", "model.layers.N.self_attn.k_norm", layers=attends),
    _attending("attn_v", "v_proj"),
    _attending("attn_output", "o_proj"),
)
AFTER_RULES = (norm("blk.N.post_attention_norm", "model.layers.N.post_attention_layernorm"),)
SHARED_RULES = (
    Rule("blk.N.ffn_gate_inp_shexp", "model.layers.N.mlp.shared_expert_gate", lambda hp: OneRow(hp.n_embd), f32=True),
    *experts.shared_rules("mlp.shared_expert"),
)
MOE_RULES = (*experts.routed_rules(), *SHARED_RULES)
OUTPUT_RULES = (norm("output_norm", "model.norm"), Rule("output", "lm_head", required=False))


# ------------------------------------------------------------------------------------ what stands in what order of rows


def sizes_of(hp: HParams) -> Recurrence:
    assert hp.recurrence is not None
    return hp.recurrence


def runs_of_heads(order: Iterable[int], dim: int, first: int = 0) -> Runs:
    """The rows of heads `order`, of `dim` rows each, that begin at row `first`."""
    return [(0, first + head * dim, dim) for head in order]


def minus_exp(x: np.ndarray) -> np.ndarray:
    """-e^x."""
    return np.asarray(-np.exp(x))


def log_minus(x: np.ndarray) -> np.ndarray:
    """ln(-x), the inverse of `minus_exp`."""
    return np.asarray(np.log(-x))


def recurrent_rules(order: Callable[[HParams], list[int]] | None = None) -> tuple[Rule, ...]:
    """Of the small tensors of recurrent layers; `order(hparams)` are the value heads of a checkpoint as files have
    them."""

    def heads(hp: HParams, *steps: Transform) -> Transform:
        return Chain(Gather(runs_of_heads(order(hp), 1)), *steps) if order else Chain(*steps)

    def conv(hp: HParams) -> Transform:
        return Chain(Flat(), Gather(channels(hp, order(hp)))) if order else Flat()

    return (
        of_recurrent("ssm_conv1d", "conv1d", conv, f32=True),
        of_recurrent("ssm_a", "A_log", lambda hp: heads(hp, Elementwise(minus_exp, log_minus)), whole=True, f32=True),
        of_recurrent("ssm_dt.bias", "dt_bias", heads if order else None, whole=True, f32=True),
        of_recurrent("ssm_norm.weight", "norm.weight", whole=True, f32=True),
    )


def channels(hp: HParams, order: Iterable[int]) -> Runs:
    """Queries, keys and the heads `order` of values, as rows of what makes all of them."""
    sizes = sizes_of(hp)
    return [(0, 0, 2 * sizes.keys), *runs_of_heads(order, sizes.head_dim_v, 2 * sizes.keys)]


def require(names: Iterable[str], shapes: Mapping[str, Shape]) -> None:
    """FormatError for a tensor that a GGUF lacks."""
    if absent := [name for name in names if name not in shapes]:
        raise FormatError(f"this GGUF lacks {absent[0]}; a shard is missing or the file is incomplete")


# -------------------------------------------------------------------------------------------------------- architectures


class Hybrid(Decoder):
    """`tiled` says which key head a value head reads, see blocks.DeltaNet."""

    rope_style = "neox"
    rotary_fraction = 0.25
    tiled: bool
    own_sizes = {"q": lambda s: 2 * s["heads"] * s["key"]}  # noqa: RUF012  data

    # ------------------------------------------------------------------------------------------------ checkpoint side

    def metadata(self, config: Config) -> Entries:
        a, values = self.name, need(config, "linear_num_value_heads")
        if values % need(config, "linear_num_key_heads"):
            raise FormatError(
                f"config.json: linear_num_value_heads = {values} is no multiple of "
                f"linear_num_key_heads = {config['linear_num_key_heads']}"
            )
        found: Entries = {
            "ssm.conv_kernel": (config.get("linear_conv_kernel_dim") or _KERNEL, "u32"),
            "ssm.state_size": (need(config, "linear_key_head_dim"), "u32"),
            "ssm.group_count": (config["linear_num_key_heads"], "u32"),
            "ssm.time_step_rank": (values, "u32"),
            "ssm.inner_size": (values * need(config, "linear_value_head_dim"), "u32"),
            "full_attention_interval": (interval(config), "u32"),
        }
        entries = super().metadata(config) | self.head_lengths(config)
        return entries | {f"{a}.{key}": entry for key, entry in found.items()}

    def config(self, metadata: Mapping[str, object], tensors: Mapping[str, LazyTensor]) -> dict[str, Any]:
        hp, keys = self.hparams(metadata, tensors.keys()), Keys(self.name, metadata)
        sizes = sizes_of(hp)
        return super().config(metadata, tensors) | {
            "head_dim": hp.head_dim_k,
            "linear_conv_kernel_dim": sizes.kernel,
            "linear_key_head_dim": sizes.head_dim_k,
            "linear_value_head_dim": sizes.head_dim_v,
            "linear_num_key_heads": sizes.key_heads,
            "linear_num_value_heads": sizes.value_heads,
            "full_attention_interval": keys.number("full_attention_interval", _INTERVAL),
        }

    # --------------------------------------------------------------------------------------------------- runtime side

    def numbers(self, keys: Keys, tensors: Collection[str]) -> dict[str, Any]:
        found = super().numbers(keys, tensors)
        inner, values, groups = (keys.number(f"ssm.{key}") for key in ("inner_size", "time_step_rank", "group_count"))
        if inner % values or values % groups:
            raise FormatError(
                f"{self.name}: ssm.inner_size {inner}, ssm.time_step_rank {values} and ssm.group_count {groups} must "
                "be multiples, each of the next"
            )
        if found["head_dim_k"] != found["head_dim_v"]:
            raise UnsupportedError(
                f"{self.name}: gated heads, keys of {found['head_dim_k']}, values of {found['head_dim_v']} elements"
            )
        sizes = Recurrence(
            kernel=keys.number("ssm.conv_kernel"),
            key_heads=groups,
            value_heads=values,
            head_dim_k=keys.number("ssm.state_size"),
            head_dim_v=inner // values,
        )
        every = keys.number("full_attention_interval", _INTERVAL)
        recurrent = frozenset(i for i in range(found["n_layer"] - found["n_mtp_layers"]) if (i + 1) % every)
        return found | {"recurrence": sizes, "recurrent": recurrent}

    def blocks(self, hparams: HParams) -> list[Block]:
        return [Block(i, (self.mixer(hparams, i), self.feed_forward(hparams, i))) for i in range(hparams.n_main)]

    def mixer(self, hp: HParams, i: int) -> Part:
        return self.delta_net(hp, i) if i in hp.recurrent else self.attention(hp, i)

    def delta_net(self, hp: HParams, i: int) -> DeltaNet:
        """With projections of their own for queries, keys and values, for gates, and for both rates."""
        stem = f"blk.{i}"
        return DeltaNet(
            norm=hp.norm(f"{stem}.attn_norm"),
            qkv=hp.linear(f"{stem}.attn_qkv"),
            gate=hp.linear(f"{stem}.attn_gate"),
            ba=None,
            beta=hp.linear(f"{stem}.ssm_beta"),
            alpha=hp.linear(f"{stem}.ssm_alpha"),
            conv=f"{stem}.ssm_conv1d.weight",
            a=f"{stem}.ssm_a",
            dt=f"{stem}.ssm_dt.bias",
            out_norm=hp.norm(f"{stem}.ssm_norm"),
            out=hp.linear(f"{stem}.ssm_out"),
            sizes=sizes_of(hp),
            tiled=self.tiled,
        )

    def attention(self, hp: HParams, i: int) -> Attention:
        return replace(with_head_norms(super().attention(hp, i), hp, i), gated=True)

    def feed_forward(self, hp: HParams, i: int) -> Part:
        return hp.feed_forward(i, "post_attention_norm")


class HybridMoE(Hybrid):
    """With routed experts and a shared one, which has a gate."""

    def metadata(self, config: Config) -> Entries:
        refuse(config, "decoder_sparse_step", (1,))
        refuse(config, "mlp_only_layers", ([],))
        width = config.get("intermediate_size")
        found = super().metadata(dict(config) | {"intermediate_size": width or 0}) | experts.entries(self.name, config)
        if not width:
            del found[f"{self.name}.feed_forward_length"]
        return found

    def rules_of(self, config: Config) -> tuple[Rule, ...]:
        if not config.get(_STACKED):
            return self.rules
        singly = [i for i, rule in enumerate(self.rules) if ".experts.E." in rule.hf]
        return (*self.rules[: singly[0]], *experts.stacked_rules(), *self.rules[singly[-1] + 1 :])

    def to_gguf(self, config: Config, shapes: Mapping[str, Shape]) -> list[Piece]:
        """As `Arch.to_gguf`; whether experts are stacked their names tell."""
        stacked = any(name.endswith(".experts.gate_up_proj") for name in shapes)
        return super().to_gguf(dict(config) | {_STACKED: stacked}, shapes)

    def config(self, metadata: Mapping[str, object], tensors: Mapping[str, LazyTensor]) -> dict[str, Any]:
        hp = self.hparams(metadata, tensors.keys())
        return super().config(metadata, tensors) | {
            "num_experts": hp.n_expert,
            "num_experts_per_tok": hp.n_expert_used,
            "moe_intermediate_size": hp.n_ff_expert,
            "shared_expert_intermediate_size": hp.n_ff_shared,
            "norm_topk_prob": hp.normalises,
        }

    def numbers(self, keys: Keys, tensors: Collection[str]) -> dict[str, Any]:
        """As they are; no layer has a plain feed-forward, so that files need not say how wide one is."""
        keys = Keys(self.name, {f"{self.name}.feed_forward_length": 0} | dict(keys.metadata))
        return super().numbers(keys, tensors) | experts.numbers(keys, tensors)

    def feed_forward(self, hp: HParams, i: int) -> Part:
        return replace(experts.routed(hp, i, "post_attention_norm"), shared_gate=f"blk.{i}.ffn_gate_inp_shexp.weight")


def interval(config: Config) -> int:
    """Every so many-th layer attends."""
    every = integer(config, "full_attention_interval")
    kinds = sequence(config, "layer_types")
    if not kinds:
        return every or _INTERVAL
    every = every or kinds.index("full_attention") + 1 if "full_attention" in kinds else len(kinds) + 1
    for i, kind in enumerate(kinds):
        if (kind == "full_attention") != ((i + 1) % every == 0):
            raise UnsupportedError(f"config.json: layer_types[{i}] = {kind!r} where every {every}th layer attends")
    return every
