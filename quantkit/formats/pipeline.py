"""The streaming loops, with progress and an ETA: pieces are made on several threads and written in order (`pump`), or
each by the thread that made it (`spread`).

Only a few pieces exist at a time, so memory is bounded by their size, whatever the size of the file, and what is
written does not depend on the number of threads.
"""

from __future__ import annotations

import math
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from quantkit.codegen import thread_pool
from quantkit.errors import printable
from quantkit.formats.mapping import release

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

PIECE_ELEMENTS = 1 << 20
_KEPT = 8 << 20  # bytes; larger than pieces are, and no more than what glibc would go up to

Job = tuple[str, Callable[[], np.ndarray]]  # tensor to append to, what makes its next bytes


def pump(
    jobs: Iterable[Job], write: Callable[[str, np.ndarray], None], total: int, *, threads: int | None, progress: bool
) -> None:
    """Run jobs on `threads` threads and `write(name, bytes)` what each gives, in their order.

    `total` is the number of bytes that all of them give; `progress` shows a bar where stderr is a terminal. The first
    exception of a job ends it all.
    """
    from concurrent.futures import ThreadPoolExecutor

    _keep_what_is_freed()
    threads = threads or thread_pool.default_threads()
    with Bar(total, progress) as bar, ThreadPoolExecutor(threads, thread_name_prefix="quantkit-pump") as pool:
        for name, data in _in_order(pool, jobs, ahead=2 * threads):
            write(name, data)
            release(data)  # of what is only copied, a view of the input
            bar.update(data.nbytes, name)


def spread(
    tasks: Iterable[Callable[[], int]], total: int, *, threads: int | None, progress: bool, unit: str = "B"
) -> None:
    """Run tasks on `threads` threads, of which this is one, in any order; each returns the bytes that it wrote.

    `total` and `progress` as of `pump`; what is counted may have another `unit`. After the first exception no other
    task is begun.
    """
    _keep_what_is_freed()
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
        except BaseException as error:  # an interrupt too: the other threads have to hear of it
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


def _keep_what_is_freed() -> None:
    """Freeing an array has glibc keep what is freed from now on in arrays up to its size, for the next piece.

    Without, much of it goes back to the system, which clears it anew for every piece: a tenth of the time of repacking.
    """
    np.empty(_KEPT, np.uint8)


class Bar:
    """A progress bar of bytes where it is wanted and stderr is a terminal, else nothing; tqdm takes time to load."""

    def __init__(self, total: int, wanted: bool, unit: str = "B"):
        self._bar: Any = None
        if wanted and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=total, unit=unit if unit == "B" else f" {unit}", unit_scale=unit == "B")

    def update(self, nbytes: int, name: str = "") -> None:
        if self._bar is not None:
            self._bar.set_description_str(printable(name), refresh=False)
            self._bar.update(nbytes)

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.close()


def _in_order(pool: ThreadPoolExecutor, jobs: Iterable[Job], ahead: int) -> Iterator[tuple[str, np.ndarray]]:
    """Results in the order of jobs, of which at most `ahead` are begun and not yet taken."""
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
    """Ranges of about so many elements, or PIECE_ELEMENTS, that start at multiples of `step` and cover a tensor's rows.

    A vector is one range over its elements, as transforms count them.
    """
    if len(shape) <= 1:
        yield 0, math.prod(shape)
        return
    rows = math.prod(shape[:-1])
    size = max(1, (elements or PIECE_ELEMENTS) // shape[-1] // step) * step
    for start in range(0, rows, size):
        yield start, min(rows, start + size)
