"""Tasks on a cluster of two processes: order, errors, unfit and slow workers."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from quantkit import cluster
from quantkit.cluster import TaskRun, UnfitWorker
from quantkit.cluster.fetching import fetched
from quantkit.errors import DataError, QuantkitError
from tests.cluster.processes import first_to, kill_workers_before

if TYPE_CHECKING:
    from distributed import Client


def square(task: int) -> int:
    time.sleep(0.002 * (task % 3))
    return task * task


def failing(task: int) -> int:
    if task == 7:
        raise DataError("row 7 is NaN")
    return task


def full_disk_on_one(folder: str) -> int:
    if first_to(folder):
        raise OSError(28, "No space left on device")
    return os.getpid()


def unfit(task: int) -> int:
    raise UnfitWorker("has no file")


def slow_on_one(task: tuple[str, int]) -> int:
    folder, number = task
    if number == 9 and first_to(folder):
        time.sleep(20)
    return number


def test_all_results_in_any_order(dask_client: Client) -> None:
    found = list(TaskRun(dask_client, square, range(30)))
    assert sorted((d.task, d.result) for d in found) == [(i, i * i) for i in range(30)]
    assert {done.worker for done in found} <= set(dask_client.nthreads())


def test_few_tasks_are_submitted_ahead(dask_client: Client) -> None:
    asked = 0

    def numbers() -> Iterator[int]:
        nonlocal asked
        while asked < 1000:
            asked += 1
            yield asked

    run = iter(TaskRun(dask_client, square, numbers()))
    for _ in range(10):
        next(run)
    assert asked < 20
    run.close()
    assert not dask_client.futures  # what was queued is cancelled


def test_an_error_of_the_function_ends_the_run(dask_client: Client) -> None:
    with pytest.raises(DataError, match="row 7 is NaN"):
        list(TaskRun(dask_client, failing, range(20)))
    assert not dask_client.futures


def test_a_worker_with_a_full_disk_gets_no_more_tasks(dask_client: Client, tmp_path: Path) -> None:
    said: list[str] = []
    run = TaskRun(dask_client, full_disk_on_one, [str(tmp_path)] * 12, on_message=said.append)
    done = list(run)
    assert len(done) == 12
    assert len({d.worker for d in done}) == 1
    ((refused, why),) = run.refused.items()
    assert refused not in {d.worker for d in done}
    assert "No space left" in why
    assert [text for text in said if refused in text and "No space left" in text]


def test_an_error_names_all_workers_when_none_can(dask_client: Client) -> None:
    with pytest.raises(QuantkitError) as error:
        list(TaskRun(dask_client, unfit, range(5)))
    assert all(worker in str(error.value) for worker in dask_client.nthreads())
    assert "has no file" in str(error.value)


def test_a_slow_task_at_the_end_runs_elsewhere_too(dask_client: Client, tmp_path: Path) -> None:
    """Where the first worker hangs, the other one gives the result."""
    started = time.monotonic()
    done = list(TaskRun(dask_client, slow_on_one, [(str(tmp_path), i) for i in range(10)]))
    assert sorted(d.result for d in done) == list(range(10))
    assert time.monotonic() - started < 15


def test_results_that_are_lost_with_all_workers_are_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with cluster.connect("local:2") as client:
        client.wait_for_workers(2)
        kill_workers_before(client, "gather", client, monkeypatch)
        found = list(TaskRun(client, square, range(12)))
    assert sorted(d.result for d in found) == [i * i for i in range(12)]


def test_waiting_for_a_result_ends_with_an_exception_of_either() -> None:
    looks = []

    def look() -> None:
        looks.append(0)
        if len(looks) == 2:
            raise DataError("no worker")

    assert fetched(lambda: 3, look) == 3
    with pytest.raises(KeyError):
        fetched(lambda: {}["x"], look)
    with pytest.raises(DataError):
        fetched(threading.Event().wait, look)
    assert len(looks) == 2


def test_a_cluster_without_workers_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    import distributed

    from quantkit.cluster import tasks

    monkeypatch.setattr(tasks, "_NOTICE_SECONDS", 0.2)
    monkeypatch.setattr(tasks, "_WORKER_SECONDS", 1.0)
    said: list[str] = []
    options = {"n_workers": 0, "processes": False, "dashboard_address": "127.0.0.1:0"}
    with (
        distributed.LocalCluster(**options) as empty,
        distributed.Client(empty) as client,
        pytest.raises(QuantkitError, match="has had no worker for"),
    ):
        list(TaskRun(client, square, range(3), on_message=said.append))
    assert said == ["no worker is left; waiting up to 1 s for others"]
