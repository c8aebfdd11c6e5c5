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

from distributed import Worker, WorkerPlugin, get_worker, secede

from quantkit.cluster.tasks import UnfitWorker, unfit_because
from quantkit.cluster.workers import FileIdentity, build, differences
from quantkit.errors import QuantkitError


class Unfit(UnfitWorker):
    """Raised by a task: the worker at an address cannot do it, and another may."""

    def __init__(self, worker: str, reason: str):
        super().__init__(worker, reason)  # an exception is pickled with its arguments
        self.worker, self.reason = worker, reason


class Outcome(NamedTuple):
    """The result of a task in parts, and (worker, seconds) of each of its stages."""

    parts: Sequence[Any]
    times: tuple[tuple[str, float], ...]


class Head(NamedTuple):
    """The first part of an Outcome, how many parts there are, and its times."""

    part: Any
    parts: int
    times: tuple[tuple[str, float], ...]


class Kept(WorkerPlugin):  # type: ignore[misc]  # distributed has no types
    """The state of a run on a worker.

    make    called with the worker's number of threads; gives the state
    files   what must be the same on a worker as it is for the client
    """

    def __init__(self, name: str, make: Callable[[int], Any], files: Sequence[FileIdentity]):
        self.name, self._make, self._files, self._build = name, make, list(files), build()

    def setup(self, worker: Worker) -> None:
        """Note whether the worker has another quantkit or other files: tasks on it raise Unfit.

        An exception here would only be logged, and the worker would get tasks all the same.
        """
        self._address, self._threads = str(worker.address), int(worker.state.nthreads)
        self._lock, self._state = threading.Lock(), tuple[Any, ...]()
        wrong = differences(self._files)
        if (mine := build()) != self._build:
            wrong.append(f"has quantkit {mine}, the coordinator {self._build}")
        self._wrong = "; ".join(wrong)

    def teardown(self, worker: Worker) -> None:
        """Drop the state."""
        self._state = ()
        gc.collect()  # a model and its parts refer to each other

    def call(self, function: Callable[[Any, Any], Sequence[Any]], argument: Any) -> Outcome:
        """function(state, argument), when no other task uses the state. Unfit if this worker cannot do it."""
        if self._wrong:
            raise Unfit(self._address, self._wrong)
        try:
            with self._lock:
                started = time.monotonic()
                if not self._state:
                    self._state = (self._make(self._threads),)
                parts = function(self._state[0], argument)
                return Outcome(parts, ((self._address, time.monotonic() - started),))
        except (QuantkitError, OSError, MemoryError) as error:
            if reason := unfit_because(error):
                raise Unfit(self._address, reason) from None
            raise


def run(name: str, function: Callable[[Any, Any], Sequence[Any]], argument: Any) -> Outcome:
    """A task: a function of the state `name` and of an argument, which gives a list of parts.

    It leaves the worker's pool of threads: those that fetch results run beside it, also on a worker of one thread.
    """
    secede()
    return _call(name, function, argument)


def run_stage(
    name: str, function: Callable[[Any, Any], Sequence[Any]], argument: Any, stage: int, before: Outcome | None
) -> Outcome:
    """A task of a pipeline: a function of the state and of (argument, stage, first part of the stage before)."""
    found = _call(name, function, (argument, stage, None if before is None else before.parts[0]))
    return found if before is None else found._replace(times=before.times + found.times)


def _call(name: str, function: Callable[[Any, Any], Sequence[Any]], argument: Any) -> Outcome:
    plugin: Kept = get_worker().plugins[name]
    return plugin.call(function, argument)


class Summed(NamedTuple):
    """The sums of a stage over some arguments, and the seconds that each worker took for each."""

    sums: Any
    seconds: tuple[tuple[str, float], ...] = ()


def run_summed_stage(
    name: str, function: Callable[[Any, Any], Sequence[Any]], argument: Any, stage: int, before: Any, summed: Summed
) -> tuple[Any, Summed]:
    """A task of a pipeline with sums: of the state and of (argument, stage, what the stage before gave, sums so far)
    the function gives what the next stage gets, and the sums with those of the argument."""
    outcome = _call(name, function, (argument, stage, before, summed.sums))
    result, sums = outcome.parts
    return result, Summed(sums, summed.seconds + outcome.times)


def head(outcome: Outcome) -> Head:
    """A task: what is sent first of an outcome."""
    return Head(outcome.parts[0], len(outcome.parts), outcome.times)


def part(outcome: Outcome, index: int) -> Any:
    """A task: a further part of an outcome."""
    return outcome.parts[index]
