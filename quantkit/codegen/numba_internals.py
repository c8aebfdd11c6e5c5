"""The private and undocumented names of numba that quantkit uses. No other module uses one.

| name | use | without it |
| --- | --- | --- |
| `Dispatcher._cache`, `CFunc._cache`, `caching.NullCache` | kernels come from and go to `disk_cache` | `cache=True`: stale after edits of other files, races between processes |
| `CompileResult._reduce`, `._rebuild`, `serialize.dumps`, `CodeLibrary.has_dynamic_globals` | a compiled function as bytes, and back | no cache on disk |
| `rtsys.initialize` | what compiled code needs to allocate arrays | `target_context.refresh()`: 0.17 s more before the first cached kernel runs |
| `ccallback.CFunc` | a C function that takes the cache before it is compiled | `numba.cfunc` compiles at once, without this cache |
| `Kernel._numba_type_`, which numba looks up; `types.Dispatcher` | a kernel calls a kernel by its global name | numba compiles all kernels of a module when it is imported |
| `types.ExternalFunction` | calling `_record_failure` by name | an address in the code, which then cannot be cached |

`pyproject.toml` caps numba at the version that this was tested with. `tests/test_numba_internals.py` has a test for each
name; run it first after raising the cap.
"""  # noqa: E501

from __future__ import annotations

import functools
import hashlib
import pickle
import re
import sys
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quantkit.codegen import disk_cache
from quantkit.codegen.cpu_target import target_cpu
from quantkit.codegen.numba_loader import load_numba, refuse_numba_config

# Settings (NUMBA_OPT, ...) that change the code numba makes
SETTINGS = ("OPT", "LOOP_VECTORIZE", "SLP_VECTORIZE", "BOUNDSCHECK", "DEBUGINFO_DEFAULT", "ENABLE_AVX",
            "USING_SVML", "LLVM_REFPRUNE_PASS", "LLVM_REFPRUNE_FLAGS")  # fmt: skip


def cache_directory() -> Path:
    """Where compiled kernels are cached: a directory per numba version, Python version and target CPU."""
    version, python = load_numba().__version__, f"py{sys.version_info[0]}{sys.version_info[1]}"
    return disk_cache.root() / f"numba-{version}-{python}-{target_cpu()[0]}"


@functools.cache
def _environment() -> str:
    """What all compiled kernels of this process depend on: versions, CPU, numba's settings."""
    import llvmlite
    import numpy as np
    from llvmlite import binding

    numba = load_numba()
    settings = [f"{name}={getattr(numba.config, name)}" for name in SETTINGS]
    versions = (numba.__version__, llvmlite.__version__, np.__version__, sys.implementation.cache_tag)
    return "\n".join(map(str, (*versions, binding.get_process_triple(), *target_cpu(), *settings)))


@functools.cache
def _cache_class() -> type:
    """The class that numba asks for a compiled function, and gives a new one to. Each is one file of `disk_cache`."""
    from numba.core.caching import NullCache
    from numba.core.compiler import CompileResult
    from numba.core.runtime import rtsys
    from numba.core.serialize import dumps

    class Cache(NullCache):
        def __init__(self, function: Callable[..., Any], identity: str):
            self._name = re.sub(r"[^\w.]", "", f"{function.__module__}.{function.__qualname__}")[-100:]
            self._key = f"{_environment()}\n{identity}"

        @property
        def cache_path(self) -> str:
            return str(cache_directory())

        def _path(self, signature: Any) -> Path:
            digest = hashlib.sha256(f"{self._key}\n{signature}".encode()).hexdigest()
            return cache_directory() / f"{self._name}-{digest[:40]}.kernel"

        def load_overload(self, sig: Any, target_context: Any) -> Any:
            refuse_numba_config()  # numba reads the file again when it compiles
            data = disk_cache.read(self._path(sig))
            if data is None:
                return None
            rtsys.initialize(target_context)
            compiled = CompileResult._rebuild(target_context, *pickle.loads(data))
            # `_path` names types, and types of another library may have the same names.
            return compiled if compiled.signature.args == tuple(getattr(sig, "args", sig)) else None

        def save_overload(self, sig: Any, data: Any) -> None:
            if data.library.has_dynamic_globals:
                warnings.warn(f"{self._name} is not cached on disk: addresses are part of its code", stacklevel=2)
                return
            disk_cache.write(self._path(sig), dumps(data._reduce()))

    return Cache


def cache_on_disk(compiled: Any, function: Callable[..., Any], identity: str) -> None:
    """Have a dispatcher or CFunc of a function use the disk cache. `identity` is `digests.identity`'s."""
    compiled._cache = _cache_class()(function, identity)


def with_own_symbols(function: Callable[..., Any], identity: str) -> Callable[..., Any]:
    """The function; if it is a closure, a copy with a qualified name of its own.

    numba makes symbols from the qualified name and from how many functions the process compiled before. Closures of
    one factory from different processes would have the same symbols, and of code linked twice LLVM keeps the first.
    """
    if not isinstance(function, types.FunctionType) or not function.__closure__:
        return function
    copy = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    functools.update_wrapper(copy, function)
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__qualname__ += "_" + hashlib.sha256(identity.encode()).hexdigest()[:16]
    return copy


def dispatcher_type(dispatcher: Any) -> Any:
    """The type that numba gives to a dispatcher, and to what has it as `_numba_type_`."""
    from numba.types import Dispatcher

    return Dispatcher(dispatcher)


def listen(kind: str, on_start: Callable[[object], None], on_end: Callable[[object], None]) -> None:
    """Call functions when something starts and ends in numba. Its manual documents the kinds of events.

    "numba:compile" is compiling a function; "numba:compiler_lock" also covers its file in the cache.
    """
    from numba.core import event

    class Listener(event.Listener):
        def on_start(self, event: Any) -> None:
            on_start(event)

        def on_end(self, event: Any) -> None:
            on_end(event)

    event.register(kind, Listener())


def external_function(symbol: str, arguments: int) -> Any:
    """A C function `void(int64, ...)` of this process that kernels call by its symbol."""
    from numba.types import ExternalFunction, int64, void

    return ExternalFunction(symbol, void(*[int64] * arguments))


def c_function(function: Callable[..., Any], returns: str, arguments: int, options: dict[str, Any]) -> Any:
    """numba's CFunc of a function of int64s, not compiled yet. `returns` is "void" or "int64"."""
    from numba import types
    from numba.core.ccallback import CFunc

    signature = ((types.int64,) * arguments, getattr(types, returns))
    return CFunc(function, signature, locals={}, options=options)
