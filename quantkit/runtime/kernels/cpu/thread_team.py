"""A team of threads that executes operation lists together.

A forward pass is hundreds of operations of some microseconds. Handing each to a thread pool costs more than many of
them take. So the threads get the whole list: each executes it from end to end, does its share of every operation and
waits at a barrier where the next operation needs the results of the others.

    ops      a ListedOperation for each operation
    sync     int64[SYNC]: shared by the threads; fields are on cache lines of their own

The thread that calls `ThreadTeam.run` is the leader, with number 0. It publishes a list by advancing the epoch; the
others run a worker loop that waits for the next epoch. The last operation of a list always ends with a barrier, so
when `run` returns, nobody reads the list any more.

A waiting thread first spins, then yields its core to other processes each time it polls. Between lists it does so for
about a millisecond and then sleeps, so an idle process uses no CPU. To wake sleeping threads takes longer than many a
list: who knows that a list comes soon calls `rouse` before, and they wait for that one without sleeping, some tens of
milliseconds at most.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import threading
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from quantkit.codegen import callbacks
from quantkit.codegen.jit import kernel
from quantkit.codegen.simd import atomic_add, atomic_load, atomic_store, call3, load_int, pause, store_int
from quantkit.errors import KernelError
from quantkit.runtime.kernels.cpu.operation import load_record, record_bytes

ARRIVED, PHASE, EPOCH, SOON, OPS, COUNT, YIELD = 0, 64, 128, 136, 192, 200, 208  # byte offsets in sync
SYNC = 32
SPINS = 2000  # polls before a waiting thread yields its core; some tens of microseconds
IDLE_SPINS = 4000  # polls before a thread without work goes to sleep
SOON_SPINS = 60_000  # the same where a list comes soon


class ListedOperation(NamedTuple):
    """An entry of an operation list."""

    function: int  # C function `void(parameters, thread, threads)`, see operation.py
    parameters: int
    barrier: int  # 1 if all threads wait for each other afterwards


_LISTED_BYTES = record_bytes(ListedOperation)


@kernel(inline="always")
def _sync_point(sync):
    """Does nothing. Stress tests compile these kernels with a random delay here."""


@kernel
def _wait_while(address, value, sync):
    """Wait until the int64 at `address` is no longer `value`."""
    polled = 0
    while atomic_load(address) == value:
        _sync_point(sync)
        polled += 1
        pause()
        if polled > SPINS:
            call3(load_int(sync + YIELD), 0, 0, 0)


@kernel
def _wait_for_list(last_epoch, sync):
    """Wait for an epoch after `last_epoch`, but not for ever."""
    polled = 0
    while atomic_load(sync + EPOCH) == last_epoch:
        _sync_point(sync)
        polled += 1
        if polled >= (IDLE_SPINS if atomic_load(sync + SOON) == 0 else SOON_SPINS):
            return
        pause()
        if polled > SPINS:
            call3(load_int(sync + YIELD), 0, 0, 0)


@kernel
def _barrier(sync, threads):
    """Return when all threads have arrived; their writes are visible."""
    phase = atomic_load(sync + PHASE)
    _sync_point(sync)
    if atomic_add(1, sync + ARRIVED) == threads - 1:
        _sync_point(sync)
        atomic_store(0, sync + ARRIVED)
        _sync_point(sync)
        atomic_store(phase + 1, sync + PHASE)
    else:
        _sync_point(sync)
        _wait_while(sync + PHASE, phase, sync)


@kernel
def _execute(ops, count, sync, thread, threads):
    """Execute a list as one of its threads."""
    for i in range(count):
        op = load_record(ListedOperation, ops + i * _LISTED_BYTES)
        _sync_point(sync)
        call3(op.function, op.parameters, thread, threads)
        if threads > 1 and (op.barrier != 0 or i == count - 1):
            _barrier(sync, threads)


@kernel
def _lead(sync, ops, count, threads):
    """Publish a list and execute it with the workers. One call, so that no signal leaves workers without a leader."""
    store_int(ops, sync + OPS)
    _sync_point(sync)
    store_int(count, sync + COUNT)
    _sync_point(sync)
    atomic_add(1, sync + EPOCH)
    _sync_point(sync)
    _execute(ops, count, sync, 0, threads)


@kernel
def _work(sync, thread, threads, last_epoch):
    """Execute every list published after `last_epoch`. Returns the last epoch once none has come for a while."""
    while True:
        _wait_for_list(last_epoch, sync)
        epoch = atomic_load(sync + EPOCH)
        if epoch == last_epoch:
            return epoch
        _sync_point(sync)
        last_epoch = epoch
        _execute(load_int(sync + OPS), load_int(sync + COUNT), sync, thread, threads)


def _yield_function() -> int:
    """Address of the C function that yields the rest of a time slice. It is called with arguments that it ignores."""
    if sys.platform == "win32":
        function = ctypes.windll.kernel32.SwitchToThread
    else:
        function = ctypes.CDLL(None).sched_yield
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return address


class ThreadTeam:
    """`threads` threads that run lists together: the caller's, and threads - 1 workers, started by the first list.

    The code acquires `_lock` directly, not through the Condition: the methods of Condition are Python code, where an
    interrupt can come between acquiring the lock and the block that releases it.
    """

    def __init__(self, threads: int):
        self.threads = threads
        self._memory = np.zeros(SYNC + 8, np.int64)
        self._sync = -(-self._memory.ctypes.data // 64) * 64
        self._fields = self._memory[(self._sync - self._memory.ctypes.data) // 8 :]
        self._fields[YIELD // 8] = _yield_function()
        self._busy = threading.Lock()  # held by the leader, from before the workers start to the end of its list
        self._lock = threading.Lock()  # guards the fields below
        self._wake = threading.Condition(self._lock)
        self._announced = 0  # number of the last list: the epoch, once it is published
        self._asleep = 0
        self._roused = 0  # number of calls of `rouse` that woke threads
        self._workers: dict[int, threading.Thread] = {}  # by number: threads that are in the worker loop
        self._attempt = 0  # number of times that workers were started
        self._closed = False
        self._failures: list[str] = []  # names of kernels that raised during the current list

    @property
    def epoch(self) -> int:
        """Number of lists published."""
        return int(self._fields[EPOCH // 8])

    def run(self, ops: np.ndarray, prepare: Callable[[], None] | None = None) -> None:
        """Run int64[count, 3], C-contiguous ListedOperations; the parameters they point to must stay alive meanwhile.

        `prepare` is called first, while no other list runs, to set parameters that other callers set too.

        An interrupt is raised before the list begins or after it ends. KernelError if an operation raised an exception:
        the list ran to its end, with incomplete results.
        """
        if not len(ops):  # without operations there is no barrier
            return
        with self._busy:
            if len(self._workers) < self.threads - 1:
                self._start()
            if prepare is not None:
                prepare()
            self._failures.clear()
            callbacks.report_failures_to(self._failures)
            try:
                with self._lock:
                    self._announced = self.epoch + 1
                    self._fields[SOON // 8] = 0
                    if self._asleep:
                        self._wake.notify_all()
                _lead(self._sync, ops.ctypes.data, len(ops), self.threads)
            finally:  # an interrupt may have come before the list was published: no worker has to stay awake for it
                self._announced = self.epoch
                callbacks.report_failures_to(None)
            if self._failures:
                names = ", ".join(sorted(set(self._failures)))
                raise KernelError(
                    f"kernels raised exceptions while {self.threads} threads ran a list of {len(ops)} operations, so "
                    f"its results are incomplete: {names}; if memory is not short, this is a defect of quantkit"
                )

    def rouse(self) -> None:
        """Wake the workers for the next list: they wait for it without sleeping for longer than otherwise."""
        with self._lock:
            self._fields[SOON // 8] = 1
            if self._asleep:
                self._roused += 1
                self._wake.notify_all()

    def _start(self) -> None:
        """Start the missing workers: all of them at first; later those that an earlier attempt could not start."""
        if self._closed:
            raise KernelError("the interpreter is shutting down: its threads have ended, no kernels run any more")
        epoch = self.epoch
        _work(self._sync, self.threads, self.threads, epoch)  # compile it here, so that no thread is late because of it
        self._attempt += 1
        for number in range(1, self.threads):
            if number in self._workers:
                continue
            worker = threading.Thread(
                target=self._worker_loop, args=(number, epoch, self._attempt), name=f"quantkit-{number}", daemon=True
            )
            try:
                worker.start()
            except RuntimeError as error:
                raise KernelError(
                    f"thread {number + 1} of {self.threads} cannot be started ({error}); run with fewer threads (-t), "
                    "or let this process have more (ulimit -u, the container's limit of processes)"
                ) from None

    def _worker_loop(self, number: int, last_epoch: int, attempt: int) -> None:
        with self._lock:
            if attempt != self._attempt or number in self._workers or self._closed:
                return  # an interrupted attempt started this thread, and another one has its place
            self._workers[number] = threading.current_thread()
        callbacks.report_failures_to(self._failures)
        roused = 0
        try:
            while not self._closed:
                last_epoch = _work(self._sync, number, self.threads, last_epoch)
                with self._lock:
                    # Workers stay awake from the announcement of a list until it is published.
                    while self._announced == last_epoch and not self._closed and self._roused == roused:
                        self._asleep += 1
                        try:
                            self._wake.wait()
                        finally:
                            self._asleep -= 1
                    roused = self._roused
        finally:
            with self._lock:
                del self._workers[number]

    def close(self) -> None:
        """End the workers after the current list. No other list can be run."""
        with self._busy:
            with self._lock:
                self._closed = True
                self._wake.notify_all()
                workers = list(self._workers.values())
            for worker in workers:
                worker.join()


_teams: dict[int, ThreadTeam] = {}
_teams_lock = threading.Lock()


def team(threads: int) -> ThreadTeam:
    """The process-wide team of `threads` threads; its lists run one after another."""
    result = _teams.get(threads)
    if result is None:
        with _teams_lock:
            result = _teams.setdefault(threads, ThreadTeam(threads))
    return result


@atexit.register
def _close_teams() -> None:
    """A daemon thread may be leading a list: end before the interpreter frees what the list reads."""
    for each in list(_teams.values()):
        each.close()


def _after_fork() -> None:
    """A forked child has none of these threads, and its locks may be held by threads that it does not have."""
    global _teams_lock
    _teams_lock = threading.Lock()
    _teams.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
