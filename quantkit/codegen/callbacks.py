"""C functions made of kernels: what the op lists of `runtime.compiled` hold by address.

    @callback("void(int64, int64, int64)")
    def add(p, thread, threads): ...          add.address: its entry point, compiled and cached like a kernel

C code cannot raise: an exception ends the function in the middle, and its results are incomplete. The code that
executes an op list therefore calls `report_failures_to` first and reads the names afterwards.
"""

from __future__ import annotations

import functools
import re
import threading
import zlib
from collections.abc import Callable
from typing import Any

from quantkit.codegen import compile_notice, digests, interrupts, numba_internals
from quantkit.codegen.jit import NO_WRAPPERS, OPTIONS, Kernel, compile_lock
from quantkit.codegen.numba_loader import load_numba
from quantkit.errors import KernelError

_FAILED = "quantkit_kernel_failed"  # the symbol that compiled code calls
_reports = threading.local()
_names: dict[int, str] = {}  # of callbacks, by number


def report_failures_to(names: list[str] | None) -> None:
    """Have the names of callbacks that raise on this thread appended to a list.

    With None, Python prints each failure as an exception that nobody can catch.
    """
    _reports.names = names


def _record_failure(number: int) -> None:
    """Called by compiled code, on the thread whose callback raised."""
    names = getattr(_reports, "names", None)
    if names is None:
        raise KernelError(f"kernel {_names[number]} raised an exception; its results are incomplete")
    names.append(_names[number])


@functools.cache
def _failure_function() -> Any:
    """`_record_failure` as a C function that compiled code finds by its symbol. The cache keeps it alive."""
    import ctypes

    from llvmlite import binding

    function = ctypes.CFUNCTYPE(None, ctypes.c_int64)(_record_failure)
    binding.add_symbol(_FAILED, ctypes.cast(function, ctypes.c_void_p).value)
    return function


def _guarded(body: Any, number: int, arguments: int) -> Callable[..., Any]:
    """A function of 1, 3 or 6 arguments that calls a kernel and reports `number` where that raises."""
    failed = numba_internals.external_function(_FAILED, 1)

    def guarded1(a):
        try:
            return body(a)
        except Exception:
            failed(number)
        return 0

    def guarded3(a, b, c):
        try:
            body(a, b, c)
        except Exception:
            failed(number)

    def guarded6(a, b, c, d, e, f):
        try:
            body(a, b, c, d, e, f)
        except Exception:
            failed(number)

    functions: dict[int, Callable[..., Any]] = {1: guarded1, 3: guarded3, 6: guarded6}
    return functions[arguments]


class Callback(digests.Compiled):
    """A function compiled as C code with one signature; `address` is its entry point as an integer."""

    signature: str

    def __init__(self, function: Callable[..., Any], signature: str, options: dict[str, Any]):
        functools.update_wrapper(self, function)  # type: ignore[arg-type]  # named like it, not callable like it
        self.function = function
        self.signature = signature
        match = re.fullmatch(r"(void|int64)\((int64(?:, ?int64)*)\)", signature)
        if match is None:
            raise TypeError(f"callback '{signature}': a signature is void(int64, ...) or int64(int64, ...)")
        self.returns, self.arguments = match[1], match[2].count("int64")
        self.options = OPTIONS | options
        name = f"{function.__module__}.{function.__qualname__}"
        self.number = zlib.crc32(name.encode())
        _names[self.number] = name

    @functools.cached_property
    def _compiled(self) -> Any:
        with compile_lock:
            if "_compiled" in self.__dict__:  # another thread made it while this one waited
                return self.__dict__["_compiled"]
            load_numba()
            compile_notice.install()
            interrupts.install()
            _failure_function()
            body = Kernel(self.function, self.options | NO_WRAPPERS, is_cached=False)
            function = _guarded(body, self.number, self.arguments)
            identity = digests.identity(self.function, self.options)
            if identity is not None:
                function = numba_internals.with_own_symbols(function, identity)
            options = {name: value for name, value in self.options.items() if name != "nogil"} | {"nopython": True}
            compiled = numba_internals.c_function(function, self.returns, self.arguments, options)
            if identity is not None:
                numba_internals.cache_on_disk(compiled, self.function, identity)
            compiled.compile()
            return compiled

    @property
    def address(self) -> int:
        """Entry point of the C function. The first use compiles it, or loads it from disk."""
        address: int = self._compiled.address
        return address


def callback(signature: str, **options: Any) -> Callable[[Callable[..., Any]], Callback]:
    """Decorator: a C function of a signature like "void(int64, int64, int64)", compiled on first use and cached."""
    return lambda function: Callback(function, signature, options)
