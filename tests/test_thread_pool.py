"""Threads: how many there are by default, and slices of rows that several threads work on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from quantkit.codegen import thread_pool


def test_threads_by_environment() -> None:
    code = "from quantkit.codegen import thread_pool; print(thread_pool.default_threads())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"QUANTKIT_THREADS": "3"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "3\n"
    assert thread_pool.default_threads() >= 1


@pytest.mark.parametrize("text", ["many", "0", "-2", "1.5"])
def test_threads_by_environment_must_be_a_number(text: str) -> None:
    code = """
from quantkit.codegen import thread_pool
from quantkit.errors import QuantkitError
try: thread_pool.default_threads()
except QuantkitError as error: print(error)
"""
    environment = os.environ | {"QUANTKIT_THREADS": text}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == f"QUANTKIT_THREADS is '{text}'; it must be a number of threads, at least 1\n"


FORK = """
import os
from quantkit.codegen import thread_pool

thread_pool.over_rows(lambda a, b: None, 8, threads=2)
child = os.fork()
if child == 0:
    rows = []
    thread_pool.over_rows(lambda a, b: rows.append(b - a), 8, threads=2)
    print(sum(rows), flush=True)
    os._exit(0)
os.waitpid(child, 0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_over_rows_works_in_a_forked_child() -> None:
    """A child has none of its parent's threads, so what it submits to the parent's pool would wait for ever."""
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORK]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as parent:
        try:
            assert parent.communicate(timeout=30)[0] == "8\n"
        except subprocess.TimeoutExpired:
            os.killpg(parent.pid, signal.SIGKILL)
            raise


@pytest.mark.parametrize(("rows", "multiple", "threads"), [(100, 1, 3), (100, 8, 2), (7, 8, 4), (1, 1, 4), (64, 4, 1)])
def test_over_rows_covers_every_row_once(rows: int, multiple: int, threads: int) -> None:
    seen: list[tuple[int, int]] = []
    thread_pool.over_rows(lambda a, b: seen.append((a, b)), rows, multiple=multiple, threads=threads)
    seen.sort()
    assert [row for a, b in seen for row in range(a, b)] == list(range(rows))
    assert all(a % multiple == 0 for a, _ in seen)


def test_over_rows_uses_threads_and_raises_what_they_raise() -> None:
    names: set[str] = set()

    def task(start: int, stop: int) -> None:
        time.sleep(0.002 * (stop - start))
        names.add(threading.current_thread().name)

    thread_pool.over_rows(task, 64, threads=2)
    assert len(names) == 2
    assert threading.current_thread().name in names

    def fails(start: int, stop: int) -> None:
        raise ValueError(f"at {start}")

    with pytest.raises(ValueError, match="at 0"):
        thread_pool.over_rows(fails, 8, threads=2)


def test_over_rows_raises_what_the_first_rows_that_fail_raise() -> None:
    """Whichever thread is faster: an error names the first bad row of a tensor, every time."""
    failed: list[int] = []

    def task(start: int, stop: int) -> None:
        time.sleep(0.1 if start == 8 else 0.01)
        if start >= 8:
            failed.append(start)
            raise ValueError(f"at {start}")

    with pytest.raises(ValueError, match=r"at 8$"):
        thread_pool.over_rows(task, 64, threads=2)
    assert failed[-1] == 8  # the other thread failed at 16 before


def test_over_rows_keeps_small_work_here() -> None:
    names: list[str] = []
    thread_pool.over_rows(lambda a, b: names.append(threading.current_thread().name), 640, threads=2)
    assert set(names) == {threading.current_thread().name}
