"""The zip directory of a file saved by torch: where its records are, checked strictly.

torch writes each record once, without compression. So compressed records, two records of one name, records that overlap
and records beyond the end of the file are errors. They are found before any data are read: a compressed record would be
read as if it were not, and a small one may inflate without end.
"""

from __future__ import annotations

import itertools
import struct
import zipfile
from pathlib import Path
from typing import NamedTuple

import numpy as np

from quantkit.errors import FormatError, UnsupportedError

MAX_RECORDS = 1 << 20
MAX_PICKLE = 256 << 20  # a tensor takes about 200 bytes of the pickle
_LOCAL_HEADER = struct.Struct("<4s5H3I2H")


class ZipRecord(NamedTuple):
    """A record's place in its file: first byte and size."""

    start: int
    nbytes: int


def records(path: Path, data: np.ndarray) -> dict[str, ZipRecord]:
    """The records of the file at `path`, whose mapped bytes are `data`, by name without the archive's folder.

    FormatError for a directory that torch would not write, UnsupportedError for big-endian files.
    """
    found: dict[str, ZipRecord] = {}
    ends = []
    for entry in _entries(path):
        start = _start_of_data(path, data, entry)
        ends.append((entry.header_offset, start + entry.file_size, entry.filename))
        name = entry.filename.partition("/")[2]
        if name in found:
            raise FormatError(f"{path}: record {entry.filename!r} occurs twice")
        found[name] = ZipRecord(start, entry.file_size)
    ends.sort()
    for (_, end, name), (begin, _, other) in itertools.pairwise(ends):
        if end > begin:
            raise FormatError(f"{path}: record {name!r} ends at byte {end}, {other!r} begins at {begin}: they overlap")
    if "data.pkl" not in found:
        raise FormatError(f"{path}: has no record data.pkl; it is not a checkpoint of torch")
    if (size := found["data.pkl"].nbytes) > MAX_PICKLE:
        raise FormatError(f"{path}: data.pkl has {size} bytes, quantkit reads up to {MAX_PICKLE}")
    if order := found.get("byteorder"):
        text = data[order.start : order.start + min(order.nbytes, 16)].tobytes()
        if text != b"little":
            raise UnsupportedError(
                f"{path}: its byte order is {text!r}, quantkit reads little-endian files: load and save it with torch "
                "on this machine"
            )
    return found


def _entries(path: Path) -> list[zipfile.ZipInfo]:
    """The entries of the zip directory; FormatError unless all are uncompressed and in one folder."""
    try:
        with zipfile.ZipFile(path) as file:
            entries = file.infolist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError, EOFError, struct.error, OSError) as error:
        raise FormatError(f"{path}: its zip directory cannot be read: {error}") from None
    if len(entries) > MAX_RECORDS:
        raise FormatError(f"{path}: {len(entries)} records, quantkit reads up to {MAX_RECORDS}")
    if len({entry.filename.partition("/")[0] for entry in entries}) > 1:
        raise FormatError(f"{path}: its records are not all in one folder; it is not a checkpoint of torch")
    for entry in entries:
        if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size or entry.flag_bits & 1:
            raise FormatError(
                f"{path}: record {entry.filename!r} is compressed or encrypted ({entry.compress_size} bytes "
                f"for {entry.file_size}); torch does not compress records: load and save it with torch"
            )
    return entries


def _start_of_data(path: Path, data: np.ndarray, entry: zipfile.ZipInfo) -> int:
    """The offset of a record's data, after its local header; FormatError if that disagrees with the directory."""
    what = f"{path}: record {entry.filename!r}"
    at = entry.header_offset
    if not 0 <= at <= data.size - _LOCAL_HEADER.size:
        raise FormatError(f"{what} begins at byte {at} of a file of {data.size}; it is truncated or corrupt")
    header = _LOCAL_HEADER.unpack(data[at : at + _LOCAL_HEADER.size].tobytes())
    magic, method = header[0], header[3]
    name_bytes, extra_bytes = int(header[9]), int(header[10])
    start = at + _LOCAL_HEADER.size + name_bytes + extra_bytes
    if magic != b"PK\3\4" or method != zipfile.ZIP_STORED:
        raise FormatError(f"{what}: at byte {at} there is no header of a stored record; the file is corrupt")
    if start + entry.file_size > data.size:
        raise FormatError(
            f"{what} takes bytes {start} to {start + entry.file_size} of a file of {data.size}; it is truncated"
        )
    return start
