"""nemotron_h: Nemotron-H and Nemotron Nano 2. Each layer is one of a Mamba-2 mixer, attention without RoPE, and a
feed-forward without a gate, down(max(up(y), 0)^2). Each has one norm. `nemotron_h_moe` has experts in its place.

    config.json                         GGUF, after the architecture's name
    hybrid_override_pattern             attention.head_count_kv and feed_forward_length, one number for each layer:
      M  linear_attention, mamba        0 and 0: a mixer
      *  full_attention, attention      KV heads and 0: attention
      -  mlp                            0 and the rows of up: a feed-forward
    conv_kernel                         ssm.conv_kernel
    ssm_state_size                      ssm.state_size
    n_groups                            ssm.group_count
    mamba_num_heads                     ssm.time_step_rank
    mamba_num_heads * mamba_head_dim    ssm.inner_size

`layers_block_type` or `layer_types` say the same as the pattern, as a list of the words. The rows of ssm_in are the
gates, the inputs of the convolution, and the steps of the heads. Checkpoints store `A_log` = ln(-a); ssm_a and ssm_d
are matrices of one column, ssm_norm has a row for each group. transformers raises the steps of a prompt to
time_step_min at least, but not in generation; files have no key for it, and neither llama.cpp nor quantkit does it.
transformers never ties the output matrix to the embedding, while NVIDIA's code does: configs that say so are refused.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from quantkit.archs.common.base import Config, Keys, need, refuse
from quantkit.archs.common.blocks import Attention, Block, FeedForward, HParams, Mamba2, Part, Recurrence
from quantkit.archs.common.decoder import Decoder
from quantkit.archs.common.hybrid import is_recurrent, log_negative, negative_exp, recurrence_of
from quantkit.archs.common.tensors import LazyTensor, Piece, Shape, TensorRule, Transform
from quantkit.archs.common.transforms import Chain, Elementwise, FoldVector, SqueezeMiddle
from quantkit.errors import FormatError, UnsupportedError
from quantkit.formats.gguf.metadata import Entries, shortest
from quantkit.inputs.settings import integer, sequence

MAMBA, ATTENTION, MLP, MOE = "M*-E"
_WORDS = {
    "linear_attention": MAMBA, "mamba": MAMBA, "full_attention": ATTENTION, "attention": ATTENTION, "mlp": MLP,
    "moe": MOE,
}  # fmt: skip
_INFINITE = (float("inf"), "inf", "Infinity", {"__float__": "Infinity"})  # as config.json may spell it


def layer_kinds(config: Config) -> str:
    """The kind of each layer, a letter of `hybrid_override_pattern`."""
    pattern = config.get("hybrid_override_pattern")
    lists = {key: sequence(config, key) for key in ("layers_block_type", "layer_types") if config.get(key)}
    found = {key: "".join(_letter(key, i, word) for i, word in enumerate(words)) for key, words in lists.items()}
    if pattern is not None:
        if not isinstance(pattern, str) or not pattern or set(pattern) - set(_WORDS.values()):
            raise FormatError(
                f"config.json: hybrid_override_pattern = {pattern!r:.80}; it has to be a text of M, *, - and E"
            )
        found["hybrid_override_pattern"] = pattern
    if not found:
        raise FormatError("config.json has neither 'hybrid_override_pattern' nor 'layers_block_type'; one is needed")
    (key, kinds), *others = found.items()
    layers = integer(config, "num_hidden_layers", len(kinds))
    if layers != len(kinds):
        raise FormatError(f"config.json: num_hidden_layers = {layers}, but {key} names {len(kinds)} layers")
    for other, theirs in others:
        if theirs != kinds:
            raise FormatError(f"config.json: {key} says {kinds:.80}, but {other} {theirs:.80}; they have to agree")
    return kinds


def _letter(key: str, i: int, word: object) -> str:
    if not isinstance(word, str) or word not in _WORDS:
        raise FormatError(f"config.json: {key}[{i}] = {word!r:.80}; known: {', '.join(_WORDS)}")
    return _WORDS[word]


def has_experts(config: Config) -> bool:
    """Whether a layer is named as one with experts, in any config.json."""
    pattern = config.get("hybrid_override_pattern")
    lists = (config.get(key) for key in ("layers_block_type", "layer_types"))
    if any("moe" in words for words in lists if isinstance(words, (list, tuple))):
        return True
    return isinstance(pattern, str) and MOE in pattern


def rows_of(config: Config, key: str) -> int:
    """The number of rows in a setting of config.json, 1 or more."""
    need(config, key)
    if (rows := integer(config, key)) < 1:
        raise FormatError(f"config.json: {key} = {rows}; it has to be 1 or more")
    return rows


def is_attention(hp: HParams, layer: int) -> bool:
    """Whether a layer has attention."""
    return hp.kv_heads_of[layer] > 0


def is_feed_forward(hp: HParams, layer: int) -> bool:
    """Whether a layer has a feed-forward, dense or with experts."""
    return layer not in hp.recurrent and not hp.kv_heads_of[layer]


def _mixer_rule(ours: str, theirs: str, **given: Any) -> TensorRule:
    return TensorRule(f"blk.N.{ours}", f"model.layers.N.mixer.{theirs}", **given)


def _vector(hp: HParams) -> Transform:
    return FoldVector(1)


def _decay(hp: HParams) -> Transform:
    return Chain(Elementwise(negative_exp, log_negative), FoldVector(1))


def _group_norm(hp: HParams) -> Transform:
    sizes = recurrence_of(hp)
    return FoldVector(sizes.inner // sizes.key_heads)


INPUT_RULES = (TensorRule("token_embd", "model.embeddings"),)
LAYER_RULES = (
    TensorRule("blk.N.attn_norm", "model.layers.N.norm", f32=True),
    _mixer_rule("ssm_in", "in_proj", layers=is_recurrent),
    _mixer_rule(
        "ssm_conv1d.weight", "conv1d.weight", transform=lambda hp: SqueezeMiddle(), layers=is_recurrent,
        full_names=True, f32=True,
    ),
    _mixer_rule("ssm_conv1d.bias", "conv1d.bias", layers=is_recurrent, full_names=True, f32=True),
    _mixer_rule("ssm_dt.bias", "dt_bias", layers=is_recurrent, full_names=True, f32=True),
    _mixer_rule("ssm_a", "A_log", transform=_decay, layers=is_recurrent, full_names=True, f32=True),
    _mixer_rule("ssm_d", "D", transform=_vector, layers=is_recurrent, full_names=True, f32=True),
    _mixer_rule(
        "ssm_norm.weight", "norm.weight", transform=_group_norm, layers=is_recurrent, full_names=True, f32=True
    ),
    _mixer_rule("ssm_out", "out_proj", layers=is_recurrent),
    *(
        _mixer_rule(f"attn_{ours}", f"{theirs}_proj", bias=True, layers=is_attention)
        for ours, theirs in (("q", "q"), ("k", "k"), ("v", "v"), ("output", "o"))
    ),
)  # fmt: skip
OUTPUT_RULES = (
    TensorRule("output_norm", "model.norm_f", f32=True),
    TensorRule("output", "lm_head", required=False),
)


class NemotronH(Decoder):
    """Nemotron-H and Nemotron Nano 2."""

    name = "nemotron_h"
    hf = ("NemotronHForCausalLM",)
    model_type = "nemotron_h"
    rope_style = "neox"
    biased = ()
    feed_forward_kind: ClassVar[str] = MLP
    defaults: ClassVar[Mapping[str, object]] = {
        "layer_norm_epsilon": 1e-5, "conv_kernel": 4, "n_groups": 8, "intermediate_size": 21504,
    }  # fmt: skip
    shape_overrides: ClassVar[Mapping[str, str]] = {"ssm_a": "rank 1", "ssm_d": "rank 1", "ssm_norm": "groups group"}
    rules: ClassVar[tuple[TensorRule, ...]] = (
        *INPUT_RULES,
        *LAYER_RULES,
        *(_mixer_rule(f"ffn_{name}", f"{name}_proj", bias=True, layers=is_feed_forward) for name in ("up", "down")),
        *OUTPUT_RULES,
    )
    EXAMPLE: ClassVar[dict[str, Any]] = {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "layers_block_type": ["linear_attention", "mlp", "linear_attention", "full_attention", "mlp"],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 32,
        "n_groups": 2,
        "conv_kernel": 4,
        "chunk_size": 32,
        "time_step_min": 1e-30,
        "time_step_floor": 1e-3,
        "max_position_embeddings": 256,
        "layer_norm_epsilon": 1e-5,
        "mlp_hidden_act": "relu2",
        "mamba_hidden_act": "silu",
        "use_conv_bias": True,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }

    # ------------------------------------------------------------------------------------------------ checkpoint side

    def accepts(self, config: Config) -> bool:
        return not has_experts(config)

    def canonical(self, name: str) -> str:
        return super().canonical(name.replace("backbone.", "model.", 1) if name.startswith("backbone.") else name)

    def dropped_tensors(self, config: Config, names: Collection[str]) -> dict[str, list[str]]:
        return super().dropped_tensors(dict(config) | {"num_hidden_layers": len(layer_kinds(config))}, names)

    def to_hf(self, hparams: HParams, shapes: Mapping[str, Shape]) -> list[Piece]:
        """As `Arch.to_hf`, with the published checkpoints' names."""
        found = super().to_hf(hparams, shapes)
        return [replace(piece, name=piece.name.replace("model.", "backbone.", 1)) for piece in found]

    def head_dim(self, config: Config) -> int:
        return integer(config, "attention_head_dim") or super().head_dim(config)

    def width(self, config: Config) -> int:
        """The rows of up in the layers that have a feed-forward."""
        return rows_of(config, "intermediate_size")

    def metadata(self, config: Config) -> Entries:
        kinds = layer_kinds(config)
        self._refuse(config, kinds)
        plain = {
            "num_hidden_layers": len(kinds), "intermediate_size": self.width(config), "hidden_act": None,
            "rms_norm_eps": need(config, "layer_norm_epsilon"), "partial_rotary_factor": None,
        }  # fmt: skip
        entries = super().metadata(dict(config) | plain) | self.head_lengths(config)
        del entries[f"{self.name}.rope.freq_base"]
        kv_heads = entries[f"{self.name}.attention.head_count_kv"][0]
        heads, dim = need(config, "mamba_num_heads"), need(config, "mamba_head_dim")
        found: Entries = {
            "attention.head_count_kv": ([kv_heads if kind == ATTENTION else 0 for kind in kinds], "u32"),
            "feed_forward_length": (
                [self.width(config) if kind == self.feed_forward_kind else 0 for kind in kinds],
                "u32",
            ),
            "ssm.conv_kernel": (integer(config, "mamba_d_conv") or need(config, "conv_kernel"), "u32"),
            "ssm.state_size": (need(config, "ssm_state_size"), "u32"),
            "ssm.group_count": (integer(config, "mamba_n_groups") or need(config, "n_groups"), "u32"),
            "ssm.time_step_rank": (heads, "u32"),
            "ssm.inner_size": (heads * dim, "u32"),
            "rope.scaling.finetuned": (False, "bool"),
        }
        return entries | {f"{self.name}.{key}": entry for key, entry in found.items()}

    def _refuse(self, config: Config, kinds: str) -> None:
        """UnsupportedError for settings that files cannot express, or that are not computed."""
        if ATTENTION not in kinds or MAMBA not in kinds:
            raise UnsupportedError(
                f"config.json: layers {kinds:.80}; quantkit supports models with both Mamba-2 (M) and attention (*)"
            )
        for key, accepted in (
            ("mlp_hidden_act", ("relu2",)), ("mamba_hidden_act", ("silu", "swish")), ("use_bias", (False,)),
            ("mamba_proj_bias", (False,)), ("use_conv_bias", (True,)), ("mamba_conv_bias", (True,)),
            ("sliding_window", ()), ("rope_scaling", ()), ("tie_word_embeddings", (False,)),
        ):  # fmt: skip
            refuse(config, key, accepted)
        for key in ("time_step_limit", "mamba_dt_limit"):
            limit = list(sequence(config, key))
            if limit and not (limit[0] == 0 and limit[-1] in _INFINITE):
                raise UnsupportedError(
                    f"config.json: {key} = {limit!r:.80}; files have no key for limits of the time steps, so that only "
                    "0 to Infinity is supported"
                )

    def _check_biases(self, config: Config, found: list[Piece]) -> None:
        # transformers makes attention without biases whatever attention_bias says, NVIDIA's code as it says: a
        # checkpoint may be of either.
        super()._check_biases(dict(config) | {"attention_bias": False}, found)

    def has_bias(self, rule: TensorRule, config: Config) -> bool:
        return not rule.full_names and super().has_bias(rule, config)

    def config(self, metadata: Mapping[str, object], tensors: Mapping[str, LazyTensor]) -> dict[str, Any]:
        hp = self.hparams(metadata, tensors.keys())
        if hp.tied:
            raise UnsupportedError(f"there is no output.weight, and {self.hf[0]} of transformers does not tie it")
        sizes, found = recurrence_of(hp), super().config(metadata, tensors)
        for key in ("rope_theta", "rms_norm_eps", "hidden_act"):
            del found[key]
        layers = range(hp.n_layer)
        kinds = (
            MAMBA if i in hp.recurrent else ATTENTION if is_attention(hp, i) else self.feed_forward_kind for i in layers
        )
        return found | {
            "hybrid_override_pattern": "".join(kinds),
            "head_dim": hp.head_dim_k,
            "mamba_num_heads": sizes.value_heads,
            "mamba_head_dim": sizes.head_dim_v,
            "ssm_state_size": sizes.head_dim_k,
            "n_groups": sizes.key_heads,
            "conv_kernel": sizes.kernel,
            "layer_norm_epsilon": shortest(hp.norm_eps),
            "mlp_hidden_act": "relu2",
            "mamba_hidden_act": "silu",
            "use_conv_bias": True,
            "attention_bias": any(f"blk.{i}.attn_q.bias" in hp.tensors for i in layers),
            "mlp_bias": any(f"blk.{i}.ffn_up.bias" in hp.tensors for i in layers),
        }

    # --------------------------------------------------------------------------------------------------- runtime side

    def numbers(self, keys: Keys, tensors: Collection[str]) -> dict[str, Any]:
        kv_heads = keys.per_layer("attention.head_count_kv")
        widths = keys.per_layer("feed_forward_length")
        if not any(kv_heads):
            raise FormatError(f"metadata key {self.name}.attention.head_count_kv: no layer has KV heads, one has to")
        for name, values in (("attention.head_count_kv", kv_heads), ("feed_forward_length", widths)):
            if len({n for n in values if n}) > 1:
                raise UnsupportedError(
                    f"{self.name}.{name} has different numbers ({sorted(set(values))!r:.80}); quantkit expects one, "
                    "and 0 for layers without"
                )
        if both := [i for i, (n, ff) in enumerate(zip(kv_heads, widths)) if n and ff]:
            raise UnsupportedError(
                f"{self.name}: layer {both[0]} has {kv_heads[both[0]]} KV heads and a feed_forward_length of "
                f"{widths[both[0]]}; quantkit expects layers with one of the two"
            )
        single = {"attention.head_count_kv": max(kv_heads), "feed_forward_length": max(widths)}
        metadata = dict(keys.metadata) | {f"{self.name}.{key}": value for key, value in single.items()}
        found = super().numbers(Keys(self.name, metadata), tensors)
        recurrent = (i for i, (n, ff) in enumerate(zip(kv_heads, widths)) if not n and not ff)
        return found | {
            "kv_heads_of": tuple(kv_heads),
            "recurrent": frozenset(recurrent),
            "recurrence": self._recurrence(keys),
        }

    def _recurrence(self, keys: Keys) -> Recurrence:
        inner, heads, groups = (keys.number(f"ssm.{key}") for key in ("inner_size", "time_step_rank", "group_count"))
        if inner % heads or heads % groups:
            raise FormatError(
                f"{self.name}: ssm.inner_size {inner}, ssm.time_step_rank {heads} and ssm.group_count {groups} must be "
                "multiples, each of the next"
            )
        return Recurrence(
            kernel=keys.number("ssm.conv_kernel"),
            key_heads=groups,
            value_heads=heads,
            head_dim_k=keys.number("ssm.state_size"),
            head_dim_v=inner // heads,
        )

    def block(self, hp: HParams, i: int) -> Block:
        if i in hp.recurrent:
            return Block(i, (self.mixer(hp, i),))
        return Block(i, (self.attention(hp, i) if is_attention(hp, i) else self.feed_forward(hp, i),))

    def mixer(self, hp: HParams, i: int) -> Mamba2:
        """The Mamba-2 mixer of layer `i`."""
        stem, sizes = f"blk.{i}", recurrence_of(hp)
        ends = (0, sizes.inner, sizes.inner + sizes.channels, sizes.inner + sizes.channels + sizes.value_heads)
        whole = hp.linear(f"{stem}.ssm_in")
        gate, entering, rate = (replace(whole, rows=rows) for rows in itertools.pairwise(ends))
        return Mamba2(
            norm=hp.norm(f"{stem}.attn_norm"),
            gate=gate,
            entering=entering,
            rate=rate,
            conv=f"{stem}.ssm_conv1d.weight",
            conv_bias=f"{stem}.ssm_conv1d.bias",
            a=f"{stem}.ssm_a",
            dt=f"{stem}.ssm_dt.bias",
            skip=f"{stem}.ssm_d",
            out_norm=hp.norm(f"{stem}.ssm_norm"),
            out=hp.linear(f"{stem}.ssm_out"),
            sizes=sizes,
        )

    def attention(self, hp: HParams, i: int) -> Attention:
        return replace(super().attention(hp, i), rope=hp.rope.without_rotation())

    def feed_forward(self, hp: HParams, i: int) -> Part:
        return ungated(hp, i)


def ungated(hp: HParams, i: int, suffix: str = "", ff: int | None = None) -> FeedForward:
    """The feed-forward of layer `i`, or with `suffix` that of its shared experts: down(max(up(y), 0)^2)."""
    up, down = (hp.linear(f"blk.{i}.ffn_{name}{suffix}") for name in ("up", "down"))
    return FeedForward(hp.norm(f"blk.{i}.attn_norm"), up, up, down, activation="reglu", ff=ff)
