"""Threads: how many to use, and `over_rows`, which shares the rows of an array among them.

numba compiles kernels as sequential code that releases the GIL. Python threads call them on slices of rows.
"""

from __future__ import annotations

import functools
import itertools
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from quantkit.errors import QuantkitError

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

_TIMED_FRACTIONS = (64, 8)  # the first 1/64 of the rows is timed, then 1/8 where that was too short to measure
_MIN_SECONDS = 4e-4  # of remaining work that is worth other threads: starting them takes up to 2e-4


@functools.cache
def default_threads() -> int:
    """Number of threads where none is given: `$QUANTKIT_THREADS`, else the CPUs that this process may use."""
    if text := os.environ.get("QUANTKIT_THREADS"):
        if not text.isdecimal() or int(text) < 1:
            raise QuantkitError(f"QUANTKIT_THREADS is '{text}'; it must be a number of threads, at least 1")
        return check_threads(int(text), "QUANTKIT_THREADS is ")
    return available_cpus()


def available_cpus() -> int:
    """Number of CPUs that this process may use, by its affinity and its control group."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(min(cpus, _cgroup_cpus())))


def _cgroup_cpus() -> float:
    """CPUs that a container's quota allows; infinite without a quota."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        return float("inf") if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return float("inf")


def check_threads(count: int, source: str = "threads ") -> int:
    """The number of threads; QuantkitError where it is below 1 or far above the CPUs. `source` is where it was set.

    The threads of a team wait for each other at barriers. More threads than CPUs are slower; with many times more,
    hardly any progress is made.
    """
    cpus = available_cpus()
    maximum = max(64, 8 * cpus)
    if not 1 <= count <= maximum:
        raise QuantkitError(
            f"{source}{count}: this process may use {cpus} CPU(s); take 1 to {maximum} threads, {cpus} are fastest"
        )
    return count


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    from concurrent.futures import ThreadPoolExecutor

    return ThreadPoolExecutor(threads, thread_name_prefix="quantkit")


if hasattr(os, "register_at_fork"):  # a forked child has none of these threads, so a task given to them never ends
    os.register_at_fork(after_in_child=_pool.cache_clear)


def over_rows(
    task: Callable[[int, int], None],
    rows: int,
    *,
    multiple: int = 1,
    threads: int | None = None,
    pieces: int = 4,
    is_long: bool = False,
) -> None:
    """Call `task(start, stop)` on slices of range(rows) from several threads and wait for all of them.

    Slices begin at multiples of `multiple`. There are `pieces` slices per thread; a thread that is done takes the next
    one, so rows of uneven cost balance. The task should spend its time in kernels, which release the GIL.

    Unless the caller knows that the work `is_long`, this thread does the first rows and times them. Other threads join
    only if the rest takes longer than starting them.

    The exception of the first slice that failed is raised again, an interrupt too, after all threads have stopped.
    """
    threads = threads or default_threads()
    groups = -(-rows // multiple)
    if threads <= 1 or groups <= 1:
        task(0, rows)
        return
    start = 0
    for fraction in () if is_long else _TIMED_FRACTIONS:
        first = min(rows, start + max(1, groups // fraction) * multiple)
        begin = time.perf_counter()
        task(start, first)
        seconds_left = (time.perf_counter() - begin) * (rows - first) / (first - start)
        start = first
        if seconds_left < _MIN_SECONDS:
            if start < rows:
                task(start, rows)
            return
        if seconds_left > 8 * _MIN_SECONDS:
            break
    groups = -(-(rows - start) // multiple)
    slices = min(groups, threads * pieces)
    bounds = [start + min(rows - start, groups * i // slices * multiple) for i in range(slices + 1)]
    numbers, failed = itertools.count(), dict[int, BaseException]()

    def work() -> None:
        while not failed and (i := next(numbers)) < slices:
            try:
                task(bounds[i], bounds[i + 1])
            except BaseException as error:
                failed[i] = error

    helpers = set[int]()

    def help_out() -> None:
        helpers.add(threading.get_ident())
        try:
            work()
        finally:
            helpers.discard(threading.get_ident())

    try:
        futures = [_pool(threads).submit(help_out) for _ in range(threads - 1)]
        work()  # while the other threads start
        for future in futures:
            future.cancel() or future.result()
    except BaseException as error:  # an interrupt: wait until no thread writes to the caller's arrays any more
        failed[slices] = error
        while helpers:
            time.sleep(1e-4)
        raise
    if failed:
        raise failed[min(failed)]  # slices start in order, so all slices before this one are done
