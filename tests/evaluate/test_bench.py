"""Benches: which tokens run where, what counts, what is read."""

from __future__ import annotations

import types as std

import numpy as np
import pytest

from quantkit.errors import DataError
from quantkit.evaluate import bench
from quantkit.evaluate.bench import Case, MeasuredSpeed
from quantkit.evaluate.report import plots


class Room:
    """A cache that goes back to its mark and to 0 only, as that of a recurrent model does."""

    def __init__(self, n_ctx: int):
        self.room, self.nbytes, self.state_bytes = n_ctx, 7 * n_ctx + 5, 5
        self.length, self.marked = 0, 0

    def mark(self) -> None:
        self.marked = self.length

    def truncate(self, length: int) -> None:
        assert length in (0, self.marked, self.length)
        self.length = length

    def save(self):
        return self.length

    def restore(self, saved: int) -> None:
        self.length = saved


class Recorder:
    """A model that remembers (tokens in the cache before, tokens run) of each call; a token takes a second."""

    vocab_size = 11

    def __init__(self, monkeypatch):
        self.calls: list[tuple[int, int]] = []
        self.now = 0.0
        self.threads = 2
        embedding = std.SimpleNamespace(nbytes=1100)
        self.weights = {"token_embd.weight": embedding, "blk.0.ffn_up.weight": std.SimpleNamespace(nbytes=500)}
        output = std.SimpleNamespace(weight="token_embd.weight")
        self.head = std.SimpleNamespace(embedding="token_embd.weight", output=output)
        self.blocks = ()
        monkeypatch.setattr(bench.time, "perf_counter", lambda: self.now)

    def new_cache(self, n_ctx):
        return Room(n_ctx)

    def forward_batch(self, parts):
        self.calls.append([(cache.length, len(tokens)) for tokens, cache in parts])
        for tokens, cache in parts:
            assert cache.length + len(tokens) <= cache.room
            cache.length += len(tokens)
            self.now += len(tokens)

    def forward(self, tokens, cache, logits):
        assert logits == "last"
        assert cache.length + len(tokens) <= cache.room
        self.calls.append((cache.length, len(tokens)))
        cache.length += len(tokens)
        self.now += len(tokens)


def test_cases_are_named_as_llama_bench_names_them():
    assert [Case(512, 0).name, Case(0, 128).name, Case(64, 8).name, Case(0, 4, 2048).name] == [
        "pp512", "tg128", "pp64+tg8", "tg4@pp2048"
    ]  # fmt: skip


def test_a_bench_warms_up_and_times_at_its_depth(monkeypatch):
    model = Recorder(monkeypatch)
    prompt, generation = bench.bench(model, [Case(3, 0), Case(0, 2, 4)], 2)
    once = [(4, 1), (5, 1)]
    assert model.calls == [(0, 3)] * 3 + [(0, 4)] + once * 3
    assert prompt == MeasuredSpeed("pp3", 0, 3, (3.0, 3.0))
    assert generation == MeasuredSpeed("tg2@pp4", 4, 2, (2.0, 2.0), 1100 + 500 + 7 * 5 + 5)
    assert generation.tokens_per_second == 1
    assert generation.gb_per_second == pytest.approx(1640e-9)


def test_a_prompt_and_its_answer_are_timed_together(monkeypatch):
    model = Recorder(monkeypatch)
    (speed,) = bench.bench(model, [Case(3, 2)], 1, warmup=False)
    assert model.calls == [(0, 3), (3, 1), (4, 1)]
    assert (speed.tokens, speed.seconds, speed.bytes_read) == (5, 5, None)


def test_a_sweep_generates_then_fills_at_each_place(monkeypatch):
    model = Recorder(monkeypatch)
    rows = list(bench.sweep(model, 12, 4, repeat=2, stride=2, warmup_batch=True))
    warm = [(0, 1), (0, 4)]
    assert model.calls == [*warm, *[(0, 1)] * 2, *[(0, 4)] * 2, (4, 4), *[(8, 1)] * 2, *[(8, 4)] * 2]
    assert [(p.test, p.n_kv, g.test, g.n_kv) for p, g in rows] == [("pp4", 0, "tg1", 0), ("pp4", 8, "tg1", 8)]


def test_a_sweep_generates_as_many_as_asked(monkeypatch):
    model = Recorder(monkeypatch)
    rows = list(bench.sweep(model, 9, 4, n_generate=5))
    assert [(p.tokens, g.tokens, g.n_kv) for p, g in rows] == [(4, 5, 0), (4, 5, 4)]
    with pytest.raises(DataError, match="a context of 8 tokens cannot hold a batch of 4 and 5 generated tokens"):
        next(bench.sweep(model, 8, 4, n_generate=5))


def test_medians_and_deviation():
    speed = MeasuredSpeed("tg8", 0, 8, (1.0, 4.0, 2.0))
    assert (speed.seconds, speed.tokens_per_second) == (2, 4)
    assert speed.deviation == pytest.approx(np.std([8, 2, 4], ddof=1))
    assert MeasuredSpeed("tg8", 0, 8, (1.0,)).deviation == 0


def test_what_is_read_is_all_bytes_of_the_weights(monkeypatch):
    rng = np.random.default_rng(0)
    data = [rng.integers(0, 256, size, np.uint8) for size in ((3, 9), (1 << 20, 9))]
    model = std.SimpleNamespace(weights={i: std.SimpleNamespace(data=d) for i, d in enumerate(data)}, threads=2)
    seen = []
    total = bench._sum
    monkeypatch.setattr(bench, "_sum", lambda words: seen.append(int(total(words))))
    assert bench.read_speed(model, repeat=1) > 0
    words = [d.reshape(-1)[: d.size // 8 * 8].view(np.uint64) for d in data]
    expected = sum(int(w.sum()) for w in words)
    assert sum(seen) % 2**64 == 2 * expected % 2**64  # the warm-up and the pass


def test_a_picture_of_a_sweep(tmp_path):
    rows = [(MeasuredSpeed("pp8", n, 8, (1.0, 2.0)), MeasuredSpeed("tg2", n, 2, (1.0, 1.5), 100)) for n in (0, 8)]
    plots.plot_sweep(tmp_path / "sweep.svg", rows, 1e3, "tiny")
    assert (tmp_path / "sweep.svg").stat().st_size > 5000


def test_several_sequences_take_their_steps_together(monkeypatch):
    """Each prompt, then a token of every sequence at a time; the warm-up before the first case does not count."""
    model = Recorder(monkeypatch)
    cases = [bench.BatchedCase(3, 2, 2), bench.BatchedCase(20, 1, 1)]
    both, alone = bench.batched(model, cases)
    warmup = [[(0, 3), (0, 3)], [(3, 1), (3, 1)]]
    first = [[(0, 3), (0, 3)], [(3, 1), (3, 1)], [(4, 1), (4, 1)]]
    assert model.calls == [*warmup, *first, [(0, 20)], [(20, 1)]]
    assert (both.case.n_kv, both.prompt_seconds, both.generation_seconds) == (10, 6, 4)
    assert (both.prompt_rate, both.generation_rate, both.rate) == (1, 1, 1)
    assert (alone.case.n_kv, alone.seconds) == (21, 21)


def test_a_shared_prompt_is_computed_once(monkeypatch):
    model = Recorder(monkeypatch)
    (speed,) = bench.batched(model, [bench.BatchedCase(4, 2, 3, shared=True)])
    assert model.calls[2:] == [[(0, 4)], [(4, 1)] * 3, [(5, 1)] * 3]
    assert (speed.case.n_kv, speed.prompt_seconds, speed.generation_seconds) == (10, 4, 6)
    assert (speed.prompt_rate, speed.generation_rate, speed.rate) == (1, 1, 1)
