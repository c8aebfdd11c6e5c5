"""Models with random weights for benchmarks: the shapes of real models, with one type for all matrices.

    write("llama-1.2b", "iq4_k", path)
    write("qwen3moe", "iq4_k", path)
    write("gemma3", "q4_K", path)

A few random rows are encoded for each row length, and every matrix repeats them, each from another one on: the time of
a product does not depend on the weights, and encoding a billion of them would take longer than the benchmark. What
latent attention reads in two forms, kv_b or k_b and v_b, has the same numbers in both. Embedding and output have the
type too, or q8_0 if rows of an embedding cannot have it; norms are float32. There is no tokenizer.

SHAPES are of llama and qwen3moe; CONFIGS are of other architectures, a config.json each, and SIZES what the EXAMPLE of
still others is given: rows as long as in the real models, but fewer layers, experts and tokens of the vocabulary. With
mxfp4, only experts have this type and the rest q8_0, as in the published gpt-oss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from quantkit import archs, types
from quantkit.archs.common.blocks import Recurrence
from quantkit.formats.gguf import Metadata, TensorSpec, Writer
from quantkit.types import QuantType

ROWS = 64  # random rows
ROUTER_SCALE = 2.0  # standard deviation of the logits that choose experts
INTERVAL = 4  # every fourth layer of a hybrid model has attention


@dataclass(frozen=True)
class Latent:
    """The sizes of latent attention."""

    q_lora: int
    kv_lora: int
    nope: int
    rope: int
    value: int


@dataclass(frozen=True)
class Shape:
    layers: int
    columns: int
    ff: int
    heads: int
    kv_heads: int
    vocabulary: int
    arch: str = "llama"
    head_dim: int = 64
    experts: int = 0  # if there are experts, ff is the width of one
    used: int = 0
    recurrence: Recurrence | None = None  # of qwen3next and qwen35moe: three of four layers are recurrent
    latent: Latent | None = None
    leading_dense: int = 0  # layers before the first with experts, whose feed-forward has dense_ff rows
    dense_ff: int = 0
    shared_ff: int = 0  # rows of the shared experts together; with a recurrence they have a gate


SHAPES = {
    "llama-1.2b": Shape(layers=16, columns=2048, ff=8192, heads=32, kv_heads=8, vocabulary=32000),
    "llama-tiny": Shape(layers=2, columns=512, ff=1024, heads=8, kv_heads=2, vocabulary=1024),
    "llama-8b": Shape(layers=32, columns=4096, ff=14336, heads=32, kv_heads=8, vocabulary=128256, head_dim=128),
    "llama-dry": Shape(layers=1, columns=64, ff=64, heads=2, kv_heads=1, vocabulary=64, head_dim=32),
    "qwen3moe-dry": Shape(layers=1, columns=64, ff=32, heads=2, kv_heads=1, vocabulary=64, arch="qwen3moe",
                          head_dim=32, experts=4, used=2),
    "qwen3moe": Shape(layers=8, columns=2048, ff=768, heads=32, kv_heads=4, vocabulary=32000, arch="qwen3moe",
                      head_dim=128, experts=64, used=8),
    "qwen3moe-tiny": Shape(layers=2, columns=512, ff=256, heads=4, kv_heads=2, vocabulary=1024, arch="qwen3moe",
                           head_dim=64, experts=8, used=3),
    "qwen3next": Shape(layers=8, columns=2048, ff=512, heads=16, kv_heads=2, vocabulary=32000, arch="qwen3next",
                       head_dim=256, experts=32, used=10, recurrence=Recurrence(4, 16, 32, 128, 128), shared_ff=512),
    "qwen35moe": Shape(layers=8, columns=2048, ff=512, heads=16, kv_heads=2, vocabulary=32000, arch="qwen35moe",
                       head_dim=256, experts=32, used=8, recurrence=Recurrence(4, 16, 32, 128, 128), shared_ff=512),
    "qwen3next-tiny": Shape(layers=4, columns=256, ff=64, heads=4, kv_heads=2, vocabulary=1024, arch="qwen3next",
                            head_dim=64, experts=8, used=3, recurrence=Recurrence(4, 2, 4, 64, 64), shared_ff=64),
    "deepseek2": Shape(layers=6, columns=2048, ff=512, heads=16, kv_heads=16, vocabulary=32000, arch="deepseek2",
                       experts=32, used=4, latent=Latent(q_lora=768, kv_lora=512, nope=128, rope=64, value=128),
                       leading_dense=1, dense_ff=4096, shared_ff=512),
    "deepseek-v3-layers": Shape(layers=4, columns=7168, ff=2048, heads=128, kv_heads=128, vocabulary=32000,
                                arch="deepseek2", experts=64, used=8, leading_dense=1, dense_ff=18432, shared_ff=2048,
                                latent=Latent(q_lora=1536, kv_lora=512, nope=128, rope=64, value=128)),
    "qwen3-30b-layers": Shape(layers=8, columns=2048, ff=768, heads=32, kv_heads=4, vocabulary=32000, arch="qwen3moe",
                              head_dim=128, experts=128, used=8),
    "deepseek2-dry": Shape(layers=1, columns=64, ff=32, heads=2, kv_heads=2, vocabulary=64, arch="deepseek2", experts=4,
                           used=2, latent=Latent(q_lora=32, kv_lora=32, nope=32, rope=16, value=32), dense_ff=64,
                           shared_ff=32),
}  # fmt: skip

_ALIKE = {"vocab_size": 32000, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "tie_word_embeddings": False}
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt-oss": _ALIKE | {
        "architectures": ["GptOssForCausalLM"], "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 4,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32,
        "num_experts_per_tok": 4, "sliding_window": 128, "rope_theta": 150000.0, "attention_bias": True,
    },
    "gemma3": _ALIKE | {
        "architectures": ["Gemma3ForCausalLM"], "hidden_size": 2560, "intermediate_size": 10240,
        "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
        "query_pre_attn_scalar": 256, "sliding_window": 1024, "tie_word_embeddings": True,
    },
    "glm4moe": _ALIKE | {
        "architectures": ["Glm4MoeForCausalLM"], "hidden_size": 5120, "intermediate_size": 12288,
        "num_hidden_layers": 3, "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128,
        "moe_intermediate_size": 1536, "n_routed_experts": 32, "num_experts_per_tok": 8, "n_shared_experts": 1,
        "first_k_dense_replace": 1, "attention_bias": True, "use_qk_norm": True, "num_nextn_predict_layers": 0,
        "rope_theta": 1e6, "partial_rotary_factor": 0.5, "routed_scaling_factor": 2.5, "norm_topk_prob": True,
        "n_group": 1, "topk_group": 1,
    },
}  # fmt: skip


def _sizes(hidden: int, ff: int, heads: int, kv_heads: int, layers: int, **others: Any) -> dict[str, Any]:
    return {"hidden_size": hidden, "intermediate_size": ff, "num_attention_heads": heads,
            "num_key_value_heads": kv_heads, "num_hidden_layers": layers} | others  # fmt: skip


SIZES: dict[str, dict[str, Any]] = {
    "bailingmoe2": _sizes(2048, 5120, 16, 4, 8, head_dim=128, moe_intermediate_size=512, num_experts=32,
                          num_experts_per_tok=8),
    "bitnet-b1.58": _sizes(2560, 6912, 20, 5, 6),
    "cohere2": _sizes(4096, 14336, 32, 8, 4, sliding_window=1024),
    "dots1": _sizes(4096, 10944, 32, 32, 3, head_dim=128, moe_intermediate_size=1408, n_routed_experts=32,
                    num_experts_per_tok=6, n_shared_experts=2),
    "ernie4_5": _sizes(1024, 3072, 16, 2, 18, head_dim=128),
    "ernie4_5-moe": _sizes(2560, 12288, 20, 4, 4, head_dim=128, moe_intermediate_size=1536, moe_num_experts=32, moe_k=6,
                           moe_layer_end_index=3),
    "glm4": _sizes(4096, 13696, 32, 2, 3, head_dim=128),
    "granite": _sizes(4096, 12800, 32, 8, 3),
    "granitemoe": _sizes(1536, 512, 24, 8, 12, num_local_experts=32, num_experts_per_tok=8),
    "hunyuan-moe": _sizes(4096, 3072, 32, 8, 2, head_dim=128, num_experts=16, moe_topk=8),
    "llama4": _sizes(5120, 8192, 40, 8, 2, head_dim=128, intermediate_size_mlp=16384, num_local_experts=4),
    "minimax-m2": _sizes(3072, 1536, 48, 8, 3, head_dim=128, rotary_dim=64, num_local_experts=32,
                         num_experts_per_tok=8),
    "mistral3": _sizes(4096, 14336, 32, 8, 3, head_dim=128),
    "qwen2": _sizes(3584, 18944, 28, 4, 3),
    "qwen2moe": _sizes(3584, 18944, 28, 4, 3, num_experts=16, num_experts_per_tok=8, moe_intermediate_size=2560,
                       shared_expert_intermediate_size=20480),
    "qwen3": _sizes(4096, 12288, 32, 8, 3, head_dim=128),
    "seed_oss": _sizes(5120, 27648, 80, 8, 2, head_dim=128),
    "smollm3": _sizes(2048, 11008, 16, 4, 8),
}  # fmt: skip
NAMES = [*SHAPES, *CONFIGS, *SIZES]


def config_of(name: str) -> dict[str, Any]:
    """The config.json of a model of CONFIGS or SIZES."""
    if name in CONFIGS:
        return CONFIGS[name]
    given = {"vocab_size": _ALIKE["vocab_size"], "max_position_embeddings": _ALIKE["max_position_embeddings"]}
    return archs.get(name).EXAMPLE | given | SIZES[name]


def of_config(config: dict[str, Any], kind: QuantType) -> tuple[Metadata, list[TensorSpec]]:
    """Keys and tensors of a config.json, all matrices but routers of one type, or of q8_0 where rows do not fit it."""
    arch, f32, fallback = archs.from_hf(config), types.get("f32"), types.get("q8_0")
    made = Metadata({"general.architecture": arch.name})
    for key, (value, value_type) in arch.metadata(config).items():
        made.set(key, value, value_type)
    made.set("tokenizer.ggml.model", "no_vocab", "str")

    def chosen(name: str, shape: tuple[int, ...], is_f32: bool) -> QuantType:
        if is_f32 or "gate_inp" in name:
            return f32
        fits = shape[-1] % kind.block_size == 0 and (kind.interleave == 1 or name != "token_embd.weight")
        return kind if fits and (kind.name != "mxfp4" or "_exps" in name) else fallback

    return made, [TensorSpec(t.name, t.shape, chosen(t.name, t.shape, t.f32)) for t in arch.tensors(config)]


def specs(shape: Shape, kind: QuantType) -> list[TensorSpec]:
    f32 = types.get("f32")
    embedding = kind if kind.interleave == 1 else types.get("q8_0")
    found = [
        TensorSpec("token_embd.weight", (shape.vocabulary, shape.columns), embedding),
        TensorSpec("output_norm.weight", (shape.columns,), f32),
        TensorSpec("output.weight", (shape.vocabulary, shape.columns), kind),
    ]
    for i in range(shape.layers):
        recurs = shape.recurrence is not None and (i + 1) % INTERVAL != 0
        vectors, matrices = attention_of(shape)
        if recurs:
            assert shape.recurrence is not None
            found += recurrent_specs(shape, shape.recurrence, kind, f"blk.{i}.")
            vectors, matrices = {"attn_norm": shape.columns}, {}
        vectors["ffn_norm" if shape.recurrence is None else "post_attention_norm"] = shape.columns
        dense = not shape.experts or i < shape.leading_dense
        rows, stem, stack = (shape.dense_ff or shape.ff, "", ()) if dense else (shape.ff, "_exps", (shape.experts,))
        matrices |= feed_forward_of(shape, rows, stem, stack)
        if not dense and shape.shared_ff:
            matrices |= feed_forward_of(shape, shape.shared_ff, "_shexp", ())
            if shape.recurrence is not None:
                vectors["ffn_gate_inp_shexp"] = shape.columns
        found += [TensorSpec(f"blk.{i}.{name}.weight", (n,), f32) for name, n in vectors.items()]
        if not dense:
            found.append(TensorSpec(f"blk.{i}.ffn_gate_inp.weight", (shape.experts, shape.columns), f32))
        found += [
            TensorSpec(f"blk.{i}.{name}.weight", size, kind if size[-1] % kind.block_size == 0 else types.get("q8_0"))
            for name, size in matrices.items()
        ]
    return found


def recurrent_specs(shape: Shape, sizes: Recurrence, kind: QuantType, stem: str) -> list[TensorSpec]:
    """Tensors of the recurrence of a layer."""
    f32, heads = types.get("f32"), sizes.value_heads
    matrices = {"attn_qkv": (sizes.channels, shape.columns), "attn_gate": (sizes.inner, shape.columns),
                "ssm_out": (shape.columns, sizes.inner)}  # fmt: skip
    rates = {"ssm_ba": 2 * heads} if shape.arch == "qwen3next" else {"ssm_beta": heads, "ssm_alpha": heads}
    matrices |= {name: (rows, shape.columns) for name, rows in rates.items()}
    vectors = {"ssm_a": heads, "ssm_dt.bias": heads, "ssm_norm.weight": sizes.head_dim_v}
    return [
        *(TensorSpec(f"{stem}{name}.weight", size, kind) for name, size in matrices.items()),
        *(TensorSpec(stem + name, (n,), f32) for name, n in vectors.items()),
        TensorSpec(f"{stem}ssm_conv1d.weight", (sizes.channels, sizes.kernel), f32),
    ]


def feed_forward_of(shape: Shape, rows: int, stem: str, stack: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """The matrices of a feed-forward."""
    wide, tall = (*stack, rows, shape.columns), (*stack, shape.columns, rows)
    return {f"ffn_gate{stem}": wide, f"ffn_up{stem}": wide, f"ffn_down{stem}": tall}


def attention_of(shape: Shape) -> tuple[dict[str, int], dict[str, tuple[int, ...]]]:
    """Vectors and matrices of attention."""
    wide, kv, n = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, shape.columns
    vectors = {"attn_norm": n}
    if shape.latent is None:
        if shape.arch == "qwen3moe" or shape.recurrence is not None:
            vectors |= {"attn_q_norm": shape.head_dim, "attn_k_norm": shape.head_dim}
        queries = wide if shape.recurrence is None else 2 * wide  # with gates
        return vectors, {"attn_q": (queries, n), "attn_k": (kv, n), "attn_v": (kv, n), "attn_output": (n, wide)}
    sizes, heads = shape.latent, shape.heads
    vectors |= {"attn_q_a_norm": sizes.q_lora, "attn_kv_a_norm": sizes.kv_lora}
    return vectors, {
        "attn_q_a": (sizes.q_lora, n),
        "attn_q_b": (heads * (sizes.nope + sizes.rope), sizes.q_lora),
        "attn_kv_a_mqa": (sizes.kv_lora + sizes.rope, n),
        "attn_kv_b": (heads * (sizes.nope + sizes.value), sizes.kv_lora),
        "attn_k_b": (heads * sizes.kv_lora, sizes.nope),
        "attn_v_b": (heads * sizes.value, sizes.kv_lora),
        "attn_output": (n, heads * sizes.value),
    }


def metadata(shape: Shape) -> Metadata:
    made = Metadata({"general.architecture": shape.arch})
    values = {
        "block_count": shape.layers, "context_length": 8192, "embedding_length": shape.columns,
        "feed_forward_length": shape.ff, "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads, "vocab_size": shape.vocabulary,
        "rope.dimension_count": shape.head_dim, "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
    }  # fmt: skip
    if shape.experts:
        values |= {
            "expert_count": shape.experts, "expert_used_count": shape.used, "expert_feed_forward_length": shape.ff,
        }  # fmt: skip
    if sizes := shape.recurrence:
        values |= {
            "ssm.conv_kernel": sizes.kernel, "ssm.state_size": sizes.head_dim_k, "ssm.group_count": sizes.key_heads,
            "ssm.time_step_rank": sizes.value_heads, "ssm.inner_size": sizes.inner, "full_attention_interval": INTERVAL,
            "expert_shared_feed_forward_length": shape.shared_ff, "rope.dimension_count": shape.head_dim // 4,
        }  # fmt: skip
    if shape.latent is not None:
        values |= {
            "feed_forward_length": shape.dense_ff, "leading_dense_block_count": shape.leading_dense,
            "expert_shared_count": shape.shared_ff // shape.ff, "expert_gating_func": 2,
            "attention.q_lora_rank": shape.latent.q_lora, "attention.kv_lora_rank": shape.latent.kv_lora,
            "attention.key_length": shape.latent.nope + shape.latent.rope,
            "attention.value_length": shape.latent.value, "rope.dimension_count": shape.latent.rope,
        }  # fmt: skip
        made.set(f"{shape.arch}.expert_weights_scale", 1.0, "f32")
        made.set(f"{shape.arch}.expert_weights_norm", True, "bool")
        made.set(f"{shape.arch}.rope.freq_base", 10000.0, "f32")
    for key, value in values.items():
        made.set(f"{shape.arch}.{key}", value, "u32")
    if shape.arch == "qwen35moe":
        made.set("qwen35moe.rope.dimension_sections", [11, 11, 10, 0], "i32")
    made.set(f"{shape.arch}.attention.layer_norm_rms_epsilon", 1e-5, "f32")
    made.set("tokenizer.ggml.model", "no_vocab", "str")
    return made


class _Rows:
    """Packed rows of a model's tensors: random ones of each type and width, ROWS of them again and again."""

    def __init__(self, shape: Shape | None):
        self._shape, self._rng = shape, np.random.default_rng(0)
        self._drawn: dict[tuple[str, int], np.ndarray] = {}
        self._of_heads: dict[str, np.ndarray] = {}  # what k_b and v_b hold, float32: the numbers of kv_b

    def of(self, spec: TensorSpec, number: int) -> np.ndarray:
        """uint8[rows, row bytes] of a matrix; `number` is where the rows begin: neighbours differ."""
        n, name = spec.shape[-1], spec.name.removesuffix(".weight").rpartition(".")[2]
        if name == "ffn_gate_inp":  # each token selects other experts, by weights that all count, as in a real model
            router = self._rng.standard_normal(spec.shape) * ROUTER_SCALE / math.sqrt(n)
            return router.astype(np.float32).view(np.uint8)
        if spec.type.name == "f32":  # norms and biases
            value = -1 if spec.name.endswith("ssm_a") else 1
            return np.full((math.prod(spec.shape[:-1]), n), value, np.float32).view(np.uint8)
        if name in self._of_heads:
            return self._quantized(spec.type, self._of_heads[name])
        if (spec.type.name, n) not in self._drawn:
            x = self._rng.standard_normal((ROWS, n)).astype(np.float32) / np.float32(n) ** np.float32(0.5)
            self._drawn[spec.type.name, n] = self._quantized(spec.type, x)
        first = number * spec.type.interleave % ROWS
        count = spec.shape[-2]
        rows = np.tile(self._drawn[spec.type.name, n], (1 + -(-count // ROWS), 1))[first : first + count]
        if name == "attn_kv_b":
            self._share(spec.type.dequantize(rows, n))
        return rows

    @staticmethod
    def _quantized(kind: QuantType, x: np.ndarray) -> np.ndarray:
        even = np.ones(x.shape[1], np.float32) if kind.requires_imatrix else None
        return kind.quantize(x, even, effort="fast")

    def _share(self, kv_b: np.ndarray) -> None:
        """The layer's k_b and v_b: attention takes them or kv_b, by the number of tokens and the device."""
        assert self._shape is not None
        assert self._shape.latent is not None
        sizes = self._shape.latent
        k, v = np.split(kv_b.reshape(self._shape.heads, -1, sizes.kv_lora), [sizes.nope], axis=1)
        self._of_heads["attn_k_b"] = np.ascontiguousarray(k.transpose(0, 2, 1)).reshape(-1, sizes.nope)
        self._of_heads["attn_v_b"] = v.reshape(-1, sizes.kv_lora)


def write(name: str, kind_name: str, path: Path, tokenizer: Metadata | None = None) -> Path:
    """A model of NAMES with all matrices of a type. One of SHAPES may have the vocabulary of another model."""
    kind, shape = types.get(kind_name), SHAPES.get(name)
    if shape is None:
        keys, wanted = of_config(config_of(name), kind)
    else:
        tokenizer = tokenizer or Metadata()
        if tokens := tokenizer.get("tokenizer.ggml.tokens"):
            shape = replace(shape, vocabulary=len(tokens))
        keys, wanted = metadata(shape), specs(shape, kind)
        for key in [key for key in tokenizer if key.startswith("tokenizer.")]:
            keys.set(key, tokenizer[key], tokenizer.kind(key))
    rows = _Rows(shape)
    with Writer(path, keys, wanted, durable=False) as writer:
        for number, spec in enumerate(wanted):
            for expert in range(spec.shape[0] if len(spec.shape) == 3 else 1):
                writer.write(spec.name, rows.of(spec, number + expert))
    return path
