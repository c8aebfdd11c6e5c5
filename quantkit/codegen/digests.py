"""Digests of everything that a compiled function depends on: cache files are named by them.

    source_digest(module)               of a module's source and of all quantkit sources that it imports
    identity(function, options)         that digest, the function's name and line, and what it captures

numba's own cache misses edits to kernels that it inlines from other files, and shares one index among all closures of
a source line. A digest of the sources has neither problem: an edit recompiles what depends on it and nothing else.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.util
import inspect
import os
import re
import sys
import time
import types
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from quantkit.codegen import disk_cache

_PACKAGE = __name__.partition(".")[0]
_PROCESS_START = time.time()
_IMPORT = re.compile(r"^[ \t]*(?:from[ \t]+([.\w]+)[ \t]+import[ \t]+(\([^)]*\)|[^\n]*)|import[ \t]+([^\n]*))", re.M)


class Compiled:
    """Base of kernels and callbacks: a function, compiled with options, for one signature or for any."""

    function: Callable[..., Any]
    options: dict[str, Any]
    signature: str | None = None


@functools.cache
def _module_source(name: str) -> Path | None:
    """Path of the source of a quantkit module; None where no such module exists (`name` may be a function)."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, AttributeError, ValueError):
        return None
    return Path(spec.origin) if spec and spec.origin and spec.origin.endswith(".py") else None


@functools.cache
def _imports(path: Path, module: str) -> set[str]:
    """Names of the quantkit modules that a source file imports, anywhere in it.

    A regular expression finds them: parsing the sources takes longer than loading the compiled kernels. Text in a
    docstring that looks like an import only makes the digest cover more.
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
    """Digest of a module's source and of all quantkit sources that it reaches by importing.

    None for a module without a source file, such as a notebook's. None also, with a notice, where a source is newer
    than this process: code imported before the edit would be cached under the digest of the new source.
    """
    pending, sources = [module], dict[str, Path | None]()
    while pending:
        name = pending.pop()
        if name in sources:
            continue
        path = _module_source(name)
        if path is None and name == module:  # a test's or a script's module
            file = getattr(sys.modules.get(name), "__file__", None)
            if file is None or not os.path.isfile(file):
                return None
            path = Path(file)
        sources[name] = path
        # A package's own __init__ only re-exports; following it would tie every kernel to the whole package.
        if path is not None and path.name != "__init__.py":
            pending.extend(_imports(path, name))
    digest = hashlib.sha256()
    for name in sorted(sources):
        if (source := sources[name]) is not None:
            status = source.stat()  # ctime too: a copied file may have an old mtime
            if max(status.st_mtime, status.st_ctime) > _PROCESS_START:
                disk_cache.notice(
                    f"{source} is newer than this process; kernels that depend on it are compiled but not cached"
                )
                return None
            digest.update(name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()


class _NoSourceError(Exception):
    """A function whose source is unknown, so that no digest can stand for it."""


class _UnknownValueError(Exception):
    """A value that `_text` cannot describe."""


def identity(function: Callable[..., Any], options: dict[str, Any] | None = None) -> str | None:
    """Text that differs for any two compiled functions: source digest, line, captured values, options.

    Functions made by one factory differ only in their closures and defaults. None where a source is unknown. TypeError
    where a captured value has no digest.
    """
    try:
        return _identity(function, options)
    except _NoSourceError:
        return None


def _identity(function: Callable[..., Any], options: dict[str, Any] | None = None, within: tuple[int, ...] = ()) -> str:
    if id(function) in within:
        return "itself"
    digest, code = source_digest(function.__module__), function.__code__
    if digest is None:
        raise _NoSourceError
    captured: dict[str, Any] = {
        name: cell.cell_contents for name, cell in zip(code.co_freevars, function.__closure__ or ())
    }
    captured |= {
        "defaults": function.__defaults__,
        "keyword defaults": function.__kwdefaults__,
        "options": options,
    }
    texts = [f"{function.__module__} {function.__qualname__} {code.co_firstlineno} {digest}"]
    for name, value in captured.items():
        try:
            texts.append(f"{name}={_text(value, (*within, id(function)))}")
        except _UnknownValueError as error:
            raise TypeError(
                f"{function.__module__}.{function.__qualname__} cannot be cached on disk: it captures {name!r}, and "
                f"no digest of a {error} is known. Capture numbers, strings, arrays, tuples or functions"
            ) from None
    return "\n".join(texts)


def _text(value: Any, within: tuple[int, ...] = ()) -> str:
    """Text that is the same in every process for equal values, and differs for other values."""
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
    if isinstance(value, Compiled):
        return each((value.options, value.signature, value.function))
    if isinstance(value, types.FunctionType):
        return f"{kind} {_identity(value, within=within)}"
    if isinstance(value, types.ModuleType):
        return f"{kind} {value.__name__}"
    if isinstance(value, (type, types.BuiltinFunctionType)):
        return f"{kind} {value.__module__}.{value.__qualname__}"
    if isinstance(value, np.ufunc):
        return f"{kind} {value.__name__}"
    if "numba" in sys.modules and isinstance(value, sys.modules["numba"].types.Type):
        return f"{kind} {value!r}"
    if hasattr(value, "__wrapped__"):  # numba's intrinsics and other decorated functions
        return f"{kind} {_text(inspect.unwrap(value), within)}"
    raise _UnknownValueError(kind)
