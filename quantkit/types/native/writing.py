"""Writing to a file from within a C function, of what it has just made."""

from __future__ import annotations

import ctypes
import functools

from quantkit.codegen.ir_builder import IrBuilder
from quantkit.codegen.ir_values import Value, Variable

SLICE_BYTES = 1 << 19  # that are made and then written: they are still in a core's cache


@functools.cache
def pwrite_address() -> int:
    """Of the C library's function; 0 where there is none (Windows)."""
    try:
        return ctypes.cast(ctypes.CDLL(None).pwrite, ctypes.c_void_p).value or 0
    except (AttributeError, OSError, TypeError):
        return 0


def write(ir: IrBuilder, to: tuple[Value, Value], x: Value, nbytes: Value, offset: Value, missing: Variable) -> None:
    """Write bytes by pwrite, of which `to` is the address, and the file's descriptor; `missing` counts what was not."""
    pwrite, descriptor = to
    missing.set(missing.get() + nbytes - ir.call_address_int64(pwrite, descriptor, x, nbytes, offset))
