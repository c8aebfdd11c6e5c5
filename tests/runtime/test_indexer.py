"""Sparse attention: the plain selection by its definition, the compiled one against it on odd sizes, and its limits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from quantkit import types
from quantkit.errors import UnsupportedError
from quantkit.placement import kv_size
from quantkit.runtime.blocks import indexer
from quantkit.runtime.blocks.spans import Span
from quantkit.runtime.kernels.cpu import indexer as kernels
from quantkit.runtime.kernels.cpu.selection import hide_others, selected_positions
from quantkit.runtime.loading import load
from tests.archs.files import written
from tests.runtime.test_step import TOKENS, by_steps, spread


def test_the_largest_scores_by_sorting(rng: np.random.Generator) -> None:
    """Of each token those up to its own; of equal scores the earlier ones."""
    scored = rng.integers(0, 6, (9, 30)).astype(np.float32)
    found = indexer.largest(scored, 21, 7)
    for i, row in enumerate(scored):
        n = 22 + i
        order = sorted(range(n), key=lambda t: (-row[t], t))[:7]
        assert np.flatnonzero(found[i]).tolist() == sorted(order)
    assert indexer.largest(scored, 3, 20)[0].tolist() == [True] * 4 + [False] * 26


def test_scores_by_their_definition(rng: np.random.Generator) -> None:
    q, w, k = (rng.standard_normal(shape, np.float32) for shape in ((5, 3, 32), (5, 3), (7, 32)))
    wanted = sum(w[:, h, None] * np.maximum(q[:, h] @ k.T, 0) for h in range(3)) / np.sqrt(96)
    np.testing.assert_allclose(indexer.scores(q, w, k), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("n", "top_k"), [(2, 1), (33, 7), (100, 99), (517, 64)])
@pytest.mark.parametrize("levels", [4, 1 << 20])
def test_the_compiled_selection(n: int, top_k: int, levels: int, rng: np.random.Generator) -> None:
    scores = (rng.integers(0, levels, n) / 8 - 3).astype(np.float32)
    record, ranks = np.zeros(1 + top_k, np.int64), np.zeros(n, np.float32)
    kernels.select(scores, ranks, top_k, record.ctypes.data)
    wanted = np.flatnonzero(indexer.largest(scores[None], n - 1, top_k)[0])
    assert record[0] == top_k
    np.testing.assert_array_equal(record[1:], wanted)
    assert selected_positions(record.ctypes.data, n)[0] == top_k
    for start, stop in ((0, n), (n // 3, n - n // 4), (n - 1, n)):
        x = np.arange(1, stop - start + 1, dtype=np.float32)
        hide_others(record.ctypes.data, start, stop, x.ctypes.data)
        inside = np.isin(np.arange(start, stop), wanted)
        assert (x[~inside] < -1e29).all()
        np.testing.assert_array_equal(x[inside], np.arange(1, stop - start + 1)[inside])
    everything = np.zeros(1 + top_k, np.int64)
    assert selected_positions(everything.ctypes.data, n) == (n, 0)


@pytest.mark.parametrize("options", [{"mla": 1}, {"mla": 2}, {"cache_type": "f16"}, {"cache_type": "q8_0 vhad"}])
def test_prompts_and_tokens_of_each_mode(tmp_path: Path, options: dict[str, object]) -> None:
    """Index keys are rounded with the values' type; both numerics select by the same rounded keys."""
    path = written(tmp_path / "m.gguf", "glm-dsa")
    exact, fast = (load(path, numerics=numerics, **({"cache_type": "f32"} | options)) for numerics in ("exact", "fast"))
    assert fast.fallback_reason is None
    expected = exact.logits(TOKENS)
    # A sum of float32 whose last bit differs, as between BLAS libraries, may be rounded to another f16 in the cache.
    limit = 1e-5 if "cache_type" not in options else 4e-3
    assert spread(fast.logits(TOKENS), expected) < limit
    assert spread(by_steps(fast, TOKENS), expected) < limit


def test_scores_of_some_tokens_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, scores = written(tmp_path / "m.gguf", "deepseek32"), indexer.scores
    expected, shapes = load(path).logits(TOKENS), set()

    def noted(q: np.ndarray, weights: np.ndarray, keys: np.ndarray) -> np.ndarray:
        shapes.add((len(q), len(keys)))
        return scores(q, weights, keys)

    monkeypatch.setattr(indexer, "INDEX_ELEMENTS", 300)
    monkeypatch.setattr(indexer, "scores", noted)
    assert spread(load(path).logits(TOKENS), expected) < 1e-6
    assert shapes == {(3, len(TOKENS))}


def test_what_is_selected_matters(tmp_path: Path) -> None:
    """With top_k as long as the text, attention is dense, and other logits follow."""
    sparse = load(written(tmp_path / "s.gguf", "deepseek32")).logits(TOKENS)
    dense = load(written(tmp_path / "d.gguf", "deepseek32", index_topk=len(TOKENS))).logits(TOKENS)
    assert spread(sparse[:48], dense[:48]) < 1e-6
    assert spread(sparse[48:], dense[48:]) > 1e-3


def test_the_size_of_the_cache_and_what_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "m.gguf", "glm-dsa")
    model = load(path)
    f32 = types.get("f32")
    assert sum(kv_size.of_layers(model.metadata, 64, f32, f32)) == model.new_cache(64).nbytes
    with pytest.raises(UnsupportedError, match=r"-mla 0: .* keys of an indexer"):
        load(path, mla=0)


@pytest.mark.parametrize(
    ("arch", "numerics", "how"),
    [
        ("deepseek32", "exact", {}),
        ("deepseek32", "fast", {"gpu_layers": 2, "kv_on_cpu": True}),
        ("glm-dsa", "exact", {"tensor_split": (1, 2)}),
        ("glm-dsa", "exact", {"override_tensor": "indexer=cpu:1,exps=cpu:0"}),
        ("glm-dsa", "fast", {}),
        ("glm-dsa", "fast", {"tensor_split": (1, 2)}),
    ],
    ids=str,
)
def test_devices_select_as_one_does(tmp_path: Path, arch: str, numerics: str, how: dict[str, object]) -> None:
    """Prompts and tokens; also where a layer attends to what one on another device has selected."""
    path = written(tmp_path / "m.gguf", arch)
    one, two = load(path, numerics=numerics), load(path, numerics=numerics, devices="cpu:0,cpu:1", **how)  # type: ignore[arg-type]
    assert 0 < one.metadata[f"{arch}.attention.indexer.top_k"] < len(TOKENS) < two.n_ctx
    assert two.new_cache(64).nbytes == one.new_cache(64).nbytes
    expected = one.logits(TOKENS)
    limit = 1e-5 if numerics == "exact" else 1e-2  # layers that do not run as plans multiply in float32
    assert spread(two.logits(TOKENS), expected) < limit
    assert spread(by_steps(two, TOKENS), expected) < limit


@pytest.mark.parametrize("arch", ["deepseek32", "glm-dsa"])
def test_tensor_parallel_attends_to_all_positions_as_far_as_that_is_the_same(tmp_path: Path, arch: str) -> None:
    path = written(tmp_path / "m.gguf", arch)
    how = {"devices": "cpu:0,cpu:1", "split_mode": "graph"}
    one, two = load(path), load(path, **how)  # type: ignore[arg-type]
    top_k = one.metadata[f"{arch}.attention.indexer.top_k"]
    assert 0 < top_k < len(TOKENS)
    assert spread(two.logits(TOKENS[:top_k]), one.logits(TOKENS[:top_k])) < 1e-5
    assert two.n_ctx == load(path, n_ctx=top_k + 9, **how).n_ctx == top_k  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match=rf"more than {top_k} positions, .* -sm graph; got {top_k + 1}.*-sm lay"):
        two.logits(TOKENS[: top_k + 1])
    x, cache = two.embed(TOKENS[: top_k + 1]), two.layer_cache(top_k + 1)
    for run in (two.run_block, two.run_block_checked):
        with pytest.raises(UnsupportedError, match=f"got {top_k + 1}"):
            run(two.blocks[0], x, [Span(0, top_k + 1, cache)])
