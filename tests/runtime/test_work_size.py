"""Predicted working memory against the buffers of loaded models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quantkit.codegen import cpu_target
from quantkit.formats import gguf
from quantkit.placement import workspace
from quantkit.runtime.loading import load
from tests.archs.files import written
from tests.runtime.conftest import random_model, rewrite
from tests.runtime.test_experts import moe  # noqa: F401
from tests.test_architectures import GEMMA_E


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random one, whose queries are wider than its hidden state."""
    embd, ff, heads, kv_heads, dim, vocab = 512, 1024, 8, 2, 128, 320
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocab, embd), "output_norm.weight": (embd,)}
    for i in range(2):
        shapes |= {f"blk.{i}.{name}_norm.weight": (embd,) for name in ("attn", "ffn")}
        shapes |= {f"blk.{i}.attn_{name}_norm.weight": (dim,) for name in "qk"}
        shapes |= {f"blk.{i}.attn_{name}.weight": (dim * (heads if name == "q" else kv_heads), embd) for name in "qkv"}
        shapes |= {f"blk.{i}.attn_output.weight": (embd, dim * heads), f"blk.{i}.ffn_down.weight": (embd, ff)}
        shapes |= {f"blk.{i}.ffn_{name}.weight": (ff, embd) for name in ("gate", "up")}
    metadata = gguf.Metadata({"general.architecture": "qwen3"})
    numbers = {"block_count": 2, "context_length": 128, "embedding_length": embd, "feed_forward_length": ff,
               "attention.head_count": heads, "attention.head_count_kv": kv_heads, "attention.key_length": dim,
               "attention.value_length": dim, "vocab_size": vocab}  # fmt: skip
    for key, value in numbers.items():
        metadata.set(f"qwen3.{key}", value, "u32")
    metadata.set("qwen3.attention.layer_norm_rms_epsilon", 1e-6, "f32")
    path = tmp_path_factory.mktemp("qwen3") / "m.gguf"
    return random_model(path, metadata, shapes, np.random.default_rng(6))


def hybrid(arch: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    wide = {"hidden_size": 512, "head_dim": 64, "linear_num_value_heads": 8, "moe_intermediate_size": 128,
            "shared_expert_intermediate_size": 256}  # fmt: skip
    return written(tmp_path_factory.mktemp(arch) / "m.gguf", arch, **wide)


@pytest.fixture(scope="session")
def qwen3next(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random one: recurrent layers, gated attention, experts and a gated shared expert."""
    return hybrid("qwen3next", tmp_path_factory)


@pytest.fixture(scope="session")
def qwen35(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random one, with separate matrices of beta and alpha."""
    return hybrid("qwen35", tmp_path_factory)


@pytest.fixture(scope="session")
def qwen35moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random one, also with experts."""
    return hybrid("qwen35moe", tmp_path_factory)


def actual(path: Path, n_ctx: int, threads: int) -> int:
    """Of a model that has run a prompt and a token."""
    model = load(path, numerics="fast", threads=threads, n_ctx=n_ctx)
    cache = model.new_cache(n_ctx)
    model.forward(np.arange(5), cache)
    model.forward([7], cache)
    assert model._fast is not None, model.fallback_reason
    return model._fast.work_bytes


@pytest.mark.skipif(not cpu_target.isa().startswith("avx512"), reason="tiles are those of AVX-512")
@pytest.mark.parametrize(
    ("which", "kind"),
    [("qwen3", "q8_0"), ("moe", "q8_0"), ("qwen3next", "q8_0"), ("qwen35", "q8_0")]
    + [
        pytest.param(which, kind, marks=pytest.mark.full)
        for which, kind in (("tiny", "q8_0"), ("tiny", "iq4_k"), ("qwen3", "iq4_k"),
                            ("qwen3next", "f16"), ("qwen35moe", "q8_0"),
                            ("tiny", "f16"), ("moe", "iq4_k"), ("moe", "f16"),
                            ("smollm2_f16", "q8_0"), ("smollm2_f16", "q4_0"), ("smollm2_f16", "f16"))
    ],
)  # fmt: skip
def test_within_a_tenth(which: str, kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    path = rewrite(request.getfixturevalue(which), tmp_path / "m.gguf", kind)
    file = gguf.open(path)
    for n_ctx, threads in ((64, 1), (100, 2)):
        predicted = workspace.work_bytes(file.tensors, file.metadata, n_ctx, threads)
        measured = actual(path, n_ctx, threads)
        print(which, kind, threads, predicted, measured)
        assert abs(predicted / measured - 1) < 0.1


@pytest.mark.skipif(not cpu_target.isa().startswith("avx512"), reason="tiles are those of AVX-512")
@pytest.mark.parametrize(
    ("arch", "change"),
    [
        ("gpt-oss", {}), ("gemma3", {}), ("gemma4", {}), ("bitnet-b1.58", {}), ("minimax-m2", {}), ("mistral3", {}),
        ("glm4moe", {"n_shared_experts": 2}), ("hunyuan-moe", {}), ("ernie4_5-moe", {}), ("llama", {"head_dim": 24}),
        ("lfm2", {}), ("lfm2moe", {}), ("apertus", {}), ("kimi-linear", {}), ("longcat-flash", {}),
        ("mistral-large4", {}), ("gemma4", GEMMA_E), ("gemma3n", {}), ("deepseek4", {}),
        ("deepseek4", {"compress_ratios": [0, 4, 0, 4], "index_topk": 3}),
        ("qwen4exp", {}), ("qwen4exp", {"ple_layer_ids": [], "indexer_budget": 8}),
    ],
)  # fmt: skip
def test_float_matrices_are_predicted_exactly(arch: str, change: dict[str, Any], tmp_path: Path) -> None:
    """To the word that each buffer ends with: panels of float weights have one size, unlike those of quantized ones."""
    path = written(tmp_path / "m.gguf", arch, **change)
    file = gguf.open(path)
    for n_ctx, threads in ((64, 1), (100, 2)):
        predicted = workspace.work_bytes(file.tensors, file.metadata, n_ctx, threads)
        assert predicted is not None
        assert 0 <= actual(path, n_ctx, threads) - predicted < 1000


def test_other_models_are_not_guessed(moe: Path) -> None:  # noqa: F811
    file = gguf.open(moe)
    tensors = {name: t for name, t in file.tensors.items() if name != "blk.1.attn_k.weight"}
    assert workspace.work_bytes(tensors, file.metadata, 64, 2) is None
