"""NVIDIA's driver by ctypes, without numba: load machine code and launch kernels.

    function = Function(code, entry, Parameters(["f32[]", "i32"]), overlaps=True)
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
from typing import Any, ClassVar, NoReturn

from quantkit.errors import QuantkitError, UnsupportedError

REMEDY = "pip install 'quantkit[cuda]', with an NVIDIA driver of CUDA 13; or run without GPU options"
_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CUlaunchAttributeID
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
        _fail(name, status)


def _fail(name: str, status: int) -> NoReturn:
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

    sizes   of each parameter: bytes of an element for an array, 0 for a number
    """

    def __init__(self, kinds: Sequence[str]):
        self.kinds = tuple(kinds)
        self.sizes = tuple(_SIZES[kind[:-2]] if kind.endswith("[]") else 0 for kind in kinds)
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


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: a number, and 64 bytes for its value, of which 4 are used here."""

    _fields_: ClassVar[Any] = [("id", ctypes.c_int), ("_pad", ctypes.c_int), ("value", ctypes.c_int * 16)]


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_: ClassVar[Any] = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint),
    ]


class Function:
    """A kernel of machine code, loaded in the current context; any thread launches it.

    `overlaps`: a launch may begin while the kernel before it on the stream ends. The kernel has to wait for that one
    itself (`kernel.waiting`).
    """

    def __init__(self, code: bytes, entry: str, parameters: Parameters, overlaps: bool):
        self.parameters, self._overlaps = parameters, overlaps
        self._function = function_of(load(code), entry)
        self._of_thread = threading.local()

    def launch(self, grid: Sequence[int], threads: int, stream: int, values: Sequence[Any]) -> None:
        """Put the kernel on a stream; `values` as `Parameters.values` gives them, copied before this returns."""
        memory = getattr(self._of_thread, "memory", None)
        if memory is None:
            memory = self._of_thread.memory = _LaunchMemory(self.parameters.packer.size, self._overlaps)
        self.parameters.packer.pack_into(memory.packed, 0, *values)
        config = memory.config
        config.grid[:], config.block[0], config.stream = (*grid, 1, 1)[:3], threads, stream
        status = library().cuLaunchKernelEx(memory.config_pointer, self._function, memory.pointers, None)
        if status:
            _fail("cuLaunchKernelEx", status)


class _LaunchMemory:
    """What the driver reads of a launch: parameters, their addresses, the configuration. Of one thread."""

    def __init__(self, nbytes: int, overlaps: bool):
        self.packed = ctypes.create_string_buffer(nbytes)
        start = ctypes.addressof(self.packed)
        self.pointers = (ctypes.c_void_p * (nbytes // 8))(*range(start, start + nbytes, 8))
        self._attribute = _Attribute(_PROGRAMMATIC_STREAM_SERIALIZATION, 0, (ctypes.c_int * 16)(1))
        one = (ctypes.c_uint * 3)(1, 1, 1)
        self.config = _Config(one, one, 0, None, ctypes.pointer(self._attribute), int(overlaps))
        self.config_pointer = ctypes.byref(self.config)
