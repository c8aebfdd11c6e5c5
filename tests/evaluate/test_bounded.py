"""Bounded base files: the bound holds for any candidate, the size is what is said, and what is damaged is named."""

from __future__ import annotations

import itertools
import json
import struct
import tracemalloc
import zlib

import numpy as np
import pytest

from quantkit.errors import DataError, FormatError
from quantkit.evaluate import base_files, bounded, divergence
from quantkit.evaluate.report import divergence_text
from quantkit.formats.kld import bounded_file
from quantkit.formats.kld.base_file import BaseWriter, file_bytes
from tests.evaluate.fake import FakeModel


def exact(base: np.ndarray, candidate: np.ndarray) -> np.ndarray:
    """float64[rows]: sum p (log p - log q), all tokens."""

    def log_softmax(x: np.ndarray) -> np.ndarray:
        x = x.astype(np.float64) - x.max(1, keepdims=True)
        return x - np.log(np.exp(x).sum(1, keepdims=True))

    log_p, log_q = log_softmax(base), log_softmax(candidate)
    return (np.exp(log_p) * (log_p - log_q)).sum(1)


def language_like(rng, rows, n):
    """Logits whose probabilities fall off as a language model's: a law of Zipf, sharpened row by row."""
    common = -1.2 * np.log(1 + rng.permutation(n))
    return ((common + rng.standard_normal((rows, n)) * 2) * rng.uniform(0.8, 2.0, (rows, 1))).astype(np.float32)


def packed(tmp_path, logits, targets, **options):
    n_ctx = 2 * len(logits) + 2
    tokens = np.zeros((1, n_ctx), np.int32)
    tokens[0, n_ctx // 2 + 1 :] = targets
    with bounded_file.BoundedWriter(tmp_path / "x.qkld", tokens, logits.shape[1], **options) as writer:
        writer.write(logits)
    return bounded_file.BoundedReader(tmp_path / "x.qkld")


@pytest.mark.parametrize(("n", "rows", "spread"), [(7, 40, 3), (5003, 12, 0.0), (5003, 12, 6.0), (30001, 6, None)])
@pytest.mark.parametrize("target", [1e-4, 1e-2])
def test_the_exact_divergence_is_within_the_bound(rng, tmp_path, n, rows, spread, target):
    base = language_like(rng, rows, n) if spread is None else (rng.standard_normal((rows, n)) * spread).astype("f4")
    targets = rng.integers(0, n, rows)
    stored = packed(tmp_path, base, targets, target=target).chunk(0)
    uneven = base + np.where(base < np.quantile(base, 0.7), 5, 0)  # a candidate whose error follows p
    others = [base + rng.standard_normal(base.shape) * noise for noise in (0, 0.03, 0.2, 1.0)]
    for candidate in [*others, uneven, rng.standard_normal(base.shape) * 9, -base]:
        logits = candidate.astype(np.float32)
        found, truth = divergence.compare_rows(logits, stored, targets), exact(base, logits)
        whole = divergence.Divergence(*found)
        assert abs(found.kld.mean() - truth.mean()) <= whole.bound
        low, high = whole.limits
        assert low <= truth.mean() <= high
        np.testing.assert_array_equal(found.same_top, base.argmax(1) == logits.argmax(1))
        nll = np.log(np.exp(base.astype(float) - base.max()).sum(1)) + base.max() - base[np.arange(rows), targets]
        np.testing.assert_allclose(found.nll_base, nll, atol=1e-9)


def test_the_dice_are_fair_and_the_doubts_are_of_their_size(rng):
    """Over many throws the values are right on average, and stray as far as the variances say, not farther."""
    base = language_like(rng, 4, 3001)
    candidate = (base + rng.standard_normal(base.shape) * 0.5).astype("f4")
    targets, truth = np.zeros(4, int), exact(base, candidate)
    apart, variances = [], []
    for seed in range(300):
        values, doubts, _ = bounded.compare_rows(
            candidate, bounded_file.encode_rows(base, targets, 2.0**-11, seed), targets
        )
        apart.append(values[:, 2] - truth)
        variances.append(doubts[:, 0] + doubts[:, 1])
    stray = np.std(apart, axis=0)
    assert (np.abs(np.mean(apart, axis=0)) < 4.5 * stray / np.sqrt(300)).all()
    assert (stray**2 < np.mean(variances, axis=0)).all()
    assert (stray**2 > 0.1 * np.mean(variances, axis=0)).all()
    assert len({tuple(a) for a in apart}) == 300


def test_what_is_stored_says_where_each_probability_lies(rng):
    base = language_like(rng, 3, 4001)
    rows = bounded_file.encode_rows(base, np.zeros(3, int), 2.0**-12)
    log_p = base - np.log(np.exp(base.astype(float)).sum(1, keepdims=True))
    value, low, high, apart = bounded._table(rows.step)[:, np.minimum(rows.classes, bounded_file.LARGE - 1)]
    kept = (rows.classes > 0) & (rows.classes < bounded_file.LARGE)
    assert set(np.unique(rows.classes)) >= {0, 1, 161, bounded_file.LARGE}
    assert (low[kept] - 1e-6 <= log_p[kept]).all()
    assert (log_p[kept] <= high[kept] + 1e-6).all()
    assert (np.abs(value - np.exp(log_p))[kept] <= apart[kept]).all()
    assert np.exp(log_p)[rows.classes == 0].max() < rows.step
    np.testing.assert_allclose(rows.large, np.exp(log_p)[rows.classes == bounded_file.LARGE], rtol=1e-6)
    assert len(set(rows.stored_tokens)) > 1  # each token its own k


def test_a_finer_bound_can_be_asked_for(rng, tmp_path):
    base = language_like(rng, 8, 7001)
    sizes, bounds = [], []
    for target in (1e-1, 1e-2, 1e-3):
        reader = packed(tmp_path, base, np.zeros(8, int), target=target)
        candidate = (base + rng.standard_normal(base.shape)).astype("f4")
        found = divergence.compare_rows(candidate, reader.chunk(0), np.zeros(8, int))
        sizes.append(reader.path.stat().st_size)
        bounds.append(divergence.Divergence(*found).bound)
        assert bounds[-1] < 3 * target
    assert sizes == sorted(sizes)
    assert bounds == sorted(bounds, reverse=True)


@pytest.mark.parametrize("like", ["a language model's", "a random head's"])
def test_of_a_large_vocabulary_it_is_a_twentieth(rng, tmp_path, like):
    n, rows = 152_064, 5
    base = language_like(rng, rows, n) if like.startswith("a l") else rng.standard_normal((rows, n)).astype("f4") * 3
    reader = packed(tmp_path, base, np.zeros(rows, int), target=1e-5)
    assert 20 <= reader.ratio < 23
    assert reader.ratio == file_bytes(reader.n_ctx, n, 1) / reader.path.stat().st_size
    for noise in (0.02, 0.2, 0.8):
        candidate = (base + rng.standard_normal(base.shape) * noise).astype("f4")
        found, truth = divergence.compare_rows(candidate, reader.chunk(0), np.zeros(rows, int)), exact(base, candidate)
        whole = divergence.Divergence(*found)
        assert abs(whole.mean_kld.value - truth.mean()) <= whole.bound
        assert abs(whole.mean_kld.value - truth.mean()) < 0.02 * truth.mean() + 1e-4  # far better than that


def test_a_model_is_read_against_it(rng, tmp_path):
    reference, candidate = FakeModel(), FakeModel(noise=0.3)
    tokens = rng.integers(0, 31, (3, 64)).astype(np.int32)
    logits = reference.hidden_sequences(tokens, slice(32, 63))
    for name in ("x.kld", "x.qkld"):
        with base_files.base_writer(tmp_path / name, tokens, 31) as writer:
            for chunk in logits:
                writer.write(chunk)
    plain, small = (
        divergence.divergence_from_base(candidate, base_files.base_reader(tmp_path / name))
        for name in ("x.kld", "x.qkld")
    )
    assert plain.bound == 0
    assert abs(small.mean_kld.value - plain.mean_kld.value) < small.bound + 1e-4
    assert "Bound of KLD" in divergence_text.report(small)
    np.testing.assert_array_equal(small.same_top, plain.same_top)
    assert len(small.first(31).bound_terms) == 31


def test_damage_is_named_with_its_place(rng, tmp_path):
    base = language_like(rng, 5, 301)
    path = packed(tmp_path, base, np.zeros(5, int), note={"model": "m.gguf"}).path
    data = path.read_bytes()
    assert bounded_file.BoundedReader(path).note == {"model": "m.gguf"}
    path.write_bytes(data[:30] + bytes([data[30] ^ 1]) + data[31:])
    with pytest.raises(FormatError, match=r"x\.qkld: chunk 0, offset 16: .* do not have their checksum"):
        bounded_file.BoundedReader(path).chunk(0)
    path.write_bytes(data[:-40] + data[-39:] + b"!")
    with pytest.raises(FormatError, match="the index does not have its checksum"):
        bounded_file.BoundedReader(path)
    for short in (data[:12], data[: len(data) // 2], b"QKLDv1\0\0" + data[8:]):
        path.write_bytes(short)
        with pytest.raises(FormatError, match=r"truncated|begins with"):
            bounded_file.BoundedReader(path)


def test_nothing_appears_when_chunks_are_missing_or_wrong(tmp_path):
    writer = bounded_file.BoundedWriter(tmp_path / "x.qkld", np.zeros((2, 8), np.int32), 50)
    with pytest.raises(DataError, match="0 chunks written of 2"), writer:
        pass
    with pytest.raises(DataError, match="expected logits"), writer:
        writer.write(np.zeros((2, 50), np.float32))
    with pytest.raises(DataError, match="NaN or Inf"), writer:
        writer.write(np.full((3, 50), np.nan, np.float32))
    with pytest.raises(DataError, match="must be larger than 0"):
        bounded_file.BoundedWriter(tmp_path / "x.qkld", np.zeros((2, 8), np.int32), 50, target=0)
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------- files that strangers made


def rebuilt(path, streams=None, **index):
    """The file at `path` with streams of its first chunk or entries of its index changed; checksums are made anew."""
    data = path.read_bytes()
    (place,) = struct.unpack("<Q", data[8:16])
    about = json.loads(zlib.decompress(data[place:-16]))
    start, _, _ = about["chunks"][0]
    lengths = struct.unpack_from("<7I", data, start)
    ends = np.cumsum((start + 28, *lengths))
    parts = [data[a:b] for a, b in itertools.pairwise(ends)]
    for i, changed in (streams or {}).items():
        parts[i] = changed(zlib.decompress(parts[i]))
    chunk = struct.pack("<7I", *map(len, parts)) + b"".join(parts)
    about["chunks"][0] = 16, len(chunk), bounded_file.digest(chunk)
    packed_index = zlib.compress(json.dumps(about | index).encode())
    head = data[:8] + struct.pack("<Q", 16 + len(chunk))
    path.write_bytes(head + chunk + packed_index + bytes.fromhex(bounded_file.digest(packed_index)))
    return path


@pytest.fixture
def small(rng, tmp_path):
    packed(tmp_path, language_like(rng, 6, 500), rng.integers(0, 500, 6))
    return tmp_path / "x.qkld"


def test_a_file_put_together_anew_is_read(small):
    before = bounded_file.BoundedReader(small).chunk(0)
    after = bounded_file.BoundedReader(rebuilt(small)).chunk(0)
    np.testing.assert_array_equal(after.classes, before.classes)


@pytest.mark.parametrize("stream", range(7))
@pytest.mark.parametrize("change", ["longer", "shorter", "bomb", "rest", "cut"])
def test_streams_hold_what_is_announced_and_nothing_else(small, stream, change):
    changes = {
        "longer": lambda data: zlib.compress(data + bytes(8)),
        "shorter": lambda data: zlib.compress(data[:-8] if data else b"\1"),
        "bomb": lambda data: zlib.compress(data + bytes(32 << 20)),
        "rest": lambda data: zlib.compress(data) + b"more",
        "cut": lambda data: zlib.compress(data)[:-2],
    }
    reader = bounded_file.BoundedReader(rebuilt(small, {stream: changes[change]}))
    tracemalloc.start()
    try:
        with pytest.raises(FormatError, match="chunk 0"):
            reader.chunk(0)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_an_index_is_not_expanded_without_limit(small):
    data = small.read_bytes()
    (place,) = struct.unpack("<Q", data[8:16])
    index = zlib.compress(b" " * (100 << 20))
    small.write_bytes(data[:place] + index + bytes.fromhex(bounded_file.digest(index)))
    with pytest.raises(FormatError, match="a stream that does not end"):
        bounded_file.BoundedReader(small)


def test_a_deep_index_is_an_error(small):
    deep = [0]
    for _ in range(200):
        deep = [deep]
    with pytest.raises(FormatError, match="nested deeper than 64"):
        bounded_file.BoundedReader(rebuilt(small, note={"made by": deep}))


@pytest.mark.parametrize(
    "index",
    [
        {"n_vocab": 10**12},
        {"n_vocab": float("inf")},
        {"n_ctx": float("inf")},
        {"target": float("inf")},
        {"target": -1},
        {"note": 5},
        {"tokens": "AAA"},
        {"chunks": [[0, 1]]},
        {"chunks": 7},
        {"n_chunk": -1},
    ],
    ids=str,
)
def test_an_index_that_contradicts_itself_is_an_error(small, index):
    with pytest.raises(FormatError, match="the index is not one of a bounded base"):
        bounded_file.BoundedReader(rebuilt(small, **index))


def test_a_target_beyond_the_vocabulary_is_refused(rng, tmp_path):
    logits = language_like(rng, 6, 500)
    for targets in (np.full(6, 500), np.full(6, -1), np.zeros(5, int), np.zeros(6)):
        with pytest.raises(DataError, match="targets"):
            bounded_file.encode_rows(logits, targets, 2.0**-11)
    for tokens, n_vocab in ((np.full((1, 14), 500), 500), (np.full((1, 14), -1), 500), (np.zeros((1, 14), int), 1)):
        with pytest.raises(DataError, match="vocabulary"):
            bounded_file.BoundedWriter(tmp_path / "y.qkld", tokens, n_vocab)
        with pytest.raises(DataError, match="vocabulary"):
            BaseWriter(tmp_path / "y.kld", tokens, n_vocab)
