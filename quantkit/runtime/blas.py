"""How many threads numpy's matrix product may use.

numpy itself offers no setting, its OpenBLAS does, as a C function. Where numpy was built with another BLAS, that one
keeps its own setting: results are the same, only `--threads` does not hold for matrix products.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

_PREFIXES = ("scipy_openblas", "openblas")
_SUFFIXES = ("64_", "_64", "")

_lock = threading.Lock()
_users = 0
_before = 0


@functools.cache
def _functions() -> tuple[Callable[[], int], Callable[[int], None]] | None:
    """OpenBLAS's own (get, set) of its number of threads; None when numpy uses another library."""
    package = Path(np.__file__).parent
    folders = (package.parent / "numpy.libs", package / ".libs", package / ".dylibs")
    for path in (path for folder in folders for path in sorted(folder.glob("*openblas*"))):
        library = ctypes.CDLL(str(path))  # the one numpy has loaded already
        for prefix in _PREFIXES:
            for suffix in _SUFFIXES:
                with contextlib.suppress(AttributeError):
                    get = getattr(library, f"{prefix}_get_num_threads{suffix}")
                    return get, getattr(library, f"{prefix}_set_num_threads{suffix}")
    return None


def set_threads(threads: int) -> None:
    """Let matrix products use `threads` threads from now on, in the whole process; for use inside `borrowed`."""
    if functions := _functions():
        functions[1](threads)


@contextlib.contextmanager
def borrowed() -> Iterator[None]:
    """The number of threads may be changed inside; when the last of all users leaves, it is what it was before."""
    global _users, _before
    functions = _functions()
    with _lock:
        if _users == 0 and functions:
            _before = functions[0]()
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0 and functions:
                functions[1](_before)
