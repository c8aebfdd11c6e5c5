"""Compressed attention as operations: against the plain forms on odd sizes, and in both plans against the exact model.

Entries are kept beside the cache, so what a cache holds is reached on many ways: prompts in pieces, tokens, truncation,
states, runs layer by layer in between.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from quantkit.archs.common import blocks
from quantkit.placement import kernel_sizes
from quantkit.runtime.blocks import compressed_attention as plain
from quantkit.runtime.blocks import indexer as plain_indexer
from quantkit.runtime.compiled import unsupported
from quantkit.runtime.kernels import kv_rounding
from quantkit.runtime.kernels.cpu import compressed_attention, entries, entry_indexer, prefill_ops
from quantkit.runtime.kernels.cpu.entries import Rows, row_reader, row_writer
from quantkit.runtime.kernels.cpu.indexer import IndexSizes
from quantkit.runtime.kernels.cpu.kv_rows import LayerView
from quantkit.runtime.kernels.cpu.op_list import OpList
from quantkit.runtime.loading import load
from quantkit.runtime.model import Model
from quantkit.types import layout
from tests.archs.files import written
from tests.other_cpus import CPUS, run_tests
from tests.other_cpus import test_that_this_is_the_path as test_that_this_is_the_path  # collected here too
from tests.runtime.test_step import spread

TOKENS = np.random.default_rng(3).integers(2, 320, 300)
N_CTX = 320


@pytest.mark.parametrize("isa", [name for name in CPUS if name != "avx512"])
@pytest.mark.full
def test_other_cpus(isa: str) -> None:
    run_tests(__file__, isa)


# --------------------------------------------------------------------------------------------------- single operations


def address(array: np.ndarray) -> int:
    return int(array.ctypes.data)


@pytest.mark.parametrize("name", kv_rounding.FLOATS + kv_rounding.QUANTIZED)
@pytest.mark.parametrize(("dim", "rotated"), [(32, False), (96, False), (320, True), (768, False), (1024, True)])
def test_rows_are_those_of_any_cache(name: str, dim: int, rotated: bool, rng: np.random.Generator) -> None:
    """The bytes of the plain encoder; read back, what they decode to."""
    x = rng.standard_normal((5, dim), np.float32)
    block = (kv_rounding.rotation_block(dim) or 0) if rotated else 0
    rows = Rows(dim, layout(name).ggml_type, block)
    given = kv_rounding.rotate(x, block) if block else x
    wanted, stored, out = kv_rounding.encode(name, given), np.zeros((5, rows.nbytes), np.uint8), np.empty_like(x)
    write, read = (ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 6)(f(rows).address) for f in (row_writer, row_reader))
    for i in range(5):
        overwritten = x[i].copy()
        write(address(overwritten), address(stored[i]), 0, 0, 0, 0)
    read(address(stored), 5, address(out), 0, 0, 0)
    if not block:
        np.testing.assert_array_equal(stored, wanted)
    decoded = layout(name).dequantize(stored, dim)
    np.testing.assert_allclose(out, kv_rounding.rotate(decoded, block) if block else decoded, atol=1e-5)


class Plain:
    """A runner of the plain forms: RoPE of real angles, norms with a weight, vectors by name."""

    def __init__(self, rng: np.random.Generator, rope: int, vectors: dict[str, np.ndarray]):
        angles = np.arange(N_CTX)[:, None] * rng.uniform(0.1, 2, rope // 2)
        self.cos, self.sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        self.vectors, self.rope = vectors, blocks.Rope("norm", rope, 1e4)

    def vector(self, name: str) -> np.ndarray:
        return self.vectors[name]

    def norm(self, norm: blocks.Norm, x: np.ndarray) -> np.ndarray:
        scale = 1 / np.sqrt(np.square(x).mean(-1, keepdims=True) + np.float32(norm.eps))
        return np.ascontiguousarray(x * scale * self.vectors[norm.weight], np.float32)

    def rotations(self, rope: blocks.Rope, n_ctx: int) -> tuple[np.ndarray, np.ndarray]:
        return self.cos[:n_ctx], self.sin[:n_ctx]


class Sequence(NamedTuple):
    """A cache of one layer with the tokens before and those of a batch, and how many tokens entries are made of."""

    k: np.ndarray  # uint8[N_CTX, row bytes]
    v: np.ndarray
    entries: np.ndarray
    keys: np.ndarray
    made: np.ndarray
    position: int
    tokens: int


class Layer(NamedTuple):
    """The shape of a layer that operations are tested with."""

    heads: int = 3
    dim: int = 32
    rope: int = 6
    window: int = 20
    rate: int = 4
    index_dim: int = 32
    kind: str = "f32"

    @property
    def overlapping(self) -> bool:
        return self.index_dim > 0

    def compressor(self, name: str, dim: int) -> blocks.Compressor:
        linear, norm = blocks.Linear(""), blocks.Norm(f"{name} norm", 1e-5)
        return blocks.Compressor(linear, linear, f"{name} ape", norm, dim, self.rate, self.overlapping)

    @property
    def compressors(self) -> list[blocks.Compressor]:
        index = [self.compressor("index", self.index_dim)] if self.index_dim else []
        return [self.compressor("main", self.dim), *index]

    @property
    def kept(self) -> int:
        return sum(2 * each.columns for each in self.compressors)

    def plain(self, rng: np.random.Generator) -> Plain:
        vectors = {}
        for name, each in zip(("main", "index"), self.compressors):
            vectors[f"{name} ape"] = rng.standard_normal(self.rate * each.columns, np.float32)
            vectors[f"{name} norm"] = rng.uniform(0.5, 2, each.dim).astype(np.float32)
        return Plain(rng, self.rope, vectors)

    def sequence(self, rng: np.random.Generator, position: int, tokens: int, made: int) -> Sequence:
        """Random rows; entries that are not made yet are NaN."""
        rows = entry_rows(self.rate)
        k, v = (
            kv_rounding.encode(self.kind, rng.standard_normal((N_CTX, n), np.float32)) for n in (self.dim, self.kept)
        )
        of, keys = (np.full((rows, n), np.nan, np.float32) for n in (self.dim, self.index_dim))
        return Sequence(k, v, of, keys, np.array([made]), position, tokens)

    def decoded(self, rows: np.ndarray, n: int) -> np.ndarray:
        return layout(self.kind).dequantize(rows, n)


def entry_rows(rate: int) -> int:
    return kernel_sizes.entry_rows(N_CTX, rate)


class Given(NamedTuple):
    """Addresses that operations take: Sizes, the position or the state of a batch, LayerView."""

    sizes: int
    position: int
    view: int


def given(ops: OpList, layer: Layer, run: Plain, sequences: list[Sequence], *, one: bool) -> Given:
    """The records of some sequences, each of which goes on; `one`: a single token of the first."""
    rows = Rows(layer.dim, layout(layer.kind).ggml_type, 0), Rows(layer.kept, layout(layer.kind).ggml_type, 0)
    sizes = entries.Sizes(
        layer.heads, layer.dim, layer.rope, layer.window, layer.rate, layer.kept, rows[0].nbytes, rows[1].nbytes,
        row_writer(rows[0]).address, row_reader(rows[0]).address, row_writer(rows[1]).address,
        row_reader(rows[1]).address,
    )  # fmt: skip
    places = [
        entries.EntryCache(address(s.k), address(s.v), N_CTX, address(s.entries), address(s.keys), address(s.made))
        for s in sequences
    ]
    view = LayerView(address(run.cos), address(run.sin), address(ops.keep(np.array(places, np.int64))), layer.window)
    if one:
        position = ops.keep(np.array([sequences[0].position], np.int64))
    else:
        ends = np.cumsum([s.tokens for s in sequences])
        spans = [prefill_ops.SpanState(int(e) - s.tokens, s.tokens, s.position) for e, s in zip(ends, sequences)]
        state = prefill_ops.BatchState(int(ends[-1]), 0, len(spans))
        position = ops.keep(np.array([*state, *(number for span in spans for number in span)], np.int64))
    return Given(ops.record(sizes).address, address(position), ops.record(view).address)


LAYERS = [Layer(), Layer(rate=128, index_dim=0, dim=96, rope=10), Layer(dim=64, index_dim=96, rope=64, kind="q8_0")]


@pytest.mark.parametrize("layer", LAYERS)
def test_entries_are_made_of_whole_windows(layer: Layer, rng: np.random.Generator) -> None:
    """From where they are missing on; those before stay. Any number of threads gives the same bits."""
    run, found = layer.plain(rng), []
    cases = [(0, 3, 0), (3, 150, 3), (150, 145, 150), (255, 1, 130), (17, 250, 9)]
    for threads in (1, 3):
        rng = np.random.default_rng(5)
        sequences = [layer.sequence(rng, *case) for case in cases]
        ops = OpList(threads)
        where = given(ops, layer, run, sequences, one=False)
        fields, offset = [], 0
        for each in layer.compressors:
            ape, weight = (address(run.vectors[name]) for name in (each.ape, each.norm.weight))
            record = entries.CompressorFields(
                each.dim, int(each.overlapping), offset, ape, weight, ops.constant(each.norm.eps)
            )
            fields.append(ops.record(record).address)
            offset += 2 * each.columns
        scratch = ops.private_buffer(
            "windows",
            kernel_sizes.compressor_bytes(layer.rate, layer.kept, max(layer.dim, layer.index_dim), layer.overlapping),
        )
        parameters = entries.EntriesParameters(
            where.sizes, where.position, where.view, fields[0], fields[1] if layer.index_dim else 0, *scratch
        )
        ops.add(entries.make_batch_entries, parameters, barrier=True)
        ops.run()
        found.append(sequences)
    for s, same in zip(*found):
        np.testing.assert_array_equal(s.entries, same.entries)
        np.testing.assert_array_equal(s.keys, same.keys)
        kept, first, last = (
            layer.decoded(s.v, layer.kept),
            s.made[0] // layer.rate,
            (s.position + s.tokens) // layer.rate,
        )
        for made, each, rows in zip((s.entries, s.keys), layer.compressors, (kept, kept[:, 4 * layer.dim :])):
            if last:
                wanted = plain.entries(run, each, run.rope, rows[: last * layer.rate])  # type: ignore[arg-type]
                np.testing.assert_allclose(made[first:last], wanted[first:], rtol=2e-4, atol=2e-5)
            assert np.isnan(made[:first]).all()
            assert np.isnan(made[last:]).all()


@pytest.mark.parametrize("selects", [False, True])
@pytest.mark.parametrize(
    "layer",
    [
        *LAYERS,
        Layer(heads=1, window=1),
        Layer(heads=70, window=200),
        Layer(heads=8, window=300, rate=4),
        Layer(heads=200),
    ],
)
@pytest.mark.parametrize("one", [True, False])
def test_attention_is_the_plain_one(layer: Layer, selects: bool, one: bool, rng: np.random.Generator) -> None:
    """Over a window and entries, all or selected; results of groups of heads one after another."""
    run, top_k, groups = layer.plain(rng), 7, next(n for n in (4, 3, 2, 1) if layer.heads % n == 0)
    cases = [(170, 1, 0)] if one else [(0, 40, 0), (0, 1, 0), (115, 140, 0), (300, 20, 0)]
    sequences = [layer.sequence(rng, *case) for case in cases]
    for s in sequences:
        s.entries[:] = rng.standard_normal(s.entries.shape)
    tokens = sum(s.tokens for s in sequences)
    q = rng.standard_normal((tokens + 6, layer.heads, layer.dim), np.float32)
    sinks, wanted, at = rng.standard_normal(layer.heads, np.float32) * 3, np.empty_like(q[:tokens]), 0
    records = np.zeros((tokens, 1 + top_k), np.int64)
    for s in sequences:
        positions = s.position + np.arange(s.tokens)
        visible, place = (positions + 1) // layer.rate, np.arange(s.position + s.tokens)
        chosen = np.arange(len(s.entries)) < visible[:, None]
        for t in np.flatnonzero(visible > top_k) if selects else ():
            records[at + t] = top_k, *np.sort(rng.choice(visible[t], top_k, replace=False))
            chosen[t] = np.isin(np.arange(len(s.entries)), records[at + t, 1:])
        near = (place <= positions[:, None]) & (place > positions[:, None] - layer.window)
        keys = np.concatenate([layer.decoded(s.k[: len(place)], layer.dim), s.entries])
        seen = np.concatenate([near, chosen], axis=1)
        out = plain.softmax_of_seen(q[at : at + s.tokens], keys, seen, sinks, 1.0)
        plain.rotate(run, run.rope, out, positions, back=True)  # type: ignore[arg-type]
        wanted[at : at + s.tokens] = out
        at += s.tokens
    found = []
    for threads in (1, 2, 5):
        ops = OpList(threads)
        where = given(ops, layer, run, sequences, one=one)
        width = layer.heads // groups * layer.dim
        nbytes = kernel_sizes.activation_bytes(width) if one else 4 * tokens * width
        target = ops.keep(np.zeros(groups * nbytes, np.uint8))
        size = kernel_sizes.compressed_decode_bytes if one else kernel_sizes.compressed_piece_bytes
        parameters = compressed_attention.AttentionParameters(
            where.sizes, where.position, where.view, address(q), address(sinks), address(records) if selects else 0,
            8 + 8 * top_k, groups, address(target), nbytes, kernel_sizes.compressed_piece_tokens(layer.heads),
            *ops.private_buffer("union", 8 * len(sequences[0].entries)),
            *ops.private_buffer("scratch", size(layer.heads, layer.dim)),
        )  # fmt: skip
        attend = compressed_attention.attend_token if one else compressed_attention.attend_batch
        ops.add(attend, parameters, barrier=True)
        ops.run()
        floats = target.reshape(groups, nbytes)[:, : 4 * tokens * width].copy().view(np.float32)
        found.append(floats.reshape(groups, tokens, -1).swapaxes(0, 1).reshape(wanted.shape))
    for out in found:
        np.testing.assert_array_equal(out, found[0])
        np.testing.assert_allclose(out, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("one", [True, False])
@pytest.mark.parametrize(("heads", "top_k"), [(1, 1), (3, 16), (8, 40)])
def test_the_entries_with_the_largest_scores(heads: int, top_k: int, one: bool, rng: np.random.Generator) -> None:
    """Of small integers, whose scores are exact and often equal."""
    layer = Layer()
    sequences = [
        layer.sequence(rng, *case) for case in ([(290, 1, 0)] if one else [(0, 70, 0), (150, 33, 0), (30, 1, 0)])
    ]
    for s in sequences:
        s.keys[:] = rng.integers(-2, 3, s.keys.shape)
    tokens = sum(s.tokens for s in sequences)
    q = rng.integers(-2, 3, (tokens, heads, layer.index_dim)).astype(np.float32)
    weights = rng.integers(-2, 3, (tokens, heads)).astype(np.float32)
    for threads in (1, 3):
        ops = OpList(threads)
        where, room = given(ops, layer, layer.plain(rng), sequences, one=one), entry_rows(layer.rate)
        records = np.full((tokens, 1 + top_k), -1, np.int64)
        sizes = IndexSizes(heads, layer.index_dim, 0, 2, 1, top_k, 0, ops.constant((heads * layer.index_dim) ** -0.5))
        parameters = entry_indexer.ScoreParameters(
            ops.record(sizes).address, layer.rate, where.position, where.view, address(q), address(weights), room,
            *ops.private_buffer("scores", 4 * room * kernel_sizes.INDEX_GROUP), address(records),
            *ops.private_buffer("ranks", 4 * room),
            *ops.private_buffer("products", 4 * heads * kernel_sizes.INDEX_BLOCK),
        )  # fmt: skip
        for operation in (
            (entry_indexer.score_entries, entry_indexer.select_entries)
            if one
            else (entry_indexer.select_batch_entries,)
        ):
            ops.add(operation, parameters, barrier=True)
        ops.run()
        at = 0
        for s in sequences:
            rows, visible = slice(at, at + s.tokens), (s.position + np.arange(s.tokens) + 1) // layer.rate
            scored = plain_indexer.scores(q[rows], weights[rows], s.keys)
            wanted = plain_indexer.largest_of_first(scored, visible, top_k)
            for record, of_token, count in zip(records[rows], wanted, visible):
                assert record[0] == (top_k if count > top_k else 0)
                if count > top_k:
                    np.testing.assert_array_equal(record[1:], np.flatnonzero(of_token))
            at += s.tokens


# --------------------------------------------------------------------------------------------------------- whole models

WIDE = {"head_dim": 96, "num_attention_heads": 6, "o_groups": 3, "qk_rope_head_dim": 16, "index_head_dim": 32,
        "index_n_heads": 12, "compress_ratios": [4, 0, 128, 4], "index_topk": 9, "sliding_window": 130}  # fmt: skip
CHANGES: dict[str, dict[str, Any]] = {
    "example": {}, "wide": WIDE, "windows": {"compress_ratios": [0, 0]}, "one of each": {"index_topk": 1},
    "all entries": {"index_topk": 100, "sliding_window": 1},
}  # fmt: skip


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("deepseek4") / "m.gguf", "deepseek4")


def pair(path: Path, kind: str = "f32", **options: Any) -> tuple[Model, Model]:
    exact, fast = (load(path, numerics=numerics, cache_type=kind, **options) for numerics in ("exact", "fast"))
    assert fast.fallback_reason is None
    return exact, fast


def by_steps(model: Model, tokens: np.ndarray) -> np.ndarray:
    cache = model.new_cache(N_CTX)
    return np.concatenate([model.forward([token], cache) for token in tokens])


@pytest.mark.parametrize("name", CHANGES)
def test_prompts_and_tokens(name: str, tmp_path: Path) -> None:
    change = CHANGES[name]
    layers = {"num_hidden_layers": len(change["compress_ratios"])} if "compress_ratios" in change else {}
    exact, fast = pair(written(tmp_path / "m.gguf", "deepseek4", **change, **layers))
    expected = exact.logits(TOKENS)
    assert spread(fast.logits(TOKENS), expected) < 1e-5
    assert spread(by_steps(fast, TOKENS[:200]), expected[:200]) < 1e-5


@pytest.mark.parametrize(
    "kind", ["f16", "bf16", "q8_0", "q8_KV", "q5_1/q6_0", "q8_0/f16 khad vhad", "iq4_nl/q4_0 vhad"]
)
def test_each_type_of_cache(kind: str, example: Path) -> None:
    """Rows are rounded as in the exact model; now and then a code falls the other way, or an expert is another one."""
    exact, fast = pair(example, kind)
    expected = exact.logits(TOKENS[:150])
    for found in (fast.logits(TOKENS[:150]), by_steps(fast, TOKENS[:150])):
        difference = np.sqrt(np.mean((found - expected) ** 2, axis=1)) / expected.std()
        assert np.median(difference) < 0.01
        assert difference.mean() < 0.05


@pytest.mark.parametrize("threads", [1, 3])
def test_any_number_of_threads_gives_the_same_bits(threads: int, example: Path) -> None:
    one, other = (load(example, numerics="fast", threads=n) for n in (2, threads))
    np.testing.assert_array_equal(one.logits(TOKENS[:140]), other.logits(TOKENS[:140]))
    np.testing.assert_array_equal(by_steps(one, TOKENS[:140]), by_steps(other, TOKENS[:140]))


def test_prompts_in_pieces_after_tokens_that_were_taken_back(example: Path) -> None:
    """Truncation within windows, at their ends, and to nothing; entries of other tokens never stay."""
    exact, fast = pair(example)
    whole, cache = exact.logits(TOKENS), fast.new_cache(N_CTX)
    for start, stop in ((0, 3), (3, 4), (4, 130), (130, 131), (131, 255), (255, 257), (257, 300)):
        assert cache.length == start
        for others in (1, 20):
            fast.forward(TOKENS[others : 2 * others], cache)
            cache.truncate(start)
        found = fast.forward(TOKENS[start:stop], cache)
        assert spread(found, whole[start:stop]) < 1e-5
    for length in (256, 131, 128, 127, 8, 7, 3, 0):
        cache.truncate(length)
        assert spread(fast.forward(TOKENS[length : length + 40], cache), whole[length : length + 40]) < 1e-5
        cache.length = length


def test_tokens_after_any_truncation(example: Path) -> None:
    exact, fast = pair(example)
    whole, cache = exact.logits(TOKENS[:140]), fast.new_cache(N_CTX)
    fast.forward(TOKENS[150:290], cache)
    for length in (129, 128, 127, 30, 29, 1, 0):
        cache.truncate(length)
        fast.forward([7], cache)
    cache.clear()
    for t in range(140):
        fast.forward(TOKENS[::-1][:2], cache)  # completes a window now and then
        cache.truncate(t)
        assert spread(fast.forward(TOKENS[t : t + 1], cache), whole[t : t + 1]) < 1e-5


def test_states_and_runs_layer_by_layer_in_between(example: Path) -> None:
    """They leave rows without entries, which the next plan makes: of a prompt, or of one token."""
    exact, fast = pair(example)
    whole, cache = exact.logits(TOKENS), fast.new_cache(N_CTX)
    fast.forward(TOKENS[:150], cache)
    saved, other = cache.save(), fast.new_cache(N_CTX - 10)
    other.restore(saved)
    assert spread(fast.forward([TOKENS[150]], other), whole[150:151]) < 1e-5
    assert spread(fast.forward(TOKENS[151:200], other), whole[151:200]) < 1e-5
    exact.forward(TOKENS[150:160], cache)
    fast.observer = lambda *_: None  # layer by layer
    fast.forward(TOKENS[160:170], cache)
    fast.observer = None
    assert spread(fast.forward(TOKENS[170:175], cache), whole[170:175]) < 1e-5
    exact.forward(TOKENS[175:180], cache)
    assert spread(fast.forward([TOKENS[180]], cache), whole[180:181]) < 1e-5


def test_sequences_of_their_own_lengths_go_on_together(example: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exact, fast = pair(example)
    alone = exact.logits(TOKENS)
    for limit in (512, 20):
        monkeypatch.setattr("quantkit.runtime.model.TOGETHER_TOKENS", limit)
        caches, done = [fast.new_cache(room) for room in (200, 320, 290)], [0, 0, 0]
        for counts in ((1, 127, 17), (1, 1, 1), (140, 1, 2), (1, 30, 120)):
            parts = [(TOKENS[d : d + n], cache) for d, n, cache in zip(done, counts, caches)]
            result, done = fast.forward_batch(parts), [d + n for d, n in zip(done, counts)]
            assert spread(result, alone[[d - 1 for d in done]]) < 1e-5


def test_what_has_no_operations(tmp_path: Path) -> None:
    for change, message in (
        ({"head_dim": 48, "qk_rope_head_dim": 16, "index_head_dim": 32}, "heads of 48 elements"),
        ({"index_head_dim": 48}, "an indexer of 48 elements"),
        ({"o_lora_rank": 8}, "rows of 16 columns"),
    ):
        model = load(written(tmp_path / "m.gguf", "deepseek4", **change))
        reason = unsupported.unsupported_feature(model.weights, model.blocks, model.head)
        assert message in (reason or "")
