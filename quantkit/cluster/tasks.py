"""`TaskRun`: a function applied to many tasks on the workers of a cluster, each task counted once.

    run = TaskRun(client, encode, tasks)     a function of a module, and an iterable of plain arguments
    for done in run:                         as tasks end
        done.task, done.result, done.worker, done.seconds

Each worker has tasks for twice its threads that are submitted and not yet consumed, so neither the coordinator nor the
scheduler holds a job, and results wait on the workers until they are asked for. A task goes to the worker that has the
least to do: dask would give the tasks of workers with many threads out in turn. Tasks in groups (`Grouped`), each of
which needs something that a worker has to fetch, stay with one worker. Tasks must be deterministic, because one may run
twice:

- A worker dies: dask gives its tasks to others. A task during which several workers died is submitted anew, up to
  `_MAX_DEATHS` times, since the workers may have been killed from outside.
- The scheduler is lost: the client connects again within its timeout, and what was submitted is submitted anew.
- A worker is slow: at the end, while threads are idle, a task that runs much longer than the others also runs on
  another worker. The first result counts.
- A worker cannot do the task (`UnfitWorker`, an OSError such as a full disk, no memory): the task goes to another
  worker, and this one gets no more tasks of the run. Without a worker left, the run ends with an error that names all.
- No worker is there: the run waits `_WORKER_SECONDS` for one, and then ends with an error. dask's nannies start dead
  workers again, but give up on one that dies while it starts.

An error of quantkit in the function ends the run. Leaving the loop early, by an interrupt too, cancels what is queued.
"""

from __future__ import annotations

import itertools
import queue
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from quantkit import errors
from quantkit.cluster import workers as checks
from quantkit.cluster.fetching import fetched
from quantkit.cluster.task_sizes import AHEAD
from quantkit.errors import QuantkitError

if TYPE_CHECKING:
    from distributed import Client, Future

T = TypeVar("T")
R = TypeVar("R")

_POLL_SECONDS = 0.5  # between two looks at the workers
_SLOW = 3.0  # times the mean duration after which a task is slow
_SLOW_SECONDS = 1.0  # at least
_NOTICE_SECONDS = 5.0  # without any worker, until that is said
_WORKER_SECONDS = 300.0  # without any worker, until the run ends
_MAX_DEATHS = 3  # submissions of a task that killed, or was killed with, as many workers as dask allows


class UnfitWorker(QuantkitError):
    """Raised in a task: this worker cannot do tasks of this run, and another may."""


class Finished(NamedTuple, Generic[T, R]):
    """A task with its result, the address of the worker that did it, and the seconds that it took there."""

    task: T
    result: R
    worker: str
    seconds: float


class _Outcome(NamedTuple):
    """What a task returns: its worker, the seconds that it took, and the result, or why there is none.

    error  the class and the text of an error of quantkit
    unfit  why this worker cannot do the task
    """

    worker: str
    seconds: float
    result: Any = None
    error: tuple[str, str] | None = None
    unfit: str | None = None


def _work(function: Callable[[Any], Any], task: object, build: str) -> _Outcome:
    """Run a task; executed by a worker."""
    from distributed import get_worker

    address, started = get_worker().address, time.perf_counter()
    if (mine := checks.build()) != build:
        return _Outcome(address, 0.0, unfit=f"has quantkit {mine}, the coordinator {build}")
    try:
        result = function(task)
    except (QuantkitError, OSError, MemoryError) as error:
        if reason := unfit_because(error):
            return _Outcome(address, 0.0, unfit=reason)
        return _Outcome(address, 0.0, error=(type(error).__name__, str(error)))
    return _Outcome(address, time.perf_counter() - started, result)


def unfit_because(error: Exception) -> str:
    """Why an error of a task is one of its worker, such as a full disk; "" if the task would fail on others too."""
    is_quantkit = isinstance(error, QuantkitError)
    if is_quantkit and not isinstance(error, UnfitWorker) and not isinstance(error.__cause__, OSError):
        return ""
    return str(error) or type(error).__name__


def no_fit_worker(refused: Mapping[str, str]) -> QuantkitError:
    """The error of a run whose workers are all refused: addresses and reasons."""
    listed = "\n  ".join(f"{worker}: {text}" for worker, text in refused.items())
    return QuantkitError(f"no worker of the cluster can do the job:\n  {listed}")


class Grouped(Generic[T]):
    """Tasks in groups: a worker takes one group after another, and helps with those of others when none is left."""

    def __init__(self, groups: Iterable[Iterable[T]]):
        self._groups = (iter(group) for group in groups)
        self._of_worker: dict[str, Iterator[T]] = {}

    def take(self, worker: str) -> T:
        """The next task for a worker; StopIteration if none is left."""
        while True:
            own = self._of_worker.get(worker)
            if own is None:
                own = next(self._groups, None)
                if own is None:
                    return self._of_others()
                self._of_worker[worker] = own
            for task in own:
                return task
            del self._of_worker[worker]

    def _of_others(self) -> T:
        for worker, tasks in list(self._of_worker.items()):
            for task in tasks:
                return task
            del self._of_worker[worker]
        raise StopIteration


@dataclass
class _Pending(Generic[T]):
    """A task that was submitted: its futures, which are several if it is slow.

    worker, threads  the worker that it is meant for, and how many threads it takes there
    """

    task: T
    worker: str
    threads: int
    futures: list[Future] = field(default_factory=list)
    deaths: int = 0
    seen: float | None = None  # when it was first seen on a worker


class TaskRun(Generic[T, R]):
    """The tasks of a run; iterate over it once.

    workers  by address: the threads of each worker that gets tasks, at the last look
    refused  by address: why a worker gets no more tasks
    """

    def __init__(
        self,
        client: Client,
        function: Callable[[T], R],
        tasks: Iterable[T] | Grouped[T],
        *,
        threads: Callable[[T], int] = lambda task: 1,
        name: str = "",
        on_message: Callable[[str], None] = lambda text: None,
    ):
        """Prepare a run.

        tasks       in the order in which they are submitted, or in groups
        threads     how many threads of its worker a task takes, if it has as many
        name        what the dashboard shows
        on_message  is told of refused and lost workers
        """
        self.workers: dict[str, int] = {}
        self.refused: dict[str, str] = {}
        self._client, self._function, self._on_message = client, function, on_message
        self._is_grouped, self._threads = isinstance(tasks, Grouped), threads
        self._tasks = tasks if isinstance(tasks, Grouped) else Grouped([tasks])
        self._key = f"{name or function.__name__}-{uuid.uuid4().hex[:12]}"
        self._numbers, self._submissions = itertools.count(), itertools.count()
        self._pending: dict[int, _Pending[T]] = {}
        self._load = Counter[str]()  # by worker: threads that its tasks take
        self._consumed, self._seconds = 0, 0.0  # tasks, and what they took in all
        self._is_exhausted = False
        self._ended: queue.SimpleQueue[tuple[int, Future]] = queue.SimpleQueue()
        self._looked = 0.0
        self._with_workers = time.monotonic()  # when workers were last there
        self._is_told = False  # that there are none
        self._is_direct = True

    def __iter__(self) -> Iterator[Finished[T, R]]:
        self._is_direct = _reaches_workers(self._client)
        try:
            while True:
                self._look()
                self._fill()
                if self._is_exhausted and not self._pending:
                    return
                finished = self._next_result()
                if finished is not None:
                    yield finished
        finally:
            self._cancel()

    # --------------------------------------------------------------------------------------------------- submitting

    def _fill(self) -> None:
        """Submit tasks until each worker has enough."""
        while not self._is_exhausted and self.workers:
            worker = min(self.workers, key=lambda address: self._load[address] / self.workers[address])
            if self._load[worker] >= AHEAD * self.workers[worker]:
                return
            try:
                task = self._tasks.take(worker)
            except StopIteration:
                self._is_exhausted = True
                return
            number = next(self._numbers)
            share = min(self._threads(task), self.workers[worker])
            self._pending[number] = _Pending(task, worker, share)
            self._load[worker] += share
            self._submit(number)

    def _submit(self, number: int, workers: list[str] | None = None) -> None:
        """Submit a task, once more if it was before; `workers`: only to these."""
        pending, loose = self._pending[number], False
        if workers is None and self.refused:
            workers = self._fit()
        elif workers is None:
            workers, loose = [pending.worker], not self._is_grouped
        future = self._client.submit(
            _work,
            self._function,
            pending.task,
            checks.build(),
            key=(self._key, next(self._submissions)),
            pure=False,
            workers=workers,
            allow_other_workers=loose,
        )
        pending.futures.append(future)
        future.add_done_callback(lambda done: self._ended.put((number, done)))

    def _fit(self) -> list[str]:
        """The workers that are not refused; QuantkitError if none is left."""
        there = list(self._client.nthreads())
        if fit := [address for address in there if address not in self.refused]:
            return fit
        raise no_fit_worker(self.refused)

    def _look(self) -> None:
        """Look at the workers, if the last look was a while ago: their threads, and at the end slow tasks."""
        now = time.monotonic()
        if now < self._looked + _POLL_SECONDS or self._client.status != "running":
            return
        self._looked = now
        try:
            there = self._client.nthreads()
            self._require_workers(there, now)
            self.workers = {worker: n for worker, n in there.items() if worker not in self.refused}
            moved = [n for n, pending in self._pending.items() if pending.worker not in there]
            if self._is_exhausted or moved:
                processing = self._client.processing()
                self._follow(moved, processing)
                if self._is_exhausted:
                    self._repeat_slow(processing, there, now)
        except OSError:  # the scheduler is being lost; the futures will say so
            return

    def _follow(self, moved: list[int], processing: dict[str, Any]) -> None:
        """Note where dask runs the tasks of workers that have gone. Submit anew those that it runs nowhere.

        Where no worker was left, dask keeps a task that was meant for one until that one comes back.
        """
        where = {key: worker for worker, keys in processing.items() for key in keys}
        for number in moved if self.workers else ():
            pending = self._pending[number]
            if any(future.done() for future in pending.futures):
                continue
            self._load[pending.worker] -= pending.threads
            found = next((where[future.key] for future in pending.futures if future.key in where), None)
            pending.worker = found or min(self.workers, key=lambda address: self._load[address])
            self._load[pending.worker] += pending.threads
            if found is None:
                self._client.cancel(pending.futures)
                pending.futures, pending.seen = [], None
                self._submit(number)

    def _require_workers(self, there: dict[str, int], now: float) -> None:
        """Say that no worker is there; QuantkitError if none comes."""
        if there:
            self._with_workers, self._is_told = now, False
            return
        missing = now - self._with_workers
        if missing > _WORKER_SECONDS:
            raise QuantkitError(
                f"the dask scheduler has had no worker for {missing:.0f} s; what is done is kept: give the same "
                "command again when there are workers"
            )
        if missing > _NOTICE_SECONDS and not self._is_told:
            self._is_told = True
            self._on_message(f"no worker is left; waiting up to {_WORKER_SECONDS:.0f} s for others")

    def _repeat_slow(self, processing: dict[str, Any], there: dict[str, int], now: float) -> None:
        """Submit slow tasks once more, to workers that have nothing to do."""
        where = {key: worker for worker, keys in processing.items() for key in keys}
        idle = [worker for worker in there if not processing.get(worker) and worker not in self.refused]
        limit = max(_SLOW_SECONDS, _SLOW * self._seconds / max(1, self._consumed))
        for number, pending in self._pending.items():
            if any(future.key in where for future in pending.futures):
                pending.seen = pending.seen or now
            is_slow = pending.seen is not None and now - pending.seen > limit
            if is_slow and idle and self._consumed and len(pending.futures) == 1:
                self._submit(number, idle)

    # ------------------------------------------------------------------------------------------------------ results

    def _next_result(self) -> Finished[T, R] | None:
        """Wait for a task to end; None if it runs again, or if none ends for a while."""
        try:
            number, future = self._ended.get(timeout=_POLL_SECONDS)
        except queue.Empty:
            self._require_scheduler()
            return None
        pending = self._pending.get(number)
        if pending is None or future not in pending.futures:
            return None  # the other one of a slow task was first
        outcome = self._outcome(number, future)
        if outcome is None:
            return None
        del self._pending[number]
        self._load[pending.worker] -= pending.threads
        others = [other for other in pending.futures if other is not future]
        if others:
            self._client.cancel(others)
        future.release()
        self._consumed += 1
        self._seconds += outcome.seconds
        return Finished(pending.task, outcome.result, outcome.worker, outcome.seconds)

    def _outcome(self, number: int, future: Future) -> _Outcome | None:
        """The outcome of a future that ended; None if its task was submitted anew."""
        from distributed import KilledWorker

        pending = self._pending[number]
        try:
            outcome: _Outcome = fetched(lambda: self._client.gather(future, direct=self._is_direct), self._look)
        except KilledWorker as error:
            pending.deaths += 1
            if pending.deaths == _MAX_DEATHS:
                raise QuantkitError(f"{pending.task}: workers died during this task again and again: {error}") from None
            self._on_message(f"workers died during a task ({error.last_worker.address} was the last): it runs again")
            self._again(number, future)
            return None
        except (CancelledError, OSError) as error:  # with the scheduler, or with the connection to it
            self._on_message(f"lost: {error}")
            self._require_scheduler(wait=True)
            self._again(number, future)
            return None
        if outcome.unfit is not None:
            if outcome.worker not in self.refused:
                self.refused[outcome.worker] = outcome.unfit
                self.workers.pop(outcome.worker, None)
                self._on_message(f"worker {outcome.worker} gets no more tasks: {outcome.unfit}")
            self._again(number, future)
            return None
        if outcome.error is not None:
            kind = getattr(errors, outcome.error[0], QuantkitError)
            kind = kind if kind is not errors.UnknownNameError else QuantkitError
            raise kind(outcome.error[1])
        return outcome

    def _again(self, number: int, future: Future) -> None:
        """Submit a task anew whose `future` failed, unless it is running elsewhere."""
        pending = self._pending[number]
        if future in pending.futures:  # else `_follow` has submitted it anew
            pending.futures.remove(future)
        pending.seen = None
        if not pending.futures:
            self._submit(number)

    def _require_scheduler(self, wait: bool = False) -> None:
        """QuantkitError if the scheduler is lost for good; `wait` until the client is connected again."""
        while wait and self._client.status == "connecting":
            time.sleep(_POLL_SECONDS)
        if self._client.status in ("closing", "closed"):
            raise QuantkitError(
                "the connection to the dask scheduler is lost, and connecting again failed; what is done is kept: "
                "give the same command again when the scheduler runs"
            )

    def _cancel(self) -> None:
        """Cancel what is queued or running."""
        futures = [future for pending in self._pending.values() for future in pending.futures]
        self._pending.clear()
        if futures and self._client.status == "running":
            self._client.cancel(futures)


def _reaches_workers(client: Client) -> bool:
    """Whether this process can connect to the workers, so that results need not pass through the scheduler."""
    import socket

    for address in list(client.nthreads())[:1]:
        host, _, port = address.rpartition("://")[2].rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=3).close()
        except (OSError, ValueError):
            return False
    return True
