"""A notice while kernels are compiled, once compiling has taken two seconds in all: by default one line on stderr.

A program that shows progress sets `show`; the command line does so. This module, and all that it imports, is part of
the digest of every kernel, so it holds no more than this.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

NOTICE_AFTER_SECONDS = 2.0
WHAT = "compiling kernels for this CPU, cached for later runs"


class Compilation(NamedTuple):
    """The state of compiling: kernels that are done, the seconds spent in all, whether the compiler is running now."""

    kernels: int
    seconds: float
    is_running: bool


@functools.cache
def _print_once() -> None:
    print(f"quantkit: {WHAT}", file=sys.stderr, flush=True)


def print_once(state: Compilation) -> None:
    """The default of `show`: one line, the first time."""
    if state.is_running:
        _print_once()


# Called when the compiler has run for a while, from a thread of its own, and then when it stops.
show: Callable[[Compilation], None] = print_once


class _CompileNotice:
    """Counts the kernels that are compiled and the time it takes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._depth = 0  # compiling a kernel compiles the kernels that it calls
        self._started = 0.0
        self._spent = 0.0
        self._count = 0
        self._timer: threading.Timer | None = None
        self._is_shown = False

    def on_start(self, event: object) -> None:
        with self._lock:
            self._depth += 1
            if self._depth == 1:
                self._started = time.monotonic()
                self._timer = threading.Timer(max(0.05, NOTICE_AFTER_SECONDS - self._spent), self._show)
                self._timer.daemon = True
                self._timer.start()

    def on_end(self, event: object) -> None:
        with self._lock:
            self._depth -= 1
            if self._depth:
                return
            self._spent += time.monotonic() - self._started
            self._count += 1
            if self._timer:
                self._timer.cancel()
            if self._is_shown:
                self._is_shown = False
                show(Compilation(self._count, self._spent, False))

    def _show(self) -> None:
        with self._lock:
            if self._depth:  # else the compiler has stopped just now
                self._is_shown = True
                show(Compilation(self._count, self._spent + time.monotonic() - self._started, True))


@functools.cache
def install() -> None:
    """Have numba report the start and end of each compilation to one notice."""
    from quantkit.codegen import numba_internals

    notice = _CompileNotice()
    numba_internals.listen("numba:compile", notice.on_start, notice.on_end)
