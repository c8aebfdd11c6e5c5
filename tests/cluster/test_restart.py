"""A scheduler that is killed and started again, with a worker: runs go on."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from quantkit import cluster
from quantkit.cluster.in_order import KeptRun
from quantkit.cluster.summed import SummedPipeline
from tests.cluster.processes import free_port, scheduler_and_worker

if TYPE_CHECKING:
    from distributed import Client


def nothing(threads: int) -> None: ...


def slowly(task: int) -> int:
    time.sleep(0.05)
    return task


def slowly_with_state(state: None, task: int) -> list[int]:
    return [slowly(task)]


def task_run(client: Client) -> Iterator[int]:
    for done in cluster.TaskRun(client, slowly, range(20)):
        yield done.result


def kept_run(client: Client) -> Iterator[int]:
    with KeptRun(client, nothing, []) as run:
        for parts in run.results(slowly_with_state, range(20)):
            yield from parts


def slowly_with_sums(state: None, argument: tuple[int, int, Any, Any]) -> tuple[int, int]:
    task, stage, before, total = argument
    assert (before is None) == (stage == 0)
    return slowly(task if before is None else before), task + (total or 0)


def summed_run(client: Client) -> Iterator[int]:
    with KeptRun(client, nothing, []) as run:
        pipeline = SummedPipeline(run, slowly_with_sums, [range(20)], 2, split=lambda total: [total])
        yield from pipeline.results(0)
        assert list(pipeline.sums(0)) == [sum(range(20))] * 2
        pipeline.cancel()


@pytest.mark.parametrize("run", [task_run, kept_run, summed_run])
def test_a_run_goes_on_after_its_scheduler_was_killed(run: Callable[[Client], Iterator[int]]) -> None:
    """The workers end with their scheduler, so a new one is started too."""
    port, found = free_port(), list[int]()
    with contextlib.ExitStack() as stack:
        scheduler = stack.enter_context(scheduler_and_worker(port))
        client = stack.enter_context(cluster.connect(f"tcp://127.0.0.1:{port}"))
        for result in run(client):
            found.append(result)
            if len(found) == 3:
                scheduler.kill()
                scheduler.wait()
                stack.enter_context(scheduler_and_worker(port))
    assert sorted(found) == list(range(20))
