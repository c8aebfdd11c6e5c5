"""Write to a file from inside a native function, while the data is still in the CPU's cache."""

from __future__ import annotations

import ctypes
import functools

from quantkit.codegen.ir_builder import IrBuilder
from quantkit.codegen.ir_values import Value, Variable

SLICE_BYTES = 1 << 19  # computed, then written: a core's cache holds them


@functools.cache
def pwrite_address() -> int:
    """Address of the C library's `pwrite`; 0 where there is none (Windows)."""
    try:
        return ctypes.cast(ctypes.CDLL(None).pwrite, ctypes.c_void_p).value or 0
    except (AttributeError, OSError, TypeError):
        return 0


def write(ir: IrBuilder, to: tuple[Value, Value], x: Value, nbytes: Value, offset: Value, missing: Variable) -> None:
    """Write bytes by pwrite. `to` is its address and the file's descriptor; `missing` counts bytes not written."""
    pwrite, descriptor = to
    missing.set(missing.get() + nbytes - ir.call_address_int64(pwrite, descriptor, x, nbytes, offset))
