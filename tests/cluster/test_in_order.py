"""Tasks that share a state on each worker: results in order, unfit, slow and killed workers."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from quantkit import cluster
from quantkit.cluster.in_order import KeptRun
from quantkit.errors import DataError, QuantkitError
from tests.cluster.processes import another_worker, first_to, kill_workers_before, other_version

if TYPE_CHECKING:
    from distributed import Client


def number_of_threads(threads: int) -> int:
    return threads


def slowly(threads: int, argument: int) -> list[int]:
    time.sleep(0.2)
    return [threads * argument, os.getpid()]


def slow_on_one(threads: int, argument: tuple[str, int]) -> list[int]:
    folder, number = argument
    if number == 6 and first_to(folder):
        time.sleep(30)
    return [number]


def full_disk_on_one(threads: int, folder: str) -> list[int]:
    if first_to(folder):
        raise OSError(28, "No space left on device")
    return [os.getpid()]


def no_memory(threads: int, argument: int) -> list[int]:
    raise MemoryError


def damaged(threads: int, argument: int) -> list[int]:
    if argument == 3:
        raise DataError("row 7 is NaN")
    return [argument]


def add_stage(threads: int, argument: tuple[int, int, int | None]) -> list[int]:
    number, stage, before = argument
    time.sleep(0.1)
    return [10 * (number if before is None else before) + stage]


def all_parts(run: KeptRun, function: Any, arguments: Sequence[Any], stages: int = 0) -> list[list[Any]]:
    return [list(parts) for parts in run.results(function, arguments, stages)]


def test_tasks_go_on_when_all_workers_were_killed() -> None:
    """dask would wait for the workers that they were meant for."""
    found = []
    with cluster.connect("local:1") as client, KeptRun(client, number_of_threads, []) as run:
        for parts in run.results(slowly, range(6)):
            found.append(next(parts))
            list(parts)
            if len(found) == 1:
                (pid,) = client.run(os.getpid).values()
                os.kill(pid, signal.SIGKILL)
        threads = sum(client.nthreads().values())
    assert found == [threads * i for i in range(6)]


def test_results_that_are_lost_with_all_workers_are_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    import distributed

    with cluster.connect("local:2") as client, KeptRun(client, number_of_threads, []) as run:
        client.wait_for_workers(2)
        kill_workers_before(distributed.Future, "result", client, monkeypatch)
        found = all_parts(run, slowly, range(5))
    assert [parts[0] for parts in found] == list(range(5))


@pytest.mark.parametrize("stages", [0, 2])
def test_an_unfit_worker_that_joins_gets_no_more_tasks(dask_client: Client, tmp_path: Path, stages: int) -> None:
    """The others do its tasks; the message names it and what is wrong."""
    said: list[str] = []
    function: Any = add_stage if stages else slowly
    found = []
    with (
        KeptRun(dask_client, number_of_threads, [], said.append) as run,
        contextlib.ExitStack() as stack,
    ):
        for parts in run.results(function, range(24), stages):
            found.append(next(parts))
            list(parts)
            if len(found) == 1:
                other = another_worker(dask_client, PYTHONPATH=str(other_version(tmp_path)))
                address = stack.enter_context(other)
    assert found == [100 * i + 1 if stages else i for i in range(24)]
    if not stages:
        assert list(run.refused) == [address]
        (line,) = said
        assert line.startswith(f"worker {address} gets no more tasks: has quantkit 9.9.9 (")
    assert address not in run.workers


def test_a_worker_without_the_file_is_refused(dask_client: Client, tmp_path: Path) -> None:
    """The file is there when the run begins, and not for a worker that joins."""
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    said: list[str] = []
    found = []
    with KeptRun(dask_client, number_of_threads, [file], said.append) as run, contextlib.ExitStack() as stack:
        for parts in run.results(slowly, range(24)):
            found.append(next(parts))
            list(parts)
            if len(found) == 1:
                file.unlink()
                address = stack.enter_context(another_worker(dask_client))
    assert found == list(range(24))
    assert said == [f"worker {address} gets no more tasks: {file} cannot be read there: No such file or directory"]


def test_a_worker_with_a_full_disk_gets_no_more_tasks(
    dask_client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quantkit.cluster.in_order._SLOW", 1e9)  # a copy elsewhere may end before the error is told
    said: list[str] = []
    with KeptRun(dask_client, number_of_threads, [], said.append) as run:
        found = all_parts(run, full_disk_on_one, [str(tmp_path)] * 8)
    assert len(found) == 8
    assert len({pid for (pid,) in found}) == 1
    ((refused, why),) = run.refused.items()
    assert "No space left" in why
    assert said == [f"worker {refused} gets no more tasks: {why}"]
    assert refused not in run.workers


def test_an_error_names_all_workers_when_none_can(dask_client: Client) -> None:
    started = time.monotonic()
    with KeptRun(dask_client, number_of_threads, []) as run, pytest.raises(QuantkitError) as error:
        all_parts(run, no_memory, range(5))
    assert all(f"{worker}: MemoryError" in str(error.value) for worker in dask_client.nthreads())
    assert time.monotonic() - started < 20


def test_an_error_of_the_function_ends_the_run(dask_client: Client) -> None:
    with KeptRun(dask_client, number_of_threads, []) as run, pytest.raises(DataError, match="row 7 is NaN"):
        all_parts(run, damaged, range(5))
    assert not dask_client.futures  # what was handed out is cancelled


def test_a_slow_task_at_the_end_runs_elsewhere_too(dask_client: Client, tmp_path: Path) -> None:
    """The workers have one thread each, which the slow task has: results are fetched beside it."""
    assert set(dask_client.nthreads().values()) == {1}
    started = time.monotonic()
    with KeptRun(dask_client, number_of_threads, []) as run:
        found = all_parts(run, slow_on_one, [(str(tmp_path), i) for i in range(7)])
    assert found == [[i] for i in range(7)]
    assert time.monotonic() - started < 15


def test_the_seconds_of_a_pipeline_are_those_of_each_worker(dask_client: Client) -> None:
    with KeptRun(dask_client, number_of_threads, []) as run:
        found = all_parts(run, add_stage, range(4), stages=2)
    assert found == [[100 * i + 1] for i in range(4)]
    assert set(run.workers) == set(dask_client.nthreads())
    assert sum(times.tasks for times in run.workers.values()) == 8
    assert all(0.1 * times.tasks <= times.seconds < 0.4 * times.tasks for times in run.workers.values())
