"""A team of threads that executes operation lists together.

A forward pass is hundreds of operations of some microseconds. Handing each to a thread pool costs more than many of
them take, so the threads are handed the whole list: each executes it from end to end, does its share of every operation
and waits at a barrier where the next operation needs what the others made.

    ops      int64[count, 3]: address of a C function `void(parameters, thread, threads)`, address of its parameters
             (int64s; what they mean is the function's own affair), 1 where all must wait for each other afterwards
    sync     int64[SYNC]: what the threads share; fields on cache lines of their own

The thread that calls `ThreadTeam.run` is the leader, with number 0. It publishes a list by advancing the epoch; the
others run a worker loop that waits for the next epoch. The last operation of a list always ends with a barrier, so
when `run` returns, nobody reads the list any more.

A waiting thread first spins, then gives its core to any other process that wants it at every look. Between lists
it does so for about a millisecond and then sleeps, so an idle process uses no CPU.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import threading
from collections.abc import Callable

import numpy as np

from quantkit.codegen import callbacks
from quantkit.codegen.jit import kernel
from quantkit.codegen.simd import atomic_add, atomic_load, atomic_store, call3, load_int, pause, store_int
from quantkit.errors import KernelError

ARRIVED, PHASE, EPOCH, OPS, COUNT, YIELD = 0, 64, 128, 192, 200, 208  # byte offsets in sync
SYNC = 32
SPINS = 2000  # looks before giving way; some tens of microseconds
IDLE_SPINS = 4000  # looks before a thread without work goes to sleep

_OP = 24


@kernel(inline="always")
def _sync_point(sync):
    """Nothing. Stress tests compile these kernels with a random delay here instead."""


@kernel
def _wait_while(address, value, looks, sync):
    """Wait until the int64 at `address` is no longer `value`; at most so many looks if `looks` > 0."""
    done = 0
    while atomic_load(address) == value:
        _sync_point(sync)
        done += 1
        if done == looks:
            return
        pause()
        if done > SPINS:
            call3(load_int(sync + YIELD), 0, 0, 0)


@kernel
def _barrier(sync, threads):
    """Return when all threads are here, and what they wrote can be seen."""
    phase = atomic_load(sync + PHASE)
    _sync_point(sync)
    if atomic_add(1, sync + ARRIVED) == threads - 1:
        _sync_point(sync)
        atomic_store(0, sync + ARRIVED)
        _sync_point(sync)
        atomic_store(phase + 1, sync + PHASE)
    else:
        _sync_point(sync)
        _wait_while(sync + PHASE, phase, 0, sync)


@kernel
def _execute(ops, count, sync, thread, threads):
    for i in range(count):
        op = ops + i * _OP
        _sync_point(sync)
        call3(load_int(op), load_int(op + 8), thread, threads)
        if threads > 1 and (load_int(op + 16) != 0 or i == count - 1):
            _barrier(sync, threads)


@kernel
def _lead(sync, ops, count, threads):
    """Publish a list and execute it with the workers. One call, so that no signal leaves them alone with it."""
    store_int(ops, sync + OPS)
    _sync_point(sync)
    store_int(count, sync + COUNT)
    _sync_point(sync)
    atomic_add(1, sync + EPOCH)
    _sync_point(sync)
    _execute(ops, count, sync, 0, threads)


@kernel
def _work(sync, thread, threads, seen):
    """Execute every list published after epoch `seen`. Returns the last epoch once none has come for a while."""
    while True:
        _wait_while(sync + EPOCH, seen, IDLE_SPINS, sync)
        epoch = atomic_load(sync + EPOCH)
        if epoch == seen:
            return epoch
        _sync_point(sync)
        seen = epoch
        _execute(load_int(sync + OPS), load_int(sync + COUNT), sync, thread, threads)


def _yield_function() -> int:
    """Address of the C function that gives the rest of a time slice away. Called with arguments that it ignores."""
    if sys.platform == "win32":
        function = ctypes.windll.kernel32.SwitchToThread
    else:
        function = ctypes.CDLL(None).sched_yield
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return address


class ThreadTeam:
    """`threads` threads that run lists together: the caller's, and threads - 1 workers, started at the first list.

    `_lock` is taken by itself, not through the Condition: its methods are Python code, where an interrupt can come
    between taking a lock and the promise to release it.
    """

    def __init__(self, threads: int):
        self.threads = threads
        self._memory = np.zeros(SYNC + 8, np.int64)
        self._sync = -(-self._memory.ctypes.data // 64) * 64
        self._fields = self._memory[(self._sync - self._memory.ctypes.data) // 8 :]
        self._fields[YIELD // 8] = _yield_function()
        self._busy = threading.Lock()  # held by the leader, from before the workers start to the end of its list
        self._lock = threading.Lock()  # guards all that follows
        self._wake = threading.Condition(self._lock)
        self._announced = 0  # number of the last list: the epoch, once it is published
        self._asleep = 0
        self._workers: dict[int, threading.Thread] = {}  # by number, who is in the worker loop
        self._attempt = 0  # to start the workers
        self._closed = False
        self._failures: list[str] = []  # kernels that raised in the list that runs

    @property
    def epoch(self) -> int:
        """How many lists were published."""
        return int(self._fields[EPOCH // 8])

    def run(self, ops: np.ndarray, prepare: Callable[[], None] | None = None) -> None:
        """Run ops int64[count, 3], C-contiguous; the parameters they point to must stay alive meanwhile.

        `prepare` is called first, when no other list runs: to set parameters that other callers set too.

        An interrupt is raised before the list begins or after its end. KernelError where an operation raised an
        exception: the list went on to its end, with incomplete numbers.
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
                    if self._asleep:
                        self._wake.notify_all()
                _lead(self._sync, ops.ctypes.data, len(ops), self.threads)
            finally:  # an interrupt may have come before it was published; nobody need stay awake for it then
                self._announced = self.epoch
                callbacks.report_failures_to(None)
            if self._failures:
                names = ", ".join(sorted(set(self._failures)))
                raise KernelError(
                    f"kernels raised exceptions while {self.threads} threads ran a list of {len(ops)} operations, so "
                    f"its results are incomplete: {names}; if memory is not short, this is a defect of quantkit"
                )

    def _start(self) -> None:
        """Start the workers that are missing: all of them at first, and again what an earlier attempt did not reach."""
        if self._closed:
            raise KernelError("the interpreter is shutting down: its threads have ended, no kernels run any more")
        epoch = self.epoch
        _work(self._sync, self.threads, self.threads, epoch)  # compiled here, so that no thread comes late for that
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

    def _worker_loop(self, number: int, seen: int, attempt: int) -> None:
        with self._lock:
            if attempt != self._attempt or number in self._workers or self._closed:
                return  # an interrupted attempt left this thread behind, and another has its place
            self._workers[number] = threading.current_thread()
        callbacks.report_failures_to(self._failures)
        try:
            while not self._closed:
                seen = _work(self._sync, number, self.threads, seen)
                with self._lock:
                    # However late a list is published after it was announced, its workers stay awake.
                    while self._announced == seen and not self._closed:
                        self._asleep += 1
                        try:
                            self._wake.wait()
                        finally:
                            self._asleep -= 1
        finally:
            with self._lock:
                del self._workers[number]

    def close(self) -> None:
        """End the workers, after the list that runs. No other can be run."""
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
    """The team of so many threads; one for the whole process, whose lists run one after another."""
    found = _teams.get(threads)
    if found is None:
        with _teams_lock:
            found = _teams.setdefault(threads, ThreadTeam(threads))
    return found


@atexit.register
def _close_teams() -> None:
    """A daemon thread may be leading a list: end before the interpreter takes apart what the list reads."""
    for each in list(_teams.values()):
        each.close()


def _after_fork() -> None:
    """A forked child has none of our threads, and locks may be held by some that it does not have."""
    global _teams_lock
    _teams_lock = threading.Lock()
    _teams.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class OpList:
    """A builder of an operation list, and the memory it points to.

    Parameters named `private_stride` are strides of a buffer that every thread writes for itself. 0 would have all
    threads write the same bytes.
    """

    def __init__(self, threads: int):
        self.threads = threads
        self._ops: list[tuple[int, int, int]] = []
        self._alive: list[np.ndarray] = []
        self._buffers: dict[tuple[str, int], np.ndarray] = {}
        self._array: np.ndarray | None = None

    def add(self, function: int, names: tuple[str, ...], wait: bool = False, **values: int) -> np.ndarray:
        """Append an operation. Parameters that are not given are 0; the array of all is returned, to be changed."""
        unknown = set(values) - set(names)
        assert not unknown, f"no parameters {unknown} among {names}"
        assert self.threads == 1 or "private_stride" not in names or values.get("private_stride", 0) > 0, (
            f"{self.threads} threads would write one buffer: private_stride is {values.get('private_stride', 0)}"
        )
        parameters = self.keep(np.array([values.get(name, 0) for name in names], np.int64))
        self._ops.append((function, parameters.ctypes.data, int(wait)))
        self._array = None
        return parameters

    def wait(self) -> None:
        """Let all threads wait for each other after the last operation."""
        if self._ops:
            function, parameters, _ = self._ops[-1]
            self._ops[-1] = function, parameters, 1
            self._array = None

    def run(self, prepare: Callable[[], None] | None = None) -> None:
        """Execute the list; see `ThreadTeam.run`."""
        array = self._array
        if array is None:
            array = self._array = np.array(self._ops, np.int64).reshape(-1, 3)
        team(self.threads).run(array, prepare)

    def keep(self, array: np.ndarray) -> np.ndarray:
        self._alive.append(array)
        return array

    def constant(self, value: float) -> int:
        """Address of a float32."""
        return self.keep(np.array([value], np.float32)).ctypes.data

    def buffer(self, name: str, nbytes: int) -> int:
        """Address of working memory, zero at first; operations that name the same buffer share it."""
        key = (name, nbytes)
        if key not in self._buffers:
            self._buffers[key] = np.zeros(nbytes // 8 + 1, np.int64)
        return self._buffers[key].ctypes.data

    @property
    def nbytes(self) -> int:
        """Of all working memory."""
        return sum(array.nbytes for array in self._buffers.values())

    def private(self, name: str, nbytes: int) -> tuple[int, int]:
        """Address and stride of a buffer for each thread, on cache lines of their own."""
        stride = -(-nbytes // 64) * 64
        return self.buffer(name, self.threads * stride), stride
