"""Base files for KL divergence in ik_llama.cpp's format: a model's log-probabilities over a text, 16 bits each.

Little-endian:

    0        8 bytes  "_logits_"
    8        i32      n_ctx, tokens of a chunk
    12       i32      n_vocab
    16       i32      n_chunk
    20       i32      x n_chunk * n_ctx: the text's tokens (without a BOS that replaces the first of a chunk)
    then n_chunk times K = n_ctx - 1 - n_ctx // 2 rows; row r is that of the logits at position n_ctx // 2 + r:
      f32    scale
      f32    min_log_prob
      u16    x n_vocab codes, and an unused one if n_vocab is odd

    log p_i = scale * code_i + min_log_prob

A row of logits l is encoded with top = max l, low = max(min l, top - 24) and Z = log sum exp(l - top) as

    scale = (top - low) / 65535    min_log_prob = low - top - Z    code_i = round((l_i - low) / scale), 0 below low

where round takes ties to even. Logits more than 24 nats (RANGE_NATS) below the top are raised to that bound.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np

from quantkit.codegen import jit, thread_pool
from quantkit.codegen.jit import kernel
from quantkit.errors import DataError, FormatError
from quantkit.formats.atomic import require_space
from quantkit.formats.kld.chunk_file import ChunkFile, LoggedChunks
from quantkit.formats.kld.scored_tokens import ScoredTokens, row_counts, rows_per_chunk
from quantkit.formats.mapping import map_file, require_whole
from quantkit.inputs import arguments

MAGIC = b"_logits_"
RANGE_NATS = 24.0  # below the top logit
_HEADER_BYTES = 20
_ROW_HEADER_WORDS = 4


def row_words(n_vocab: int) -> int:
    """Number of 16-bit words of a row."""
    return 2 * ((n_vocab + 1) // 2) + _ROW_HEADER_WORDS


@dataclass(frozen=True)
class EncodedRows:
    """Rows of a base file: log p = scale[:, None] * codes + min_log_prob[:, None]. Properties are views.

    words: uint16[rows, row_words(n_vocab)], as in the file.
    """

    words: np.ndarray
    n_vocab: int

    @property
    def scale(self) -> np.ndarray:
        """float32[rows]: nats a code."""
        return self.words[:, :_ROW_HEADER_WORDS].view("<f4")[:, 0]

    @property
    def min_log_prob(self) -> np.ndarray:
        """float32[rows]: the log-probability of code 0, in nats."""
        return self.words[:, :_ROW_HEADER_WORDS].view("<f4")[:, 1]

    @property
    def codes(self) -> np.ndarray:
        """uint16[rows, n_vocab]: the codes."""
        return self.words[:, _ROW_HEADER_WORDS : _ROW_HEADER_WORDS + self.n_vocab]

    def log_probs(self) -> np.ndarray:
        """float32[rows, n_vocab]: log-probabilities in nats."""
        steps: np.ndarray = self.scale[:, None] * self.codes.astype(np.float32)
        return np.asarray(steps + self.min_log_prob[:, None])


@kernel
def _encode_rows(logits: np.ndarray, out: np.ndarray) -> None:
    """float32[rows, n_vocab] -> uint16[rows, row_words], by the formula at the top of this file."""
    rows, n = logits.shape
    for r in range(rows):
        row = logits[r]
        top, low = row[0], row[0]
        for i in range(n):
            top = max(top, row[i])
            low = min(low, row[i])
        low = max(low, np.float32(top - np.float32(RANGE_NATS)))
        total = 0.0
        for i in range(n):
            total += np.float64(np.exp(np.float32(row[i] - top)))
        header = out[r, :4].view(np.float32)
        scale = np.float32((top - low) / np.float32(65535.0))
        header[0] = scale
        header[1] = np.float32(low - top) - np.float32(np.log(total))
        codes = out[r, 4 : 4 + n]
        for i in range(n):
            code = np.int32(0)
            if row[i] > low and scale > 0:
                code = np.int32(np.rint((row[i] - low) / scale))
            codes[i] = np.uint16(min(code, np.int32(65535)))  # the quotient at the top may round to 65536
        for i in range(4 + n, out.shape[1]):
            out[r, i] = 0


def encode_rows(logits: np.ndarray) -> EncodedRows:
    """Encode logits, float32[rows, n_vocab]. DataError for NaN or Inf."""
    logits = arguments.real_numbers(logits, "logits")
    if logits.ndim != 2 or not logits.shape[1]:
        raise DataError(f"expected logits[rows, n_vocab], got shape {logits.shape}")
    finite = np.isfinite(logits.sum(axis=1, dtype=np.float64))
    if not finite.all():
        raise DataError(f"logits of row {int(np.argmin(finite))} hold NaN or Inf")
    out = np.empty((len(logits), row_words(logits.shape[1])), np.uint16)
    logits = jit.readonly(logits)
    thread_pool.over_rows(lambda a, b: _encode_rows(logits[a:b], out[a:b]), len(logits))
    return EncodedRows(out, logits.shape[1])


@dataclass(frozen=True)
class BaseEncoder:
    """Makes chunks as a `BaseWriter` stores them: what it takes of the writer, small enough to send to a worker.

    path     of the file, for errors
    counts   int64[n_chunk]: the rows of each chunk
    """

    path: Path
    n_vocab: int
    counts: np.ndarray

    def encode(self, logits: np.ndarray, index: int) -> np.ndarray:
        """uint8[n]: chunk `index` of the file, of its float32[rows, n_vocab] logits. DataError for another shape."""
        expected = (int(self.counts[index]) if index < len(self.counts) else 0, self.n_vocab)
        if logits.shape != expected:
            raise DataError(f"{self.path}: chunk {index}: expected logits {expected}, got {logits.shape}")
        return encode_rows(logits).words.astype("<u2", copy=False).reshape(-1).view(np.uint8)


class BaseReader:
    """A base file, mapped: `.n_ctx .n_vocab .n_chunk`, `.tokens` int32[n_chunk, n_ctx], `.chunk(i)` EncodedRows.

    scored   as given to the BaseWriter
    """

    def __init__(self, path: str | os.PathLike[str], scored: ScoredTokens | None = None):
        self.path, self.scored = Path(path), scored
        self._bytes = map_file(self.path)
        size = self._bytes.size
        if size < _HEADER_BYTES:
            raise FormatError(f"{path}: {size} bytes, the header of a KL-divergence base takes {_HEADER_BYTES}")
        if (magic := self._bytes[:8].tobytes()) != MAGIC:
            raise FormatError(f"{path}: begins with {magic!r}, a KL-divergence base with {MAGIC!r}")
        self.n_ctx, self.n_vocab, self.n_chunk = struct.unpack("<iii", self._bytes[8:_HEADER_BYTES].tobytes())
        if self.n_ctx < 4 or self.n_vocab < 2 or self.n_chunk < 1:
            raise FormatError(
                f"{path}: offset 8: n_ctx {self.n_ctx}, n_vocab {self.n_vocab}, n_chunk {self.n_chunk}; "
                "expected at least 4, 2 and 1"
            )
        least = _HEADER_BYTES + 4 * self.n_chunk * self.n_ctx
        if size < least:  # before anything is allocated for so many chunks
            raise FormatError(
                f"{path}: {size} bytes, but the tokens of {self.n_chunk} chunks of {self.n_ctx} alone take {least}; "
                "the file is truncated"
            )
        if scored is not None and scored.mask.shape != (self.n_chunk, self.n_ctx):
            raise DataError(f"{path}: {(self.n_chunk, self.n_ctx)} tokens, of which {scored.mask.shape} are scored")
        self.counts = row_counts(self.n_ctx, self.n_chunk, scored)
        expected = file_bytes(self.n_ctx, self.n_vocab, self.n_chunk, int(self.counts.sum()))
        if size != expected:
            raise FormatError(
                f"{path}: {size} bytes, but {self.n_chunk} chunks of {self.n_ctx} tokens and a vocabulary of "
                f"{self.n_vocab} take {expected}; the file is {'truncated' if size < expected else 'corrupt'}"
            )
        tokens = np.frombuffer(self._bytes, "<i4", self.n_chunk * self.n_ctx, _HEADER_BYTES)
        bad = np.flatnonzero((tokens < 0) | (tokens >= self.n_vocab))
        if len(bad):
            raise FormatError(
                f"{path}: offset {_HEADER_BYTES + 4 * bad[0]}: token {bad[0]} is {tokens[bad[0]]}, "
                f"the vocabulary has {self.n_vocab}"
            )
        self.tokens = tokens.reshape(self.n_chunk, self.n_ctx)

    def __reduce__(self) -> tuple[object, ...]:
        return BaseReader, (self.path.absolute(), self.scored)  # a worker opens the file itself

    def chunk(self, index: int) -> EncodedRows:
        """The rows of one chunk; FormatError if scale or min_log_prob of a row are impossible."""
        rows, words = int(self.counts[index]), row_words(self.n_vocab)
        start = _HEADER_BYTES + 4 * self.tokens.size + 2 * words * int(self.counts[:index].sum())
        require_whole(self._bytes, self.path)
        data = np.frombuffer(self._bytes, "<u2", rows * words, start).reshape(rows, words)
        encoded = EncodedRows(data, self.n_vocab)
        with np.errstate(invalid="ignore"):
            top = 65535 * encoded.scale + encoded.min_log_prob  # log-probability that the largest code would have
            valid = (encoded.scale >= 0) & (encoded.min_log_prob <= 0) & (top < 0.01) & (encoded.min_log_prob > -1e4)
        if not valid.all():
            row = int(np.argmin(valid))
            raise FormatError(
                f"{self.path}: chunk {index}, row {row}, offset {start + 2 * words * row}: scale {encoded.scale[row]}, "
                f"min_log_prob {encoded.min_log_prob[row]} are impossible for log-probabilities; the file is corrupt"
            )
        return encoded


def file_bytes(n_ctx: int, n_vocab: int, n_chunk: int, n_rows: int | None = None) -> int:
    """Size of a base file in bytes; `n_rows`: its number of rows, by default that of the format."""
    n_rows = n_chunk * rows_per_chunk(n_ctx) if n_rows is None else n_rows
    return _HEADER_BYTES + 4 * n_chunk * n_ctx + 2 * n_rows * row_words(n_vocab)


class BaseWriter:
    """Writes a base file chunk by chunk; it appears when the `with` block ends and all chunks are written.

    tokens   int[n_chunk, n_ctx], the text's tokens
    logged   the chunks that a log says an earlier run wrote; None without a log. With a log, the partial file stays
             when the block is left early. `done` counts the chunks that are there and need not be written again.
    scored   the scored tokens, if they are not those of the format. The file does not record them and cannot be
             resumed: it is for a reader in the same process that knows them. `bounded_file` records them
    """

    def __init__(
        self, path: str | os.PathLike[str], tokens: np.ndarray, n_vocab: int, *, logged: LoggedChunks | None = None,
        scored: ScoredTokens | None = None,
    ):  # fmt: skip
        self.path = Path(path)
        n_vocab = arguments.integer(n_vocab, f"{path}: the size of the vocabulary", 2, 2**31 - 1)
        self.tokens = arguments.integers(tokens, f"{path}: tokens of a vocabulary of {n_vocab}", n_vocab).astype("<i4")
        if self.tokens.ndim != 2:
            raise DataError(f"{path}: expected tokens[n_chunk, n_ctx], got shape {self.tokens.shape}")
        if scored is not None and logged is not None:
            raise DataError(f"{path}: this format cannot record which tokens are scored; name the file .qkld")
        self.n_vocab, self._logged = n_vocab, logged
        self._counts = row_counts(self.tokens.shape[1], len(self.tokens), scored)
        self.encoder = BaseEncoder(self.path, n_vocab, self._counts)

    def __enter__(self) -> BaseWriter:
        n_chunk, n_ctx = self.tokens.shape
        require_space(self.path.parent, file_bytes(n_ctx, self.n_vocab, n_chunk, int(self._counts.sum())))
        head = MAGIC + struct.pack("<iii", n_ctx, self.n_vocab, n_chunk) + self.tokens.tobytes()
        size = 2 * rows_per_chunk(n_ctx) * row_words(self.n_vocab)
        self._file = ChunkFile(self.path, head, self._logged, lambda read, offset: size)
        self.done = len(self._file.places)
        return self

    @property
    def digest(self) -> str:
        """The digest of the last chunk, for a log."""
        return self._file.places[-1][2]

    def write(self, logits: np.ndarray) -> None:
        """Append one chunk's float32[rows, n_vocab] logits."""
        self.append(self.encoder.encode(logits, len(self._file.places)))

    def append(self, encoded: np.ndarray) -> None:
        """Append one chunk that the encoder made."""
        self._file.append(encoded.data)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                if (written := len(self._file.places)) != len(self.tokens):
                    raise DataError(f"{self.path}: {written} chunks written of {len(self.tokens)}")
                self._file.finish()
        finally:
            self._file.leave()
