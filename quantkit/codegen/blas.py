"""Make numpy's matrix products single-threaded, for callers that split the work over threads of their own.

A BLAS that starts its own threads under each of quantkit's oversubscribes the CPU, and its threads spin while they wait
for each other: with another process on one core it was ten times slower. numpy has no setting for this; its OpenBLAS
has a C function. With another BLAS the results are the same, at worst slower.
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
_threads_before = 0


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
    """Context: numpy's matrix products run on the calling thread only, in the whole process.

    Contexts may overlap. When the last one ends, the number of BLAS threads is what it was before the first.
    """
    global _users, _threads_before
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
                _threads_before = threads
            _users += 1
            counted = True  # no call since the last line: an interrupt comes before both or after both
            set_threads(1)
        yield
    finally:
        if counted:
            with _lock:
                _users -= 1
                if _users == 0:
                    set_threads(_threads_before)
