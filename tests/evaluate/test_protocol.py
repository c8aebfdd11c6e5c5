"""The evaluation protocol on a fake model: chunks, BOS, scored positions, batches, NaN, what enters weights."""

from __future__ import annotations

import math

import numpy as np
import pytest

from quantkit.errors import DataError, QuantkitError
from quantkit.evaluate import divergence, perplexity, text
from quantkit.evaluate.imatrix import collect as collect_imatrix
from quantkit.formats.kld.base_file import BaseReader, BaseWriter
from tests.evaluate.fake import FakeModel, FakeTokenizer

N_CTX = 16


@pytest.fixture
def letters(tmp_path):
    path = tmp_path / "letters.txt"
    path.write_text("the quick brown fox jumps over the lazy dog " * 3 + "\n")  # 132 letters
    return path


def naive_nll(model: FakeModel, chunks: text.Chunks) -> np.ndarray:
    """The protocol as four plain lines."""
    found = []
    for own, fed in zip(chunks.tokens, chunks.inputs):
        for i in range(N_CTX // 2, N_CTX - 1):
            logits = model.table[fed[i]].astype(np.float64)
            found.append(math.log(np.exp(logits).sum()) - logits[own[i + 1]])
    return np.array(found).reshape(len(chunks), -1)


def test_chunks_drop_the_remainder_and_the_last_newline(letters):
    chunks = text.chunked(FakeTokenizer(), letters, N_CTX)
    assert chunks.tokens.shape == (8, N_CTX)
    assert len(text.read_text(letters)) == 132
    assert np.array_equal(chunks.inputs, chunks.tokens)
    assert len(text.chunked(FakeTokenizer(), letters, N_CTX, limit=3)) == 3
    later = text.chunked(FakeTokenizer(), letters, N_CTX, limit=3, skip=2)
    assert np.array_equal(later.tokens, chunks.tokens[2:5])


def test_bos_stands_in_for_the_first_token_of_every_chunk(letters):
    chunks = text.chunked(FakeTokenizer(adds_bos=True), letters, N_CTX)
    assert (chunks.inputs[:, 0] == 0).all()
    assert (chunks.tokens[1:, 0] != 0).all()
    assert np.array_equal(chunks.inputs[:, 1:], chunks.tokens[:, 1:])


def test_short_texts_and_odd_bytes_are_errors(letters, tmp_path):
    with pytest.raises(DataError, match=r"132 tokens, chunks of 128 need at least 256"):
        text.chunked(FakeTokenizer(), letters, 128)
    with pytest.raises(DataError, match="too short to score"):
        text.chunked(FakeTokenizer(), letters, 2)
    (tmp_path / "latin1.txt").write_bytes(b"caf\xe9 " * 50)
    with pytest.raises(DataError, match=r"latin1.txt: offset 3: not UTF-8"):
        text.chunked(FakeTokenizer(), tmp_path / "latin1.txt", N_CTX)
    with pytest.raises(QuantkitError, match=r"missing.txt: cannot read"):
        text.chunked(FakeTokenizer(), tmp_path / "missing.txt", N_CTX)


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("n_batch", [1, 32, 2048])
def test_perplexity_follows_the_protocol(letters, adds_bos, n_batch):
    model = FakeModel(adds_bos=adds_bos)
    chunks = text.chunked(model.tokenizer, letters, N_CTX)
    running = []
    found = perplexity.perplexity_of_chunks(model, chunks, n_batch=n_batch, on_chunk=lambda p: running.append(p.value))
    expected = naive_nll(model, chunks)
    np.testing.assert_allclose(found.nll, expected, rtol=1e-5)
    assert found.value == pytest.approx(math.exp(expected.mean()), rel=1e-6)
    assert found.error == pytest.approx(found.value * expected.std() / math.sqrt(expected.size - 1), rel=1e-6)
    assert running == pytest.approx([math.exp(expected[: i + 1].mean()) for i in range(len(chunks))], rel=1e-6)
    assert len(model.calls) == math.ceil(8 / max(1, n_batch // N_CTX))


def test_too_long_a_context_is_an_error(letters):
    model = FakeModel()
    model.n_ctx_train = 8
    with pytest.raises(DataError, match="chunks of 16 tokens, but the model was trained with 8"):
        perplexity.perplexity_of_chunks(model, text.chunked(model.tokenizer, letters, N_CTX))


def test_base_and_divergence(letters, tmp_path):
    base_model, model = FakeModel(adds_bos=True), FakeModel(adds_bos=True, noise=0.1)
    chunks = text.chunked(model.tokenizer, letters, N_CTX)
    path = tmp_path / "base.kld"
    with BaseWriter(path, chunks.tokens, model.vocab_size) as writer:
        base_ppl = perplexity.perplexity_of_chunks(base_model, chunks, base=writer)
    base = BaseReader(path)
    assert np.array_equal(base.tokens, chunks.tokens)  # not the BOS
    seen = []
    found = divergence.divergence_from_base(model, base, on_chunk=lambda i, d: seen.append((i, len(d))))
    assert seen == [(i + 1, 7 * (i + 1)) for i in range(8)]
    assert found.ppl_base.value == pytest.approx(base_ppl.value, rel=1e-4)
    assert found.ppl.value == pytest.approx(perplexity.perplexity_of_chunks(model, chunks).value, rel=1e-6)
    assert 0 < found.mean_kld.value < 0.1
    same = divergence.divergence_from_base(base_model, base)
    assert abs(same.mean_kld.value) < 1e-4
    assert same.top_agreement.value == 1


def test_a_base_of_another_vocabulary_is_an_error(letters, tmp_path):
    model = FakeModel()
    chunks = text.chunked(model.tokenizer, letters, N_CTX)
    with BaseWriter(tmp_path / "base.kld", chunks.tokens, model.vocab_size) as writer:
        perplexity.perplexity_of_chunks(model, chunks, base=writer)
    with pytest.raises(DataError, match="vocabulary of 31, the model has 40"):
        divergence.divergence_from_base(FakeModel(vocab=40), BaseReader(tmp_path / "base.kld"))


@pytest.mark.parametrize("n_batch", [16, 2048])
@pytest.mark.parametrize("process_output", [False, True])
def test_importance_is_the_mean_square_of_what_enters(letters, n_batch, process_output):
    model = FakeModel(adds_bos=True)
    chunks = text.chunked(model.tokenizer, letters, N_CTX)
    found, _ = collect_imatrix.collect(model, chunks, process_output=process_output, n_batch=n_batch)
    x = model.table[chunks.inputs] + 0.01 * np.arange(N_CTX)[None, :, None]
    mean_square = (x.reshape(-1, 31).astype(np.float64) ** 2).mean(axis=0)
    expected = {"blk.0.ffn_up.weight": mean_square[:8], "blk.0.ffn_down.weight": mean_square}
    if process_output:
        expected["output.weight"] = mean_square[:4]  # of all positions, not of the scored ones
    assert list(found.entries) == list(expected)
    for name, values in expected.items():
        np.testing.assert_allclose(found[name].values, values[None], rtol=1e-5)
        assert found[name].counts.tolist() == [8 * N_CTX]
        assert found[name].calls == 8
    assert (found.chunks, found.dataset) == (8, str(letters))
    assert model.observer is None


def test_importance_with_and_without_perplexity(letters):
    model = FakeModel()
    chunks = text.chunked(model.tokenizer, letters, N_CTX)
    values = []
    with_it, ppl = collect_imatrix.collect(model, chunks, on_chunk=lambda i, p: values.append(p.value))
    assert ppl is not None
    assert values[-1] == ppl.value == pytest.approx(perplexity.perplexity_of_chunks(model, chunks).value)
    without, no_ppl = collect_imatrix.collect(
        model, chunks, with_perplexity=False, on_chunk=lambda i, p: values.append(p)
    )
    assert values[-1] is no_ppl is None
    for name, entry in with_it.entries.items():
        np.testing.assert_array_equal(entry.values, without[name].values)


def test_nan_entering_a_weight_names_it(letters):
    model = FakeModel()
    chunks = text.chunked(model.tokenizer, letters, N_CTX)
    model.table[chunks.tokens[0, 5], 3] = np.nan
    with pytest.raises(DataError, match=r"blk.0.ffn_up.weight: NaN or Inf entered it within 8 chunks"):
        collect_imatrix.collect(model, chunks)
    assert model.observer is None
