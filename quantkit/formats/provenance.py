"""Hashes of the inputs of each tensor of an output. They tell which tensors have to be requantized.

    source      the type and the bytes of the tensor that was read, and the scales of an NVFP4 tensor. For a checkpoint,
                the bytes that `convert` would write, so that quantizing a checkpoint and quantizing the converted file
                have the same source
    importance  the float32 importance of its columns, "-" for none; where second moments of its input were used,
                followed by their hash
    codec       the version of the encoder (below); "copy" if the bits were copied
    data        the bytes that were written

An output has them in its metadata, one line a `Record`:

    quantkit.tensors            ["blk.0.attn_q.weight TYPE SOURCE IMPORTANCE CODEC DATA", …]
    quantkit.source.sha256      of the names and sources of all tensors
    quantkit.imatrix.sha256     of the whole importance matrix. With --hide-imatrix it is absent, and IMPORTANCE is
                                "hidden"
    quantkit.calibration        only with --calibrate: the settings of the measurement. IMPORTANCE and
                                quantkit.imatrix.sha256 are then hashes of the text and the settings

The records stay when the file is copied, split or repacked, so TYPE may be the type before repacking.

The hash of a tensor is the first 128 bits of SHA-256 over the hashes of its pieces (`row_pieces`). So threads hash the
pieces that they encode anyway, and nothing is read only to be hashed. Hashing costs about a nanosecond a byte: a tenth
of the CPU time of F16 to Q4_K_M, a sixth of that to Q8_0, and less the longer an encoder searches.

**The version of a codec** is a hash of the bytes to which it encodes a fixed probe (`codec`). A version number in each
type's file would be forgotten. A hash of the sources changes with every comment and every imported file, so that any
update would requantize everything. The bytes of the probe change if and only if the bytes of files change. They also
cover the compiler, which a hash of sources does not. A change that touches none of the probe's 1024 blocks of 32 is
missed. So the probe has rows of many kinds, with importance and without: normal, heavy-tailed, sparse, ternary, tiny
and huge weights, outliers, rows with a nonzero mean.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from quantkit import types
from quantkit.formats.gguf.scales import Scaled
from quantkit.formats.imatrix import Imatrix
from quantkit.types import QuantType

TENSORS = "quantkit.tensors"
SOURCE = "quantkit.source.sha256"
IMATRIX = "quantkit.imatrix.sha256"
CALIBRATION = "quantkit.calibration"

NONE, HIDDEN, COPY = "-", "hidden", "copy"
_UNKNOWN = "0" * 32  # placeholder for a hash that is not known yet

PIECE_ELEMENTS = 1 << 19  # 2 MiB of float32: stays in a core's cache from decoding to encoding
_GROUP = 16  # rows; a multiple of the rows that any type interleaves


class StoredRows(Protocol):
    """Rows of a tensor, or of an unfinished one, as a file stores them."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows last but one, columns last."""

    @property
    def type(self) -> QuantType:
        """The type of the bytes that `rows` returns."""

    def rows(self, start: int, stop: int) -> np.ndarray:
        """uint8[stop - start, row_bytes]: some rows as stored."""


class Rows(StoredRows, Scaled, Protocol):
    """A tensor of a GGUF file, or a tensor of a checkpoint as `convert` would write it."""


@dataclass(frozen=True)
class Record:
    """A tensor's type and the hashes of its inputs: 32 hexadecimal digits, 16 for the codec."""

    name: str
    type: str
    source: str
    importance: str
    codec: str
    data: str

    def __str__(self) -> str:
        return " ".join((self.name, self.type, self.source, self.importance, self.codec, self.data))

    @classmethod
    def parse(cls, line: str) -> Record | None:
        """The record of a line; None unless the line has six fields."""
        parts = line.rsplit(" ", 5)
        return cls(*parts) if len(parts) == 6 else None

    def hidden(self) -> Record:
        """The record without the hash of the importance."""
        return self if self.importance == NONE else replace(self, importance=HIDDEN)

    def same_encoding(self, other: Record) -> bool:
        """Whether type, importance and codec are the same; sources are not compared. False for hidden importance."""
        mine, others = ((record.type, record.importance, record.codec) for record in (self, other))
        return mine == others and self.importance != HIDDEN


def records(metadata: Mapping[str, object]) -> dict[str, Record]:
    """The records in a file's metadata, by tensor name."""
    lines = metadata.get(TENSORS)
    found = [Record.parse(line) for line in lines if isinstance(line, str)] if isinstance(lines, list) else []
    return {record.name: record for record in found if record}


def unknown(name: str, kind: str, importance: str, codec_: str) -> Record:
    """A record with placeholders for the hashes of source and data. It is as long as the final record."""
    return Record(name, kind, _UNKNOWN, importance, codec_, _UNKNOWN)


def of_sources(tensor_records: Iterable[Record]) -> str:
    """SHA-256 of the names and source hashes of all tensors, in order."""
    return hashlib.sha256(
        "".join(f"{r.name} {r.source}\n" for r in tensor_records).encode("utf-8", "surrogateescape")
    ).hexdigest()


# ----------------------------------------------------------------------------------------------------------- of tensors


def row_pieces(shape: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Ranges of rows in which a tensor is encoded and hashed: whole groups of 16 rows, never across two matrices."""
    rows = shape[-2] if len(shape) > 1 else 1
    step = max(1, PIECE_ELEMENTS // shape[-1] // _GROUP) * _GROUP
    matrices = 1
    for n in shape[:-2]:
        matrices *= n
    for first in range(0, matrices * rows, rows):
        yield from ((first + start, first + min(rows, start + step)) for start in range(0, rows, step))


def of_piece(data: np.ndarray) -> bytes:
    """SHA-256 of the bytes of one piece."""
    return hashlib.sha256(np.ascontiguousarray(data).data).digest()


def of_pieces(kind: str, pieces: Iterable[bytes]) -> str:
    """The hash of a tensor, from its type and the hashes of its pieces."""
    return hashlib.sha256(kind.encode() + b"\n" + b"".join(pieces)).hexdigest()[:32]


def of_importance(values: np.ndarray | None) -> str:
    """The hash of importance values, float32[matrices, n]; "-" for None."""
    return NONE if values is None else hashlib.sha256(np.ascontiguousarray(values, "<f4").data).hexdigest()[:32]


def of_entry(imatrix: Imatrix, name: str, with_moments: bool) -> str:
    """The hash of a tensor's importance and, `with_moments`, second moments in an importance matrix."""
    moments = imatrix.second_moments.get(name) if with_moments else None
    return of_importance(imatrix[name].values) + (moments.sha256()[:32] if moments is not None else "")


def of_calibration(digest: str, with_moments: bool) -> str:
    """The value of `importance` for importance, and second moments, that are measured while the file is written."""
    return digest[:32] * (1 + with_moments)


def has_moments(importance: str) -> bool:
    """Whether second moments are in the hash that `of_entry` or `of_calibration` gave."""
    return len(importance) > 32


def of_imatrix(matrix: Imatrix) -> str:
    """SHA-256 of the names, values and second moments of all entries; the same for both file formats."""
    digest = hashlib.sha256()
    for name, entry in sorted(matrix.entries.items()):
        digest.update(f"{name} {entry.values.size}\n".encode("utf-8", "surrogateescape"))
        digest.update(np.ascontiguousarray(entry.values, "<f4").data)
        if name in matrix.second_moments:
            digest.update(matrix.second_moments[name].sha256().encode())
    return digest.hexdigest()


# ------------------------------------------------------------------------------------------------------------ of codecs


@functools.cache
def codec(name: str, effort: str, second_moments: bool = False, scale: float | None = None) -> str:
    """The version of a type's encoder: a hash of the encoded probe (under second moments), 16 hexadecimal digits.

    `scale` is what values are divided by before.
    """
    kind, digest = types.get(name), hashlib.sha256()
    if scale is not None:
        digest.update(f"scale {scale}\n".encode())
    x, importance = _probe()
    if second_moments:
        integers = np.rint(x[:16] * 2**15).astype(np.int64)  # sums of integers are the same on every machine
        h = ((integers.T @ integers) / 2.0**34).astype(np.float32)
        digest.update(kind.quantize(x, importance, second_moments=h, effort=effort, threads=1).tobytes())
    for weights in () if second_moments else (None, importance):
        if weights is not None or not kind.requires_imatrix:
            digest.update(kind.quantize(x, weights, effort=effort, threads=1).tobytes())
    return digest.hexdigest()[:16]


@functools.cache
def _probe() -> tuple[np.ndarray, np.ndarray]:
    """The probe, float32[64, 512], and the importance of its columns. Integer arithmetic: the same on every machine."""
    bits = _mixed(64 * 512)
    drawn = bits[:, None] >> np.array([0, 16, 32, 48], np.uint64) & np.uint64(0xFFFF)
    x = (drawn.astype(np.float32).sum(1) - 131070) / 2**15  # nearly normal, and exact
    x = x.astype(np.float32).reshape(-1, 8, 512)  # eight rows of a kind each
    x[:, 2] *= x[:, 2] * x[:, 2]  # heavy tails
    x[:, 3] *= bits.reshape(x.shape)[:, 3] % np.uint64(8) == 0  # most of it zero
    x[:, 4] = np.sign(x[:, 4]) * (np.abs(x[:, 4]) > 0.5)
    x[:, 5] *= np.float32(2**-12)
    x[:, 6] *= np.float32(2**9)
    x[:, 6, 77::256] *= np.float32(16)
    x[:, 7] += np.float32(3)
    weights = (_mixed(512) >> np.uint64(48)).astype(np.float32) / np.float32(2**16)
    return x.reshape(-1, 512), weights * weights * (weights > 0.06)  # some columns were never seen


def _mixed(count: int) -> np.ndarray:
    """uint64[count] of random bits: SplitMix64 (Steele, Lea, Flood 2014) of 0, 1, 2, …"""
    z = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return z ^ z >> np.uint64(31)
