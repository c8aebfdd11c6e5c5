"""Routed experts: the rules, GGUF keys, hyperparameters and blocks that mixture-of-experts architectures share.

    config.json                       GGUF key, after the architecture's name
    n_routed_experts, num_experts …   expert_count
    num_experts_per_tok               expert_used_count
    moe_intermediate_size             expert_feed_forward_length
    n_shared_experts                  expert_shared_count
    shared_expert_intermediate_size   expert_shared_feed_forward_length
    first_k_dense_replace             leading_dense_block_count; mlp_layer_types says the same
    routed_scaling_factor             expert_weights_scale
    norm_topk_prob                    expert_weights_norm
    scoring_func                      expert_gating_func: 1 softmax, 2 sigmoid, 3 softmax over the selected
    n_group, topk_group               expert_group_count, expert_group_used_count

ik_llama.cpp has no keys for groups: its converter writes none, and it selects among all experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

from quantkit.archs.common import fused_experts
from quantkit.archs.common.base import Config, Keys, need
from quantkit.archs.common.blocks import Experts, FeedForward, HParams
from quantkit.archs.common.tensors import Piece, Shape, TensorRule, Transform
from quantkit.archs.common.transforms import GatherRows
from quantkit.errors import FormatError, UnsupportedError
from quantkit.formats.gguf.metadata import Entries, shortest
from quantkit.inputs.settings import integer, real, sequence

_OURS = ("gate", "up", "down")
_GATING = {1: "softmax", 2: "sigmoid"}
# Softmax over the logits of the selected experts. This equals softmax over all, divided by the sum of the selected.
_SOFTMAX_OF_SELECTED = 3
GATING_NUMBERS = {name: number for number, name in _GATING.items()}


def is_dense(hp: HParams, layer: int) -> bool:
    """Whether `layer` is one of the leading dense layers."""
    return layer < hp.n_leading_dense


def has_experts(hp: HParams, layer: int) -> bool:
    """Whether `layer` comes after the leading dense layers."""
    return layer >= hp.n_leading_dense


def _has_shared(hp: HParams, layer: int) -> bool:
    return layer >= hp.n_leading_dense and hp.n_ff_shared > 0


def _has_choice_bias(hp: HParams, layer: int) -> bool:
    return layer >= hp.n_leading_dense and hp.has_choice_bias


GATED = ("gate_proj", "up_proj", "down_proj")  # checkpoint names of the three matrices in most models
MIXTRAL = ("w1", "w3", "w2")  # the same in Mixtral's


def dense_rules(*, bias: bool = False) -> tuple[TensorRule, ...]:
    """The rules of dense layers, which come before the first layer with experts."""
    return tuple(
        TensorRule(f"blk.N.ffn_{ours}", f"model.layers.N.mlp.{theirs}", bias=bias, layers=is_dense)
        for ours, theirs in zip(_OURS, GATED)
    )


def routed_rules(block: str = "mlp", names: tuple[str, ...] = GATED, router: str = "gate") -> tuple[TensorRule, ...]:
    """The rules of the router and of routed experts with a matrix each. `block` stands for `mlp` in the checkpoint."""
    prefix = f"model.layers.N.{block}"
    matrices = (
        TensorRule(f"blk.N.ffn_{ours}_exps", f"{prefix}.experts.E.{theirs}", layers=has_experts)
        for ours, theirs in zip(_OURS, names)
    )
    return (TensorRule("blk.N.ffn_gate_inp", f"{prefix}.{router}", f32=True, layers=has_experts), *matrices)


def stacked_rules(
    block: str = "mlp", names: tuple[str, str] = ("experts.gate_up_proj", "experts.down_proj")
) -> tuple[TensorRule, ...]:
    """The rules of routed experts whose matrices the checkpoint stacks, in two tensors.

    The first is [experts, 2 * ff, n_embd], of each expert the rows of gate, then of up; the second, of down, is
    [experts, n_embd, ff].
    """
    prefix = f"model.layers.N.{block}"

    def part(first: int) -> Callable[[HParams], Transform]:
        def transform(hp: HParams) -> Transform:
            ff = hp.n_ff_expert
            runs = ((0, (2 * expert + first) * ff, ff) for expert in range(hp.n_expert))
            return GatherRows(runs, (hp.n_expert, ff))

        return transform

    pairs = (
        TensorRule(f"blk.N.ffn_{ours}_exps.weight", f"{prefix}.{names[0]}", part(first), layers=has_experts,
             full_names=True, to_gguf_only=True)
        for first, ours in enumerate(_OURS[:2])
    )  # fmt: skip
    return (
        *pairs,
        TensorRule("blk.N.ffn_down_exps.weight", f"{prefix}.{names[1]}", layers=has_experts, full_names=True),
    )


def joined(shapes: Mapping[str, Shape], gate: str, name: str) -> Piece:
    """The checkpoint tensor `name` that holds the rows of a GGUF tensor `gate` and of the up tensor beside it.

    Of experts, it has the rows of gate, then of up, of each. FormatError if one of the two is missing.
    """
    sources = gate, gate.replace("ffn_gate", "ffn_up")
    if absent := [source for source in sources if source not in shapes]:
        raise FormatError(f"this GGUF lacks {absent[0]}; a shard is missing or the file is incomplete")
    *count, ff, columns = shapes[gate]
    runs = [(source, i * ff, ff) for i in range(math.prod(count)) for source in range(2)]
    return Piece(name, (*count, 2 * ff, columns), sources, GatherRows(runs, (*count, 2 * ff)), False)


def choice_rule(
    name: str = "mlp.gate.e_score_correction_bias", transform: Callable[[HParams], Transform] | None = None
) -> TensorRule:
    """The rule of the choice bias: it is added to the scores to select experts, not to their weights."""
    hf_name = f"model.layers.N.{name}"
    return TensorRule("blk.N.exp_probs_b.bias", hf_name, transform, layers=_has_choice_bias, full_names=True, f32=True)


def shared_rules(block: str = "mlp.shared_experts") -> tuple[TensorRule, ...]:
    """The rules of the shared experts."""
    return tuple(
        TensorRule(f"blk.N.ffn_{ours}_shexp", f"model.layers.N.{block}.{theirs}", layers=_has_shared)
        for ours, theirs in zip(_OURS, GATED)
    )


RULES = (*dense_rules(), choice_rule(), *routed_rules(), *shared_rules())


def entries(name: str, config: Config) -> Entries:
    """The GGUF keys of routed experts. config.json may use any of the names in the table above."""
    count = next(
        (config[key] for key in ("n_routed_experts", "num_experts", "num_local_experts") if config.get(key)), 0
    )
    found: Entries = {
        "expert_count": (count or need(config, "num_experts"), "u32"),
        "expert_used_count": (need(config, "num_experts_per_tok"), "u32"),
        "expert_feed_forward_length": (need(config, "moe_intermediate_size"), "u32"),
    }
    for theirs, ours, kind in (
        ("n_shared_experts", "expert_shared_count", "u32"),
        ("shared_expert_intermediate_size", "expert_shared_feed_forward_length", "u32"),
        ("first_k_dense_replace", "leading_dense_block_count", "u32"),
        ("routed_scaling_factor", "expert_weights_scale", "f32"),
        ("norm_topk_prob", "expert_weights_norm", "bool"),
    ):
        if config.get(theirs) is not None:
            found[ours] = (real(config, theirs) if kind == "f32" else config[theirs], kind)
    if (dense := leading_dense(config)) is not None:
        found["leading_dense_block_count"] = (dense, "u32")
    groups = integer(config, "n_group") or 1
    if groups > 1:
        found["expert_group_count"] = (groups, "u32")
        found["expert_group_used_count"] = (need(config, "topk_group"), "u32")
    return {f"{name}.{key}": entry for key, entry in found.items()}


def mlp_layer_types(hp: HParams) -> list[str]:
    """What transformers 5 calls the feed-forward of each layer."""
    return ["dense"] * hp.n_leading_dense + ["sparse"] * (hp.n_main - hp.n_leading_dense)


def leading_dense(config: Config) -> int | None:
    """The dense layers before the first one with experts, from `mlp_layer_types`; None where config.json has none."""
    kinds = list(sequence(config, "mlp_layer_types"))
    if not kinds:
        return None
    layers, dense = int(need(config, "num_hidden_layers")), kinds.count("dense")
    if kinds[:layers] != ["dense"] * dense + ["sparse"] * (layers - dense):
        raise UnsupportedError(
            f"config.json: mlp_layer_types = {kinds!r:.80}; GGUF has a number of dense layers, which come before all "
            f"sparse ones, of num_hidden_layers = {layers}"
        )
    return dense


def numbers(
    keys: Keys, tensors: Collection[str], *, ff: int | None = None, biased: bool | None = None
) -> dict[str, Any]:
    """The fields of HParams about experts. FormatError if they are impossible.

    `ff` is the width of an expert if no key says it. `tensors` tell whether there is a choice bias. Without `tensors`,
    `biased` does; None means that sigmoid gating has one and softmax has not.
    """
    count, used = keys.number("expert_count"), keys.number("expert_used_count")
    if not 1 <= used <= count:
        raise FormatError(f"{keys.arch}.expert_used_count is {used} of expert_count {count}; it must be 1 to {count}")
    groups = keys.number("expert_group_count", 0) or 1
    groups_used = keys.number("expert_group_used_count", 0) or groups
    if count % groups or not 1 <= groups_used <= groups or used > groups_used * (count // groups):
        raise FormatError(
            f"{keys.arch}: {used} of {count} experts in {groups_used} of {groups} groups; groups must be of one size, "
            "and the groups used must hold enough experts"
        )
    bias_present = any(".exp_probs_b." in name for name in tensors)
    # Models with a choice bias use softmax or sigmoid, so without `biased` their files have to say which.
    optional = biased is not None or not bias_present
    number = keys.number("expert_gating_func", 0 if optional else None) or 1
    over_selected = number == _SOFTMAX_OF_SELECTED
    number = 1 if over_selected else number
    if number not in _GATING:
        raise UnsupportedError(f"{keys.arch}.expert_gating_func = {number}; known: 1 (softmax), 2 (sigmoid)")
    ff = keys.number("expert_feed_forward_length", ff)
    if ff < 1:
        raise FormatError(f"metadata key {keys.arch}.expert_feed_forward_length = {ff}; an expert has 1 column or more")
    if tensors or biased is None:
        biased = bias_present if tensors else _GATING[number] == "sigmoid"
    return {
        "n_expert": count,
        "n_expert_used": used,
        "n_ff_expert": ff,
        "n_ff_shared": keys.number("expert_shared_feed_forward_length", 0)
        or ff * keys.number("expert_shared_count", 0),
        "n_leading_dense": keys.number("leading_dense_block_count", 0),
        "n_expert_groups": groups,
        "n_expert_groups_used": groups_used,
        "normalises": over_selected or keys.flag("expert_weights_norm", True),
        "expert_scale": keys.real("expert_weights_scale", 0.0) or 1.0,
        "gating": _GATING[number],
        "has_choice_bias": biased,
    }


def config(hp: HParams) -> dict[str, Any]:
    """The config.json of those fields, with the names that DeepSeek and GLM use."""
    return {
        "moe_intermediate_size": hp.n_ff_expert,
        "n_routed_experts": hp.n_expert,
        "num_experts_per_tok": hp.n_expert_used,
        "n_shared_experts": hp.n_ff_shared // hp.n_ff_expert,
        "first_k_dense_replace": hp.n_leading_dense,
        "routed_scaling_factor": shortest(hp.expert_scale),
        "norm_topk_prob": hp.normalises,
        "n_group": hp.n_expert_groups,
        "topk_group": hp.n_expert_groups_used,
    }


def feed_forward(hp: HParams, i: int, norm: str = "ffn_norm") -> FeedForward | Experts:
    """The feed-forward of layer `i`: dense in the leading layers, then routed experts."""
    return hp.feed_forward(i, norm) if is_dense(hp, i) else routed(hp, i, norm)


def routed(hp: HParams, i: int, norm: str = "ffn_norm") -> Experts:
    """The routed experts of layer `i`, with the shared ones if the model has them."""
    blk = f"blk.{i}"
    if f"{blk}.{fused_experts.STEM}.weight" in hp.tensors:
        gate, up = hp.halves(f"{blk}.{fused_experts.STEM}")
    else:
        gate, up = (hp.linear(f"{blk}.ffn_{name}_exps") for name in ("gate", "up"))
    return Experts(
        norm=hp.norm(f"{blk}.{norm}"),
        router=hp.linear(f"{blk}.ffn_gate_inp"),
        gate=gate,
        up=up,
        down=hp.linear(f"{blk}.ffn_down_exps"),
        count=hp.n_expert,
        used=hp.n_expert_used,
        ff=hp.n_ff_expert,
        normalise=hp.normalises,
        scale=hp.expert_scale,
        gating=hp.gating,
        choice_bias=f"{blk}.exp_probs_b.bias" if hp.has_choice_bias else None,
        groups=hp.n_expert_groups,
        groups_used=hp.n_expert_groups_used,
        shared=hp.feed_forward(i, norm, "_shexp", hp.n_ff_shared) if hp.n_ff_shared else None,
    )
