"""A notice on stderr while kernels are compiled, shown once compiling has taken two seconds in all."""

from __future__ import annotations

import atexit
import functools
import sys
import threading
import time

from quantkit.codegen import numba_internals

NOTICE_AFTER_SECONDS = 2.0


class _CompileNotice:
    """Counts the kernels that are compiled and the time it takes; prints one line, updated on a terminal."""

    def __init__(self) -> None:
        self._depth = 0  # compiling a kernel compiles the kernels that it calls
        self._started = 0.0
        self._spent = 0.0
        self._count = 0
        self._timer: threading.Timer | None = None
        self._is_shown = False

    def on_start(self, event: object) -> None:
        self._depth += 1
        if self._depth == 1:
            self._started = time.monotonic()
            self._timer = threading.Timer(max(0.05, NOTICE_AFTER_SECONDS - self._spent), self._show)
            self._timer.daemon = True
            self._timer.start()

    def on_end(self, event: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._spent += time.monotonic() - self._started
            self._count += 1
            if self._timer:
                self._timer.cancel()
            if self._is_shown:
                self._show()

    def _show(self) -> None:
        seconds = self._spent + (time.monotonic() - self._started if self._depth else 0.0)
        text = f"quantkit: compiling kernels for this CPU, cached for later runs: {self._count} done, {seconds:.0f} s"
        if sys.stderr.isatty():
            print(f"\r{text}", end="", file=sys.stderr, flush=True)
        elif not self._is_shown:
            print(text, file=sys.stderr, flush=True)
        if not self._is_shown and sys.stderr.isatty():
            atexit.register(print, file=sys.stderr)  # ends the line
        self._is_shown = True


@functools.cache
def install() -> None:
    """Have numba report the start and end of each compilation to one notice."""
    notice = _CompileNotice()
    numba_internals.listen_to_compilations(notice.on_start, notice.on_end)
