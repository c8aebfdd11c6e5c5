"""What qwen3next, qwen35 and qwen35moe share: recurrent layers, and attention in every fourth layer.

Recurrent layers compute a gated delta rule (`blocks.DeltaNet`). Attention layers have gated heads and apply RoPE to
part of each head.

    config.json                 GGUF, after the architecture's name
    linear_conv_kernel_dim      ssm.conv_kernel
    linear_key_head_dim         ssm.state_size
    linear_num_key_heads        ssm.group_count
    linear_num_value_heads      ssm.time_step_rank
    linear_value_head_dim       ssm.inner_size = linear_value_head_dim * linear_num_value_heads
    full_attention_interval     full_attention_interval; newer configs list layer_types instead

Checkpoints store norm weights minus 1, except the norm of a recurrent layer's heads, and `A_log` = ln(-a); GGUF stores
the weights and a themselves.
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
from quantkit.archs.common.tensors import LazyTensor, Piece, Shape, TensorRule, Transform
from quantkit.archs.common.transforms import Chain, Elementwise, GatherRows, RowToVector, SqueezeMiddle, add
from quantkit.errors import FormatError, UnsupportedError
from quantkit.formats.gguf.metadata import Entries
from quantkit.inputs.settings import integer, sequence

RowRuns = list[tuple[int, int, int]]  # (index of the source, first row, number of rows), see transforms.GatherRows

_INTERVAL, _KERNEL = 4, 4
_STACKED = "experts stacked"  # entry that `to_gguf` adds to a config: the checkpoint stacks the experts' matrices


def norm_rule(ours: str, theirs: str, **given: Any) -> TensorRule:
    """The rule of a norm whose checkpoint weight is stored minus 1."""
    return TensorRule(ours, theirs, lambda hp: add(1), f32=True, **given)


def is_recurrent(hp: HParams, layer: int) -> bool:
    """Whether a layer is recurrent; MTP layers are not."""
    return layer in hp.recurrent


def is_attention(hp: HParams, layer: int) -> bool:
    """Whether a layer has attention, as MTP layers have too."""
    return layer not in hp.recurrent


def recurrent_rule(
    ours: str, theirs: str, transform: Callable[[HParams], Transform] | None = None, **given: Any
) -> TensorRule:
    """The rule of a tensor of recurrent layers; `theirs` is its checkpoint name under `linear_attn`."""
    return TensorRule(f"blk.N.{ours}", f"model.layers.N.linear_attn.{theirs}", transform, layers=is_recurrent, **given)


def _attention_rule(ours: str, theirs: str) -> TensorRule:
    return TensorRule(f"blk.N.{ours}", f"model.layers.N.self_attn.{theirs}", bias=True, layers=is_attention)


ATTENTION_RULES = (
    norm_rule("blk.N.attn_norm", "model.layers.N.input_layernorm"),
    _attention_rule("attn_q", "q_proj"),
    norm_rule("blk.N.attn_q_norm", "model.layers.N.self_attn.q_norm", layers=is_attention),
    _attention_rule("attn_k", "k_proj"),
    norm_rule("blk.N.attn_k_norm", "model.layers.N.self_attn.k_norm", layers=is_attention),
    _attention_rule("attn_v", "v_proj"),
    _attention_rule("attn_output", "o_proj"),
)
FFN_NORM_RULES = (norm_rule("blk.N.post_attention_norm", "model.layers.N.post_attention_layernorm"),)
SHARED_RULES = (
    TensorRule(
        "blk.N.ffn_gate_inp_shexp", "model.layers.N.mlp.shared_expert_gate", lambda hp: RowToVector(hp.n_embd), f32=True
    ),
    *experts.shared_rules("mlp.shared_expert"),
)
MOE_RULES = (*experts.routed_rules(), *SHARED_RULES)
OUTPUT_RULES = (norm_rule("output_norm", "model.norm"), TensorRule("output", "lm_head", required=False))


# -------------------------------------------------------------------------------------------------------- order of rows


def recurrence_of(hp: HParams) -> Recurrence:
    """The sizes of the recurrent layers, which every hybrid model has."""
    assert hp.recurrence is not None
    return hp.recurrence


def head_runs(order: Iterable[int], dim: int, first: int = 0) -> RowRuns:
    """The rows of the heads in `order`; a head has `dim` rows, and head 0 begins at row `first`."""
    return [(0, first + head * dim, dim) for head in order]


def negative_exp(x: np.ndarray) -> np.ndarray:
    """-e^x."""
    return np.asarray(-np.exp(x))


def log_negative(x: np.ndarray) -> np.ndarray:
    """ln(-x), the inverse of `negative_exp`."""
    return np.asarray(np.log(-x))


def recurrent_rules(order: Callable[[HParams], list[int]] | None = None) -> tuple[TensorRule, ...]:
    """The rules of the small tensors of recurrent layers.

    `order(hparams)` lists a checkpoint's value heads in the order of the GGUF; None: the order is the same.
    """

    def heads(hp: HParams, *steps: Transform) -> Transform:
        return Chain(GatherRows(head_runs(order(hp), 1)), *steps) if order else Chain(*steps)

    def conv(hp: HParams) -> Transform:
        return Chain(SqueezeMiddle(), GatherRows(conv_rows(hp, order(hp)))) if order else SqueezeMiddle()

    return (
        recurrent_rule("ssm_conv1d", "conv1d", conv, f32=True),
        recurrent_rule(
            "ssm_a", "A_log", lambda hp: heads(hp, Elementwise(negative_exp, log_negative)), full_names=True, f32=True
        ),
        recurrent_rule("ssm_dt.bias", "dt_bias", heads if order else None, full_names=True, f32=True),
        recurrent_rule("ssm_norm.weight", "norm.weight", full_names=True, f32=True),
    )


def conv_rows(hp: HParams, order: Iterable[int]) -> RowRuns:
    """The rows of attn_qkv and of the convolution: all queries and keys, then the value heads in `order`."""
    sizes = recurrence_of(hp)
    return [(0, 0, 2 * sizes.keys), *head_runs(order, sizes.head_dim_v, 2 * sizes.keys)]


def require_tensors(names: Iterable[str], shapes: Mapping[str, Shape]) -> None:
    """FormatError if a GGUF lacks one of these tensors."""
    if absent := [name for name in names if name not in shapes]:
        raise FormatError(f"this GGUF lacks {absent[0]}; a shard is missing or the file is incomplete")


# -------------------------------------------------------------------------------------------------------- architectures


class Hybrid(Decoder):
    """The base of the hybrid architectures. `tiled` says which key head a value head reads, see `blocks.DeltaNet`."""

    rope_style = "neox"
    rotary_fraction = 0.25
    tiled: bool
    size_overrides = {"q": lambda s: 2 * s["heads"] * s["key"]}  # noqa: RUF012  data

    # ------------------------------------------------------------------------------------------------ checkpoint side

    def metadata(self, config: Config) -> Entries:
        a, values = self.name, need(config, "linear_num_value_heads")
        if values % need(config, "linear_num_key_heads"):
            raise FormatError(
                f"config.json: linear_num_value_heads = {values} is not a multiple of "
                f"linear_num_key_heads = {config['linear_num_key_heads']}"
            )
        found: Entries = {
            "ssm.conv_kernel": (config.get("linear_conv_kernel_dim") or _KERNEL, "u32"),
            "ssm.state_size": (need(config, "linear_key_head_dim"), "u32"),
            "ssm.group_count": (config["linear_num_key_heads"], "u32"),
            "ssm.time_step_rank": (values, "u32"),
            "ssm.inner_size": (values * need(config, "linear_value_head_dim"), "u32"),
            "full_attention_interval": (attention_interval(config), "u32"),
        }
        entries = super().metadata(config) | self.head_lengths(config)
        return entries | {f"{a}.{key}": entry for key, entry in found.items()}

    def config(self, metadata: Mapping[str, object], tensors: Mapping[str, LazyTensor]) -> dict[str, Any]:
        hp, keys = self.hparams(metadata, tensors.keys()), Keys(self.name, metadata)
        sizes = recurrence_of(hp)
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
                f"{self.name}: attention.key_length = {found['head_dim_k']}, attention.value_length = "
                f"{found['head_dim_v']}; quantkit supports gated heads with keys and values of one length"
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

    def block(self, hp: HParams, i: int) -> Block:
        return Block(i, (self.mixer(hp, i), self.feed_forward(hp, i)))

    def mixer(self, hp: HParams, i: int) -> Part:
        """The part of a layer that mixes tokens: the recurrence or the attention."""
        return self.delta_net(hp, i) if i in hp.recurrent else self.attention(hp, i)

    def delta_net(self, hp: HParams, i: int) -> DeltaNet:
        """The recurrence, with separate tensors for queries, keys and values, for gates, beta and alpha."""
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
            sizes=recurrence_of(hp),
            tiled=self.tiled,
        )

    def attention(self, hp: HParams, i: int) -> Attention:
        return replace(with_head_norms(super().attention(hp, i), hp, i), gated=True)

    def feed_forward(self, hp: HParams, i: int) -> Part:
        return hp.feed_forward(i, "post_attention_norm")


class HybridMoE(Hybrid):
    """A hybrid architecture with routed experts and a gated shared expert in every layer."""

    def metadata(self, config: Config) -> Entries:
        refuse(config, "decoder_sparse_step", (1,))
        refuse(config, "mlp_only_layers", ([],))
        width = config.get("intermediate_size")
        found = super().metadata(dict(config) | {"intermediate_size": width or 0}) | experts.entries(self.name, config)
        if not width:
            del found[f"{self.name}.feed_forward_length"]
        return found

    def rules_of(self, config: Config) -> tuple[TensorRule, ...]:
        if not config.get(_STACKED):
            return self.rules
        singly = [i for i, rule in enumerate(self.rules) if ".experts.E." in rule.hf]
        return (*self.rules[: singly[0]], *experts.stacked_rules(), *self.rules[singly[-1] + 1 :])

    def to_gguf(self, config: Config, shapes: Mapping[str, Shape]) -> list[Piece]:
        """As `Arch.to_gguf`; the names tell whether the checkpoint stacks the experts' matrices."""
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
        """Fields of HParams. Files may omit feed_forward_length, because no layer has a dense feed-forward."""
        keys = Keys(self.name, {f"{self.name}.feed_forward_length": 0} | dict(keys.metadata))
        return super().numbers(keys, tensors) | experts.numbers(keys, tensors)

    def feed_forward(self, hp: HParams, i: int) -> Part:
        return replace(experts.routed(hp, i, "post_attention_norm"), shared_gate=f"blk.{i}.ffn_gate_inp_shexp.weight")


def attention_interval(config: Config) -> int:
    """n, if every n-th layer has attention. UnsupportedError if layer_types says otherwise."""
    every = integer(config, "full_attention_interval")
    kinds = sequence(config, "layer_types")
    if not kinds:
        return every or _INTERVAL
    every = every or kinds.index("full_attention") + 1 if "full_attention" in kinds else len(kinds) + 1
    for i, kind in enumerate(kinds):
        if kind not in ("linear_attention", "full_attention"):
            raise UnsupportedError(
                f"config.json: layer_types[{i}] = {kind!r:.80}; known are linear_attention and full_attention"
            )
        if (kind == "full_attention") != ((i + 1) % every == 0):
            raise UnsupportedError(
                f"config.json: layer_types[{i}] = {kind!r}; full_attention has to be the last of every {every} layers"
            )
    return every
