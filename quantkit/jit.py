"""The one door to numba: lazy kernels, a disk cache that cannot go stale, CPU features, threads.

Nothing here imports numba until the first kernel runs, so a module full of kernels costs nothing to import.

    @kernel                      a function compiled for each new set of argument types, GIL released, no Python inside
    @callback("void(int64)")     the same as a C function with one signature; `.address` is what an op list holds
    (machine.py                  C functions that need no numba at all)
    kept(make, *given)           the arrays that make(*given) gives, kept on disk as kernels are
    keep(path, data)             a file of that cache, whole at once
    over_rows(task, rows)        task(start, stop) on several threads
    isa()                        "avx512vnni", "avx512", "avx2" or "generic": the code path the SIMD kernels take

Kernels call kernels by their global names. numba keys its own cache by the one source file a function stands in
and misses edits to kernels it inlines from elsewhere; here the key is a digest of the file *and of every quantkit
module it imports, directly or not*, so a change recompiles what depends on it and nothing else.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import itertools
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.errors import QuantkitError

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

    import numpy as np

NOTICE_AFTER_SECONDS = 2.0
_PACKAGE = __name__.partition(".")[0]

# ----------------------------------------------------------------------------------------------------------- the cache


def cache_root() -> Path:
    """Where compiled code lives: `$QUANTKIT_CACHE_DIR`, or `quantkit` in the user's cache folder."""
    if root := os.environ.get("QUANTKIT_CACHE_DIR"):
        return Path(root)
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / _PACKAGE


def cache_directory() -> Path:
    """Where numba keeps kernels: a folder per numba version and target CPU.

    numba's own index adds the exact CPU features to each entry's key.
    """
    version, python = _numba().__version__, f"py{sys.version_info[0]}{sys.version_info[1]}"
    return cache_root() / f"numba-{version}-{python}-{target_cpu()[0]}"


def _module_source(name: str) -> Path | None:
    """Path of the source of a quantkit module, None when there is no such module (`name` may be a function)."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, AttributeError, ValueError):
        return None
    return Path(spec.origin) if spec and spec.origin and spec.origin.endswith(".py") else None


_IMPORT = re.compile(r"^[ \t]*(?:from[ \t]+([.\w]+)[ \t]+import[ \t]+(\([^)]*\)|[^\n]*)|import[ \t]+([^\n]*))", re.M)


def _imports(path: Path, module: str) -> set[str]:
    """Names of the quantkit modules that a source file imports, anywhere in it.

    Read by a regular expression: parsing the sources takes longer than loading what was compiled from them. What looks
    like an import in a docstring only makes the digest cover more.
    """
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found: set[str] = set()
    for base, names, modules in _IMPORT.findall(path.read_text()):
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
def source_digest(module: str) -> str:
    """Digest of a module's source and of all quantkit sources it can reach by importing."""
    pending, seen = [module], {}
    while pending:
        name = pending.pop()
        if name in seen:
            continue
        path = Path(__file__) if name == __name__ else _module_source(name)
        if path is None and name == module:  # a test's or a notebook's module
            path = Path(sys.modules[name].__file__ or "")
        seen[name] = path
        # A package's own __init__ only re-exports; following it would tie every kernel to the whole house.
        if path is not None and path.name != "__init__.py":
            pending.extend(_imports(path, name))
    digest = hashlib.sha256()
    for name in sorted(seen):
        if (source := seen[name]) is not None:
            digest.update(name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()


@functools.cache
def _cache_class() -> type:
    """numba's disk cache with our folder and our idea of freshness."""
    from numba.core.caching import CompileResultCacheImpl, FunctionCache, _CacheLocator
    from numba.core.runtime import rtsys

    class Locator(_CacheLocator):
        def __init__(self, function: Callable, path: str):
            self._function = function

        def get_cache_path(self) -> str:
            return str(cache_directory())

        def get_source_stamp(self) -> str:
            return source_digest(self._function.__module__)

        def get_disambiguator(self) -> str:
            return str(self._function.__code__.co_firstlineno)

        @classmethod
        def from_function(cls, function: Callable, path: str) -> Any:
            return cls(function, path)

    class Impl(CompileResultCacheImpl):
        _locator_classes = [Locator]  # noqa: RUF012  numba's name for it

    class Cache(FunctionCache):
        _impl_class = Impl

        def load_overload(self, sig: Any, target_context: Any) -> Any:
            """numba's, without having its compiler learn all that it knows first: who compiles does that."""
            rtsys.initialize(target_context)  # what machine code calls for memory
            with self._guard_against_spurious_io_errors():
                return self._load_overload(sig, target_context)

    return Cache


@functools.cache
def _cache_is_usable() -> bool:
    path = cache_directory()
    try:
        path.mkdir(parents=True, exist_ok=True)
        (path / f".probe-{os.getpid()}").touch()
        (path / f".probe-{os.getpid()}").unlink()
    except OSError as error:
        print(
            f"quantkit: {path} cannot be written ({error.strerror}); kernels are compiled anew in every process. "
            "Set QUANTKIT_CACHE_DIR to a writable folder.",
            file=sys.stderr,
        )
        return False
    return True


def kept(make: Callable[..., tuple[np.ndarray, ...]], *given: np.ndarray | int) -> tuple[np.ndarray, ...]:
    """What `make(*given)` gives, from disk where it was made before by the same sources of the same arguments."""
    import io
    import zipfile

    import numpy as np

    digest = hashlib.sha256(source_digest(make.__module__).encode())
    for x in map(np.ascontiguousarray, given):
        digest.update(f"{x.dtype} {x.shape} ".encode() + x.tobytes())
    path = cache_root() / "arrays" / f"{digest.hexdigest()}.npz"
    try:
        with np.load(path, allow_pickle=False) as file:
            return tuple(file[name] for name in file)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile):  # not there, or not whole
        made = make(*given)
    data = io.BytesIO()
    np.savez(data, *made)
    keep(path, data.getbuffer())
    return made


def keep(path: Path, data: bytes | memoryview) -> None:
    """Put a file into the cache, whole at once. A folder that cannot be written only means making it anew next time."""
    partial = path.with_name(f"{path.name}.partial-{os.getpid()}-{threading.get_ident()}")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(data)
        os.replace(partial, path)


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


class Kernel:
    """A function that numba compiles when it is first called, or first used inside another kernel."""

    def __init__(self, function: Callable, options: dict[str, Any], alone: bool = True):
        functools.update_wrapper(self, function)
        self.function = function
        self.options = _OPTIONS | options
        self.alone = alone  # not only a part of other kernels

    @functools.cached_property
    def dispatcher(self) -> Any:
        with _materialize:
            numba = _numba()
            _install_notice()
            options = dict(self.options)
            options.pop("nopython")
            if not self.alone:
                return numba.njit(pipeline_class=_part_compiler(), **options)(self.function)
            made = numba.njit(**options)(self.function)
            if _cache_is_usable():
                made._cache = _cache_class()(self.function)
            return made

    @property
    def _numba_type_(self) -> Any:
        """What numba asks of a global it meets inside another kernel."""
        return self.dispatcher._numba_type_

    def __call__(self, *args: Any) -> Any:
        if "no_cpython_wrapper" in self.options:
            raise TypeError(f"{self.function.__name__} is called by kernels only; call its `.function` from Python")
        return self.dispatcher(*args)


def kernel(function: Callable | None = None, **options: Any) -> Any:
    """Decorator: a lazily compiled, cached, GIL-free kernel. Options are numba's (`fastmath=True`, `inline=…`)."""
    if function is None:
        return lambda f: Kernel(f, options)
    return Kernel(function, options)


_NO_WRAPPERS = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}


def inner(function: Callable) -> Kernel:
    """Decorator: a kernel that only kernels call, without wrappers for Python and C. It is kept on disk."""
    return Kernel(function, _NO_WRAPPERS)


def part(function: Callable) -> Kernel:
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


class Callback:
    """A function compiled as C code with one signature; `address` is its entry point as an integer."""

    def __init__(self, function: Callable, signature: str, options: dict[str, Any]):
        functools.update_wrapper(self, function)  # type: ignore[arg-type]  # named like it, not callable like it
        self.function = function
        self.signature = signature
        self.options = _OPTIONS | options

    @functools.cached_property
    def _compiled(self) -> Any:
        with _materialize:
            from numba.core.ccallback import CFunc
            from numba.core.sigutils import normalize_signature

            _install_notice()
            options = dict(self.options)
            options.pop("nogil")
            made: Any = CFunc(self.function, normalize_signature(self.signature), locals={}, options=options)
            if _cache_is_usable():
                made._cache = _cache_class()(self.function)
            made.compile()
            return made

    @property
    def address(self) -> int:
        return self._compiled.address


def callback(signature: str, **options: Any) -> Callable[[Callable], Callback]:
    """Decorator: a lazily compiled, cached C function of the given numba signature."""
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


def _numba() -> Any:
    """numba, which must make code for the CPU that `isa` speaks of. Its configuration file could name another one."""
    import numba

    asked, configured = os.environ.get("NUMBA_CPU_NAME") or None, numba.config.CPU_NAME or None
    if asked != configured:
        raise QuantkitError(
            f"numba is configured for the CPU {configured}, NUMBA_CPU_NAME says {asked or 'nothing'}; remove cpu_name "
            "from .numba_config.yaml, or set the variable to it"
        )
    return numba


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
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return float("inf") if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return float("inf")


@functools.cache
def default_threads() -> int:
    """Threads to use where nobody said: `$QUANTKIT_THREADS`, else the CPUs this process may run on."""
    if text := os.environ.get("QUANTKIT_THREADS"):
        if not text.isdecimal() or int(text) < 1:
            raise QuantkitError(f"QUANTKIT_THREADS is '{text}'; it must be a number of threads, at least 1")
        return int(text)
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(min(cpus, _cgroup_cpus())))


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
    slice that failed is raised again here. Unless the caller knows that it `is_long`, the first rows are done here and
    timed: other threads help with what is left only if it will take longer than waking them.
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

    others = [_pool(threads).submit(work) for _ in range(threads - 1)]
    work()  # from now on, while the others wake
    for other in others:
        other.cancel() or other.result()
    if failed:
        raise failed[min(failed)]  # slices are begun in order: those before it are done
