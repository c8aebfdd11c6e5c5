"""Streaming loops over pieces of tensors, with a progress bar: several threads make the pieces. `pump` writes them in
order; with `spread` each thread writes its own.

Only a few pieces exist at a time, so memory does not grow with the file. The output does not depend on the number of
threads.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Protocol

import numpy as np

from quantkit.codegen import thread_pool
from quantkit.formats.mapping import release
from quantkit.progress import ProgressBar

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

PIECE_ELEMENTS = 1 << 20
_FREED = 8 << 20  # bytes; more than a piece, and below the largest threshold that glibc adapts to


class Progress(Protocol):
    """What callers may pass as `progress`: a function that is called after each piece, from one thread at a time."""

    def __call__(self, done: int, total: int, label: str) -> None:
        """`done` of `total` bytes are done (or tensors, while those of an interrupted run are checked).

        `label` is the name of the tensor, or "".
        """


Job = tuple[str, Callable[[], np.ndarray]]  # name of a tensor, function that makes its next bytes


def pump(
    jobs: Iterable[Job],
    write: Callable[[str, np.ndarray], None],
    bar: Bar,
    *,
    threads: int | None,
) -> None:
    """Run jobs on `threads` threads and call `write(name, bytes)` with their results, in the order of the jobs.

    `bar` counts the bytes of the results. The first exception of a job ends the loop.
    """
    from concurrent.futures import ThreadPoolExecutor

    _keep_freed_memory()
    threads = threads or thread_pool.default_threads()
    with ThreadPoolExecutor(threads, thread_name_prefix="quantkit-pump") as pool:
        for name, data in _in_order(pool, jobs, ahead=2 * threads):
            write(name, data)
            release(data)  # a job that only copies gives a view of the input
            bar.update(data.nbytes, name)


def spread(
    tasks: Iterable[Callable[[], int]], total: int, *, threads: int | None, progress: Progress | bool, unit: str = "B"
) -> None:
    """Run tasks on `threads` threads, including this one, in any order; each returns the number of bytes it wrote.

    `total` and `progress` are those of a `Bar`; `unit` is what the tasks count if not bytes. After the first exception
    no further task starts, and the exception is raised here.
    """
    _keep_freed_memory()
    pending, lock = iter(tasks), threading.Lock()
    failed: list[BaseException] = []

    def work() -> None:
        try:
            while not failed:
                with lock:
                    task = next(pending, None)
                if task is None:
                    return
                done = task()
                with lock:
                    bar.update(done)
        except BaseException as error:  # an interrupt too: the other threads have to stop
            failed.append(error)

    with Bar(total, progress, unit) as bar:
        others = [threading.Thread(target=work) for _ in range((threads or thread_pool.default_threads()) - 1)]
        for other in others:
            other.start()
        work()
        for other in others:
            other.join()
        if failed:
            raise failed[0]


def _keep_freed_memory() -> None:
    """Make glibc keep freed arrays of up to 8 MiB in the process, for the next piece.

    glibc raises its threshold for returning memory when a large array is freed. Without this, memory goes back to the
    system, which clears it again for every piece: a tenth of the time of repacking.
    """
    np.empty(_FREED, np.uint8)


class Bar:
    """Counts the work that is done and reports it: to a `Progress`, to a bar on a terminal, or not at all.

    `total` is the work in all. `progress` is True for a bar on stderr where that is a terminal (`quantkit.progress`).
    """

    def __init__(self, total: int, progress: Progress | bool, unit: str = "B"):
        self._bar = ProgressBar(total=total, unit=unit) if progress is True else None
        self._report = self._bar if isinstance(progress, bool) else progress
        self._done, self._total = 0, total

    def update(self, nbytes: int, name: str = "") -> None:
        """Add `nbytes` (or other units) of the tensor `name`."""
        self._done += nbytes
        self.describe(name)

    def describe(self, what: str) -> None:
        """Say what is being done, while nothing is written."""
        if self._report is not None:
            self._report(self._done, self._total, what)

    def __enter__(self) -> Bar:
        if self._bar is not None:
            self._bar.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if self._bar is not None:
            self._bar.close(failed=kind is not None)


def _in_order(pool: ThreadPoolExecutor, jobs: Iterable[Job], ahead: int) -> Iterator[tuple[str, np.ndarray]]:
    """Results in the order of the jobs; at most `ahead` jobs are started and not yet consumed."""
    flying: deque[tuple[str, Future[np.ndarray]]] = deque()
    try:
        for name, make in jobs:
            flying.append((name, pool.submit(make)))
            if len(flying) >= ahead:
                first, future = flying.popleft()
                yield first, future.result()
        while flying:
            first, future = flying.popleft()
            yield first, future.result()
    finally:
        for _, future in flying:
            future.cancel()


def row_ranges(shape: tuple[int, ...], step: int, elements: int = 0) -> Iterator[tuple[int, int]]:
    """Ranges (start, stop) that cover the rows of a tensor, in pieces of about `elements` (or PIECE_ELEMENTS) elements.

    Each range starts at a multiple of `step`. A vector is one range over its elements, as transforms count them.
    """
    if len(shape) <= 1:
        yield 0, math.prod(shape)
        return
    rows = math.prod(shape[:-1])
    size = max(1, (elements or PIECE_ELEMENTS) // shape[-1] // step) * step
    for start in range(0, rows, size):
        yield start, min(rows, start + size)
