"""The streaming loop: pieces are made on several threads and written in order, with progress and an ETA.

Only a few pieces exist at a time, so memory is bounded by their size, whatever the size of the file, and what is
written does not depend on the number of threads.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from quantkit import jit
from quantkit.files.mapping import release

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
    from tqdm import tqdm

    # Freeing this has glibc keep what is freed from now on in arrays up to its size, for the next piece. Without, much
    # of it goes back to the system, which clears it anew for every piece: a tenth of the time of repacking.
    np.empty(_KEPT, np.uint8)
    threads = threads or jit.default_threads()
    bar: Any = tqdm(total=total, unit="B", unit_scale=True, disable=None if progress else True)
    with bar, ThreadPoolExecutor(threads, thread_name_prefix="quantkit-pump") as pool:
        for name, data in _in_order(pool, jobs, ahead=2 * threads):
            write(name, data)
            release(data)  # of what is only copied, a view of the input
            bar.set_description_str(name, refresh=False)
            bar.update(data.nbytes)


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


def row_ranges(shape: tuple[int, ...], step: int) -> Iterator[tuple[int, int]]:
    """Ranges of about PIECE_ELEMENTS that start at multiples of `step` and cover a tensor's rows.

    A vector is one range over its elements, as transforms count them.
    """
    if len(shape) <= 1:
        yield 0, math.prod(shape)
        return
    rows = math.prod(shape[:-1])
    size = max(1, PIECE_ELEMENTS // shape[-1] // step) * step
    for start in range(0, rows, size):
        yield start, min(rows, start + size)
