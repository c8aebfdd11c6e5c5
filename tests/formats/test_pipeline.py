"""The loop that runs tasks on threads: each once, none after a failure, and no thread outlives it."""

from __future__ import annotations

import threading
import time

import pytest

from quantkit.formats.pipeline import spread


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_every_task_runs_once(threads):
    done = []
    tasks = [lambda i=i: done.append(i) or i for i in range(40)]
    before = threading.active_count()
    spread(tasks, sum(range(40)), threads=threads, progress=False)
    assert sorted(done) == list(range(40))
    assert threading.active_count() == before


def test_threads_work_at_the_same_time():
    meeting, met = threading.Barrier(3), []

    def task():
        met.append(meeting.wait(timeout=10))
        return 1

    spread([task] * 3, 3, threads=3, progress=False)
    assert sorted(met) == [0, 1, 2]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("threads", [1, 3])
def test_after_an_error_nothing_more_is_begun(error, threads):
    begun = []

    def task(i):
        begun.append(i)
        if i == 5:
            raise error(f"task {i}")
        time.sleep(0.001)
        return 1

    before = threading.active_count()
    with pytest.raises(error, match="task 5"):
        spread((lambda i=i: task(i) for i in range(1000)), 1000, threads=threads, progress=False)
    assert len(begun) < 20
    assert threading.active_count() == before


def test_an_error_between_tasks_ends_it_too():
    def tasks():
        yield lambda: 1
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        spread(tasks(), 2, threads=2, progress=False)
