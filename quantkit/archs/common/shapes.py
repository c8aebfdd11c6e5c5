"""Shapes of tensors by their GGUF names. A name means the same in every architecture, so one table serves all.

    sizes = Sizes("qwen3moe", metadata)                      the numbers, from GGUF keys
    expected_tensors(["token_embd.weight", "blk.0.attn_q.weight"], sizes)    [ExpectedTensor(name, shape, f32)]

Shapes are numpy's, rows first. A dimension of the table is the name of a number of `Sizes`, or a product "2*embd".
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from quantkit.archs.common.tensors import split_name
from quantkit.errors import FormatError, UnsupportedError

_TABLE = """
token_embd          vocab embd
token_embd_norm     embd
output_norm         embd
output              vocab embd

attn_norm           embd
attn_q              q embd
attn_k              k embd
attn_v              v embd
attn_output         embd o
attn_q_norm         q_norm
attn_k_norm         k_norm
attn_sinks          heads
attn_ssmax          heads
attn_sub_norm       o
post_attention_norm embd

attn_q_a            q_lora embd
attn_q_a_norm       q_lora
attn_q_b            q q_lora
attn_kv_a_mqa       latent embd
attn_kv_a_norm      kv_lora
attn_kv_b           kv_b kv_lora
attn_k_b            k_b nope
attn_v_b            o kv_lora

indexer.attn_q_b    index_heads*index q_lora
indexer.attn_k      index embd
indexer.k_norm      index
indexer.proj        index_heads embd
indexer.q_proj      index_heads*index embd
indexer.k_proj      index embd
indexer.q_norm      index
indexer.norm        embd
indexer.ssmax       index_heads

attn_kv             key embd
attn_output_a       o_groups*o_rank o_part
attn_output_b       embd o_groups*o_rank
attn_compressor_kv    entry embd
attn_compressor_gate  entry embd
attn_compressor_ape   rate entry
attn_compressor_norm  key
indexer_compressor_kv    2*index embd
indexer_compressor_gate  2*index embd
indexer_compressor_ape   rate 2*index
indexer_compressor_norm  index

attn_qkv            qkv embd
attn_gate           inner embd
ssm_conv1d          conv kernel
ssm_conv1d_q        inner 1 kernel
ssm_conv1d_k        inner 1 kernel
ssm_conv1d_v        inner 1 kernel
ssm_f_a             head_v embd
ssm_f_b             inner head_v
ssm_g_a             head_v embd
ssm_g_b             inner head_v
ssm_a               rank
ssm_dt              rank
ssm_norm            head_v
ssm_in              ssm_in embd
ssm_d               rank
ssm_alpha           rank embd
ssm_beta            rank embd
ssm_ba              2*rank embd
ssm_out             embd inner

shortconv.in_proj   3*embd embd
shortconv.conv      embd l_cache
shortconv.out_proj  embd embd

hc_attn_fn          hc_mix streams*embd
hc_attn_base        hc_mix
hc_attn_scale       3
hc_ffn_fn           hc_mix streams*embd
hc_ffn_base         hc_mix
hc_ffn_scale        3
output_hc_fn        streams streams*embd
output_hc_base      streams
output_hc_scale     1
hc_attn_norm        streams*embd
hc_attn_down        low_rank streams*embd
hc_attn_up          streams*embd low_rank
hc_attn_inject      streams streams*embd
hc_ffn_norm         streams*embd
hc_ffn_down         low_rank streams*embd
hc_ffn_up           streams*embd low_rank
hc_ffn_inject       streams streams*embd
output_hc_norm      streams*embd
output_hc_down      low_rank streams*embd
output_hc_up        streams*embd low_rank
ple_key             streams*embd ngrams
ple_value           embd ngrams
ple_norm_key        streams*embd
ple_norm_query      streams*embd
ple_norm_conv       streams*embd
ple_conv1d          streams*embd ple_kernel

layer_output_scale  1
per_layer_token_embd    vocab layers*layer_input
per_layer_model_proj    layers*layer_input embd
per_layer_proj_norm     layer_input
inp_gate            layer_input embd
proj                embd layer_input
post_norm           embd
altup_proj          altup_others embd embd
altup_unembd_proj   altup_others embd embd
altup_predict_coef  altup*altup altup
altup_correct_coef  altup altup
altup_correct_scale embd
altup_router        altup embd
altup_router_norm   embd
laurel_l            laurel embd
laurel_r            embd laurel
laurel_post_norm    embd
post_ffw_norm       embd
post_ffw_norm_1     embd
post_ffw_norm_2     embd
pre_ffw_norm_2      embd
ffn_norm            embd
ffn_gate            ff embd
ffn_up              up_ff embd
ffn_down            embd ff
ffn_sub_norm        ff
ffn_gate_inp        experts embd
ffn_gate_inp.scale  embd
ffn_gate_tid2eid    vocab used
exp_probs_b         experts
ffn_latent_down     routed embd
ffn_latent_up       embd routed
ffn_gate_exps       experts eff routed
ffn_up_exps         experts eff routed
ffn_down_exps       experts routed eff
ffn_down_exps.scale experts
ffn_gate_up_exps    experts 2*eff routed
ffn_gate_shexp      sff embd
ffn_up_shexp        sff embd
ffn_down_shexp      embd sff
ffn_gate_inp_shexp  embd

nextn.eh_proj           embd 2*embd
nextn.enorm             embd
nextn.hnorm             embd
nextn.embed_tokens      vocab embd
nextn.shared_head_head  vocab embd
nextn.shared_head_norm  embd
"""
_SHAPES = {line.split()[0]: line.split()[1:] for line in _TABLE.splitlines() if line}
_INTEGERS = "ffn_gate_tid2eid"  # the tensor of whole numbers
OVERLAPPING_RATE = 4  # tokens of a window whose entry overlaps with the one before: see blocks.Compressor
# Tensors that converters store in float32 although they are matrices.
_FLOAT32 = (
    "_norm.weight", "ffn_gate_inp.weight", "ssm_conv1d", "shortconv.conv.weight", "_compressor_ape.weight",
    "hc_attn_fn.weight", "hc_ffn_fn.weight", "output_hc_fn.weight", "ple_conv1d", "altup_predict_coef",
    "altup_correct_coef",
)  # fmt: skip


@dataclass(frozen=True)
class ExpectedTensor:
    """A tensor that a config.json's model has. `f32`: it is stored in float32 in models of every type."""

    name: str
    shape: tuple[int, ...]
    f32: bool
    integers: bool = False  # it is I32


class Sizes:
    """The dimensions in the table above, by name: `sizes["embd"]`. FormatError names a missing key."""

    def __init__(
        self,
        arch: str,
        metadata: Mapping[str, object],
        own: Mapping[str, Callable[[Sizes], int]] | None = None,
        shapes: Mapping[str, str] | None = None,
    ):
        """`own`: how an architecture computes a dimension that differs from the usual one; `shapes`: the dimensions of
        tensors that have others than in the table."""
        self.arch = arch
        self.metadata = metadata
        self._own = own or {}
        self.shapes = {name: dims.split() for name, dims in (shapes or {}).items()}
        self.layer: int | None = None  # whose entry of a list counts

    def key(self, key: str) -> int | None:
        """The integer in a metadata key; None if it is missing or 0."""
        value = self.metadata.get(f"{self.arch}.{key}")
        if isinstance(value, (list, tuple)):
            if self.layer is not None and self.layer < len(value):
                value = value[self.layer : self.layer + 1]
            if len(set(value)) != 1:
                raise UnsupportedError(
                    f"{self.arch}.{key} differs between layers; the shapes of such models are not known"
                )
            value = value[0]
        if not value:
            return None
        if not isinstance(value, (int, float)):
            raise FormatError(f"metadata key {self.arch}.{key} = {value!r}; it has to be a number")
        return int(value)

    def need(self, key: str) -> int:
        """The number of a metadata key. FormatError if it is missing."""
        value = self.key(key)
        if value is None:
            raise FormatError(f"metadata key {self.arch}.{key} is missing, and the shapes of tensors follow from it")
        return value

    @functools.cached_property
    def n_layer(self) -> int:
        """Layers, with MTP layers."""
        return self.need("block_count")

    def __getitem__(self, name: str) -> int:
        """The dimension `name`, or a product of dimensions and integers, such as "2*embd"."""
        return math.prod(int(part) if part.isdigit() else self._number(part) for part in name.split("*"))

    def _number(self, name: str) -> int:
        compute = self._own.get(name) or _NUMBERS.get(name)
        return compute(self) if compute else self.need(_KEYS[name])


_KEYS = {
    "vocab": "vocab_size", "embd": "embedding_length", "ff": "feed_forward_length", "heads": "attention.head_count",
    "experts": "expert_count", "eff": "expert_feed_forward_length", "q_lora": "attention.q_lora_rank",
    "kv_lora": "attention.kv_lora_rank", "rope": "rope.dimension_count", "kernel": "ssm.conv_kernel",
    "index": "attention.indexer.key_length", "index_heads": "attention.indexer.head_count",
    "state": "ssm.state_size", "groups": "ssm.group_count", "rank": "ssm.time_step_rank", "inner": "ssm.inner_size",
    "l_cache": "shortconv.l_cache", "used": "expert_used_count", "streams": "hyper_connection.count",
    "o_groups": "attention.output_group_count", "o_rank": "attention.output_lora_rank",
    "rate": "attention.compress_ratios",
    "layers": "block_count", "layer_input": "embedding_length_per_layer_input",
    "altup": "altup.num_inputs", "low_rank": "hyper_connection.low_rank", "ple_kernel": "ple.conv_kernel",
}  # fmt: skip
_NUMBERS: dict[str, Callable[[Sizes], int]] = {
    "kv_heads": lambda s: s.key("attention.head_count_kv") or s["heads"],
    "key": lambda s: s.key("attention.key_length") or s["embd"] // s["heads"],
    "value": lambda s: s.key("attention.value_length") or s["embd"] // s["heads"],
    "up_ff": lambda s: s["ff"],
    "qkv": lambda s: s["conv"],
    "q_norm": lambda s: s["key"],
    "k_norm": lambda s: s["key"],
    "q": lambda s: s["heads"] * s["key"],
    "k": lambda s: s["kv_heads"] * s["key"],
    "v": lambda s: s["kv_heads"] * s["value"],
    "o": lambda s: s["heads"] * s["value"],
    "nope": lambda s: s["key"] - s["rope"],
    "latent": lambda s: s["kv_lora"] + s["rope"],
    "kv_b": lambda s: s["heads"] * (s["nope"] + s["value"]),
    "k_b": lambda s: s["heads"] * s["kv_lora"],
    "head_v": lambda s: s["inner"] // s["rank"],
    "conv": lambda s: s["inner"] + 2 * s["groups"] * s["state"],
    "ssm_in": lambda s: s["inner"] + s["conv"] + s["rank"],
    "group": lambda s: s["inner"] // s["groups"],
    "o_part": lambda s: s["o"] // s["o_groups"],
    "entry": lambda s: s["key"] * (2 if s["rate"] == OVERLAPPING_RATE else 1),
    "ngrams": lambda s: (s.need("ple.ngram_size") - 1) * s.need("ple.heads_per_ngram") * s["layer_input"],
    "hc_mix": lambda s: (2 + s["streams"]) * s["streams"],
    "routed": lambda s: s.key("moe_latent_size") or s["embd"],
    "sff": lambda s: s.key("expert_shared_feed_forward_length") or s["eff"] * s.need("expert_shared_count"),
}


def expected_tensors(names: Iterable[str], sizes: Sizes) -> list[ExpectedTensor]:
    """The tensors of these names; a bias has the rows of its weight. UnsupportedError for a name of unknown shape."""
    return [_expected_tensor(name, sizes) for name in names]


def has_shape(name: str) -> bool:
    """Whether the table has a tensor's name."""
    return _dims(name)[0] is not None


def _dims(name: str) -> tuple[list[str] | None, str]:
    """The dimensions of a tensor, as the table has them, and the last part of its name."""
    stem, _, suffix = split_name(name) if "." in name else (name, None, "")
    known = stem.removeprefix("blk.N.")
    return _SHAPES.get(f"{known}.{suffix}") or _SHAPES.get(known) or _SHAPES.get(name.rpartition(".")[2]), suffix


def _expected_tensor(name: str, sizes: Sizes) -> ExpectedTensor:
    dims, suffix = _dims(name)
    dims = sizes.shapes.get(name.split(".")[2] if name.startswith("blk.") else name, dims)
    if dims is None:
        raise UnsupportedError(
            f"{name}: the shape of such a tensor is not known (add it to quantkit/archs/common/shapes.py)"
        )
    sizes.layer = split_name(name)[1] if "." in name else None
    shape = tuple(sizes[dim] for dim in dims)
    if suffix == "bias":
        shape = shape[:-1] if len(shape) > 1 else shape
    f32 = len(shape) < 2 or suffix != "weight" or any(part in name for part in _FLOAT32)
    return ExpectedTensor(name, shape, f32, f".{_INTEGERS}." in name)
