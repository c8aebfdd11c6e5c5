"""`KeptRun`: run a function over many arguments on workers that keep a state, and give the results in order.

Each worker runs one task and has another waiting, so that results wait on workers, not in this process: a result is
fetched in its turn, in parts. dask runs the tasks of a dead worker again. When all tasks are handed out, those of slow
workers are given to idle ones too, and the first result counts: tasks are deterministic.

A worker that cannot do a task (another quantkit, other files, an OSError, too little memory) gets no more tasks of the
run, and its tasks go to others.
"""

from __future__ import annotations

import contextlib
import queue
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.cluster.connection import RECONNECT_SECONDS
from quantkit.cluster.fetching import fetched
from quantkit.cluster.tasks import no_fit_worker
from quantkit.cluster.workers import require_same
from quantkit.errors import QuantkitError

if TYPE_CHECKING:
    from distributed import Client, Future

    from quantkit.cluster.kept import Head, Unfit

PER_WORKER = 2  # tasks: one runs, one waits
AHEAD = 4  # tasks for each worker that may be done before their turn
WAIT_SECONDS = 60.0  # for a worker to come back
_REFRESH_SECONDS = 1.0
_SLOW = 2.0  # a task that takes so many times the longest one is run on another worker too


@dataclass
class WorkerTime:
    """The tasks that a worker has done, of a pipeline its stages, and their seconds."""

    tasks: int = 0
    seconds: float = 0.0


class KeptRun:
    """A context manager.

    make        called on each worker with its number of threads, gives its state; a picklable function of quantkit
    files       checked on all workers: the same quantkit, the same files
    on_message  is told of refused workers

    By address, `workers` are the times of workers, and `refused` says why a worker gets no more tasks.
    """

    def __init__(
        self,
        client: Client,
        make: Callable[[int], Any],
        files: Sequence[str | Path],
        on_message: Callable[[str], None] = lambda text: None,
    ):
        self.client, self._make, self._on_message = client, make, on_message
        self._identities = require_same(client, files)
        self.name = f"quantkit-{uuid.uuid4().hex}"
        self.workers: dict[str, WorkerTime] = {}
        self.refused: dict[str, str] = {}

    def __enter__(self) -> KeptRun:
        self.register()
        return self

    def register(self) -> None:
        """Have the state on all workers, also on those that come later."""
        from quantkit.cluster.kept import Kept

        self.client.register_plugin(Kept(self.name, self._make, self._identities))

    def wait_for_scheduler(self) -> None:
        """Wait until the client is connected again. QuantkitError if the scheduler does not come back."""
        deadline = time.monotonic() + RECONNECT_SECONDS
        while self.client.status not in ("running", "closing", "closed") and time.monotonic() < deadline:
            time.sleep(_REFRESH_SECONDS)
        if self.client.status != "running":
            raise lost_scheduler()

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(Exception):  # the error of the run counts, not that of a scheduler that is gone
            self.client.unregister_worker_plugin(self.name)

    def results(
        self, function: Callable[[Any, Any], Sequence[Any]], arguments: Sequence[Any], stages: int = 0
    ) -> Iterator[Iterator[Any]]:
        """Yield the parts of function(state, argument) for each argument, in their order.

        function   of quantkit, picklable; gives a list of parts, of which one at a time is in this process' memory
        stages     of a pipeline: function(state, (argument, stage, first part of the stage before or None)) of each
                   stage in turn; 0: no pipeline

        An error of a task is raised again. QuantkitError if a task ends several workers, or none is left that can do
        the tasks.
        """
        flights = _Flights(self, function, arguments, stages)
        try:
            for index in range(len(arguments)):
                yield flights.parts(index)
        finally:
            flights.cancel()

    def count(self, head: Head) -> None:
        """Add a task to the times of its worker; of a pipeline, each stage to that of its own."""
        for worker, seconds in head.times:
            self.count_seconds(worker, seconds)

    def count_seconds(self, worker: str, seconds: float) -> None:
        """Add a task of so many seconds to the times of a worker."""
        times = self.workers.setdefault(worker, WorkerTime())
        times.tasks, times.seconds = times.tasks + 1, times.seconds + seconds

    def refuse(self, worker: str, reason: str) -> None:
        """Give a worker no more tasks."""
        if worker not in self.refused:
            self.refused[worker] = reason
            self._on_message(f"worker {worker} gets no more tasks: {reason}")


@dataclass
class _Flight:
    """A task that was handed out: its copies, the workers that they are meant for, and since when."""

    futures: list[Future]
    workers: list[str]
    since: float


class _Flights:
    """The tasks of `KeptRun.results` that are handed out."""

    def __init__(
        self, run: KeptRun, function: Callable[[Any, Any], Sequence[Any]], arguments: Sequence[Any], stages: int
    ):
        self._run, self._function, self._arguments, self._stages = run, function, arguments, stages
        self._flights: dict[int, _Flight] = {}
        self._next, self._longest, self._losses = 0, 0.0, 0
        self._done: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._known: list[str] = []  # addresses of workers that are there and not refused
        self._met: set[str] = set()  # those of all that were there once
        self._are_new = False  # since none of those that tasks were given to is left
        self._refreshed, self._seen = 0.0, time.monotonic()  # when they were asked for, and when there were some

    def parts(self, index: int) -> Iterator[Any]:
        """The parts of a result; the flight ends after the last, and all end with an error."""
        from quantkit.cluster import kept

        try:
            head: Head = self._fetched(index, kept.head)
            self._longest = max(self._longest, sum(seconds for _, seconds in head.times))
            self._run.count(head)
            yield head.part
            for i in range(1, head.parts):
                yield self._fetched(index, kept.part, i)
        except (Exception, KeyboardInterrupt):  # a traceback may keep `KeptRun.results` from ending
            self.cancel()
            raise
        self._run.client.cancel(self._flights.pop(index).futures)

    def _fetched(self, index: int, function: Callable[..., Any], *arguments: object) -> Any:
        """The result of a short function of a task's outcome. The task runs again if it was lost meanwhile."""
        short: Future | None = None
        while True:
            if short is None:
                short = self._run.client.submit(function, self._landed(index), *arguments, pure=False)
                short.add_done_callback(self._done.put)
            self._wait()
            if short.status in ("cancelled", "lost"):
                self._recover(index)
                short = None
            elif _unfit(short) is not None:  # dask ran the task of a dead worker there
                short = None
            elif short.done():
                try:
                    return self._result(short, index)
                except CancelledError:  # lost with all workers after it had ended
                    pass
                finally:
                    short.release()
                short = None
            elif self._hand_out(index):
                short = None

    def _landed(self, index: int) -> Future:
        """A finished copy of a task. Hands out further tasks meanwhile."""
        while True:
            self._hand_out(index)
            flight = self._flights.get(index)
            for future in flight.futures if flight else ():
                if future.status in ("cancelled", "lost"):
                    self._recover(index)
                    break
                if future.done() and _unfit(future) is None:
                    return future
            self._wait()

    def _wait(self) -> None:
        """Wait until something ends, or for a while."""
        with contextlib.suppress(queue.Empty):
            self._done.get(timeout=_REFRESH_SECONDS)

    def _hand_out(self, index: int) -> bool:
        """Give tasks to workers that have too few. Returns whether all tasks from `index` on are handed out anew."""
        is_anew = self._start_anew(index)
        self._replace_unfit()
        workers = self._workers()
        load = self._load(workers)
        active = sum(not _ended(flight) for flight in self._flights.values())
        room = PER_WORKER * len(workers) - active
        if self._stages > len(workers):
            room = len(self._arguments)
        elif not self._stages:
            room = min(room, index + AHEAD * len(workers) - self._next)
        for i in range(self._next, min(self._next + room, len(self._arguments)) if workers else 0):
            worker = min(workers, key=load.__getitem__)
            if not self._stages and load[worker] >= PER_WORKER:
                break
            load[worker] += 1
            self._flights[i] = self._flight(i, worker)
            self._next = i + 1
        if self._next == len(self._arguments) and self._longest and not self._stages:
            self._repeat([worker for worker in workers if not load[worker]])
        return is_anew

    def _load(self, workers: list[str]) -> Counter[str]:
        """How many tasks that have not ended each worker has."""
        load = Counter(dict.fromkeys(workers, 0))
        for flight in self._flights.values():
            load.update(worker for worker in flight.workers if worker in load and not _ended(flight))
        return load

    def _repeat(self, idle: list[str]) -> None:
        """Give tasks of slow workers to idle ones too."""
        late = time.monotonic() - _SLOW * self._longest * PER_WORKER
        for index, flight in self._flights.items():
            if idle and len(flight.futures) == 1 and flight.since < late and not _ended(flight):
                worker = idle.pop()
                flight.futures.append(self._submit(index, worker))
                flight.workers.append(worker)

    def _replace_unfit(self) -> None:
        """Refuse workers that cannot do a task, and give their tasks to others."""
        for flight in self._flights.values():
            for future in list(flight.futures):
                if (error := _unfit(future)) is not None:
                    self._run.refuse(error.worker, error.reason)
                    flight.futures.remove(future)
                    future.release()
        if not self._run.refused:
            return
        self._known = [worker for worker in self._known if worker not in self._run.refused]
        workers = self._workers()
        load = self._load(workers)
        for index, flight in self._flights.items() if workers else ():
            left = set(flight.workers) & set(workers)
            is_gone = not left or (self._stages and len(left) < len(flight.workers))
            if not flight.futures or (is_gone and not _ended(flight)):
                worker = min(workers, key=load.__getitem__)
                load[worker] += 1
                self._run.client.cancel(flight.futures)
                self._flights[index] = self._flight(index, worker)

    def _flight(self, index: int, worker: str) -> _Flight:
        """Submit a task; the stages of a pipeline go to all workers."""
        workers = list(self._known) if self._stages else [worker]
        return _Flight([self._submit(index, worker)], workers, time.monotonic())

    def _submit(self, index: int, worker: str) -> Future:
        """Submit a task. dask may choose other workers than these, unless some are refused."""
        from quantkit.cluster import kept

        client, run = self._run.client, self._run
        options: dict[str, Any] = {"allow_other_workers": not run.refused, "pure": False}
        task = run.name, self._function, self._arguments[index]
        if not self._stages:
            future = client.submit(kept.run, *task, workers=[worker], priority=-index, **options)
        else:
            before, workers = None, self._known
            for stage in range(self._stages):
                of_stage, pass_ = workers[stage % len(workers)], stage // len(workers)
                priority = -(pass_ * len(self._arguments) + index)
                future = before = client.submit(
                    kept.run_stage, *task, stage, before, workers=[of_stage], priority=priority, **options
                )
        future.add_done_callback(self._done.put)
        return future

    def _start_anew(self, index: int) -> bool:
        """Hand tasks out again if no worker is left of those that have them: dask waits until one comes back."""
        self._workers()
        if not self._are_new:
            return False
        self._are_new = False
        self._recover(index)
        return True

    def _workers(self) -> list[str]:
        """Addresses of the workers that may get tasks. QuantkitError if there are none for a while."""
        now, refused = time.monotonic(), self._run.refused
        if now - self._refreshed > _REFRESH_SECONDS or not self._known:
            before, there, self._refreshed = self._known, self._there(), now
            self._met |= there
            self._known = sorted(there - refused.keys())
            if self._flights and self._known and not set(before) & set(self._known):
                self._are_new = True
        if self._known:
            self._seen = now
        elif self._met and self._met <= refused.keys():
            raise no_fit_worker(refused)
        elif now - self._seen > WAIT_SECONDS:
            raise no_workers(self._run.client)
        return self._known

    def _there(self) -> set[str]:
        """Addresses of all workers; those of the last time while the scheduler is being lost, as futures will say."""
        try:
            return set(self._run.client.nthreads())
        except OSError:
            return set(self._known)

    def _result(self, future: Future, index: int) -> Any:
        from distributed import KilledWorker

        try:
            return fetched(future.result, lambda: self._hand_out(index))
        except KilledWorker as error:
            task = f"task {index} of {len(self._arguments)}"
            raise killed_workers(task, error.allowed_failures + 1) from None

    def _recover(self, index: int) -> None:
        """After the scheduler has lost tasks: hand them out again. QuantkitError if it does not come back."""
        self._losses += 1
        if self._losses > len(self._arguments):
            raise lost_scheduler()
        self._run.wait_for_scheduler()
        with contextlib.suppress(CancelledError):
            self.cancel()
        self._run.register()
        self._next, self._known, self._are_new, self._seen = index, [], False, time.monotonic()

    def cancel(self) -> None:
        """Cancel what is handed out."""
        futures = [future for flight in self._flights.values() for future in flight.futures]
        self._flights.clear()
        if futures and self._run.client.status == "running":
            self._run.client.cancel(futures, force=True)


def killed_workers(task: str, workers: int) -> QuantkitError:
    """The error of a task that ended the workers that ran it."""
    return QuantkitError(
        f"{task}: {workers} workers ended while they ran it; their logs may tell why, most often memory; start workers "
        "with more, or take a smaller -b"
    )


def lost_scheduler() -> QuantkitError:
    """The error of a run whose scheduler does not come back."""
    return QuantkitError("the connection to the scheduler is lost; run the same command again to resume")


def no_workers(client: Client) -> QuantkitError:
    """The error of a run whose workers are gone."""
    return QuantkitError(
        f"no worker is left at {client.scheduler.address} for {WAIT_SECONDS:.0f} s; start some, and run the same "
        "command again to resume"
    )


def _ended(flight: _Flight) -> bool:
    return any(future.done() for future in flight.futures)


def _unfit(future: Future) -> Unfit | None:
    """The error of a task whose worker cannot do it."""
    from quantkit.cluster.kept import Unfit

    error = future.exception() if future.status == "error" else None
    return error if isinstance(error, Unfit) else None
