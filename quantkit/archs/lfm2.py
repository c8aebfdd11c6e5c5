"""lfm2: LFM2 and LFM2.5 (Liquid AI). Gated short convolutions, and grouped-query attention in some layers; SwiGLU.

Queries and keys are RMS-normed per head before "neox" RoPE. Which layers attend is said by layer_types, in older
configs by full_attn_idxs; in GGUF by attention.head_count_kv, a list with 0 for each layer with a convolution.

    config.json                              GGUF
    conv_L_cache                             lfm2.shortconv.l_cache, the width of the convolution
    intermediate_size, or block_ff_dim       lfm2.feed_forward_length: with block_auto_adjust_ff_dim, two thirds, times
                                             block_ffn_dim_multiplier, rounded up to block_multiple_of
    model.embedding_norm                     token_embd_norm: the norm before the output, which llama.cpp named so
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from quantkit.archs.common import experts
from quantkit.archs.common.base import EMBEDDING_RULES, Config, Keys, is_tied, need, refuse
from quantkit.archs.common.blocks import Attention, Block, Head, HParams, Part, Recurrence, ShortConv
from quantkit.archs.common.decoder import Decoder, with_head_norms
from quantkit.archs.common.hybrid import is_attention, is_recurrent, recurrence_of
from quantkit.archs.common.tensors import LazyTensor, TensorRule
from quantkit.archs.common.transforms import SqueezeMiddle
from quantkit.errors import FormatError, UnsupportedError
from quantkit.formats.gguf.metadata import Entries
from quantkit.inputs.settings import integer, real, sequence

_FULL, _CONV = "full_attention", "conv"
_KV_HEADS = "attention.head_count_kv"


def _attention_rule(ours: str, theirs: str, *, f32: bool = False) -> TensorRule:
    return TensorRule(f"blk.N.{ours}", f"model.layers.N.self_attn.{theirs}", layers=is_attention, f32=f32)


MIXER_RULES = (
    TensorRule("blk.N.attn_norm", "model.layers.N.operator_norm", f32=True),
    TensorRule("blk.N.shortconv.in_proj", "model.layers.N.conv.in_proj", layers=is_recurrent),
    TensorRule(
        "blk.N.shortconv.conv", "model.layers.N.conv.conv", lambda hp: SqueezeMiddle(), layers=is_recurrent, f32=True
    ),
    TensorRule("blk.N.shortconv.out_proj", "model.layers.N.conv.out_proj", layers=is_recurrent),
    _attention_rule("attn_q", "q_proj"),
    _attention_rule("attn_q_norm", "q_layernorm", f32=True),
    _attention_rule("attn_k", "k_proj"),
    _attention_rule("attn_k_norm", "k_layernorm", f32=True),
    _attention_rule("attn_v", "v_proj"),
    _attention_rule("attn_output", "out_proj"),
    TensorRule("blk.N.ffn_norm", "model.layers.N.ffn_norm", f32=True),
)
DENSE_RULES = tuple(
    TensorRule(f"blk.N.ffn_{ours}", f"model.layers.N.feed_forward.{theirs}", layers=experts.is_dense)
    for ours, theirs in zip(("gate", "up", "down"), experts.MIXTRAL)
)
OUTPUT_RULES = (
    TensorRule("token_embd_norm", "model.embedding_norm", f32=True),
    TensorRule("output", "lm_head", required=False),
)


class Lfm2(Decoder):
    """LFM2 and LFM2.5."""

    name = "lfm2"
    hf: ClassVar[tuple[str, ...]] = ("Lfm2ForCausalLM", "LFM2ForCausalLM")
    model_type = "lfm2"
    rope_style = "neox"
    ties_by_default = True
    defaults: ClassVar[Mapping[str, object]] = {"rope_theta": 1000000.0, "norm_eps": 1e-5, "conv_L_cache": 3}
    rules: ClassVar[tuple[TensorRule, ...]] = (*EMBEDDING_RULES, *MIXER_RULES, *DENSE_RULES, *OUTPUT_RULES)
    EXAMPLE: ClassVar[dict[str, Any]] = {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "block_auto_adjust_ff_dim": False,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "layer_types": [_CONV, _CONV, _FULL, _CONV],
        "conv_L_cache": 3,
        "conv_bias": False,
        "max_position_embeddings": 256,
        "norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
    }

    # ------------------------------------------------------------------------------------------------ checkpoint side

    @staticmethod
    def intermediate_size(config: Config) -> int:
        """The setting, one number for all layers."""
        need(config, "intermediate_size")
        return integer(config, "intermediate_size")

    def feed_forward_length(self, config: Config) -> int:
        """Columns of a dense feed-forward, from config.json."""
        width = integer(config, "block_ff_dim") or self.intermediate_size(config)
        if not config.get("block_auto_adjust_ff_dim", True):
            return width
        multiple = integer(config, "block_multiple_of", 256)
        adjusted = int(real(config, "block_ffn_dim_multiplier", 1.0) * int(2 * width / 3))
        return multiple * -(-adjusted // multiple)

    def metadata(self, config: Config) -> Entries:
        for key in ("conv_bias", "attention_bias"):
            refuse(config, key, (False,))
        refuse(config, "tie_embedding", (is_tied(config, self.ties_by_default),))
        given = {**config, "rms_norm_eps": need(config, "norm_eps")}
        given["intermediate_size"] = self.feed_forward_length(config)
        entries = super().metadata(given)
        if config.get("head_dim"):
            entries |= self.head_lengths(config)
        kv_heads, _ = entries[f"{self.name}.{_KV_HEADS}"]
        return entries | {
            f"{self.name}.{_KV_HEADS}": ([kv_heads if kind == _FULL else 0 for kind in _kinds(config)], "u32"),
            f"{self.name}.shortconv.l_cache": (need(config, "conv_L_cache"), "u32"),
        }

    def config(self, metadata: Mapping[str, object], tensors: Mapping[str, LazyTensor]) -> dict[str, Any]:
        hp, found = self.hparams(metadata, tensors.keys()), super().config(metadata, tensors)
        for key in ("hidden_act", "attention_bias"):
            del found[key]
        if hp.has_own_head_dim:
            found["head_dim"] = hp.head_dim_k
        return found | {
            "norm_eps": found.pop("rms_norm_eps"),
            "layer_types": [_CONV if i in hp.recurrent else _FULL for i in range(hp.n_layer)],
            "conv_L_cache": recurrence_of(hp).kernel,
            "conv_bias": False,
            "block_auto_adjust_ff_dim": False,
        }

    # --------------------------------------------------------------------------------------------------- runtime side

    def numbers(self, keys: Keys, tensors: Collection[str]) -> dict[str, Any]:
        kv_heads = keys.per_layer(_KV_HEADS)
        kinds = sorted(set(kv_heads) - {0})
        if len(kinds) != 1:
            raise UnsupportedError(
                f"{self.name}.{_KV_HEADS} = {kv_heads!r:.80}; quantkit supports one number of KV heads for all layers "
                "that attend, of which there is at least one, and 0 for layers with a convolution"
            )
        found = super().numbers(Keys(self.name, {**keys.metadata, f"{self.name}.{_KV_HEADS}": kinds[0]}), tensors)
        return found | {
            "recurrence": Recurrence.of_convolution(keys.number("shortconv.l_cache"), found["n_embd"]),
            "recurrent": frozenset(i for i, heads in enumerate(kv_heads) if not heads),
            "n_leading_dense": found["n_layer"],
        }

    def head(self, hparams: HParams) -> Head:
        head = super().head(hparams)
        norm = hparams.norm("token_embd_norm")
        return Head(head.embedding, norm, head.output, embedding_factor=head.embedding_factor)

    def block(self, hp: HParams, i: int) -> Block:
        mixer = self.short_conv(hp, i) if i in hp.recurrent else self.attention(hp, i)
        return Block(i, (mixer, self.feed_forward(hp, i)))

    def short_conv(self, hp: HParams, i: int) -> ShortConv:
        """The convolution of layer `i`."""
        return ShortConv(
            norm=hp.norm(f"blk.{i}.attn_norm"),
            in_proj=hp.linear(f"blk.{i}.shortconv.in_proj"),
            conv=f"blk.{i}.shortconv.conv.weight",
            out=hp.linear(f"blk.{i}.shortconv.out_proj"),
            sizes=recurrence_of(hp),
        )

    def attention(self, hp: HParams, i: int) -> Attention:
        return with_head_norms(super().attention(hp, i), hp, i)

    def feed_forward(self, hp: HParams, i: int) -> Part:
        return experts.feed_forward(hp, i)


def _kinds(config: Config) -> list[str]:
    """layer_types, or what full_attn_idxs says: one kind for each layer."""
    layers = int(need(config, "num_hidden_layers"))
    kinds = list(sequence(config, "layer_types"))
    if not kinds:
        attending = range(layers) if config.get("full_attn_idxs") is None else sequence(config, "full_attn_idxs")
        if unknown := [i for i in attending if type(i) is not int or not 0 <= i < layers]:
            raise FormatError(
                f"config.json: full_attn_idxs has {unknown[0]!r:.80}; its entries are layers from 0 to {layers - 1}"
            )
        return [_FULL if i in attending else _CONV for i in range(layers)]
    if len(kinds) != layers:
        raise FormatError(f"config.json: layer_types has {len(kinds)} entries, num_hidden_layers is {layers}")
    if unknown := [kind for kind in kinds if kind not in (_FULL, _CONV)]:
        raise UnsupportedError(f"config.json: layer_types has {unknown[0]!r:.80}; known are {_FULL} and {_CONV}")
    return [str(kind) for kind in kinds]
