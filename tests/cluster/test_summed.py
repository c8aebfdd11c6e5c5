"""Pipelines whose stages add up what they see: sums in the order of arguments, killed workers."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pytest

from quantkit import cluster
from quantkit.cluster import summed
from quantkit.cluster.in_order import KeptRun
from quantkit.cluster.summed import SummedPipeline
from quantkit.errors import QuantkitError
from tests.cluster.processes import kill_workers_before

if TYPE_CHECKING:
    from distributed import Client

STAGES = 3


def nothing(threads: int) -> None: ...


def appended(state: None, argument: tuple[int, int, str | None, str | None]) -> tuple[str, str]:
    """The stages that an argument went through, and the arguments that a stage saw."""
    number, stage, before, seen = argument
    time.sleep(0.02)
    return f"{before or number}/{stage}", f"{seen or ''}{number},"


def letters(seen: str) -> Sequence[str]:
    """The sums of a stage in parts."""
    return list(seen)


def pipeline_of(run: KeptRun, groups: Sequence[Sequence[int]]) -> SummedPipeline:
    return SummedPipeline(run, appended, groups, STAGES, letters)


def all_of(pipeline: SummedPipeline, group: int) -> tuple[list[Any], str]:
    return list(pipeline.results(group)), "".join(pipeline.sums(group))


def expected(group: Sequence[int]) -> tuple[list[str], str]:
    return [f"{number}/0/1/2" for number in group], STAGES * "".join(f"{number}," for number in group)


def test_sums_are_in_the_order_of_arguments_and_of_each_group(dask_client: Client) -> None:
    groups = [range(5), range(7, 9), [3]]
    with KeptRun(dask_client, nothing, []) as run:
        pipeline = pipeline_of(run, groups)
        found = [all_of(pipeline, group) for group in range(len(groups))]
    assert found == [expected(group) for group in groups]
    times = run.workers.values()
    assert sum(of.tasks for of in times) == STAGES * sum(map(len, groups))
    assert all(of.seconds > 0.02 * of.tasks for of in times)


@pytest.mark.parametrize("lost", ["a result", "sums"])
def test_what_is_lost_with_all_workers_is_made_again(lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All workers are killed after a task has ended and before its result is fetched."""
    import distributed

    with cluster.connect("local:2") as client, KeptRun(client, nothing, []) as run:
        client.wait_for_workers(2)
        pipeline = pipeline_of(run, [range(4)])
        results: Iterator[Any] = pipeline.results(0)
        first = [] if lost == "a result" else list(results)
        kill_workers_before(distributed.Future, "result", client, monkeypatch)
        found = first + list(results), "".join(pipeline.sums(0))
    assert found == expected(range(4))


def test_workers_that_end_again_and_again_end_the_run(dask_client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summed, "_ends_soon", lambda future: False)
    with KeptRun(dask_client, nothing, []) as run:
        pipeline = pipeline_of(run, [range(2)])
        monkeypatch.setattr(pipeline, "_look", _lost)
        with pytest.raises(QuantkitError, match="ended 5 times"):
            list(pipeline.results(0))


def _lost() -> None:
    raise summed._Lost
