"""Models that the runtime's tests share: the wheel's SmolLM2 in other types, and a tiny random one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from quantkit import types
from quantkit.formats import gguf


def rewrite(source: Path, target: Path, kind: str, **others: str) -> Path:
    """`source` with every matrix decoded and encoded as `kind`, where its rows fit; vectors and routers stay float32.

    `others`: part of a name -> type of such tensors.
    """
    file = gguf.open(source)
    quant = types.get(kind)

    def chosen(tensor: gguf.Tensor) -> types.QuantType:
        expected = next((types.get(other) for part, other in others.items() if part in tensor.name), quant)
        fits = len(tensor.shape) >= 2 and tensor.shape[-1] % expected.block_size == 0 and "gate_inp" not in tensor.name
        return expected if fits and tensor.shape[-2] % expected.interleave == 0 else types.get("f32")

    specs = [gguf.TensorSpec(t.name, t.shape, chosen(t)) for t in file.tensors.values()]
    metadata = file.metadata.copy()
    metadata.set("general.file_type", quant.file_type or 0, "u32")
    with gguf.Writer(target, metadata, specs) as writer:
        for spec, tensor in zip(specs, file.tensors.values()):
            rows = tensor.dequantize().reshape(-1, tensor.shape[-1])
            even = np.ones(rows.shape[1], np.float32) if spec.type.requires_imatrix else None
            writer.write(tensor.name, spec.type.quantize(rows, even))
    return target


@pytest.fixture(scope="session")
def smollm2_f16(smollm2_q4_1: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rewrite(smollm2_q4_1, tmp_path_factory.mktemp("smollm2") / "f16.gguf", "f16")


@pytest.fixture(scope="session")
def smollm2_f32(smollm2_q4_1: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rewrite(smollm2_q4_1, tmp_path_factory.mktemp("smollm2") / "f32.gguf", "f32")


VOCAB, EMBD, FF, LAYERS, HEADS, KV_HEADS = 320, 256, 512, 2, 4, 2


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random llama whose rows are multiples of 256, so that every type fits."""
    rng = np.random.default_rng(5)
    dim = EMBD // HEADS
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCAB, EMBD), "output.weight": (VOCAB, EMBD)}
    for i in range(LAYERS):
        shapes |= {f"blk.{i}.attn_norm.weight": (EMBD,), f"blk.{i}.ffn_norm.weight": (EMBD,)}
        shapes |= {f"blk.{i}.attn_q.weight": (EMBD, EMBD), f"blk.{i}.attn_output.weight": (EMBD, EMBD)}
        shapes |= {f"blk.{i}.attn_{kind}.weight": (KV_HEADS * dim, EMBD) for kind in "kv"}
        shapes |= {f"blk.{i}.ffn_{kind}.weight": (FF, EMBD) for kind in ("gate", "up")}
        shapes |= {f"blk.{i}.ffn_down.weight": (EMBD, FF)}
    shapes["output_norm.weight"] = (EMBD,)
    metadata = gguf.Metadata()
    for key, value, kind in (
        ("general.architecture", "llama", "str"),
        ("llama.block_count", LAYERS, "u32"),
        ("llama.context_length", 128, "u32"),
        ("llama.embedding_length", EMBD, "u32"),
        ("llama.feed_forward_length", FF, "u32"),
        ("llama.attention.head_count", HEADS, "u32"),
        ("llama.attention.head_count_kv", KV_HEADS, "u32"),
        ("llama.attention.layer_norm_rms_epsilon", 1e-5, "f32"),
        ("llama.vocab_size", VOCAB, "u32"),
    ):
        metadata.set(key, value, kind)
    return random_model(tmp_path_factory.mktemp("tiny") / "tiny.gguf", metadata, shapes, rng)


def random_model(
    path: Path, metadata: gguf.Metadata, shapes: dict[str, tuple[int, ...]], rng: np.random.Generator
) -> Path:
    """Float32 matrices about 0, vectors about 1."""
    f32 = types.get("f32")
    with gguf.Writer(path, metadata, [gguf.TensorSpec(n, s, f32) for n, s in shapes.items()]) as writer:
        for name, shape in shapes.items():
            x = rng.standard_normal(shape, np.float32) * np.float32(0.07 if len(shape) > 1 else 0.1)
            writer.write(name, (x + np.float32(len(shape) == 1)).reshape(-1, shape[-1]).view(np.uint8))
    return path
