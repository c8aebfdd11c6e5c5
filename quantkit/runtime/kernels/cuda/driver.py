"""NVIDIA's driver by ctypes, without numba: load machine code and launch kernels.

    module = load(code);  function = function_of(module, entry)
    launch(function, blocks, threads, stream, slots)
    slots(parameters, arguments)    a kernel's parameters as bytes, 8 for each

A kernel takes an array as seven parameters, of which it reads the address, the size and the stride in bytes; the two
first are numba's owner and parent, which device code does not look at.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Sequence
from typing import Any

from quantkit.errors import QuantkitError, UnsupportedError

REMEDY = "pip install 'quantkit[cuda]', with an NVIDIA driver of CUDA 13; or run without GPU options"
_SIZES = {"u8": 1, "i8": 1, "u16": 2, "u32": 4, "i32": 4, "f32": 4, "i64": 8}


@functools.cache
def library() -> ctypes.CDLL:
    """The driver; UnsupportedError where there is none."""
    for name in ("libcuda.so.1", "nvcuda.dll"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise UnsupportedError(f"no CUDA GPU: the NVIDIA driver is not installed (libcuda.so.1 is not found); {REMEDY}")


def _call(name: str, *arguments: Any) -> None:
    status = getattr(library(), name)(*arguments)
    if status:
        text = ctypes.c_char_p()
        library().cuGetErrorString(status, ctypes.byref(text))
        raise QuantkitError(f"CUDA: {name} failed with {status}: {(text.value or b'unknown').decode()}")


def load(code: bytes) -> ctypes.c_void_p:
    """A module of machine code, in the current context."""
    module = ctypes.c_void_p()
    _call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(code))
    return module


def function_of(module: ctypes.c_void_p, entry: str) -> ctypes.c_void_p:
    """The kernel of this name in a module."""
    function = ctypes.c_void_p()
    _call("cuModuleGetFunction", ctypes.byref(function), module, entry.encode())
    return function


def slots(parameters: Sequence[str], arguments: Sequence[Any]) -> bytes:
    """Parameters as 8 bytes each. Arrays are given as (address, number of elements).

    TypeError where there are more or fewer arguments than parameters.
    """
    if len(parameters) != len(arguments):
        raise TypeError(f"{len(arguments)} arguments for the parameters {' '.join(parameters)}")
    packed = []
    for parameter, value in zip(parameters, arguments):
        if parameter.endswith("[]"):
            address, count = value
            size = _SIZES[parameter[:-2]]
            packed.append(struct.pack("<7q", 0, 0, count, size, address, count, size))
        elif parameter == "f32":
            packed.append(struct.pack("<f4x", value))
        else:
            packed.append(struct.pack("<q", value))
    return b"".join(packed)


def launch(function: ctypes.c_void_p, blocks: Sequence[int], threads: int, stream: int, packed: bytes) -> None:
    """Put a kernel on a stream. Its parameters are copied before this returns."""
    memory = ctypes.create_string_buffer(packed, len(packed))
    start, count = ctypes.addressof(memory), len(packed) // 8
    pointers = (ctypes.c_void_p * count)(*range(start, start + len(packed), 8))
    grid = [ctypes.c_uint(n) for n in (*blocks, 1, 1)[:3]]
    _call("cuLaunchKernel", function, *grid, ctypes.c_uint(threads), ctypes.c_uint(1), ctypes.c_uint(1),
          ctypes.c_uint(0), ctypes.c_void_p(stream), pointers, None)  # fmt: skip
