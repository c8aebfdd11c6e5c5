"""Streams mixed by gates of low rank, n-grams and indexers of blocks as operations: against plain forms and models."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from quantkit import types
from quantkit.archs.common import blocks
from quantkit.placement.kernel_sizes import activation_bytes
from quantkit.runtime.blocks import hyper_connections as plain
from quantkit.runtime.blocks import ngrams as plain_ngrams
from quantkit.runtime.blocks.indexer import largest_of_first
from quantkit.runtime.blocks.spans import Span
from quantkit.runtime.kernels.cpu import ngrams, prefill_ops, stream_mixers
from quantkit.runtime.kernels.cpu.delta_net import LayerStates, StatesView
from quantkit.runtime.kernels.cpu.indexer import select
from quantkit.runtime.kernels.cpu.op_list import OpList
from quantkit.runtime.kernels.cpu.selection import hide_blocks, sees_blocks
from quantkit.runtime.kv.saved_state import LayerState
from quantkit.runtime.loading import load
from tests.archs.files import written
from tests.other_cpus import CPUS, run_tests
from tests.other_cpus import test_that_this_is_the_path as test_that_this_is_the_path  # collected here too
from tests.runtime.test_step import spread

TOKENS = np.random.default_rng(7).integers(2, 320, 150).tolist()
TOKENS[30] = TOKENS[31] = TOKENS[100] = 1  # the end token of n-grams


@pytest.mark.parametrize("isa", [name for name in CPUS if name != "avx512"])
@pytest.mark.full
def test_other_cpus(isa: str) -> None:
    run_tests(__file__, isa)


class _Run:
    """A runner of a part whose products are given by the name of a matrix."""

    threads = 1

    def __init__(self, products: dict[str, np.ndarray], vectors: dict[str, np.ndarray]):
        self.products, self.vectors = products, vectors

    def norm(self, norm: blocks.Norm, x: np.ndarray) -> np.ndarray:
        return np.asarray(x / np.sqrt(np.square(x).mean(-1, keepdims=True) + np.float32(norm.eps)), np.float32)

    def linear(self, linear: blocks.Linear, x: np.ndarray) -> np.ndarray:
        return self.products[linear.weight].copy()

    def vector(self, name: str) -> np.ndarray:
        return self.vectors[name]

    def check(self, what: str, y: np.ndarray) -> None:
        assert np.isfinite(y).all(), what


@pytest.mark.parametrize(("n", "width"), [(2, 96), (3, 160), (4, 32)])
@pytest.mark.parametrize("tokens", [1, 37])
def test_mixers_are_the_plain_form(n: int, width: int, tokens: int) -> None:
    rng, wide = np.random.default_rng(n), n * width
    x, made = (rng.standard_normal((tokens, m), np.float32) for m in (wide, width))
    gates, shares, weight = (2 * rng.standard_normal(m, np.float32) for m in ((tokens, wide), (tokens, n), wide))
    linears = (blocks.Linear(name) for name in ("down", "up", "inject"))
    part = blocks.StreamMixer(blocks.Norm("weight", 1e-5), *linears, streams=n, rank=32)
    run: Any = _Run({"down": np.ones((tokens, 32), np.float32), "up": gates, "inject": shares}, {"weight": weight})
    mixed, share = plain.mix(run, part, x)
    normed = plain.norm_streams(run, part.norm, x, n)
    wanted = x.reshape(tokens, n, width) + share[:, :, None] * made[:, None]
    for threads in (1, 3):
        ops, one = OpList(threads), tokens == 1
        streams, out = ops.keep(x.copy()), ops.keep(np.full((tokens, width), np.nan, np.float32))
        given = ops.keep(made.copy())
        kept = [ops.keep(array) for array in (gates, shares, weight)]
        nbytes = activation_bytes(wide)
        normed_at = ops.buffer("normed", threads * nbytes if one else 4 * x.size)
        state = ops.keep(np.array(prefill_ops.BatchState(tokens, 0, 1), np.int64)).ctypes.data
        parameters = stream_mixers.MixerParameters(
            state=state, streams=streams.ctypes.data, n=n, width=width, weight=kept[2].ctypes.data,
            eps=ops.constant(1e-5), normed=normed_at, normed_stride=nbytes if one else 0,
            gates=kept[0].ctypes.data, shares=kept[1].ctypes.data, out=out.ctypes.data, x=given.ctypes.data, clears=0,
            multiple=32,
        )  # fmt: skip
        suffix = "token" if one else "batch"
        for name in ("norm", "mix", "write"):
            ops.add(getattr(stream_mixers, f"{name}_{suffix}"), parameters, barrier=True)
        ops.add(getattr(stream_mixers, f"mix_{suffix}"), parameters._replace(clears=1), barrier=True)
        ops.run()
        np.testing.assert_allclose(out, mixed, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(streams.reshape(tokens, n, width), wanted, rtol=1e-4, atol=1e-5)
        assert not given.any()
        assert np.isfinite(normed).all()


@pytest.mark.parametrize(("n", "width", "kernel"), [(2, 96, 4), (3, 32, 2)])
@pytest.mark.parametrize("counts", [[1], [1, 40, 3], [70]])
def test_ngrams_are_the_plain_form(n: int, width: int, kernel: int, counts: list[int]) -> None:
    """Spans of several sequences, shorter and longer than the convolution, with states that they continue."""
    rng, tokens, wide, longest = np.random.default_rng(width), sum(counts), n * width, 3
    names = ("key", "value", "key_norm", "query_norm", "conv_norm", "conv", "table")
    norms = [blocks.Norm(f"{name}", 1e-5) for name in names[2:5]]
    part = blocks.NGrams(
        "table", 4, blocks.Linear("key"), blocks.Linear("value"), *norms, "conv", kernel, n, (3, 5, 7), (11, 13),
        (0, 11), 1,
    )  # fmt: skip
    vectors = {name: rng.standard_normal(wide, np.float32) for name in names[2:5]}
    vectors["conv"] = rng.standard_normal(wide * kernel, np.float32)
    x, key = (rng.standard_normal((tokens, wide), np.float32) for _ in range(2))
    key[0, :width] = 0  # a score of 0
    value = rng.standard_normal((tokens, width), np.float32)
    run: Any = _Run({"key": key, "value": value}, vectors)
    run.weights = {"table": None}
    before = [rng.standard_normal((part.past, wide), np.float32) for _ in counts]
    states = [[LayerState(past.copy(), np.zeros((1, 1, 2), np.float32)) for _ in range(2)] for past in before]

    def cache(i: int) -> Any:
        return SimpleNamespace(advance=lambda number, count: tuple(states[i]))

    starts = np.cumsum([0, *counts])
    spans = [
        Span(int(a), int(b), cache(i), tokens=np.full(b - a, 9)) for i, (a, b) in enumerate(itertools.pairwise(starts))
    ]
    patch = pytest.MonkeyPatch()
    patch.setattr(plain_ngrams, "looked_up", lambda weights, part, rows: np.zeros((len(rows), 16), np.float32))
    try:
        wanted = x + plain_ngrams.ngrams(run, part, 7, x, spans)
    finally:
        patch.undo()
    for threads in (1, 3):
        ops = OpList(threads)
        streams, keys, values = (ops.keep(array.copy()) for array in (x, key, value))
        kept = {name: ops.keep(array.copy()).ctypes.data for name, array in vectors.items() if name != "conv"}
        taps = ops.keep(np.ascontiguousarray(vectors["conv"].reshape(wide, kernel).T))
        own = [ops.keep(past.copy()) for past in before]
        records = ops.keep(np.array([LayerStates(past.ctypes.data, 0) for past in own], np.int64))
        header = [*prefill_ops.BatchState(tokens, 0, len(counts))]
        for span in spans:
            header += [span.start, span.stop - span.start, 5]
        parameters = ngrams.NGramParameters(
            state=ops.keep(np.array(header, np.int64)).ctypes.data,
            layer_states=ops.record(StatesView(records.ctypes.data)).address,
            streams=streams.ctypes.data, n=n, width=width, keys=keys.ctypes.data, value=values.ctypes.data,
            key_weight=kept["key_norm"], query_weight=kept["query_norm"], conv_weight=kept["conv_norm"],
            key_eps=ops.constant(1e-5), query_eps=ops.constant(1e-5), conv_eps=ops.constant(1e-5),
            taps=taps.ctypes.data, kernel=kernel, dilation=longest, multiple=32,
        )  # fmt: skip
        ops.add(ngrams.gate, parameters, barrier=True)
        ops.add(ngrams.convolve, parameters, barrier=True)
        ops.run()
        np.testing.assert_allclose(streams, wanted, rtol=1e-3, atol=1e-5)
        for past, (_, after) in zip(own, states):
            np.testing.assert_allclose(past, after.inputs, rtol=1e-4, atol=1e-5)


def test_hidden_blocks() -> None:
    """For pieces of positions from any place to any other, and selections of all blocks too."""
    rng = np.random.default_rng(1)
    for rate, blocks_seen, top in ((4, 9, 3), (3, 5, 1), (6, 2, 4)):
        end, record = rate * blocks_seen, np.zeros(1 + top, np.int64)
        scores = rng.standard_normal(blocks_seen).astype(np.float32)
        select(scores, scores.copy(), top, record.ctypes.data)
        chosen = largest_of_first(scores[None], np.array([blocks_seen]), top)[0]
        visible = np.concatenate([np.repeat(chosen, rate), np.ones(rate, bool)])
        for start in range(end):
            for stop in range(start + 1, end + rate + 1):
                x = np.ones(stop - start, np.float32)
                hide_blocks(record.ctypes.data, rate, end, start, stop, x.ctypes.data)
                np.testing.assert_array_equal(x > 0, visible[start:stop])
                assert sees_blocks(record.ctypes.data, rate, end, start, stop) == visible[start:stop].any()


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"indexer_budget": 4},  # one block, so that most steps of attention see nothing
        {"indexer_compress_ratio": 8, "indexer_budget": 16, "hc_count": 2, "ngram_size": 4, "heads_per_ngram": 2},
        {"ple_layer_ids": [], "num_key_value_heads": 4, "head_dim": 64,
         "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [8, 4, 4]}},
    ],
)  # fmt: skip
def test_plans_against_the_exact_model(change: dict[str, Any], threads: int, tmp_path: Path) -> None:
    """Prompts in pieces, steps, several sequences in one batch, a state that comes back."""
    path = written(tmp_path / "m.gguf", "qwen4exp", max_position_embeddings=1024, **change)
    exact, fast = (load(path, numerics=how, cache_type="f32", threads=threads) for how in ("exact", "fast"))
    assert fast.fallback_reason is None
    wanted, cache = exact.logits(TOKENS), fast.new_cache(150)
    ends = [1, 6, 70, 71, 140]
    found = [fast.forward(TOKENS[a:b], cache) for a, b in zip([0, *ends], ends)]
    saved = cache.save()
    found += [fast.forward([token], cache) for token in TOKENS[140:]]
    assert spread(np.concatenate(found), wanted) < 1e-5
    cache.restore(saved)
    assert spread(fast.forward(TOKENS[140:], cache), wanted[140:]) < 1e-5
    caches = [fast.new_cache(200) for _ in range(2)]
    fast.forward(TOKENS[:40], caches[1])
    together = fast.forward_batch([(TOKENS[:33], caches[0]), (TOKENS[40:90], caches[1])])
    assert spread(together, wanted[[32, 89]]) < 1e-5


def test_long_contexts_skip_what_no_block_shows(tmp_path: Path) -> None:
    """Beyond several steps of positions; caches of other types, also with rotated values."""
    path = written(tmp_path / "m.gguf", "qwen4exp", max_position_embeddings=2048, indexer_budget=8)
    tokens = np.random.default_rng(9).integers(2, 320, 1200)
    exact = load(path, cache_type="f32").logits(tokens)
    fast = load(path, numerics="fast", cache_type="f32", threads=2)
    cache = fast.new_cache(1200)
    found = [fast.forward(tokens[:1190], cache), *(fast.forward([token], cache) for token in tokens[1190:])]
    assert spread(np.concatenate(found), exact) < 1e-5
    for kind in ("f16", "q8_0", "q8_0 khad vhad"):
        plain_model, compiled = (load(path, numerics=how, cache_type=kind) for how in ("exact", "fast"))
        caches = [model.new_cache(300) for model in (plain_model, compiled)]
        logits = [model.forward(tokens[:200], own) for model, own in zip((plain_model, compiled), caches)]
        rows = [types.get(own.type.v).dequantize(own.index[3][0, :200], 32) for own in caches]
        np.testing.assert_allclose(rows[0], rows[1], atol=0.05)
        assert np.median(np.abs(logits[0] - logits[1])) < 0.01
