"""Attention to blocks of positions that are selected for each KV head: by definition, compiled, and in other caches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quantkit import types
from quantkit.placement import kv_size
from quantkit.runtime.blocks import block_indexer
from quantkit.runtime.loading import load
from tests.archs.files import written
from tests.runtime.test_step import TOKENS, by_steps, spread


def test_scores_by_their_definition(rng: np.random.Generator) -> None:
    q, keys = rng.standard_normal((4, 2, 32), np.float32), rng.standard_normal((11, 32), np.float32)
    found = block_indexer.scores(q, keys, np.arange(7, 11), 4)
    assert found.shape == (4, 2, 3)
    for t in range(4):
        for head in range(2):
            for block in range(3):
                seen = [float(q[t, head] @ keys[i]) for i in range(4 * block, min(4 * block + 4, 7 + t + 1))]
                assert found[t, head, block] == pytest.approx(max(seen, default=-np.inf), rel=1e-5)


# Blocks that fill no whole pieces of keys, more local ones than one, one that is selected, blocks longer than a piece.
SIZES = [(16, 3, 1), (5, 4, 2), (7, 1, 1), (70, 1, 1), (3, 6, 0)]


@pytest.mark.parametrize(("rate", "top", "local"), SIZES)
def test_plans_select_as_exact_numerics_do(tmp_path: Path, rate: int, top: int, local: int) -> None:
    sizes = {"index_block_size": rate, "index_topk_blocks": top, "index_local_blocks": local}
    path = written(tmp_path / "m.gguf", "minimax-m3", **sizes)
    exact, fast = (load(path, numerics=numerics, cache_type="f32") for numerics in ("exact", "fast"))
    assert fast.fallback_reason is None
    expected = exact.logits(TOKENS)
    assert spread(fast.logits(TOKENS), expected) < 1e-5
    assert spread(by_steps(exact, TOKENS[:80]), expected[:80]) < 1e-5
    assert spread(by_steps(fast, TOKENS), expected) < 1e-5
    all_of_them = load(written(tmp_path / "all.gguf", "minimax-m3", **sizes | {"index_topk_blocks": 99}))
    assert spread(all_of_them.logits(TOKENS)[-9:], expected[-9:]) > 1e-3


@pytest.mark.parametrize("cache_type", ["f16", "q8_0", "q8_0/q4_0 khad"])
def test_other_caches(tmp_path: Path, cache_type: str) -> None:
    """Both numerics select by the same rounded keys; two sequences side by side, and one that goes on."""
    path = written(tmp_path / "m.gguf", "minimax-m3")
    exact, fast = (load(path, numerics=numerics, cache_type=cache_type) for numerics in ("exact", "fast"))
    expected = exact.logits(TOKENS)
    cache = fast.new_cache(128)
    parts = [fast.forward(TOKENS[:60], cache), fast.forward(TOKENS[60:], cache)]
    assert spread(np.concatenate(parts), expected) < 4e-3
    saved = cache.save()
    cache.truncate(55)
    assert spread(fast.forward(TOKENS[55:70], cache), expected[55:70]) < 4e-3
    cache.restore(saved)
    assert cache.length == len(TOKENS)
    pair = fast.forward_sequences(np.stack([TOKENS, TOKENS[::-1]]), slice(None))
    assert spread(pair[0], expected) < 4e-3
    assert spread(pair[1], exact.logits(TOKENS[::-1])) < 4e-3


@pytest.mark.parametrize("how", [{}, {"gpu_layers": 2, "kv_on_cpu": True}], ids=str)
@pytest.mark.parametrize("numerics", ["exact", "fast"])
def test_devices_select_as_one_does(tmp_path: Path, numerics: str, how: dict[str, Any]) -> None:
    path = written(tmp_path / "m.gguf", "minimax-m3")
    one, two = load(path, numerics=numerics), load(path, numerics=numerics, devices="cpu:0,cpu:1", **how)
    expected, limit = one.logits(TOKENS), 1e-5 if numerics == "exact" else 1e-2
    assert spread(two.logits(TOKENS), expected) < limit
    assert spread(by_steps(two, TOKENS), expected) < limit
    cache, again = two.new_cache(96), two.new_cache(96)
    assert cache.nbytes == one.new_cache(96).nbytes
    two.forward(TOKENS[:70], cache)
    again.restore(cache.save())
    assert spread(two.forward(TOKENS[70:], again), expected[70:]) < limit


def test_the_size_of_the_cache(tmp_path: Path) -> None:
    model, f32, f16 = load(written(tmp_path / "m.gguf", "minimax-m3")), types.get("f32"), types.get("f16")
    sizes = kv_size.of_layers(model.metadata, 64, f32, f16)
    assert sum(sizes) == model.new_cache(64, "f32/f16").nbytes
    assert sizes[1] - sizes[0] == 64 * 2 * 32  # the indexer's keys
