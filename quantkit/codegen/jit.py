"""Kernels: Python functions that numba compiles when they are first called, cached on disk, without the GIL.

    @kernel              compiled for each new set of argument types; Python and other kernels call it
    @kernel(fastmath=True, inline="always")     options are numba's
    @subkernel           a kernel that only kernels call

Kernels call kernels by their global names. Importing a module of kernels compiles nothing and does not import numba.
`callbacks` has the C functions of op lists. `thread_pool.over_rows` calls a kernel on slices of rows from several
threads. `cpu_target.isa()` names the SIMD code path. `native` has C functions that need no numba.

Each compiled function is one file of `disk_cache`. `digests.identity` and the argument types, CPU, versions and options
name it. So an edit recompiles what depends on it and nothing else, and nobody has to clear the cache.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar, overload

from quantkit.codegen import compile_notice, digests, interrupts, numba_internals
from quantkit.codegen.numba_loader import load_numba

OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "boundscheck": False}
NO_WRAPPERS: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
compile_lock = threading.RLock()

_P = ParamSpec("_P")
_R = TypeVar("_R")


class Kernel(digests.Compiled, Generic[_P, _R]):
    """A function that numba compiles when it is first called, or first used inside another kernel.

    To a type checker it has the signature of the function.
    """

    function: Callable[_P, _R]

    def __init__(self, function: Callable[_P, _R], options: dict[str, Any], is_cached: bool = True):
        functools.update_wrapper(self, function)
        self.function = function
        self.options = OPTIONS | options
        self.is_cached = is_cached

    @functools.cached_property
    def dispatcher(self) -> Any:
        """numba's dispatcher of the function, made on first use."""
        with compile_lock:
            if "dispatcher" in self.__dict__:  # another thread made it while this one waited
                return self.__dict__["dispatcher"]
            numba = load_numba()
            compile_notice.install()
            interrupts.install()
            identity = digests.identity(self.function, self.options)
            if identity is None:
                return numba.njit(**self.options)(self.function)
            dispatcher = numba.njit(**self.options)(numba_internals.with_own_symbols(self.function, identity))
            if self.is_cached:
                numba_internals.cache_on_disk(dispatcher, self.function, identity)
            return dispatcher

    @property
    def _numba_type_(self) -> Any:
        """numba asks for it where a kernel is a global of another kernel."""
        return numba_internals.dispatcher_type(self.dispatcher)

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        if "no_cpython_wrapper" in self.options:
            raise TypeError(f"{self.function.__name__} is called by kernels only; call its `.function` from Python")
        result: _R = self.dispatcher(*args, **kwargs)
        return result


@overload
def kernel(function: Callable[_P, _R]) -> Kernel[_P, _R]: ...
@overload
def kernel(**options: Any) -> Callable[[Callable[_P, _R]], Kernel[_P, _R]]: ...
def kernel(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Decorator: a kernel. Options are numba's (`fastmath=True`, `inline="always"`)."""
    if function is None:
        return lambda f: Kernel(f, options)
    return Kernel(function, options)


def subkernel(function: Callable[_P, _R]) -> Kernel[_P, _R]:
    """Decorator: a kernel that only kernels call. It is compiled into its callers and cached as part of them."""
    return Kernel(function, NO_WRAPPERS, is_cached=False)


def shared_subkernel(function: Callable[_P, _R]) -> Kernel[_P, _R]:
    """Decorator: a kernel that only kernels of several modules call. It has a cache file of its own."""
    return Kernel(function, NO_WRAPPERS)


def readonly(array: Any) -> Any:
    """A view that cannot be written. numba then compiles a kernel once, whether memory is mapped or owned."""
    view = array.view()
    view.flags.writeable = False
    return view
