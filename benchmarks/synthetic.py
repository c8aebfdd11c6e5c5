"""Models with random weights for benchmarks: the shapes of real models, with one type for all matrices.

    write("llama-1.2b", "iq4_k", path)
    write("qwen3moe", "iq4_k", path)

A few hundred random rows are encoded for each row length, and every matrix repeats them: the time of a product does not
depend on the weights, and encoding a billion of them would take longer than the benchmark. Embedding and output have
the type too, or q8_0 if rows of an embedding cannot have it; norms are float32. There is no tokenizer.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from quantkit import types
from quantkit.formats.gguf import Metadata, TensorSpec, Writer
from quantkit.types import QuantType

ROWS = 64  # random rows


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
    latent: Latent | None = None
    leading_dense: int = 0  # layers before the first with experts, whose feed-forward has dense_ff rows
    dense_ff: int = 0
    shared_ff: int = 0  # rows of the shared experts together


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
    "deepseek2": Shape(layers=6, columns=2048, ff=512, heads=16, kv_heads=16, vocabulary=32000, arch="deepseek2",
                       experts=32, used=4, latent=Latent(q_lora=768, kv_lora=512, nope=128, rope=64, value=128),
                       leading_dense=1, dense_ff=4096, shared_ff=512),
    "deepseek2-dry": Shape(layers=2, columns=64, ff=32, heads=2, kv_heads=2, vocabulary=64, arch="deepseek2", experts=4,
                           used=2, latent=Latent(q_lora=32, kv_lora=32, nope=32, rope=16, value=32), leading_dense=1,
                           dense_ff=64, shared_ff=32),
}  # fmt: skip


def specs(shape: Shape, kind: QuantType) -> list[TensorSpec]:
    f32 = types.get("f32")
    embedding = kind if kind.interleave == 1 else types.get("q8_0")
    found = [
        TensorSpec("token_embd.weight", (shape.vocabulary, shape.columns), embedding),
        TensorSpec("output_norm.weight", (shape.columns,), f32),
        TensorSpec("output.weight", (shape.vocabulary, shape.columns), kind),
    ]
    for i in range(shape.layers):
        vectors, matrices = attention_of(shape)
        vectors["ffn_norm"] = shape.columns
        dense = not shape.experts or i < shape.leading_dense
        rows, stem, stack = (shape.dense_ff or shape.ff, "", ()) if dense else (shape.ff, "_exps", (shape.experts,))
        matrices |= feed_forward_of(shape, rows, stem, stack)
        if not dense and shape.shared_ff:
            matrices |= feed_forward_of(shape, shape.shared_ff, "_shexp", ())
        found += [TensorSpec(f"blk.{i}.{name}.weight", (n,), f32) for name, n in vectors.items()]
        if not dense:
            found.append(TensorSpec(f"blk.{i}.ffn_gate_inp.weight", (shape.experts, shape.columns), f32))
        found += [
            TensorSpec(f"blk.{i}.{name}.weight", size, kind if size[-1] % kind.block_size == 0 else types.get("q8_0"))
            for name, size in matrices.items()
        ]
    return found


def feed_forward_of(shape: Shape, rows: int, stem: str, stack: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """The matrices of a feed-forward."""
    wide, tall = (*stack, rows, shape.columns), (*stack, shape.columns, rows)
    return {f"ffn_gate{stem}": wide, f"ffn_up{stem}": wide, f"ffn_down{stem}": tall}


def attention_of(shape: Shape) -> tuple[dict[str, int], dict[str, tuple[int, ...]]]:
    """Vectors and matrices of attention."""
    wide, kv, n = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, shape.columns
    vectors = {"attn_norm": n}
    if shape.latent is None:
        if shape.arch == "qwen3moe":
            vectors |= {"attn_q_norm": shape.head_dim, "attn_k_norm": shape.head_dim}
        return vectors, {"attn_q": (wide, n), "attn_k": (kv, n), "attn_v": (kv, n), "attn_output": (n, wide)}
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
    made.set(f"{shape.arch}.attention.layer_norm_rms_epsilon", 1e-5, "f32")
    made.set("tokenizer.ggml.model", "no_vocab", "str")
    return made


def write(name: str, kind_name: str, path: Path) -> Path:
    """A model of a shape in SHAPES with all matrices of a type."""
    shape, kind = SHAPES[name], types.get(kind_name)
    rng = np.random.default_rng(0)
    drawn: dict[tuple[str, int], np.ndarray] = {}

    def rows(spec: TensorSpec) -> np.ndarray:
        n = spec.shape[-1]
        if len(spec.shape) == 1:
            return np.ones((1, n), np.float32).view(np.uint8)
        if (spec.type.name, n) not in drawn:
            x = rng.standard_normal((ROWS, n)).astype(np.float32) / np.float32(n) ** np.float32(0.5)
            even = np.ones(n, np.float32) if spec.type.requires_imatrix else None
            drawn[spec.type.name, n] = spec.type.quantize(x, even, effort="fast")
        if spec.name.endswith("ffn_gate_inp.weight"):  # each token selects other experts, as in a real model
            return rng.standard_normal(spec.shape).astype(np.float32).view(np.uint8)
        return np.tile(drawn[spec.type.name, n], (-(-spec.shape[-2] // ROWS), 1))[: spec.shape[-2]]

    wanted = specs(shape, kind)
    with Writer(path, metadata(shape), wanted, durable=False) as writer:
        for spec in wanted:
            for _ in range(spec.shape[0] if len(spec.shape) == 3 else 1):
                writer.write(spec.name, rows(spec))
    return path
