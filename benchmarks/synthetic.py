"""Models with random weights for benchmarks: the shapes of real models, with one type for all matrices.

    write("llama-1.2b", "iq4_k", path)
    write("qwen3moe", "iq4_k", path)
    write("gemma3", "q4_K", path)

A few hundred random rows are encoded for each row length, and every matrix repeats them: the time of a product does not
depend on the weights, and encoding a billion of them would take longer than the benchmark. Embedding and output have
the type too, or q8_0 if rows of an embedding cannot have it; norms are float32. There is no tokenizer.

SHAPES are of llama and qwen3moe; CONFIGS are of other architectures, a config.json each: rows as long as in the real
models, but fewer layers, experts and tokens of the vocabulary. With mxfp4, only experts have this type and the rest
q8_0, as in the published gpt-oss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quantkit import archs, types
from quantkit.archs.common.blocks import Recurrence
from quantkit.formats.gguf import Metadata, TensorSpec, Writer
from quantkit.types import QuantType

ROWS = 64  # random rows
INTERVAL = 4  # every fourth layer of a hybrid model has attention


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
    shared: int = 0  # width of the shared expert, which has a gate


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
                       head_dim=256, experts=32, used=10, recurrence=Recurrence(4, 16, 32, 128, 128), shared=512),
    "qwen35moe": Shape(layers=8, columns=2048, ff=512, heads=16, kv_heads=2, vocabulary=32000, arch="qwen35moe",
                       head_dim=256, experts=32, used=8, recurrence=Recurrence(4, 16, 32, 128, 128), shared=512),
    "qwen3next-tiny": Shape(layers=4, columns=256, ff=64, heads=4, kv_heads=2, vocabulary=1024, arch="qwen3next",
                            head_dim=64, experts=8, used=3, recurrence=Recurrence(4, 2, 4, 64, 64), shared=64),
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
NAMES = [*SHAPES, *CONFIGS]


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
    wide, kv, f32 = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, types.get("f32")
    embedding = kind if kind.interleave == 1 else types.get("q8_0")
    found = [
        TensorSpec("token_embd.weight", (shape.vocabulary, shape.columns), embedding),
        TensorSpec("output_norm.weight", (shape.columns,), f32),
        TensorSpec("output.weight", (shape.vocabulary, shape.columns), kind),
    ]
    matrices: dict[str, tuple[int, ...]] = {
        "attn_q": (wide, shape.columns), "attn_k": (kv, shape.columns), "attn_v": (kv, shape.columns),
        "attn_output": (shape.columns, wide),
    }  # fmt: skip
    vectors = {"attn_norm": shape.columns, "ffn_norm": shape.columns}
    stem, stack = ("_exps", (shape.experts,)) if shape.experts else ("", ())
    for name in ("ffn_gate", "ffn_up"):
        matrices[name + stem] = (*stack, shape.ff, shape.columns)
    matrices["ffn_down" + stem] = (*stack, shape.columns, shape.ff)
    if shape.arch == "qwen3moe":
        vectors |= {"attn_q_norm": shape.head_dim, "attn_k_norm": shape.head_dim}
    if shape.recurrence is not None:
        vectors["post_attention_norm"] = vectors.pop("ffn_norm")
        vectors |= {"attn_q_norm": shape.head_dim, "attn_k_norm": shape.head_dim, "ffn_gate_inp_shexp": shape.columns}
        matrices["attn_q"] = (2 * wide, shape.columns)
        matrices |= {f"ffn_{name}_shexp": (shape.shared, shape.columns) for name in ("gate", "up")}
        matrices["ffn_down_shexp"] = (shape.columns, shape.shared)
    for i in range(shape.layers):
        if shape.recurrence is not None and (i + 1) % INTERVAL:
            found += recurrent_specs(shape, shape.recurrence, kind, f"blk.{i}.")
            found += [
                TensorSpec(f"blk.{i}.{name}.weight", size, f32 if len(size) == 1 else kind)
                for name, size in {**{k: (n,) for k, n in vectors.items()}, **matrices}.items()
                if name == "attn_norm" or not name.startswith("attn_")
            ]
            found.append(TensorSpec(f"blk.{i}.ffn_gate_inp.weight", (shape.experts, shape.columns), f32))
            continue
        found += [TensorSpec(f"blk.{i}.{name}.weight", (n,), f32) for name, n in vectors.items()]
        if shape.experts:
            found.append(TensorSpec(f"blk.{i}.ffn_gate_inp.weight", (shape.experts, shape.columns), f32))
        found += [TensorSpec(f"blk.{i}.{name}.weight", size, kind) for name, size in matrices.items()]
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
            "expert_shared_feed_forward_length": shape.shared, "rope.dimension_count": shape.head_dim // 4,
        }  # fmt: skip
    for key, value in values.items():
        made.set(f"{shape.arch}.{key}", value, "u32")
    if shape.arch == "qwen35moe":
        made.set("qwen35moe.rope.dimension_sections", [11, 11, 10, 0], "i32")
    made.set(f"{shape.arch}.attention.layer_norm_rms_epsilon", 1e-5, "f32")
    made.set("tokenizer.ggml.model", "no_vocab", "str")
    return made


def write(name: str, kind_name: str, path: Path) -> Path:
    """A model of SHAPES or CONFIGS with all matrices of a type."""
    kind = types.get(kind_name)
    if name in CONFIGS:
        keys, wanted = of_config(CONFIGS[name], kind)
    else:
        keys, wanted = metadata(SHAPES[name]), specs(SHAPES[name], kind)
    rng = np.random.default_rng(0)
    drawn: dict[tuple[str, int], np.ndarray] = {}

    def rows(spec: TensorSpec) -> np.ndarray:
        n = spec.shape[-1]
        if spec.type.name == "f32" and "gate_inp.weight" not in spec.name:  # norms and biases
            value = -1 if spec.name.endswith("ssm_a") else 1
            return np.full((math.prod(spec.shape[:-1]), n), value, np.float32).view(np.uint8)
        if (spec.type.name, n) not in drawn:
            x = rng.standard_normal((ROWS, n)).astype(np.float32) / np.float32(n) ** np.float32(0.5)
            even = np.ones(n, np.float32) if spec.type.requires_imatrix else None
            drawn[spec.type.name, n] = spec.type.quantize(x, even, effort="fast")
        if spec.name.endswith("ffn_gate_inp.weight"):  # each token selects other experts, as in a real model
            return rng.standard_normal(spec.shape).astype(np.float32).view(np.uint8)
        return np.tile(drawn[spec.type.name, n], (-(-spec.shape[-2] // ROWS), 1))[: spec.shape[-2]]

    with Writer(path, keys, wanted, durable=False) as writer:
        for spec in wanted:
            for _ in range(spec.shape[0] if len(spec.shape) == 3 else 1):
                writer.write(spec.name, rows(spec))
    return path
