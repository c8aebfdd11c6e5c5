"""What all operations of an op list share: the C signature, how parameters are read, how rows are split over threads.

An operation is a C function `void(parameters, thread, threads)`. `parameters` is the address of a record: int64 fields,
one after another. A record is declared once, as a NamedTuple of ints:

    class NormParameters(NamedTuple):
        x: int  # address of float32[n]
        n: int

    @callback(OPERATION)
    def norm(parameters, thread, threads):
        p = load_record(NormParameters, parameters)
        ... p.x, p.n ...

    ops.add(norm, NormParameters(x=x.ctypes.data, n=len(x)))

A field that is missing or unknown is a TypeError when the plan is built. Offsets are constants of the compiled code.
Records also describe other memory that kernels read, such as the places of KV caches.

Rows are divided in one of two ways. `row_share` gives each thread its share: what it computed, it can read in the next
operation without a barrier. `claim_rows` gives threads pieces of rows, and one that is done with its own share takes
pieces of the others': no thread waits at the barrier for one whose core is slower or does other work. Large products
whose result is read after a barrier anyway do this.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from quantkit.codegen.jit import kernel
from quantkit.codegen.simd import atomic_add, atomic_load, load_record
from quantkit.placement.kernel_sizes import CACHE_LINE

OPERATION = "void(int64, int64, int64)"  # parameters, thread, threads
_FIELD_BYTES = 8
_PIECES = 8  # of a thread's share, that are claimed

__all__ = ["OPERATION", "StoredRecord", "claim_rows", "load_record", "offset_of", "record_bytes", "row_share"]


def offset_of(declaration: type[NamedTuple], field: str) -> int:
    """Bytes from the start of a record to a field."""
    return _FIELD_BYTES * declaration._fields.index(field)


def record_bytes(declaration: type[NamedTuple]) -> int:
    """Size of a record in bytes."""
    return _FIELD_BYTES * len(declaration._fields)


class StoredRecord:
    """A record in memory, for kernels to read. `set` changes fields while no op list runs that reads them."""

    def __init__(self, fields: NamedTuple):
        self._names = fields._fields
        self._values = np.array(fields, np.int64)

    @property
    def address(self) -> int:
        """Address of the record; the caller holds the StoredRecord while a kernel may read it."""
        return self._values.ctypes.data

    def set(self, **fields: int) -> None:
        """Overwrite fields, given by name."""
        for name, value in fields.items():
            self._values[self._names.index(name)] = value


@kernel(inline="always")
def row_share(rows, multiple, thread, threads):
    """First and last + 1 of a thread's share of `rows`. Shares are multiples of `multiple` rows, except the last."""
    runs = -(-rows // multiple)
    return min(rows, runs * thread // threads * multiple), min(rows, runs * (thread + 1) // threads * multiple)


@kernel
def claim_rows(claims, rows, multiple, thread, threads):
    """First and last + 1 of rows that no thread has claimed yet, from the thread's own share first; (0, 0): none left.

    claims   `OpList.claims`: int64 per thread, on cache lines of their own; the pieces claimed of its share
    """
    for turn in range(threads):
        owner = (thread + turn) % threads
        first, last = row_share(rows, multiple, owner, threads)
        piece, counter = -(-(last - first) // (_PIECES * multiple)) * multiple, claims + owner * CACHE_LINE
        if first + atomic_load(counter) * piece < last:  # read before it is written: others may be reading it
            begin = first + atomic_add(1, counter) * piece
            if begin < last:
                return begin, min(last, begin + piece)
    return 0, 0
