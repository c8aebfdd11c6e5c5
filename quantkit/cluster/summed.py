"""`SummedPipeline`: a pipeline over workers whose stages add up what they see, argument after argument.

    argument 0 -> stage 0 -> stage 1 -> result 0
                     |          |
    argument 1 -> stage 0 -> stage 1 -> result 1
                     |          |
                   sums 0     sums 1

A task gets what the stage before gave for its argument, and the sums of its stage over the arguments before. So sums
are added in the order of arguments, and stay on the worker of the stage. Both are values that no task changes: dask may
run the tasks of a dead worker again, those of its stage from the first argument on. If no worker is left, or the
scheduler was started again, all tasks are handed out again.
"""

from __future__ import annotations

import contextlib
import operator
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Any

from quantkit.cluster.fetching import fetched
from quantkit.cluster.in_order import WAIT_SECONDS, KeptRun, killed_workers, no_workers
from quantkit.errors import QuantkitError

if TYPE_CHECKING:
    from distributed import Future

_REFRESH_SECONDS = 1.0
_MAX_RESTARTS = 4  # after all workers have ended, or the scheduler


class _Lost(Exception):
    """None of the workers is left that have the tasks, or the scheduler has forgotten the tasks."""


class SummedPipeline:
    """The tasks of all groups of arguments, each group with sums of its own.

    run        the workers' state
    function   of quantkit, picklable: of the state and of (argument, stage, what the stage before gave or None, sums so
               far or None) it gives what the next stage gets, or the result, and the sums with those of the argument
    split      gives parts of a stage's sums, which are sent one after another
    """

    def __init__(
        self,
        run: KeptRun,
        function: Callable[[Any, Any], Sequence[Any]],
        groups: Sequence[Sequence[Any]],
        stages: int,
        split: Callable[[Any], Sequence[Any]],
    ):
        self._run, self._function, self._groups, self._stages, self._split = run, function, groups, stages, split
        self._count, self._restarts = sum(map(len, groups)), 0
        self._seen = time.monotonic()  # when workers were last there
        self._submit_all()

    def results(self, group: int) -> Iterator[Any]:
        """Yield the results of a group's arguments in their order."""
        for index in range(len(self._groups[group])):
            yield self._fetched(self._result, group, index)

    def sums(self, group: int) -> Iterator[Any]:
        """Yield the parts of the sums over a group, stage by stage."""
        for stage in range(self._stages):
            parts, seconds = self._fetched(self._of_sums, _described, group, stage)
            for worker, of_task in seconds:
                self._run.count_seconds(worker, of_task)
            for index in range(parts):
                yield self._fetched(self._of_sums, _part, group, stage, index)

    def cancel(self) -> None:
        """Cancel what is not done."""
        futures = [future for futures in (*self._results, *self._sums) for future in futures]
        if self._run.client.status == "running":
            self._run.client.cancel(futures, force=True)

    def _submit_all(self) -> None:
        self._workers = sorted(self._run.client.nthreads())
        if not self._workers:
            raise no_workers(self._run.client)
        self._results: list[list[Future]] = []
        self._sums: list[list[Future]] = []
        for group in self._groups:
            self._submit(group, sum(map(len, self._results)))

    def _submit(self, group: Sequence[Any], before: int) -> None:
        """Hand out the tasks of a group; `before` are the arguments of groups before it."""
        from quantkit.cluster import kept

        client, run = self._run.client, self._run
        sums: list[Any] = [kept.Summed(None)] * self._stages
        results = []
        for number, argument in enumerate(group, before):
            states: Future | None = None
            for stage in range(self._stages):
                pass_ = stage // len(self._workers)
                place = {
                    "workers": [self._workers[stage % len(self._workers)]], "allow_other_workers": True, "pure": False,
                    "priority": -(pass_ * self._count + number),
                }  # fmt: skip
                both = client.submit(
                    kept.run_summed_stage, run.name, self._function, argument, stage, states, sums[stage], **place
                )
                states, sums[stage] = (client.submit(operator.getitem, both, i, **place) for i in range(2))
            results.append(states)
        self._results.append(results)
        self._sums.append(sums)

    def _result(self, group: int, index: int) -> Future:
        return self._results[group][index]

    def _of_sums(self, function: Callable[..., Any], group: int, stage: int, *arguments: Any) -> Future:
        """A short task, where the sums of a stage are."""
        return self._run.client.submit(function, self._sums[group][stage], self._split, *arguments, pure=False)

    def _fetched(self, future_of: Callable[..., Future], *arguments: Any) -> Any:
        """The result of a task. All are handed out again if all workers end, or the scheduler.

        QuantkitError if none comes back.
        """
        while True:
            future, self._seen = future_of(*arguments), time.monotonic()
            try:
                while not _ends_soon(future):
                    self._look()
                return self._outcome(future)
            except _Lost:
                self._restart()

    def _look(self) -> None:
        """_Lost if none of the workers is left that have the tasks; QuantkitError if no other comes."""
        try:
            there = self._run.client.nthreads()
        except OSError:  # the scheduler is being lost; the future will say so
            return
        if there:
            self._seen = time.monotonic()
        elif time.monotonic() - self._seen > WAIT_SECONDS:
            raise no_workers(self._run.client)
        if there and not set(self._workers) & set(there):
            raise _Lost

    def _outcome(self, future: Future) -> Any:
        from distributed import KilledWorker

        from quantkit.cluster.kept import Unfit

        try:
            return fetched(future.result, self._look)
        except Unfit as error:
            raise QuantkitError(
                f"worker {error.worker} cannot do the job: {error.reason}; end it, and run the same command again"
            ) from None
        except KilledWorker as error:
            raise killed_workers("a task", error.allowed_failures + 1) from None
        except CancelledError:
            self._run.wait_for_scheduler()
            raise _Lost from None

    def _restart(self) -> None:
        """Hand out all tasks again, to the workers that came in the place of those that have ended."""
        self._restarts += 1
        if self._restarts > _MAX_RESTARTS:
            raise QuantkitError(f"all workers, or the scheduler, ended {self._restarts} times; their logs may tell why")
        with contextlib.suppress(CancelledError):
            self.cancel()
        with contextlib.suppress(TimeoutError):  # `_submit_all` says that there is none
            self._run.client.wait_for_workers(1, timeout=WAIT_SECONDS)
        self._run.register()
        self._submit_all()


def _ends_soon(future: Future) -> bool:
    """Whether a task ends, in whatever way, before it is time to look for its workers."""
    ended = threading.Event()
    future.add_done_callback(lambda _: ended.set())
    return ended.wait(_REFRESH_SECONDS) or future.done()


def _described(summed: Any, split: Callable[[Any], Sequence[Any]]) -> tuple[int, Any]:
    """How many parts there are, and the seconds of workers."""
    return len(split(summed.sums)), summed.seconds


def _part(summed: Any, split: Callable[[Any], Sequence[Any]], index: int) -> Any:
    return split(summed.sums)[index]
