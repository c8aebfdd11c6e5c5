"""Ctrl-C while numba compiles: `install` has it wait until LLVM returns.

LLVM calls Python functions through ctypes. An exception in one of them is printed and lost, that of an interrupt too:
the job would go on to its end. So an interrupt comes between two passes of numba's compiler, or when that is done. A
second one does not wait.

This module, and all that it imports, is part of the digest of every kernel, so it holds no more than this.
"""

from __future__ import annotations

import functools
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any


class _Deferral:
    """The handler of SIGINT while the main thread has numba's lock of the compiler."""

    def __init__(self) -> None:
        self._depth = 0  # compiling a kernel compiles the kernels that it calls
        self._before: Callable[[int, FrameType | None], Any] | None = None
        self._is_waiting = False

    def on_start(self, event: object) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # Python runs handlers in the main thread only
        if self._depth == 0 and callable(before := signal.getsignal(signal.SIGINT)):
            self._before = before
            signal.signal(signal.SIGINT, self._note)
        self._depth += 1

    def on_end(self, event: object) -> None:
        if threading.current_thread() is not threading.main_thread() or not self._depth:
            return
        self._depth -= 1
        if self._depth or self._before is None:
            return
        signal.signal(signal.SIGINT, self._before)
        self._before = None
        if self._is_waiting:
            self._is_waiting = False
            signal.raise_signal(signal.SIGINT)

    def between_passes(self, event: object) -> None:
        if self._is_waiting and self._before is not None and threading.current_thread() is threading.main_thread():
            self._is_waiting = False
            self._before(signal.SIGINT, None)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._is_waiting and self._before is not None:
            self._before(number, frame)
        self._is_waiting = True


@functools.cache
def install() -> None:
    """Have numba report to one deferral when its compiler starts and ends, also to load a file of the cache."""
    from quantkit.codegen import numba_internals

    deferral = _Deferral()
    numba_internals.listen("numba:compiler_lock", deferral.on_start, deferral.on_end)
    numba_internals.listen("numba:run_pass", deferral.between_passes, lambda event: None)
