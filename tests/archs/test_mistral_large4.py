"""Mistral Large 4: its size, what is refused, the parts that no other architecture has."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quantkit import archs, types
from quantkit.archs.common.blocks import LatentAttention
from quantkit.errors import FormatError, UnsupportedError
from quantkit.formats import gguf
from quantkit.pipelines.convert_mla import plan_relayout
from quantkit.placement import kv_size
from quantkit.runtime.blocks import float_ops
from quantkit.runtime.blocks.spans import Span
from quantkit.runtime.loading import load
from tests.archs.files import written
from tests.runtime.test_step import by_steps, spread

MISTRAL_LARGE_4: dict[str, Any] = {  # everything else is the class's default
    "architectures": ["MistralLarge4ForConditionalGeneration"], "model_type": "mistral_large4",
    "text_config": {"model_type": "mistral_large4_text"},
}  # fmt: skip
ARCH = archs.get("mistral-large4")
TOKENS = np.random.default_rng(3).integers(2, 320, 120)


def test_the_published_size() -> None:
    """1050.1 billion elements, as many as transformers' text model and its output matrix have."""
    import torch
    import transformers

    config = archs.language_model(MISTRAL_LARGE_4)
    assert archs.from_hf(config) is ARCH
    with torch.device("meta"):
        text = transformers.MistralLarge4TextModel(transformers.MistralLarge4TextConfig())
    theirs = sum(x.numel() for x in text.parameters()) + config["vocab_size"] * config["hidden_size"]
    assert sum(math.prod(t.shape) for t in ARCH.tensors(config)) == theirs
    keys = {key: value for key, (value, _) in ARCH.metadata(config).items()}
    assert keys["mistral-large4.rope.dimension_count_per_layer"][:8] == [64, 64, 64, 0] * 2
    assert keys["mistral-large4.attention.indexer.types"] == [True] * 72
    assert keys["mistral-large4.final_logit_softcapping"] == 30.0
    shapes = {t.name: t.shape for t in ARCH.tensors(config)}
    assert shapes["blk.2.attn_k_b.weight"] == (64, 512, 64)
    assert shapes["blk.3.attn_k_b.weight"] == (64, 512, 128)
    assert shapes["blk.3.attn_kv_a_mqa.weight"] == (512, 6144)
    assert shapes["blk.3.indexer.attn_q_b.weight"] == (32 * 128, 6144)


YARN = ARCH.EXAMPLE["rope_parameters"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_source_layers": [0, 0, 2, 3, 4]}, r"kv_source_layers = \[0, 0, 2, 3, 4\]"),
        ({"n_group": 2, "topk_group": 1}, "n_group = 2"),
        ({"norm_topk_prob": False}, "norm_topk_prob = False"),
        ({"q_lora_rank": 32}, "q_lora_rank = 32"),
        ({"rope_parameters": YARN | {"attention_factor": None}}, "attention_factor = None with yarn"),
        ({"rope_parameters": YARN | {"mscale_all_dim": 1.0}}, "mscale_all_dim = 1.0"),
    ],
)
def test_what_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        ARCH.metadata(ARCH.EXAMPLE | change)


@pytest.mark.parametrize("flags", [[1, 0, 1], [1, 0, 2, 1, 1]])
def test_layers_with_rope_are_listed(flags: list[int]) -> None:
    with pytest.raises(FormatError, match="no_rope_layers"):
        ARCH.metadata(ARCH.EXAMPLE | {"no_rope_layers": flags})


def test_scaling_by_position_and_head() -> None:
    class At:
        length = 5

    q = np.random.default_rng(0).standard_normal((3, 8), np.float32)
    scale, bias = np.array([0.5, -2], np.float32), np.array([1, 3], np.float32)
    scaled = q.copy()
    float_ops.scale_heads(scaled, scale, bias, [Span(0, 3, At())])  # type: ignore[arg-type]  # only its length counts
    for token in range(3):
        for head in range(2):
            factor = scale[head] * math.log(5 + token + 1) + bias[head]
            part = slice(4 * head, 4 * head + 4)
            np.testing.assert_allclose(scaled[token, part], q[token, part] * factor, rtol=1e-6)


@pytest.mark.parametrize("options", [{"mla": 1}, {"mla": 2}, {"threads": 3}, {"cache_type": "q8_0 vhad"}])
def test_modes_of_the_plans(tmp_path: Path, options: dict[str, Any]) -> None:
    path = written(tmp_path / "m.gguf", "mistral-large4")
    exact, fast = (load(path, numerics=numerics, **({"cache_type": "f32"} | options)) for numerics in ("exact", "fast"))
    assert fast.fallback_reason is None
    # The last bit of a sum may round a key of an indexer otherwise, after which another position is selected.
    tokens, limit = (TOKENS, 1e-5) if "cache_type" not in options else (TOKENS[:48], 4e-3)
    expected = exact.logits(tokens)
    assert spread(fast.logits(tokens), expected) < limit
    assert spread(by_steps(fast, tokens), expected) < limit


def test_every_part_counts(tmp_path: Path) -> None:
    """Without the scaling, RoPE's divisors or the norm before an indexer's queries other logits follow."""
    path = written(tmp_path / "m.gguf", "mistral-large4")
    expected = load(path).logits(TOKENS)

    def without(part: LatentAttention, **change: Any) -> LatentAttention:
        return replace(part, **change)

    changes = (
        lambda part: without(part, scaling=None),
        lambda part: without(part, rope=replace(part.rope, factors=None)),
        lambda part: without(part, indexer=part.indexer and replace(part.indexer, q_norm=None)),
        lambda part: without(part, indexer=part.indexer and replace(part.indexer, scaling=None)),
    )
    for change in changes:
        model = load(path)
        model.blocks = [replace(b, parts=(change(b.parts[0]), *b.parts[1:])) for b in model.blocks]  # type: ignore[arg-type]
        assert spread(model.logits(TOKENS), expected) > 1e-3


def test_caches_of_layers_without_rope(tmp_path: Path) -> None:
    path = written(tmp_path / "m.gguf", "mistral-large4")
    model, f32 = load(path, cache_type="f32"), types.get("f32")
    cache = model.new_cache(64)
    sizes = kv_size.of_layers(model.metadata, 64, f32, f32)
    assert sum(sizes) == cache.nbytes
    assert [size // 64 // 4 for size in sizes] == [64 + dim + 64 for dim in (32, 0, 32, 0, 32)]
    with pytest.raises(UnsupportedError, match=r"heads of blk\.1 have 64 elements without RoPE, others 32"):
        plan_relayout(gguf.open(path), "kv_b")
    with pytest.raises(UnsupportedError, match=r"-sm graph: blk\.0 scales queries by position and head"):
        load(path, devices="cpu:0,cpu:1", split_mode="graph")
