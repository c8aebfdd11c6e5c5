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
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from quantkit.codegen.jit import kernel
from quantkit.codegen.simd import load_record

OPERATION = "void(int64, int64, int64)"  # parameters, thread, threads
_FIELD_BYTES = 8

__all__ = ["OPERATION", "StoredRecord", "load_record", "offset_of", "record_bytes", "row_share"]


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
