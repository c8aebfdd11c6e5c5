"""Bounded base files for KL divergence (`.qkld`): a model's distributions over a text, at 1/20 of the size.

ik_llama.cpp's base file takes 16 bits for each token of the vocabulary. With p the base's probabilities, q a
candidate's and e = log p - log q, the divergence is KLD = sum p e. Here each token's p is rounded at random to one of
the two nearest values that can be stored, such that the expected value is p. With r the rounded p,

    KLD  =  sum r log p  +  sum r (-log q)  -  sum (r - p) e

The first sum is one number a row, stored exactly. The second needs r and the candidate. The third is unknown: a sum of
independent terms with mean zero for every candidate, each as small as its e. So a candidate near the base is
measured almost exactly, and over many tokens the error falls with the square root of their number. Bernstein's
inequality bounds the sum: the printed bound fails with a probability below 1e-9 (over the random bits of the rounding,
on which no candidate depends). Without random rounding no file of this size could give such a bound: tokens of about
the same p may change places and give the same file.

With a step s, the same for all rows of a chunk, and v = p / s, a token is stored as

    not stored    v < 2^-20      mass and sum p log p of these are stored
    0 or s        v < 1          s with probability v: ids of few of the unlikely tokens, v to an eighth octave
    2^(j/8) s     v < 12         one of the two neighbours
    n s           v < 76         one of the two neighbours
    p             v >= 76        as float32

A bit reduces the error about equally anywhere in this table, so one s for all rows and sizes of p is right. The number
of stored tokens follows from it, row by row: a few where the model is certain, thousands where it is not. s is the
largest step for which 256 tokens (or all, if there are fewer) are expected to reach the target bound with e of one nat,
but not so small that the chunk exceeds its share of 1/20 of ik_llama.cpp's format. evaluate/bounded.py computes the
bound.

Little-endian:

    0     8 bytes  "QKLDv2\\0\\0"; "QKLDv3\\0\\0" for a file whose index has `scored`
    8     u64      offset of the index
    16    chunks, each as written by `_pack`: u32 lengths of seven zlib streams, then these
    index zlib of JSON: n_ctx, n_vocab, n_chunk, target, note (its origin), tokens (base64 of int32), and for each
          chunk its offset, bytes and BLAKE2b-128; `scored` (scored_tokens.py) where other tokens than the second
          halves of chunks are scored, which tells how many rows each chunk has; then the BLAKE2b-128 of the
          compressed index, 16 bytes, ends the file
"""

from __future__ import annotations

import base64
import itertools
import json
import math
import os
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from quantkit.codegen import jit, thread_pool
from quantkit.codegen.jit import kernel
from quantkit.errors import DataError, FormatError
from quantkit.formats.kld.base_file import file_bytes, row_words
from quantkit.formats.kld.chunk_file import ChunkFile, LoggedChunks, digest
from quantkit.formats.kld.scored_tokens import ScoredTokens, row_counts, scored_rows
from quantkit.formats.mapping import map_file, require_whole
from quantkit.inputs import arguments, json_input
from quantkit.inputs.regular_file import read_beginning

MAGIC = b"QKLDv2\0\0"
MAGIC_SCORED = b"QKLDv3\0\0"
SMALLER = 20  # a file is at least this many times smaller than one in ik_llama.cpp's format
FROM_VOCABULARY = 8192  # tokens; with a smaller vocabulary, the numbers of a row alone exceed that share
TARGET = 1e-3  # nats, the default bound
_TARGET_TOKENS = 256  # number of scored tokens over which the bound should reach the target
FAILURE_PROBABILITY = 1e-9  # probability that a bound fails
LOG_ODDS = math.log(3 / FAILURE_PROBABILITY)  # the bound needs three inequalities
_BINS = 160  # half octaves of p below 1
_ESCAPE = 255  # a gap of ids that does not fit a byte
_MAX_LOG_RATIO = 20.0  # nats: the largest e that the expected bound assumes
_STREAMS = 7
_INDEX_BYTES, _INDEX_RATIO = 64 << 20, 32  # an index may expand to _INDEX_BYTES + _INDEX_RATIO times its size
_MAX_VOCAB = 1 << 24

# Class of a token, a byte: 0 not stored; 1 … 160 below s, by eighths of octaves; 161 … 254 of the grid; 255 as float32.
TAIL = 160
LARGE = 255
GRID = np.array([*(2.0 ** (np.arange(29) / 8)), *np.arange(12.0, 77.0)])  # in steps


# ------------------------------------------------------------------------------------------------------------ encoding


@kernel
def _probabilities(row: np.ndarray, out: np.ndarray) -> float:
    """softmax of float32[n] into float64[n]; returns log sum exp."""
    top = row[0]
    for i in range(row.shape[0]):
        top = max(top, row[i])
    total = 0.0
    for i in range(row.shape[0]):
        out[i] = np.exp(np.float64(row[i]) - np.float64(top))
        total += out[i]
    for i in range(row.shape[0]):
        out[i] /= total
    log_sum: float = np.float64(top) + np.log(total)
    return log_sum


@kernel
def _survey_rows(logits: np.ndarray, counts: np.ndarray, masses: np.ndarray) -> None:
    """Count tokens and sum their probability by half octaves below 1; int64 and float64[rows, _BINS]."""
    p = np.empty(logits.shape[1], np.float64)
    for r in range(logits.shape[0]):
        _probabilities(logits[r], p)
        for i in range(p.shape[0]):
            if p[i] > 0:
                at = min(counts.shape[1] - 1, int(-2.0 * np.log2(p[i])))
                counts[r, at] += 1
                masses[r, at] += p[i]


@kernel
def _uniform(seed: np.uint64, i: int) -> float:
    """A random number in [0, 1) for token i of a row: SplitMix64."""
    z = seed + np.uint64(i + 1) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.float64((z ^ (z >> np.uint64(31))) >> np.uint64(11)) * 2.0**-53


@kernel
def _class_of(v: float, u: float, grid: np.ndarray) -> int:
    """The class of a token of v steps, with a random number u in [0, 1)."""
    if v < 1.0:
        return 1 + min(159, int(-8.0 * np.log2(v))) if u < v else 0
    if v >= grid[-1]:
        return 255
    j = min(grid.shape[0] - 2, int(8.0 * np.log2(v)) if v < 12.0 else 17 + int(v))
    while grid[j] > v:
        j -= 1
    while grid[j + 1] <= v:
        j += 1
    above: int = 161 + j + int(u < (v - grid[j]) / (grid[j + 1] - grid[j]))
    return above


@kernel
def _round_rows(
    logits: np.ndarray,
    targets: np.ndarray,
    step: float,
    seeds: np.ndarray,
    grid: np.ndarray,
    classes: np.ndarray,
    numbers: np.ndarray,
    top: np.ndarray,
) -> None:
    """Fill, for each row, the class of each token and the numbers, the first without the tokens of class 255."""
    p = np.empty(logits.shape[1], np.float64)
    for r in range(logits.shape[0]):
        log_sum = _probabilities(logits[r], p)
        stored_sum, negligible_mass, negligible_sum, best = 0.0, 0.0, 0.0, 0
        for i in range(logits.shape[1]):
            if logits[r, i] > logits[r, best]:
                best = i
            log_p, v, class_ = np.float64(logits[r, i]) - log_sum, p[i] / step, 0
            if v < 2.0**-20:
                negligible_mass += p[i]
                negligible_sum += p[i] * log_p
            else:
                class_ = _class_of(v, _uniform(seeds[r], i), grid)
                if class_ > 0 and class_ < 255:
                    stored_sum += step * (grid[class_ - 161] if class_ > 160 else 1.0) * log_p
            classes[r, i] = class_
        numbers[r, 0] = stored_sum
        numbers[r, 1] = negligible_sum
        numbers[r, 2] = negligible_mass
        numbers[r, 3] = log_sum - np.float64(logits[r, targets[r]])
        top[r] = best


@dataclass(frozen=True)
class BoundedRows:
    """The rows of a chunk.

    classes  uint8[rows, n_vocab]: 0 not stored, 1 … 160 tail, 161 … 254 grid, 255 as float32
    large    float32[n]: the probabilities of class 255, row by row in the order of ids
    numbers  float64[rows, 4]: sum r log p; sum p log p and mass of tokens below 2^-20 steps; NLL of the target
    top      uint32[rows]: the token with the largest logit, the first in a tie
    step     s
    """

    classes: np.ndarray
    large: np.ndarray
    numbers: np.ndarray
    top: np.ndarray
    step: float

    @property
    def stored_tokens(self) -> np.ndarray:
        """int[rows]: number of tokens whose ids are stored."""
        return np.asarray(np.count_nonzero(self.classes, axis=1))


def encode_rows(logits: np.ndarray, targets: np.ndarray, step: float, seed: int = 0) -> BoundedRows:
    """Classes of float32[rows, n_vocab] logits with steps of `step`; `seed` is that of the random numbers."""
    logits = arguments.real_numbers(logits, "logits")
    if logits.ndim != 2 or not logits.size or np.shape(targets) != logits.shape[:1]:
        raise DataError(f"expected logits[rows, n_vocab] and targets[rows], got {logits.shape} and {np.shape(targets)}")
    rows, n = logits.shape
    targets = arguments.integers(targets, f"targets in a vocabulary of {n}", n).astype(np.int32)
    outputs = np.empty((rows, n), np.uint8), np.empty((rows, 4)), np.empty(rows, np.uint32)
    logits, targets = jit.readonly(logits), jit.readonly(targets)
    seeds = jit.readonly(np.random.SeedSequence(seed).generate_state(rows, np.uint64))
    grid = jit.readonly(GRID.copy())

    def task(a: int, b: int) -> None:
        _round_rows(logits[a:b], targets[a:b], step, seeds[a:b], grid, *(array[a:b] for array in outputs))

    thread_pool.over_rows(task, rows)
    classes, numbers, top = outputs
    row, ids = np.nonzero(classes == LARGE)
    log_p = logits[row, ids] - (numbers[:, 3] + logits[np.arange(rows), targets])[row]
    large = np.exp(log_p).astype(np.float32)
    numbers[:, 0] += np.bincount(row, large * log_p, rows)
    return BoundedRows(classes, large, numbers, top, step)


def steps(logits: np.ndarray, target: float, n_rows: int, max_bytes: float = math.inf) -> float:
    """The largest step, a power of sqrt 2, for which the expected bound over `n_rows` such rows is the target.

    See the top of this file. The step is larger if the chunk would take more than about `max_bytes`: an id costs as
    much as a position in a list of that density, a class five bits.
    """
    rows, n = logits.shape
    counts, masses = np.zeros((rows, _BINS), np.int64), np.zeros((rows, _BINS))
    logits = jit.readonly(np.ascontiguousarray(logits))
    thread_pool.over_rows(lambda a, b: _survey_rows(logits[a:b], counts[a:b], masses[a:b]), rows)
    above, mass = np.cumsum(counts.sum(0)), np.cumsum(masses.sum(0))
    tail = np.maximum(0, mass[-1] - mass)
    step = 2.0 ** (-(np.arange(_BINS) + 1) / 2)  # the lower edge of a bin
    variance = (step * tail + above * step**2 / 6) * n_rows / rows
    largest = step * _MAX_LOG_RATIO
    deviation = np.sqrt(variance) + largest * math.sqrt(2 * LOG_ODDS)  # upper bound of the estimate from the sample
    expected = (deviation * math.sqrt(2 * LOG_ODDS) + largest * LOG_ODDS / 3) / n_rows
    reaching = np.flatnonzero(expected <= target)
    stored = above + tail / step
    nbytes = stored * (np.log2(np.maximum(2, rows * n / np.maximum(1, stored))) + 1.44 + 5) / 8
    allowed = max(1, int(np.count_nonzero(nbytes <= max_bytes))) - 1
    chosen = min(int(reaching[0]) if len(reaching) else _BINS - 1, allowed)
    return float(step[chosen])


# ------------------------------------------------------------------------------------------------------------- packing


def _compressed(data: np.ndarray) -> bytes:
    """Compress with zlib; only Huffman codes for bytes of classes and gaps, which have no repetitions."""
    strategy = zlib.Z_HUFFMAN_ONLY if data.dtype == np.uint8 else zlib.Z_DEFAULT_STRATEGY
    compressor = zlib.compressobj(9, strategy=strategy)
    return compressor.compress(np.ascontiguousarray(data).tobytes()) + compressor.flush()


def _pack(rows: BoundedRows) -> bytes:
    """A chunk as bytes."""
    n = rows.classes.shape[1]
    row, ids = np.nonzero(rows.classes)
    gaps = np.diff(row * n + ids, prepend=-1) - 1  # over the ends of rows: row and id follow from the sum
    small = np.minimum(gaps, _ESCAPE).astype(np.uint8)
    streams = [
        np.array([rows.step], "<f8"), small, gaps[gaps >= _ESCAPE].astype("<u4"), rows.classes[row, ids],
        rows.large.astype("<f4"), rows.numbers.T.astype("<f8"), rows.top.astype("<u4"),
    ]  # fmt: skip
    packed = [_compressed(stream) for stream in streams]
    return struct.pack(f"<{_STREAMS}I", *map(len, packed)) + b"".join(packed)


def _size_at(read: Callable[[int, int], bytes], offset: int) -> int:
    """Size of the chunk at an offset in bytes; 0 if there is none."""
    lengths = read(offset, 4 * _STREAMS)
    return 4 * _STREAMS + sum(struct.unpack(f"<{_STREAMS}I", lengths)) if len(lengths) == 4 * _STREAMS else 0


def _unpack(data: bytes, rows: int, n: int) -> BoundedRows:
    """The inverse of `_pack`; ValueError or zlib.error for bytes that it did not write.

    No stream is expanded beyond the size that the streams before it imply.
    """
    lengths = struct.unpack_from(f"<{_STREAMS}I", data)
    if 4 * _STREAMS + sum(lengths) != len(data):
        raise ValueError(f"streams of {sum(lengths)} bytes in a chunk of {len(data)}")
    ends = 4 * _STREAMS + np.cumsum((0, *lengths))
    streams = [data[a:b] for a, b in itertools.pairwise(ends)]
    step = float(np.frombuffer(_expanded(streams[0], 8, exactly=True), "<f8")[0])
    gaps = np.frombuffer(_expanded(streams[1], rows * n), np.uint8).astype(np.int64)
    escaped = gaps == _ESCAPE
    gaps[escaped] = np.frombuffer(_expanded(streams[2], 4 * int(escaped.sum()), exactly=True), "<u4")
    positions = np.cumsum(gaps + 1) - 1
    stored_classes = np.frombuffer(_expanded(streams[3], len(positions), exactly=True), np.uint8)
    if len(positions) and (positions[-1] >= rows * n or not stored_classes.min()):
        raise ValueError("ids or classes out of range")
    if not 0 < step < 1:
        raise ValueError(f"a step of {step}")
    classes = np.zeros(rows * n, np.uint8)
    classes[positions] = stored_classes
    large = np.frombuffer(_expanded(streams[4], 4 * int((stored_classes == LARGE).sum()), exactly=True), "<f4")
    if not (large > 0).all():
        raise ValueError(f"{len(large)} probabilities, some of which are not positive")
    numbers = np.frombuffer(_expanded(streams[5], 32 * rows, exactly=True), "<f8").reshape(4, rows).T
    top = np.frombuffer(_expanded(streams[6], 4 * rows, exactly=True), "<u4")
    if not np.isfinite(numbers).all() or top.max(initial=0) >= n:
        raise ValueError("sums that are not finite")
    return BoundedRows(classes.reshape(rows, n), large, np.ascontiguousarray(numbers), top, step)


def _expanded(data: bytes, max_bytes: int, *, exactly: bool = False) -> bytes:
    """Expand one zlib stream to `max_bytes`, or to fewer unless `exactly`. ValueError for another size."""
    decompressor = zlib.decompressobj()
    expanded = decompressor.decompress(data, max_bytes + 1)  # zlib takes 0 as no limit
    if (
        len(expanded) > max_bytes
        or not decompressor.eof
        or decompressor.unused_data
        or (exactly and len(expanded) < max_bytes)
    ):
        raise ValueError(f"a stream that does not end after {max_bytes} bytes, as it should")
    return expanded


# --------------------------------------------------------------------------------------------------------------- files


@dataclass(frozen=True)
class BoundedEncoder:
    """Makes chunks as a `BoundedWriter` stores them: what it takes of the writer, small enough to send to a worker.

    path     of the file, for errors
    tokens   int[n_chunk, n_ctx]
    target   nats, as for the writer
    counts   int64[n_chunk]: the rows of each chunk
    scored   the scored tokens; None: the second half of each chunk
    """

    path: Path
    tokens: np.ndarray
    n_vocab: int
    target: float
    counts: np.ndarray
    scored: ScoredTokens | None

    def encode(self, logits: np.ndarray, index: int) -> np.ndarray:
        """uint8[n]: chunk `index` of the file, of its float32[rows, n_vocab] logits. DataError for another shape."""
        expected = (int(self.counts[index]) if index < len(self.tokens) else 0, self.n_vocab)
        if logits.shape != expected or index >= len(self.tokens):
            raise DataError(f"{self.path}: chunk {index}: expected logits {expected}, got {logits.shape}")
        if not np.isfinite(logits.sum(axis=1, dtype=np.float64)).all():
            raise DataError(f"{self.path}: chunk {index}: logits hold NaN or Inf")
        return np.frombuffer(self._fitting(np.asarray(logits, np.float32), index), np.uint8)

    def _fitting(self, logits: np.ndarray, index: int) -> bytes:
        """Encode a chunk with the largest step that reaches the target, or a larger one if the size demands it.

        The size does not limit small vocabularies, where the numbers of a row alone take more. The seed of the random
        numbers is a hash of the text: the same model and text give the same file, and no candidate depends on it.
        """
        tokens = self.tokens[index]
        if self.scored is None:
            targets = tokens[scored_rows(len(tokens)).start + 1 :]
        else:
            targets = tokens[self.scored.rows(index) + 1]
        seed = int(digest(tokens.tobytes() + struct.pack("<I", index)), 16)
        limited = self.n_vocab >= FROM_VOCABULARY
        most = 2 * len(logits) * (row_words(self.n_vocab) // SMALLER - 32) if limited else math.inf
        over = max(len(logits), min(_TARGET_TOKENS, int(self.counts.sum())))
        step = steps(logits, self.target, over, most)
        while True:
            data = _pack(encode_rows(logits, targets, step, seed))
            if len(data) <= most or step > 0.1:
                return data
            # Halving the stored tokens takes about one octave; the square root aims just below the limit.
            step = min(0.5, step * max(2**0.125, (len(data) / most) ** 0.5))


class BoundedWriter:
    """Writes a `.qkld` chunk by chunk; used like `BaseWriter`.

    tokens   int[n_chunk, n_ctx], the text's tokens
    target   nats: the bound to reach, see the top of this file
    note     a JSON object about the origin of the file, stored in it and shown with results
    logged   as for BaseWriter
    scored   the scored tokens; None: the second half of each chunk
    """

    def __init__(self, path: str | os.PathLike[str], tokens: np.ndarray, n_vocab: int, *, target: float = TARGET,
                 note: dict[str, Any] | None = None, logged: LoggedChunks | None = None,
                 scored: ScoredTokens | None = None):  # fmt: skip
        self.path = Path(path)
        n_vocab = arguments.integer(n_vocab, f"{path}: the size of the vocabulary", 2, _MAX_VOCAB)
        self.tokens = arguments.integers(tokens, f"{path}: tokens of a vocabulary of {n_vocab}", n_vocab).astype("<i4")
        if self.tokens.ndim != 2:
            raise DataError(f"{path}: expected tokens[n_chunk, n_ctx], got shape {self.tokens.shape}")
        if not target > 0:
            raise DataError(f"{path}: a bound of {target} nats; it must be larger than 0")
        self.n_vocab, self.target, self.note, self._logged = n_vocab, target, note or {}, logged
        self.scored, self._magic = scored, MAGIC if scored is None else MAGIC_SCORED
        counts = row_counts(self.tokens.shape[1], len(self.tokens), scored)
        self.encoder = BoundedEncoder(self.path, self.tokens, n_vocab, target, counts, scored)

    def __enter__(self) -> BoundedWriter:
        self._file = ChunkFile(self.path, self._magic + bytes(8), self._logged, _size_at)
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
                self._finish()
                self._file.finish()
        finally:
            self._file.leave()

    def _finish(self) -> None:
        n_chunk, n_ctx = self.tokens.shape
        index = {
            "n_ctx": n_ctx, "n_vocab": self.n_vocab, "n_chunk": n_chunk, "target": self.target, "note": self.note,
            "tokens": base64.b64encode(self.tokens.tobytes()).decode(), "chunks": self._file.places,
        }  # fmt: skip
        if self.scored is not None:
            index["scored"] = self.scored.to_json()
        data = zlib.compress(json.dumps(index).encode(), 9)
        stream = self._file.file.stream
        place = stream.tell()
        stream.write(data + bytes.fromhex(digest(data)))
        stream.seek(len(self._magic))
        stream.write(struct.pack("<Q", place))


class BoundedReader:
    """A `.qkld`, mapped: `.n_ctx .n_vocab .n_chunk .target .note`, `.tokens` int32[n_chunk, n_ctx], `.chunk(i)`.

    `.scored` are its scored tokens, None for the second half of each chunk; `.counts` int64[n_chunk] their number.
    Every part is checked against its checksum when it is read: FormatError.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self._bytes = map_file(self.path)
        size = self._bytes.size
        if (magic := self._bytes[:8].tobytes()) not in (MAGIC, MAGIC_SCORED):
            raise FormatError(f"{path}: begins with {magic!r}, a bounded base with {MAGIC!r} or {MAGIC_SCORED!r}")
        self._has_scored = magic == MAGIC_SCORED
        (place,) = struct.unpack("<Q", self._bytes[8:16].tobytes().ljust(8, b"\0"))
        if not 16 <= place <= size - 16:
            raise FormatError(f"{path}: {size} bytes, its index would begin at {place}; the file is truncated")
        data = self._bytes[place : size - 16].tobytes()
        if bytes.fromhex(digest(data)) != self._bytes[size - 16 :].tobytes():
            raise FormatError(f"{path}: offset {place}: the index does not have its checksum; the file is corrupt")
        try:
            expanded = _expanded(data, _INDEX_BYTES + _INDEX_RATIO * len(data))
            self._read_index(json_input.parse(expanded, f"{path}: offset {place}: the index"))
        except (ValueError, KeyError, TypeError, OverflowError, MemoryError, DataError, zlib.error) as error:
            raise FormatError(f"{path}: offset {place}: the index is not one of a bounded base ({error})") from None

    def __reduce__(self) -> tuple[object, ...]:
        return BoundedReader, (self.path.absolute(),)  # a worker opens the file itself

    def _read_index(self, index: dict[str, Any]) -> None:
        self.n_ctx, self.n_vocab, self.n_chunk = (int(index[k]) for k in ("n_ctx", "n_vocab", "n_chunk"))
        self.target, self.note = float(index["target"]), dict(index["note"])
        tokens = np.frombuffer(base64.b64decode(index["tokens"]), "<i4").reshape(self.n_chunk, self.n_ctx)
        if self.n_ctx < 4 or len(index["chunks"]) != self.n_chunk or not self.n_chunk:
            raise ValueError(f"{len(index['chunks'])} chunks, {self.n_chunk} announced")
        if tokens.min() < 0 or tokens.max() >= self.n_vocab:
            raise ValueError(f"token {tokens.max()} of a vocabulary of {self.n_vocab}")
        if self.n_vocab > _MAX_VOCAB or not 0 < self.target < math.inf:
            raise ValueError(f"a vocabulary of {self.n_vocab} and a bound of {self.target}")
        self.tokens = tokens
        self.scored: ScoredTokens | None = None
        if self._has_scored:
            self.scored = ScoredTokens.from_json(index["scored"], self.n_chunk, self.n_ctx)
        self.counts = row_counts(self.n_ctx, self.n_chunk, self.scored)
        self._index = [(int(a), int(b), str(c)) for a, b, c in index["chunks"]]

    @property
    def ratio(self) -> float:
        """How many times larger ik_llama.cpp's format would be."""
        return file_bytes(self.n_ctx, self.n_vocab, self.n_chunk, int(self.counts.sum())) / self._bytes.size

    def chunk(self, index: int) -> BoundedRows:
        """The rows of one chunk; FormatError if its checksum is wrong."""
        start, size, expected = self._index[index]
        require_whole(self._bytes, self.path)
        data = self._bytes[start : start + size].tobytes()
        if digest(data) != expected:
            raise FormatError(
                f"{self.path}: chunk {index}, offset {start}: {size} bytes that do not have their checksum {expected}; "
                "the file is corrupt: make the base again"
            )
        try:
            return _unpack(data, int(self.counts[index]), self.n_vocab)
        except (ValueError, IndexError, MemoryError, struct.error, zlib.error) as error:
            reason = str(error) or type(error).__name__
            raise FormatError(f"{self.path}: chunk {index}, offset {start}: {reason}") from None


def is_bounded(path: str | os.PathLike[str]) -> bool:
    """Whether a regular file begins as a bounded base does."""
    try:
        return read_beginning(path, len(MAGIC)) in (MAGIC, MAGIC_SCORED)
    except (OSError, FormatError):
        return False
