"""What the tasks of a run share on a worker, such as an open model: a worker plugin of dask.

Every worker gets the plugin, also one that joins or restarts during the run. The first task on a worker makes the
state; it is dropped at the end of the run. Tasks use it one at a time. This module imports distributed.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from distributed import Worker, WorkerPlugin, get_worker

from quantkit.cluster.workers import FileIdentity, build, differences
from quantkit.errors import QuantkitError


class Outcome(NamedTuple):
    """The result of a task in parts, the worker that ran it, and its seconds there."""

    parts: Sequence[Any]
    worker: str
    seconds: float


class Head(NamedTuple):
    """The first part of an Outcome, and how many there are."""

    part: Any
    parts: int
    worker: str
    seconds: float


class Kept(WorkerPlugin):  # type: ignore[misc]  # distributed has no types
    """The state of a run on a worker.

    make    called with the worker's number of threads; gives the state
    files   what must be the same on a worker as it is for the client
    """

    def __init__(self, name: str, make: Callable[[int], Any], files: Sequence[FileIdentity]):
        self.name, self._make, self._files, self._build = name, make, list(files), build()

    def setup(self, worker: Worker) -> None:
        """Refuse the worker if it has another quantkit or other files: QuantkitError."""
        wrong = differences(self._files)
        if build() != self._build:
            wrong.append(f"has quantkit {build()}, the client has {self._build}")
        if wrong:
            raise QuantkitError(f"worker {worker.address}: {'; '.join(wrong)}")
        self._lock, self._threads = threading.Lock(), int(worker.state.nthreads)
        self._state: tuple[Any, ...] = ()

    def teardown(self, worker: Worker) -> None:
        """Drop the state."""
        self._state = ()
        gc.collect()  # a model and its parts refer to each other

    def call(self, function: Callable[[Any, Any], Sequence[Any]], argument: Any) -> Sequence[Any]:
        """function(state, argument), when no other task uses the state."""
        with self._lock:
            if not self._state:
                self._state = (self._make(self._threads),)
            return function(self._state[0], argument)


def run(name: str, function: Callable[[Any, Any], Sequence[Any]], argument: Any) -> Outcome:
    """A task: a function of the state `name` and of an argument, which gives a list of parts."""
    worker = get_worker()
    started = time.monotonic()
    parts = worker.plugins[name].call(function, argument)
    return Outcome(parts, worker.address, time.monotonic() - started)


def run_stage(
    name: str, function: Callable[[Any, Any], Sequence[Any]], argument: Any, stage: int, before: Outcome | None
) -> Outcome:
    """A task of a pipeline: a function of the state and of (argument, stage, first part of the stage before)."""
    found = run(name, function, (argument, stage, None if before is None else before.parts[0]))
    return found if before is None else found._replace(seconds=found.seconds + before.seconds)


class Summed(NamedTuple):
    """The sums of a stage over some arguments, and the seconds that each worker took for each."""

    sums: Any
    seconds: tuple[tuple[str, float], ...] = ()


def run_summed_stage(
    name: str, function: Callable[[Any, Any], Sequence[Any]], argument: Any, stage: int, before: Any, summed: Summed
) -> tuple[Any, Summed]:
    """A task of a pipeline with sums: of the state and of (argument, stage, what the stage before gave, sums so far)
    the function gives what the next stage gets, and the sums with those of the argument."""
    outcome = run(name, function, (argument, stage, before, summed.sums))
    result, sums = outcome.parts
    return result, Summed(sums, (*summed.seconds, (outcome.worker, outcome.seconds)))


def head(outcome: Outcome) -> Head:
    """A task: what is sent first of an outcome."""
    return Head(outcome.parts[0], len(outcome.parts), outcome.worker, outcome.seconds)


def part(outcome: Outcome, index: int) -> Any:
    """A task: a further part of an outcome."""
    return outcome.parts[index]
