"""`in_threads`: the threads of a worker, which the tasks that it has at a time share.

Parts of a task that came first are done first. While its last parts run, those of the next task take the threads that
have nothing to do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

R = TypeVar("R")


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="quantkit-worker")


def in_threads(function: Callable[..., R], arguments: Iterable[tuple[object, ...]]) -> list[R]:
    """The results of a function for each tuple of arguments, computed in all threads of this worker.

    The first exception is raised, and parts that have not begun are dropped. Outside of a worker, and on one of one
    thread, all of it runs here.
    """
    from distributed import get_worker

    try:
        threads = get_worker().state.nthreads
    except ValueError:
        threads = 1
    if threads == 1:
        return [function(*each) for each in arguments]
    futures = [_pool(threads).submit(function, *each) for each in arguments]
    try:
        return [future.result() for future in futures]
    finally:
        for future in futures:
            future.cancel()
