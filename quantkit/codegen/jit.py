"""The one door to numba: lazy kernels, a disk cache that cannot go stale, CPU features, threads.

Nothing here imports numba until the first kernel runs, so a module full of kernels costs nothing to import.

    @kernel                      a function compiled for each new set of argument types, GIL released, no Python inside
    @callback("void(int64)")     the same as a C function with one signature; `.address` is what an op list holds
    (machine.py                  C functions that need no numba at all)
    kept(make, *given)           the arrays that make(*given) gives, cached on disk as kernels are
    over_rows(task, rows)        task(start, stop) on several threads
    isa()                        "avx512vnni", "avx512", "avx2" or "generic": the code path the SIMD kernels take

Kernels call kernels by their global names. numba's own cache has an index for each line of source, which closures
share and processes write without a lock, and misses edits to kernels that it inlines from other files. Here each
compiled function is one file (`disk_cache`), named by a digest of all that it depends on: the source file *and every
quantkit module it imports, directly or not*, what a closure captures, argument types, options, CPU and versions. So a
change recompiles what depends on it and nothing else, and no process can take one kernel for another.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.util
import inspect
import itertools
import os
import pickle
import re
import sys
import threading
import time
import types
import warnings
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, overload

from quantkit.codegen import disk_cache
from quantkit.errors import KernelError, QuantkitError

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

    import numpy as np

NOTICE_AFTER_SECONDS = 2.0
_PACKAGE = __name__.partition(".")[0]
_STARTED = time.time()

# ----------------------------------------------------------------------------------------------------------- the cache


def cache_directory() -> Path:
    """Where compiled kernels are: a directory per numba version, Python version and target CPU."""
    version, python = load_numba().__version__, f"py{sys.version_info[0]}{sys.version_info[1]}"
    return disk_cache.root() / f"numba-{version}-{python}-{target_cpu()[0]}"


@functools.cache
def _module_source(name: str) -> Path | None:
    """Path of the source of a quantkit module, None when there is no such module (`name` may be a function)."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, AttributeError, ValueError):
        return None
    return Path(spec.origin) if spec and spec.origin and spec.origin.endswith(".py") else None


_IMPORT = re.compile(r"^[ \t]*(?:from[ \t]+([.\w]+)[ \t]+import[ \t]+(\([^)]*\)|[^\n]*)|import[ \t]+([^\n]*))", re.M)


@functools.cache
def _imports(path: Path, module: str) -> set[str]:
    """Names of the quantkit modules that a source file imports, anywhere in it.

    Read by a regular expression: parsing the sources takes longer than loading what was compiled from them. What looks
    like an import in a docstring only makes the digest cover more.
    """
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found: set[str] = set()
    for base, names, modules in _IMPORT.findall(path.read_text(encoding="utf-8")):
        if modules:
            found.update(re.findall(r"(?:^|,)\s*([.\w]+)", modules))
            continue
        if base.startswith("."):
            base = importlib.util.resolve_name(base, package)
        found.add(base)
        if base.split(".")[0] == _PACKAGE:
            found.update(f"{base}.{name}" for name in re.findall(r"(?:^|[(,])\s*(\w+)", re.sub("#.*", "", names)))
    return {name for name in found if name.split(".")[0] == _PACKAGE}


@functools.cache
def source_digest(module: str) -> str | None:
    """Digest of a module's source and of all quantkit sources it can reach by importing.

    None for a module without a source file, as a notebook's, and, which is said, where a source is newer than this
    process: what was imported before the edit would be cached as if it were made of the new source.
    """
    pending, seen = [module], dict[str, Path | None]()
    while pending:
        name = pending.pop()
        if name in seen:
            continue
        path = Path(__file__) if name == __name__ else _module_source(name)
        if path is None and name == module:  # a test's or a script's module
            given = getattr(sys.modules.get(name), "__file__", None)
            if given is None or not os.path.isfile(given):
                return None
            path = Path(given)
        seen[name] = path
        # A package's own __init__ only re-exports; following it would tie every kernel to the whole package.
        if path is not None and path.name != "__init__.py":
            pending.extend(_imports(path, name))
    digest = hashlib.sha256()
    for name in sorted(seen):
        if (source := seen[name]) is not None:
            status = source.stat()  # ctime: a copy may bring an old mtime with it
            if max(status.st_mtime, status.st_ctime) > _STARTED:
                disk_cache.say(
                    f"{source} is newer than this process; kernels that depend on it are compiled anew, not cached"
                )
                return None
            digest.update(name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()


# ---------------------------------------------------------------------------------- what a compiled function depends on


class _NoSourceError(Exception):
    """A function whose source is not known, so that no digest can stand for it."""


def identity(function: Callable, options: dict[str, Any] | None = None) -> str | None:
    """Text that tells a function, compiled with options, from all others: its source and what it captures.

    Functions that one factory makes differ in their closures and defaults only. None where a source is not known.
    """
    try:
        return _identity(function, options)
    except _NoSourceError:
        return None


def _identity(function: Callable, options: dict[str, Any] | None = None, within: tuple[int, ...] = ()) -> str:
    if id(function) in within:
        return "itself"
    digest, code = source_digest(function.__module__), function.__code__
    if digest is None:
        raise _NoSourceError
    given: dict[str, Any] = dict(zip(code.co_freevars, function.__closure__ or ()))
    for name, cell in given.items():
        given[name] = cell.cell_contents
    given |= {"defaults": function.__defaults__, "keyword defaults": function.__kwdefaults__, "options": options}
    texts = [f"{function.__module__} {function.__qualname__} {code.co_firstlineno} {digest}"]
    for name, value in given.items():
        try:
            texts.append(f"{name}={_text(value, (*within, id(function)))}")
        except _UnknownValueError as error:
            raise TypeError(
                f"{function.__module__}.{function.__qualname__} cannot be cached on disk: it captures {name!r}, and "
                f"no digest of a {error} is known. Capture numbers, strings, arrays, tuples or functions"
            ) from None
    return "\n".join(texts)


class _UnknownValueError(Exception):
    """A value that `_text` cannot describe."""


def _text(value: Any, within: tuple[int, ...] = ()) -> str:
    """Text that is the same in every process for equal values, and differs for others."""
    import numpy as np

    kind = f"{type(value).__module__}.{type(value).__qualname__}"

    def each(values: Iterable[Any]) -> str:
        return f"{kind}({', '.join(_text(v, within) for v in values)})"

    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, np.dtype)):
        return f"{kind} {value!r}"
    if isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject:
        return f"{kind} {value.dtype} {value.shape} {hashlib.sha256(value.tobytes()).hexdigest()}"
    if isinstance(value, (tuple, list)):
        return each(value)
    if isinstance(value, (set, frozenset)):
        return each(sorted(value, key=repr))
    if isinstance(value, dict):
        return each(value.items())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return each((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
    if isinstance(value, (Kernel, Callback)):
        return each((value.options, getattr(value, "signature", None), value.function))
    if isinstance(value, types.FunctionType):
        return f"{kind} {_identity(value, within=within)}"
    if isinstance(value, types.ModuleType):
        return f"{kind} {value.__name__}"
    if isinstance(value, (type, types.BuiltinFunctionType)):
        return f"{kind} {value.__module__}.{value.__qualname__}"
    if isinstance(value, np.ufunc):
        return f"{kind} {value.__name__}"
    if "numba" in sys.modules and isinstance(value, load_numba().types.Type):
        return f"{kind} {value!r}"
    if hasattr(value, "__wrapped__"):  # numba's intrinsics and other decorated functions
        return f"{kind} {_text(inspect.unwrap(value), within)}"
    raise _UnknownValueError(kind)


_CONFIGURATION = ("OPT", "LOOP_VECTORIZE", "SLP_VECTORIZE", "BOUNDSCHECK", "DEBUGINFO_DEFAULT", "ENABLE_AVX",
                  "USING_SVML", "LLVM_REFPRUNE_PASS", "LLVM_REFPRUNE_FLAGS")  # fmt: skip


@functools.cache
def _environment() -> str:
    """What all compiled kernels of this process depend on: versions, CPU, numba's settings."""
    import llvmlite
    import numpy as np

    numba = load_numba()
    settings = [f"{name}={getattr(numba.config, name, None)}" for name in _CONFIGURATION]
    versions = (numba.__version__, llvmlite.__version__, np.__version__, sys.implementation.cache_tag)
    return "\n".join(map(str, (*versions, _binding().get_process_triple(), *target_cpu(), *settings)))


def _with_own_symbols(function: Callable, identity: str) -> Callable:
    """The function; if it is a closure, a copy with a qualified name of its own.

    numba derives symbols from the qualified name and from how many functions a process compiled before. Closures of
    one factory from different processes would have the same symbols, and of code linked twice LLVM keeps the first.
    """
    if not function.__closure__:
        return function
    copy = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    functools.update_wrapper(copy, function)
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__qualname__ += "_" + hashlib.sha256(identity.encode()).hexdigest()[:16]
    return copy


@functools.cache
def _cache_class() -> type:
    """What numba asks for compiled functions and gives new ones to: each is one file of the disk cache."""
    from numba.core.caching import CompileResultCacheImpl, NullCache
    from numba.core.runtime import rtsys
    from numba.core.serialize import dumps

    class Serializer(CompileResultCacheImpl):
        """numba's, for any function."""

        def __init__(self) -> None:
            pass

    class Cache(NullCache):
        def __init__(self, function: Callable, identity: str):
            self._name = re.sub(r"[^\w.]", "", f"{function.__module__}.{function.__qualname__}")[-100:]
            self._key = f"{_environment()}\n{identity}"

        @property
        def cache_path(self) -> str:
            return str(cache_directory())

        def _path(self, signature: Any) -> Path:
            digest = hashlib.sha256(f"{self._key}\n{signature}".encode()).hexdigest()
            return cache_directory() / f"{self._name}-{digest[:40]}.kernel"

        def load_overload(self, sig: Any, target_context: Any) -> Any:
            refuse_numba_config()  # numba reads it again when it compiles
            data = disk_cache.read(self._path(sig))
            if data is None:
                return None
            rtsys.initialize(target_context)  # what machine code calls for memory; all else only who compiles needs
            found = Serializer().rebuild(target_context, pickle.loads(data))
            # Types are told apart by their names in `_path`, which another library's types may share.
            return found if found.signature.args == tuple(getattr(sig, "args", sig)) else None

        def save_overload(self, sig: Any, data: Any) -> None:
            if data.library.has_dynamic_globals:
                warnings.warn(f"{self._name} is not cached on disk: addresses are part of its code", stacklevel=2)
                return
            disk_cache.write(self._path(sig), dumps(Serializer().reduce(data)))

    return Cache


def _cached(function: Callable, options: dict[str, Any]) -> tuple[Callable, Any]:
    """The function as numba is to compile it, and its cache; no cache where its source is not known."""
    text = identity(function, options)
    if text is None:
        return function, None
    return _with_own_symbols(function, text), _cache_class()(function, text)


def kept(make: Callable[..., tuple[np.ndarray, ...]], *given: np.ndarray | int) -> tuple[np.ndarray, ...]:
    """What `make(*given)` gives, from disk where it was made before by the same sources of the same arguments."""
    import io

    import numpy as np

    source = source_digest(make.__module__)
    if source is None:
        return make(*given)
    digest = hashlib.sha256(f"{source} {make.__qualname__}".encode())
    for x in map(np.ascontiguousarray, given):
        digest.update(f"{x.dtype} {x.shape} ".encode() + x.tobytes())
    path = disk_cache.root() / "arrays" / f"{digest.hexdigest()}.npz"
    if (found := disk_cache.read(path)) is not None:
        with np.load(io.BytesIO(found), allow_pickle=False) as file:
            return tuple(file[name] for name in file)
    made = make(*given)
    data = io.BytesIO()
    np.savez(data, *made)
    disk_cache.write(path, data.getbuffer())
    return made


class _CompileNotice:
    """Says on stderr, in one line, that kernels are being compiled once that has taken longer than two seconds."""

    def __init__(self) -> None:
        self._depth = 0
        self._started = 0.0
        self._spent = 0.0
        self._count = 0
        self._timer: threading.Timer | None = None
        self._shown = False

    def on_start(self, event: Any) -> None:
        self._depth += 1
        if self._depth == 1:
            self._started = time.monotonic()
            self._timer = threading.Timer(max(0.05, NOTICE_AFTER_SECONDS - self._spent), self._show)
            self._timer.daemon = True
            self._timer.start()

    def on_end(self, event: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._spent += time.monotonic() - self._started
            self._count += 1
            if self._timer:
                self._timer.cancel()
            if self._shown:
                self._show()

    def _show(self) -> None:
        seconds = self._spent + (time.monotonic() - self._started if self._depth else 0.0)
        text = f"quantkit: compiling kernels for this CPU, kept for next time: {self._count} done, {seconds:.0f} s"
        if sys.stderr.isatty():
            print(f"\r{text}", end="", file=sys.stderr, flush=True)
        elif not self._shown:
            print(text, file=sys.stderr, flush=True)
        if not self._shown and sys.stderr.isatty():
            import atexit

            atexit.register(print, file=sys.stderr)
        self._shown = True


@functools.cache
def _install_notice() -> None:
    from numba.core import event

    notice = _CompileNotice()

    class Listener(event.Listener):
        on_start = staticmethod(notice.on_start)
        on_end = staticmethod(notice.on_end)

    event.register("numba:compile", Listener())


# ---------------------------------------------------------------------------------------------------------- the kernels

_OPTIONS: dict[str, Any] = {"nopython": True, "nogil": True, "error_model": "numpy", "boundscheck": False}
_materialize = threading.RLock()


_P = ParamSpec("_P")
_R = TypeVar("_R")


class Kernel(Generic[_P, _R]):
    """A function that numba compiles when it is first called, or first used inside another kernel.

    To a type checker it has the signature of the function.
    """

    def __init__(self, function: Callable[_P, _R], options: dict[str, Any], alone: bool = True):
        functools.update_wrapper(self, function)
        self.function = function
        self.options = _OPTIONS | options
        self.alone = alone  # not only a part of other kernels

    @functools.cached_property
    def dispatcher(self) -> Any:
        with _materialize:
            if "dispatcher" in self.__dict__:  # made while we waited
                return self.__dict__["dispatcher"]
            numba = load_numba()
            _install_notice()
            options = dict(self.options)
            options.pop("nopython")
            function, cache = _cached(self.function, self.options)
            if not self.alone:
                return numba.njit(pipeline_class=_part_compiler(), **options)(function)
            made = numba.njit(**options)(function)
            if cache is not None:
                made._cache = cache
            return made

    @property
    def _numba_type_(self) -> Any:
        """What numba asks of a global it meets inside another kernel."""
        return self.dispatcher._numba_type_

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
    """Decorator: a lazily compiled, cached, GIL-free kernel. Options are numba's (`fastmath=True`, `inline=…`)."""
    if function is None:
        return lambda f: Kernel(f, options)
    return Kernel(function, options)


_NO_WRAPPERS = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}


def inner(function: Callable[_P, _R]) -> Kernel[_P, _R]:
    """Decorator: a kernel that only kernels call, without wrappers for Python and C. It is kept on disk."""
    return Kernel(function, _NO_WRAPPERS)


def part(function: Callable[_P, _R]) -> Kernel[_P, _R]:
    """Decorator: a kernel that only kernels call, compiled with them: optimized there, made machine code there.

    It is not kept on disk, as its callers are. What several types share is better an `inner`.
    """
    return Kernel(function, _NO_WRAPPERS, alone=False)


@functools.cache
def _part_compiler() -> type:
    """numba's compiler, for parts: what it makes is LLVM's code as it was lowered, to be linked into callers."""
    from numba.core.codegen import JITCodeLibrary
    from numba.core.compiler import Compiler

    class Codegen:
        """numba's, but for the environment, which is for functions that Python calls."""

        def __init__(self, real: Any):
            self._real = real

        def __getattr__(self, name: str) -> Any:
            return getattr(self._real, name)

        def set_env(self, name: str, environment: Any) -> None:
            pass

    class Library(JITCodeLibrary):
        """Linked into others; optimized and made into machine code there."""

        @property
        def codegen(self) -> Any:
            return Codegen(self._codegen)

        def _optimize_final_module(self) -> None:
            pass

        def _finalize_final_module(self) -> None:
            self._finalize_dynamic_globals()
            self._verify_declare_only_symbols()
            self._finalized = True

        def get_pointer_to_function(self, name: str) -> int:
            self._ensure_finalized()
            return 0

    class PartCompiler(Compiler):
        def __init__(self, *args: Any):
            super().__init__(*args)
            self.state.library = Library(self.state.targetctx.codegen(), "part")

    return PartCompiler


_FAILED = "quantkit_kernel_failed"  # the symbol that compiled code calls
_reports = threading.local()
_callback_names: dict[int, str] = {}


def report_failures_to(names: list[str] | None) -> None:
    """Have the names of callbacks that raise on this thread appended to a list.

    C functions cannot raise. An exception ends a callback in the middle, so whoever calls one looks here afterwards.
    None: nobody does, and failures are shown as exceptions that nobody can catch.
    """
    _reports.names = names


def _record_failure(number: int) -> None:
    """Called by compiled code, on the thread whose callback raised."""
    names = getattr(_reports, "names", None)
    if names is None:
        raise KernelError(f"kernel {_callback_names[number]} raised an exception; its results are incomplete")
    names.append(_callback_names[number])


@functools.cache
def _failure_function() -> Any:
    """`_record_failure` as a C function, under the name by which compiled code finds it. It lives as long as this."""
    import ctypes

    function = ctypes.CFUNCTYPE(None, ctypes.c_int64)(_record_failure)
    _binding().add_symbol(_FAILED, ctypes.cast(function, ctypes.c_void_p).value)
    return function


def _guarded(body: Kernel, number: int, arguments: int) -> Any:
    """A function of so many arguments that calls a kernel, and says so when that raises, whatever it raises."""
    from numba import types as kinds

    failed = kinds.ExternalFunction(_FAILED, kinds.void(kinds.int64))

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

    return {1: guarded1, 3: guarded3, 6: guarded6}[arguments]


class Callback:
    """A function compiled as C code with one signature; `address` is its entry point as an integer."""

    def __init__(self, function: Callable, signature: str, options: dict[str, Any]):
        functools.update_wrapper(self, function)  # type: ignore[arg-type]  # named like it, not callable like it
        self.function = function
        self.signature = signature
        self.options = _OPTIONS | options
        name = f"{function.__module__}.{function.__qualname__}"
        self.number = zlib.crc32(name.encode())
        _callback_names[self.number] = name

    @functools.cached_property
    def _compiled(self) -> Any:
        with _materialize:
            if "_compiled" in self.__dict__:  # made while we waited
                return self.__dict__["_compiled"]
            load_numba()
            from numba.core.ccallback import CFunc
            from numba.core.sigutils import normalize_signature

            _install_notice()
            _failure_function()
            options = dict(self.options)
            options.pop("nogil")
            args, returns = normalize_signature(self.signature)
            guarded = _guarded(Kernel(self.function, self.options | _NO_WRAPPERS, alone=False), self.number, len(args))
            text = identity(self.function, self.options)
            if text is not None:
                guarded = _with_own_symbols(guarded, text)
            made: Any = CFunc(guarded, (args, returns), locals={}, options=options)
            if text is not None:
                made._cache = _cache_class()(self.function, text)
            made.compile()
            return made

    @property
    def address(self) -> int:
        return self._compiled.address


def callback(signature: str, **options: Any) -> Callable[[Callable], Callback]:
    """Decorator: a lazily compiled, cached C function of the given numba signature.

    What it raises goes to `report_failures_to`.
    """
    return lambda function: Callback(function, signature, options)


def readonly(array: Any) -> Any:
    """A view that cannot be written. numba compiles a kernel once for it, be the memory mapped or owned."""
    view = array.view()
    view.flags.writeable = False
    return view


# ---------------------------------------------------------------------------------------------------- CPU and threads

_VNNI_CPUS = ("cascadelake", "cooperlake", "icelake", "tigerlake", "rocketlake", "sapphirerapids", "emeraldrapids",
              "graniterapids", "znver4", "znver5")  # fmt: skip
_AVX512_CPUS = ("skylake-avx512", "skx", "cannonlake", "x86-64-v4")
_AVX2_CPUS = ("haswell", "broadwell", "skylake", "core-avx2", "core-avx-i", "alderlake", "raptorlake", "meteorlake",
              "arrowlake", "lunarlake", "znver1", "znver2", "znver3", "x86-64-v3")  # fmt: skip


@functools.cache
def target_cpu() -> tuple[str, str]:
    """Name of the CPU that code is generated for and its features as LLVM reads them ("+avx2,-avx512f").

    The host, or what NUMBA_CPU_NAME and NUMBA_CPU_FEATURES say; a name alone stands for all that CPUs so called have.
    """
    name, features = os.environ.get("NUMBA_CPU_NAME"), os.environ.get("NUMBA_CPU_FEATURES")
    if name or features:
        return name or _binding().get_host_cpu_name(), features or ""
    return _binding().get_host_cpu_name(), _binding().get_host_cpu_features().flatten()


@functools.cache
def cpu_features() -> frozenset[str]:
    """Features of the CPU that code is generated for; of a CPU given by name those that choose between kernels."""
    name, features = target_cpu()
    if features:
        return frozenset(part[1:] for part in features.split(",") if part.startswith("+"))
    vnni = {"avx512vnni"} if name.startswith(_VNNI_CPUS) else set()
    wide = {"avx512f", "avx512bw", "avx512vl", "avx512dq"} if vnni or name in _AVX512_CPUS else set()
    return frozenset(vnni | wide | ({"avx2", "fma", "f16c"} if wide or name in _AVX2_CPUS else set()))


def _binding() -> Any:
    from llvmlite import binding

    return binding


def load_numba() -> Any:
    """numba, which must make code for the CPU that `isa` speaks of. Its configuration file could name another one."""
    refuse_numba_config()
    import numba

    asked, configured = os.environ.get("NUMBA_CPU_NAME") or None, numba.config.CPU_NAME or None
    if asked != configured:
        raise QuantkitError(
            f"numba is configured for the CPU {configured}, NUMBA_CPU_NAME says {asked or 'nothing'}; remove cpu_name "
            "from .numba_config.yaml, or set the variable to it"
        )
    return numba


def refuse_numba_config() -> None:
    """QuantkitError where numba would take its settings from a file of the working directory.

    Whoever supplies a directory of models could then choose how kernels are compiled, down to modules that are loaded.
    """
    if os.path.isfile(".numba_config.yaml"):
        raise QuantkitError(
            f"{os.path.abspath('.numba_config.yaml')} changes numba's settings for what is started in this directory; "
            "remove it or work in another directory. Environment variables (NUMBA_…) can set the same"
        )


@functools.cache
def isa() -> str:
    """The SIMD code path: "avx512vnni", "avx512" (with BW), "avx2" (with FMA and F16C) or "generic"."""
    has = cpu_features()
    if {"avx512f", "avx512bw", "avx512vl"} <= has:
        return "avx512vnni" if "avx512vnni" in has else "avx512"
    return "avx2" if {"avx2", "fma", "f16c"} <= has else "generic"


def _cgroup_cpus() -> float:
    """CPUs that a container's quota allows; infinite without one."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        return float("inf") if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return float("inf")


@functools.cache
def default_threads() -> int:
    """Threads to use where nobody said: `$QUANTKIT_THREADS`, else the CPUs this process may run on."""
    if text := os.environ.get("QUANTKIT_THREADS"):
        if not text.isdecimal() or int(text) < 1:
            raise QuantkitError(f"QUANTKIT_THREADS is '{text}'; it must be a number of threads, at least 1")
        return check_threads(int(text), "QUANTKIT_THREADS is ")
    return available_cpus()


def available_cpus() -> int:
    """The CPUs that this process may use, by its affinity and its control group."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(min(cpus, _cgroup_cpus())))


def check_threads(count: int, what: str = "threads ") -> int:
    """The number; QuantkitError for one that no machine like this has a use for. `what` says where it is from.

    Threads of a team wait for each other in turns. More than there are CPUs are slower, many times more stand still.
    """
    cpus = available_cpus()
    most = max(64, 8 * cpus)
    if not 1 <= count <= most:
        raise QuantkitError(
            f"{what}{count}: this process may use {cpus} CPU(s); take 1 to {most} threads, {cpus} are fastest"
        )
    return count


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    from concurrent.futures import ThreadPoolExecutor

    return ThreadPoolExecutor(threads, thread_name_prefix="quantkit")


if hasattr(os, "register_at_fork"):  # a forked child has none of these threads; what it submitted would wait forever
    os.register_at_fork(after_in_child=_pool.cache_clear)


_PROBES = (64, 8)  # parts of the rows that are timed; the second, where of the first much may be overhead
_WORTH_WAKING = 4e-4  # seconds of work; handing out slices takes up to 2e-4


def over_rows(
    task: Callable[[int, int], None],
    rows: int,
    *,
    multiple: int = 1,
    threads: int | None = None,
    pieces: int = 4,
    is_long: bool = False,
) -> None:
    """Call `task(start, stop)` over slices of range(rows) from several threads and wait for all of them.

    Slices begin at multiples of `multiple`; there are `pieces` for each thread, and who is done takes the next, so
    uneven rows balance. The task should spend its time in kernels, which release the GIL. The exception of the first
    slice that failed is raised again here, an interrupt too, when no slice is worked on any more. Unless the caller
    knows that it `is_long`, the first rows are done here and timed: other threads help with what is left only if it
    will take longer than waking them.
    """
    threads = threads or default_threads()
    groups = -(-rows // multiple)
    if threads <= 1 or groups <= 1:
        task(0, rows)
        return
    done = 0
    for part in () if is_long else _PROBES:
        first = min(rows, done + max(1, groups // part) * multiple)
        begin = time.perf_counter()
        task(done, first)
        left = (time.perf_counter() - begin) * (rows - first) / (first - done)
        done = first
        if left < _WORTH_WAKING:
            if done < rows:
                task(done, rows)
            return
        if left > 8 * _WORTH_WAKING:
            break
    groups = -(-(rows - done) // multiple)
    slices = min(groups, threads * pieces)
    bounds = [done + min(rows - done, groups * i // slices * multiple) for i in range(slices + 1)]
    numbers, failed = itertools.count(), dict[int, BaseException]()

    def work() -> None:
        while not failed and (i := next(numbers)) < slices:
            try:
                task(bounds[i], bounds[i + 1])
            except BaseException as error:
                failed[i] = error

    helping = set[int]()

    def help_out() -> None:
        helping.add(threading.get_ident())
        try:
            work()
        finally:
            helping.discard(threading.get_ident())

    try:
        others = [_pool(threads).submit(help_out) for _ in range(threads - 1)]
        work()  # from now on, while the others wake
        for other in others:
            other.cancel() or other.result()
    except BaseException as error:  # an interrupt; the others must not write to what the caller takes back
        failed[slices] = error
        while helping:
            time.sleep(1e-4)
        raise
    if failed:
        raise failed[min(failed)]  # slices are begun in order: those before it are done
