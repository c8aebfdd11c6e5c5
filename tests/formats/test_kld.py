"""Base files of KL divergence: the reference's file, the encoding against its formula, and files that lie."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from quantkit.errors import DataError, FormatError, QuantkitError
from quantkit.formats.kld import base_file

N_CTX, N_VOCAB = 8, 101


def naive_encode(row: np.ndarray) -> tuple[np.float32, np.float32, np.ndarray]:
    """The encoding as spec'd, one row of float32."""
    top = row.max()
    low = max(row.min(), np.float32(top - np.float32(24)))
    z = np.float32(np.log(np.exp((row - top).astype(np.float64)).sum()))
    scale = np.float32((top - low) / np.float32(65535))
    codes = np.where(row > low, np.rint((row - low) / scale), 0) if scale > 0 else np.zeros(len(row))
    return scale, np.float32(low - top) - z, np.minimum(codes, 65535).astype(np.uint16)


@pytest.fixture
def logits(rng):
    return (rng.standard_normal((2, base_file.rows_per_chunk(N_CTX), N_VOCAB)) * 6).astype(np.float32)


@pytest.fixture
def base(tmp_path, logits, rng):
    path = tmp_path / "x.kld"
    tokens = rng.integers(0, N_VOCAB, (2, N_CTX)).astype(np.int32)
    with base_file.BaseWriter(path, tokens, N_VOCAB) as writer:
        for chunk in logits:
            writer.write(chunk)
    return path


def test_reads_the_reference_s_file(golden):
    base = base_file.BaseReader(golden / "smollm2-135m-f16.c64.kld")
    assert (base.n_ctx, base.n_vocab, base.n_chunk) == (64, 49152, 1)
    log_probs = base.chunk(0).log_probs().astype(np.float64)
    np.testing.assert_allclose(np.exp(log_probs).sum(axis=1), 1, atol=1e-4)
    nll = -log_probs[np.arange(31), base.tokens[0, 33:]]
    assert abs(np.exp(nll.mean()) - 30.5198) < 6e-4  # golden's figure; 31 codes' rounding moves it by that at most


def test_encoding_the_reference_s_rows_again_gives_its_codes(golden):
    """Decoded rows are logits whose own encoding must be what they came from, to a code's rounding."""
    rows = base_file.BaseReader(golden / "smollm2-135m-f16.c64.kld").chunk(0)
    again = base_file.encode_rows(rows.log_probs())
    np.testing.assert_allclose(again.scale, rows.scale, rtol=1e-5)
    np.testing.assert_allclose(again.min_log_prob, rows.min_log_prob, atol=2e-4)
    assert np.abs(again.codes.astype(int) - rows.codes.astype(int)).max() <= 1


@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 8.0, 40.0])
@pytest.mark.parametrize("n_vocab", [2, 100, 101])
def test_encoding_follows_the_formula(rng, spread, n_vocab):
    logits = (rng.standard_normal((5, n_vocab)) * spread + 3).astype(np.float32)
    found = base_file.encode_rows(logits)
    assert found.words.shape == (5, base_file.row_words(n_vocab))
    for r, row in enumerate(logits):
        scale, low, codes = naive_encode(row)
        assert found.scale[r] == scale
        assert abs(found.min_log_prob[r] - low) <= 2 * np.spacing(np.float32(24))
        np.testing.assert_array_equal(found.codes[r], codes)
    if n_vocab % 2:
        assert not found.words[:, -1].any()


def test_layout(base, logits):
    data = base.read_bytes()
    assert data[:8] == b"_logits_"
    assert struct.unpack_from("<iii", data, 8) == (N_CTX, N_VOCAB, 2)
    assert len(data) == base_file.file_bytes(N_CTX, N_VOCAB, 2) == 20 + 4 * 16 + 2 * 2 * 3 * 106
    reader = base_file.BaseReader(base)
    for i, chunk in enumerate(logits):
        exact = chunk - chunk.max(1, keepdims=True)
        exact = exact - np.log(np.exp(exact).sum(1, keepdims=True))
        found = reader.chunk(i).log_probs()
        clipped = np.maximum(exact, exact.max(1, keepdims=True) - 24)
        np.testing.assert_allclose(found, clipped, atol=24 / 65535)


def test_nothing_appears_when_chunks_are_missing_or_wrong(tmp_path, logits):
    tokens = np.zeros((2, N_CTX), np.int32)
    writer = base_file.BaseWriter(tmp_path / "x", tokens, N_VOCAB)
    with pytest.raises(DataError, match="1 chunks written of 2"), writer:
        writer.write(logits[0])
    with pytest.raises(DataError, match="expected logits"), writer:
        writer.write(logits[0, 1:])
    with pytest.raises(DataError, match="NaN or Inf"):
        base_file.encode_rows(np.full((1, 4), np.nan, np.float32))
    assert list(tmp_path.iterdir()) == []


def patched(data: bytes, at: int, value: int | float) -> bytes:
    raw = struct.pack("<i", value) if isinstance(value, int) else struct.pack("<f", value)
    return data[:at] + raw + data[at + 4 :]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: b"", "the file is empty"),
        (lambda d: d[:19], "19 bytes, the header"),
        (lambda d: b"GGUF" + d[4:], "begins with"),
        (lambda d: patched(d, 8, 0), "n_ctx 0"),
        (lambda d: patched(d, 8, -512), "n_ctx -512"),
        (lambda d: patched(d, 12, 1), "n_vocab 1"),
        (lambda d: patched(d, 16, 2**31 - 1), "2147483647 chunks"),
        (lambda d: d[:-1], "truncated"),
        (lambda d: d + b"!", "corrupt"),
        (lambda d: patched(d, 24, N_VOCAB), "offset 24: token 1 is 101"),
        (lambda d: patched(d, 24, -1), "token 1 is -1"),
        (lambda d: patched(d, 84, float("nan")), r"chunk 0, row 0, offset 84: scale nan"),
        (lambda d: patched(d, 84, 1.0), "scale 1.0"),
        (lambda d: patched(d, 88, 5.0), "min_log_prob 5.0"),
    ],
)
def test_files_that_lie_are_named_with_the_place(base, damage, message):
    base.write_bytes(damage(base.read_bytes()))
    with pytest.raises((FormatError, QuantkitError), match=message) as error:
        base_file.BaseReader(base).chunk(0)
    assert str(base) in str(error.value)
