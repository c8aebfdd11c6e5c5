"""Keeping numpy's matrix products on the thread that asks for them.

quantkit's own threads share out the work. A BLAS that adds its own to each of them oversubscribes the CPU, and its
threads wait for each other spinning: with a core taken by another process it was ten times slower. numpy itself offers
no setting; its OpenBLAS does, as a C function. Built with another BLAS, numpy gives the same results, slower at worst.
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


@contextlib.contextmanager
def single_threaded() -> Iterator[None]:
    """Matrix products made inside stay on the thread that calls them, in the whole process.

    When the last of all users leaves, the number of threads is again what it was before the first came.
    """
    global _users, _before
    functions = _functions()
    if functions is None:
        yield
        return
    get, set_threads = functions
    counted = False
    try:
        with _lock:
            threads = get()
            if _users == 0:
                _before = threads
            _users += 1
            counted = True  # no call since the last line: an interrupt comes before both or after both
            set_threads(1)
        yield
    finally:
        if counted:
            with _lock:
                _users -= 1
                if _users == 0:
                    set_threads(_before)
