"""Bounded base files of KL divergence (`.qkld`): a model's distributions over a text, in a twentieth of the size.

A base of the reference takes 16 bits a token of the vocabulary. What a divergence from the base needs is less: with p
the base's probabilities and x = -log q a candidate's,

    KLD = sum p log p + sum p x

The first sum is a number, stored exactly. For the second the tokens of a row are put into classes by p alone, and of
each class the probability it holds as a whole is stored exactly, so that what is unknown is only how it is spread
within the class. For a class of n tokens with the mean probability m and the mean x̄ of x,

    sum p x = n m x̄ + sum (p - m)(x - x̄),     |sum (p - m)(x - x̄)| <= D * sqrt(sum (x - x̄)²)

with D = sqrt(sum (p - m)²), which is stored, rounded up, too (Cauchy and Schwarz). x is any candidate's: the bound is
worked out from its logits when it is compared (evaluate/bounded.py) and needs no assumption about it.

Classes of a row: with a step s, the same for all rows of a chunk,

    tail      p < s                   the ids are not stored
    1, 2      s <= p < 2s <= p < 4s
    3 … 63    then equal steps of 4s
    head      p >= 248 s              each token by itself: no unknown, D = 0

Equal steps in p, not in log p, are what the bound asks for: a token costs log2(1/step) bits, and adds to the bound in
proportion to the step of its p. The same s for all rows makes the number k of kept tokens each row's own: two or
three where the model is sure, thousands where it is not. s is the largest with

    mean over the rows of:  sum over classes of D sqrt(n)  +  tail mass * TAIL_NATS  <=  target

that is, the bound for a candidate whose x spread by one nat within a class and by TAIL_NATS in the tail (and with what
D is when p is spread evenly in a class). Where a chunk
would then be larger than its share of 1/20 of the reference's format the step is made coarser until it is not; the
bound that is printed is the one that holds, in either case. The tail's part of it is narrowed further by the largest p
in it, by D, and by Gibbs: sum p log(p/q) over the tail is at least T log(T / Q), with the masses T and Q.

Little-endian:

    0     8 bytes  "QKLDv1\\0\\0"
    8     u64      offset of the index
    16    chunks, each as written by `_pack`: u32 lengths of ten zlib streams, then these
    index zlib of JSON: n_ctx, n_vocab, n_chunk, target, note (what made it), tokens (base64 of int32), and for each
          chunk its offset, bytes and BLAKE2b-128; then the BLAKE2b-128 of the compressed index, 16 bytes, ends the file
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import math
import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quantkit import jit
from quantkit.errors import DataError, FormatError
from quantkit.files.atomic import AtomicFile, publish
from quantkit.files.kld import row_words, rows_per_chunk, scored_rows
from quantkit.files.mapping import map_file
from quantkit.jit import kernel

MAGIC = b"QKLDv1\0\0"
CLASSES = 63  # of kept tokens, without the head
HEAD = CLASSES + 1
SMALLER = 20  # times than the reference's format, at least
FROM_VOCABULARY = 98304  # tokens, from which it holds: in small ones a row's own numbers weigh more
TARGET = 1e-3  # nats
TAIL_NATS = 10.0
_BINS = 160  # half octaves of p below 1
_ESCAPE = 255  # gap of ids that does not fit a byte
_CENTRES = 65534.0  # codes of a class's mean between its edges
_SPREADS = 254.0
# In units of the step, of classes 1 … 63.
_LOWER = np.array([1.0, 2.0, *(4.0 * np.arange(1, CLASSES - 1))])
_WIDTH = np.array([1.0, 2.0, *(4.0 * np.ones(CLASSES - 2))])


# ------------------------------------------------------------------------------------------------------------ encoding


@kernel
def _probabilities(row, out):
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
    return np.float64(top) + np.log(total)


@kernel
def _survey_rows(logits, counts, masses):
    """Tokens and their probability by half octaves below 1, of each row; int64 and float64[rows, _BINS]."""
    p = np.empty(logits.shape[1], np.float64)
    for r in range(logits.shape[0]):
        _probabilities(logits[r], p)
        for i in range(p.shape[0]):
            if p[i] > 0:
                at = min(counts.shape[1] - 1, int(-2.0 * np.log2(p[i])))
                counts[r, at] += 1
                masses[r, at] += p[i]


@kernel
def _class_of(v):
    """Of a probability in steps."""
    if v < 4.0:
        return int(v >= 1.0) + int(v >= 2.0)
    return 64 if v >= 248.0 else 2 + int(v / 4.0)


@kernel
def _classify_rows(logits, targets, step, classes, numbers, top, centres, spreads):
    """Fill, for each row, the class of each token and the sums."""
    n = logits.shape[1]
    p = np.empty(n, np.float64)
    count, mass, squares = np.empty(64, np.int64), np.empty(64, np.float64), np.empty(64, np.float64)
    for r in range(logits.shape[0]):
        log_sum = _probabilities(logits[r], p)
        count[:] = 0
        mass[:] = 0
        entropy, tail_entropy, largest, best = 0.0, 0.0, 0.0, 0
        for i in range(n):
            if logits[r, i] > logits[r, best]:
                best = i
            log_p = np.float64(logits[r, i]) - log_sum
            entropy += p[i] * log_p
            j = _class_of(p[i] / step)
            classes[r, i] = j
            if j < 64:
                count[j] += 1
                mass[j] += p[i]
            if j == 0:
                tail_entropy += p[i] * log_p
                largest = max(largest, p[i])
        squares[:] = 0
        for i in range(n):
            j = classes[r, i]
            if j < 64:
                squares[j] += (p[i] - mass[j] / count[j]) ** 2
        for j in range(1, 64):
            if count[j]:
                lower = np.float64(j if j < 3 else 4 * (j - 2))
                width = step * (j if j < 3 else 4)
                place = (mass[j] / count[j] - lower * step) / width
                centres[r, j - 1] = np.uint16(min(max(np.rint(place * 65534.0), 0.0), 65534.0))
                spreads[r, j - 1] = np.uint8(min(np.ceil(np.sqrt(squares[j] / count[j]) / width * 508.0), 255.0))
        numbers[r, 0] = entropy
        numbers[r, 1] = tail_entropy
        numbers[r, 2] = mass[0]
        numbers[r, 3] = largest
        numbers[r, 4] = np.sqrt(squares[0])
        numbers[r, 5] = log_sum - np.float64(logits[r, targets[r]])
        top[r] = best


@dataclass(frozen=True)
class BoundedRows:
    """The rows of a chunk.

    classes  uint8[rows, n_vocab]: 0 tail, 1 … 63, 64 head
    head     float32[n]: probabilities of the head's tokens, row by row in the order of ids
    numbers  float64[rows, 6]: sum p log p; that of the tail; mass, largest p and D of the tail; nll of the target
    top      uint32[rows]: the token with the largest logit, the first of equals
    centres  uint16[rows, 63]: mean p of a class, from its lower (0) to its upper edge (65534)
    spreads  uint8[rows, 63]: D / sqrt(n) of a class in units of the class's width / 508, rounded up
    step     of the classes
    """

    classes: np.ndarray
    head: np.ndarray
    numbers: np.ndarray
    top: np.ndarray
    centres: np.ndarray
    spreads: np.ndarray
    step: float

    @property
    def kept(self) -> np.ndarray:
        """int[rows]: tokens whose ids are stored."""
        return np.count_nonzero(self.classes, axis=1)

    def means(self) -> np.ndarray:
        """float64[rows, 63]: the mean p of each class."""
        return self.step * (_LOWER + _WIDTH * (self.centres / _CENTRES))

    def deviations(self) -> np.ndarray:
        """float64[rows, 63]: D / sqrt(n) of each class, at least."""
        return self.step * _WIDTH * self.spreads / (2 * _SPREADS)


def encode_rows(logits: np.ndarray, targets: np.ndarray, step: float) -> BoundedRows:
    """Classes of float32[rows, n_vocab] logits with steps of `step`."""
    rows, n = logits.shape
    outputs = (np.empty((rows, n), np.uint8), np.empty((rows, 6)), np.empty(rows, np.uint32),
               np.zeros((rows, CLASSES), np.uint16), np.zeros((rows, CLASSES), np.uint8))  # fmt: skip
    logits, targets = jit.readonly(np.ascontiguousarray(logits)), jit.readonly(np.asarray(targets, np.int32))

    def task(a: int, b: int) -> None:
        _classify_rows(logits[a:b], targets[a:b], step, *(array[a:b] for array in outputs))

    jit.over_rows(task, rows)
    classes, numbers, top, centres, spreads = outputs
    row, ids = np.nonzero(classes == HEAD)
    log_sum = numbers[:, 5] + logits[np.arange(rows), targets]
    head = np.exp(logits[row, ids] - log_sum[row]).astype(np.float32)
    return BoundedRows(classes, head, numbers, top, centres, spreads, step)


def steps(logits: np.ndarray, target: float, most: float = math.inf) -> float:
    """The largest step, a power of sqrt 2, whose expected bound is within the target; see the top of this file.

    It is made coarser where the chunk would take more than about `most` bytes: an id costs what a place in a list of
    such density does, a class two and a half bits.
    """
    rows, n = logits.shape
    counts, masses = np.zeros((rows, _BINS), np.int64), np.zeros((rows, _BINS))
    logits = jit.readonly(np.ascontiguousarray(logits))
    jit.over_rows(lambda a, b: _survey_rows(logits[a:b], counts[a:b], masses[a:b]), rows)
    kept, mass = np.cumsum(counts.sum(0)), np.cumsum(masses.sum(0))
    step = 2.0 ** (-(np.arange(_BINS) + 1) / 2)  # the lower edge of a bin
    expected = (kept * step * _WIDTH[-1] / math.sqrt(12) + np.maximum(0, mass[-1] - mass) * TAIL_NATS) / rows
    fine = np.flatnonzero(expected <= target)
    size = kept * (np.log2(rows * n / np.maximum(1, kept)) + 1.44 + 2.5) / 8
    allowed = max(1, int(np.count_nonzero(size <= most))) - 1
    chosen = min(int(fine[0]) if len(fine) else _BINS - 1, allowed)
    return float(step[chosen])


# ------------------------------------------------------------------------------------------------------------- packing


def _compressed(data: np.ndarray) -> bytes:
    """zlib; symbols only, no repetitions, where the data are bytes of classes and gaps, which have none."""
    strategy = zlib.Z_HUFFMAN_ONLY if data.dtype == np.uint8 and data.ndim == 1 else zlib.Z_DEFAULT_STRATEGY
    machine = zlib.compressobj(9, strategy=strategy)
    return machine.compress(np.ascontiguousarray(data).tobytes()) + machine.flush()


def _pack(rows: BoundedRows) -> bytes:
    """A chunk as bytes."""
    n = rows.classes.shape[1]
    row, ids = np.nonzero(rows.classes)
    gaps = np.diff(row * n + ids, prepend=-1) - 1  # over the ends of rows: row and id follow from the sum
    small = np.minimum(gaps, _ESCAPE).astype(np.uint8)
    streams = [
        np.array([rows.step]), small, gaps[gaps >= _ESCAPE].astype("<u4"), rows.classes[row, ids],
        rows.head.astype("<f4"), rows.numbers.T.astype("<f8"), rows.top.astype("<u4"),
        (rows.centres & 255).astype(np.uint8).reshape(-1), (rows.centres >> 8).astype(np.uint8).reshape(-1),
        rows.spreads.reshape(-1),
    ]  # fmt: skip
    packed = [_compressed(stream) for stream in streams]
    return struct.pack("<10I", *map(len, packed)) + b"".join(packed)


def _unpack(data: bytes, rows: int, n: int) -> BoundedRows:
    """The inverse; ValueError or zlib.error for bytes that `_pack` did not write."""
    lengths = struct.unpack_from("<10I", data)
    if 40 + sum(lengths) != len(data):
        raise ValueError(f"streams of {sum(lengths)} bytes in a chunk of {len(data)}")
    ends = 40 + np.cumsum((0, *lengths))
    parts = [_expanded(data[a:b], 16 * rows * n + 4096) for a, b in itertools.pairwise(ends)]
    step = float(np.frombuffer(parts[0], "<f8")[0])
    gaps = np.frombuffer(parts[1], np.uint8).astype(np.int64)
    gaps[gaps == _ESCAPE] = np.frombuffer(parts[2], "<u4")
    at = np.cumsum(gaps + 1) - 1
    kinds = np.frombuffer(parts[3], np.uint8)
    if len(kinds) != len(at) or (len(at) and (at[-1] >= rows * n or not 1 <= kinds.min() <= kinds.max() <= HEAD)):
        raise ValueError("ids or classes out of range")
    if not 0 < step < 1:
        raise ValueError(f"a step of {step}")
    classes = np.zeros(rows * n, np.uint8)
    classes[at] = kinds
    head = np.frombuffer(parts[4], "<f4")
    if len(head) != np.count_nonzero(kinds == HEAD):
        raise ValueError(f"{len(head)} probabilities of the head")
    numbers = np.frombuffer(parts[5], "<f8").reshape(6, rows).T
    low, high, spreads = (np.frombuffer(part, np.uint8).reshape(rows, CLASSES) for part in parts[7:])
    centres = low.astype(np.uint16) | (high.astype(np.uint16) << 8)
    top = np.frombuffer(parts[6], "<u4").reshape(rows)
    if not np.isfinite(numbers).all() or top.max(initial=0) >= n:
        raise ValueError("sums that are not finite")
    return BoundedRows(classes.reshape(rows, n), head, np.ascontiguousarray(numbers), top, centres, spreads, step)


def _expanded(data: bytes, most: int) -> bytes:
    machine = zlib.decompressobj()
    found = machine.decompress(data, most)
    if machine.unconsumed_tail or not machine.eof:
        raise ValueError("a stream that does not end where it should")
    return found


# --------------------------------------------------------------------------------------------------------------- files


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


class BoundedWriter:
    """Writes a `.qkld` chunk by chunk; the use of `files.kld.BaseWriter`.

    tokens   int[n_chunk, n_ctx], the text's own
    target   nats: the bound to aim at, see the top of this file
    note     what the file was made of, kept in it and shown with results
    """

    def __init__(self, path: str | os.PathLike[str], tokens: np.ndarray, n_vocab: int, *, target: float = TARGET,
                 note: dict[str, Any] | None = None):  # fmt: skip
        self.path = Path(path)
        self.tokens = np.ascontiguousarray(tokens, "<i4")
        if self.tokens.ndim != 2:
            raise DataError(f"{path}: expected tokens[n_chunk, n_ctx], got shape {self.tokens.shape}")
        if not target > 0:
            raise DataError(f"{path}: a bound of {target} nats; it must be larger than 0")
        self.n_vocab, self.target, self.note = n_vocab, target, note or {}
        self._index: list[tuple[int, int, str]] = []

    def __enter__(self) -> BoundedWriter:
        self._file = AtomicFile(self.path)
        self._file.stream.write(MAGIC + bytes(8))
        return self

    def write(self, logits: np.ndarray) -> None:
        """Append one chunk's float32[rows_per_chunk, n_vocab] logits."""
        n_ctx, index = self.tokens.shape[1], len(self._index)
        expected = (rows_per_chunk(n_ctx), self.n_vocab)
        if logits.shape != expected or index >= len(self.tokens):
            raise DataError(f"{self.path}: chunk {index}: expected logits {expected}, got {logits.shape}")
        if not np.isfinite(logits.sum(axis=1, dtype=np.float64)).all():
            raise DataError(f"{self.path}: chunk {index}: logits hold NaN or Inf")
        data = self._fitting(np.asarray(logits, np.float32), self.tokens[index, scored_rows(n_ctx).start + 1 :])
        self._index.append((self._file.stream.tell(), len(data), _digest(data)))
        self._file.stream.write(data)

    def _fitting(self, logits: np.ndarray, targets: np.ndarray) -> bytes:
        """The chunk with the finest step that the target asks for and the size allows.

        The size is no limit for small vocabularies, where the numbers of a row alone take more.
        """
        limited = self.n_vocab >= FROM_VOCABULARY
        most = 2 * len(logits) * (row_words(self.n_vocab) // SMALLER - 32) if limited else math.inf
        step = steps(logits, self.target, most)
        while True:
            data = _pack(encode_rows(logits, targets, step))
            if len(data) <= most or step > 0.1:
                return data
            # Halving what is kept takes about one octave; the square root aims just below the limit.
            step = min(0.5, step * max(2**0.125, (len(data) / most) ** 0.5))

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        try:
            if kind is None:
                if len(self._index) != len(self.tokens):
                    raise DataError(f"{self.path}: {len(self._index)} chunks written, {len(self.tokens)} announced")
                self._finish()
                publish([self._file])
        finally:
            self._file.discard()

    def _finish(self) -> None:
        n_chunk, n_ctx = self.tokens.shape
        index = {
            "n_ctx": n_ctx, "n_vocab": self.n_vocab, "n_chunk": n_chunk, "target": self.target, "note": self.note,
            "tokens": base64.b64encode(self.tokens.tobytes()).decode(), "chunks": self._index,
        }  # fmt: skip
        data = zlib.compress(json.dumps(index).encode(), 9)
        place = self._file.stream.tell()
        self._file.stream.write(data + bytes.fromhex(_digest(data)))
        self._file.stream.seek(len(MAGIC))
        self._file.stream.write(struct.pack("<Q", place))


class BoundedReader:
    """A `.qkld`, mapped: `.n_ctx .n_vocab .n_chunk .target .note`, `.tokens` int32[n_chunk, n_ctx], `.chunk(i)`.

    Every part is checked against its checksum when it is read: FormatError.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self._bytes = map_file(self.path)
        size = self._bytes.size
        if (magic := self._bytes[:8].tobytes()) != MAGIC:
            raise FormatError(f"{path}: begins with {magic!r}, a bounded base with {MAGIC!r}")
        (place,) = struct.unpack("<Q", self._bytes[8:16].tobytes().ljust(8, b"\0"))
        if not 16 <= place <= size - 16:
            raise FormatError(f"{path}: {size} bytes, its index would begin at {place}; the file is truncated")
        data = self._bytes[place : size - 16].tobytes()
        if bytes.fromhex(_digest(data)) != self._bytes[size - 16 :].tobytes():
            raise FormatError(f"{path}: offset {place}: the index does not have its checksum; the file is corrupt")
        try:
            self._read_index(json.loads(zlib.decompress(data)))
        except (ValueError, KeyError, TypeError, zlib.error) as error:
            raise FormatError(f"{path}: offset {place}: the index is not one of a bounded base ({error})") from None

    def _read_index(self, index: dict[str, Any]) -> None:
        self.n_ctx, self.n_vocab, self.n_chunk = (int(index[k]) for k in ("n_ctx", "n_vocab", "n_chunk"))
        self.target, self.note = float(index["target"]), dict(index["note"])
        tokens = np.frombuffer(base64.b64decode(index["tokens"]), "<i4").reshape(self.n_chunk, self.n_ctx)
        if self.n_ctx < 4 or len(index["chunks"]) != self.n_chunk or not self.n_chunk:
            raise ValueError(f"{len(index['chunks'])} chunks, {self.n_chunk} announced")
        if tokens.min() < 0 or tokens.max() >= self.n_vocab:
            raise ValueError(f"token {tokens.max()} of a vocabulary of {self.n_vocab}")
        self.tokens = tokens
        self._index = [(int(a), int(b), str(c)) for a, b, c in index["chunks"]]

    @property
    def rows_per_chunk(self) -> int:
        return rows_per_chunk(self.n_ctx)

    @property
    def ratio(self) -> float:
        """How many times larger the reference's format would be."""
        from quantkit.files.kld import file_bytes

        return file_bytes(self.n_ctx, self.n_vocab, self.n_chunk) / self._bytes.size

    def chunk(self, index: int) -> BoundedRows:
        """The rows of one chunk."""
        start, size, digest = self._index[index]
        data = self._bytes[start : start + size].tobytes()
        if _digest(data) != digest:
            raise FormatError(
                f"{self.path}: chunk {index}, offset {start}: {size} bytes that do not have their checksum {digest}; "
                "the file is corrupt: make the base again"
            )
        try:
            return _unpack(data, self.rows_per_chunk, self.n_vocab)
        except (ValueError, IndexError, struct.error, zlib.error) as error:
            raise FormatError(f"{self.path}: chunk {index}, offset {start}: {error}") from None


def is_bounded(path: str | os.PathLike[str]) -> bool:
    """Whether a file begins as a bounded base does."""
    try:
        with open(path, "rb") as stream:
            return stream.read(8) == MAGIC
    except OSError:
        return False
