"""NVIDIA's driver by ctypes, without numba: load machine code and launch kernels.

    function = Function(code, entry, Parameters(["f32[]", "i32"]))
    function.launch(grid, threads, stream, function.parameters.values([(address, count), 3]))

A kernel takes an array as seven parameters, of which it reads the address, the size and the stride in bytes; the two
first are numba's owner and parent, which device code does not look at.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from collections.abc import Sequence
from typing import Any

from quantkit.errors import QuantkitError, UnsupportedError

REMEDY = "install an NVIDIA driver for CUDA 13 and pip install 'quantkit[cuda]', or run without GPU options"
# CUlaunchConfig: grid, block, bytes of shared memory; stream; attributes, of which there are none.
_CONFIG = struct.Struct("<7I4xQQI4x")
_FORMS = {"i32": "i4x", "f32": "f4x"}
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


class Parameters:
    """How a kernel's parameters lie in memory, 8 bytes each; an array is seven of them.

    sizes    of each parameter: bytes of an element for an array, 0 for a number
    arrays   which of them are arrays
    """

    def __init__(self, kinds: Sequence[str]):
        self.kinds = tuple(kinds)
        self.sizes = tuple(_SIZES[kind[:-2]] if kind.endswith("[]") else 0 for kind in kinds)
        self.arrays = tuple(i for i, size in enumerate(self.sizes) if size)
        forms = ("16x5q" if size else _FORMS.get(kind, "q") for kind, size in zip(kinds, self.sizes))
        self.packer = struct.Struct("<" + "".join(forms))

    def values(self, arguments: Sequence[Any]) -> list[Any]:
        """What `packer` takes. Arrays are given as (address, number of elements).

        TypeError where there are more or fewer arguments than parameters.
        """
        if len(arguments) != len(self.sizes):
            raise TypeError(f"{len(arguments)} arguments for the parameters {' '.join(self.kinds)}")
        result: list[Any] = []
        for size, value in zip(self.sizes, arguments):
            if size:
                address, count = value
                result += (count, size, address, count, size)
            else:
                result.append(value)
        return result


class Function:
    """A kernel of machine code, loaded in the current context; any thread launches it."""

    def __init__(self, code: bytes, entry: str, parameters: Parameters):
        self.parameters = parameters
        self._function = function_of(load(code), entry)
        self._of_thread = threading.local()

    def launch(self, grid: Sequence[int], threads: int, stream: int, values: Sequence[Any]) -> None:
        """Put the kernel on a stream; `values` as `Parameters.values` gives them, copied before this returns."""
        own = self._of_thread
        if not hasattr(own, "memory"):
            count = self.parameters.packer.size
            own.memory, own.config = (ctypes.create_string_buffer(size) for size in (count, _CONFIG.size))
            start = ctypes.addressof(own.memory)
            own.pointers = (ctypes.c_void_p * (count // 8))(*range(start, start + count, 8))
        self.parameters.packer.pack_into(own.memory, 0, *values)
        x, y, z = (*grid, 1, 1)[:3]
        _CONFIG.pack_into(own.config, 0, x, y, z, threads, 1, 1, 0, stream, 0, 0)
        _call("cuLaunchKernelEx", own.config, self._function, own.pointers, None)  # each argument costs the host
