"""Canaries: one test for each private or undocumented name of numba that quantkit uses.

A failure after an update of numba means: read how numba does it now, change `quantkit/codegen/numba_internals.py`, then
raise the bound of numba in `pyproject.toml`.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import re
from pathlib import Path

import numba
import numpy as np
import pytest
from numba.core import event
from numba.core.caching import NullCache
from numba.core.ccallback import CFunc
from numba.core.compiler import CompileResult
from numba.core.dispatcher import Dispatcher
from numba.core.registry import cpu_target
from numba.core.runtime import rtsys
from numba.core.serialize import dumps

import quantkit
from quantkit.codegen import callbacks, numba_internals
from quantkit.codegen.jit import kernel

ROOT = Path(quantkit.__file__).parents[1]
FIX = "numba changed: look at quantkit/codegen/numba_internals.py"


def parameters(function: object) -> list[str]:
    assert callable(function)
    return list(inspect.signature(function).parameters)


def compiled() -> tuple[Dispatcher, CompileResult]:
    """A new function each time, compiled without a cache."""

    @numba.njit
    def add(x: int) -> int:
        return x + 1

    assert add(1) == 2
    (result,) = add.overloads.values()
    return add, result


def test_the_installed_numba_and_llvmlite_are_within_the_bounds_that_were_tested() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for package in ("numba", "llvmlite"):
        found = re.search(rf'"{package}>=0\.(\d+),<0\.(\d+)"', text)
        assert found, f"pyproject.toml does not bound {package}"
        installed = int(importlib.metadata.version(package).split(".")[1])
        assert int(found[1]) <= installed < int(found[2]), FIX


def test_no_other_module_uses_numba_core() -> None:
    users = [
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "quantkit").rglob("*.py")
        if re.search(r"numba\.core\.\w+|\._cache = |\._rebuild\(", path.read_text(encoding="utf-8"))
    ]
    assert users == ["quantkit/codegen/numba_internals.py"]


def test_dispatchers_and_cfuncs_ask_their_cache() -> None:
    """`Dispatcher._cache` and `CFunc._cache`, and what they call of it."""

    class Cache(NullCache):
        def __init__(self) -> None:
            self.loads: list[object] = []
            self.saved: list[CompileResult] = []

        def load_overload(self, sig: object, target_context: object) -> None:
            self.loads.append(sig)

        def save_overload(self, sig: object, data: CompileResult) -> None:
            self.saved.append(data)

    assert parameters(NullCache.load_overload) == ["self", "sig", "target_context"], FIX
    assert len(parameters(NullCache.save_overload)) == 3, FIX
    add = numba.njit(lambda x: x + 1)
    c_add = numba_internals.c_function(lambda x: x + 1, "int64", 1, {"nopython": True})
    for function, call in ((add, lambda: add(1)), (c_add, c_add.compile)):
        cache = function._cache = Cache()
        call()
        assert len(cache.loads) == len(cache.saved) == 1, FIX
        assert isinstance(cache.saved[0], CompileResult), FIX
        assert getattr(cache.loads[0], "args", cache.loads[0]) == (numba.types.int64,), FIX


def test_a_compile_result_becomes_bytes_and_back() -> None:
    """`CompileResult._reduce`, `CompileResult._rebuild` and `serialize.dumps`."""
    import pickle

    _, result = compiled()
    assert parameters(CompileResult._rebuild)[0] == "target_context", FIX
    again = CompileResult._rebuild(cpu_target.target_context, *pickle.loads(dumps(result._reduce())))
    assert again.signature == result.signature, FIX
    assert again.fndesc.llvm_func_name == result.fndesc.llvm_func_name, FIX


def test_a_library_knows_whether_it_holds_addresses() -> None:
    """`CodeLibrary.has_dynamic_globals`."""
    import ctypes

    assert compiled()[1].library.has_dynamic_globals is False, FIX
    function = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(lambda x: x)

    @numba.njit
    def call(x: int) -> int:
        return function(x)

    assert call(2) == 2
    assert call.overloads[(numba.types.int64,)].library.has_dynamic_globals is True, FIX


def test_the_runtime_can_be_initialized_without_the_compiler() -> None:
    """`rtsys.initialize`: cached kernels that allocate arrays run after it (see also tests/test_jit.py)."""
    assert parameters(rtsys.initialize) == ["ctx"], FIX
    rtsys.initialize(cpu_target.target_context)


def test_a_cfunc_compiles_when_it_is_told_to() -> None:
    """`ccallback.CFunc`: its parameters, `compile`, `address` and `cache_hits`."""
    assert parameters(CFunc)[:4] == ["pyfunc", "sig", "locals", "options"], FIX
    function = numba_internals.c_function(lambda x: x * 3, "int64", 1, {"nopython": True})
    assert not function.address, FIX
    function.compile()
    assert function.cache_hits == 0, FIX
    import ctypes

    assert ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(function.address)(5) == 15, FIX


def test_kernels_call_a_function_of_the_process_by_its_symbol() -> None:
    """`types.ExternalFunction`."""
    callbacks._failure_function()
    failed = numba_internals.external_function(callbacks._FAILED, 1)
    names: list[str] = []
    callbacks._names[7] = "seven"
    callbacks.report_failures_to(names)
    try:
        numba.njit(lambda: failed(7))()
    finally:
        callbacks.report_failures_to(None)
        del callbacks._names[7]
    assert names == ["seven"], FIX


def test_compilations_are_reported() -> None:
    """`numba.core.event`, which numba's developer manual documents."""
    assert hasattr(event, "Listener"), FIX
    seen: list[str] = []
    numba_internals.listen("numba:compile", lambda e: seen.append("start"), lambda e: seen.append("end"))
    compiled()
    assert seen == ["start", "end"], FIX


def test_a_kernel_is_a_global_that_kernels_call() -> None:
    """`_numba_type_` and `types.Dispatcher`."""

    @kernel
    def double(x: int) -> int:
        return 2 * x

    @kernel
    def twice(x: int) -> int:
        return double(double(x))

    assert numba.typeof(double) == numba.types.Dispatcher(double.dispatcher), FIX
    assert twice(3) == 12, FIX


@pytest.mark.parametrize("name", numba_internals.SETTINGS)
def test_settings_that_change_the_code_exist(name: str) -> None:
    assert hasattr(numba.config, name), FIX


def test_closures_have_symbols_of_their_own() -> None:
    """numba builds symbols from the qualified name: `with_own_symbols` relies on it."""

    def factory(k: int) -> object:
        return lambda x: x + k

    symbols = set()
    for k in (1, 2):
        function = numba_internals.with_own_symbols(factory(k), f"closure {k}")  # type: ignore[arg-type]
        dispatcher = numba.njit(function)
        assert dispatcher(np.int64(1)) == 1 + k
        (result,) = dispatcher.overloads.values()
        symbols.add(result.fndesc.qualname.rpartition("_")[2][:16])
        assert function.__qualname__ in result.fndesc.qualname, FIX
    assert len(symbols) == 2
