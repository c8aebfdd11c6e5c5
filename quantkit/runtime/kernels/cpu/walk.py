"""One list of operations, walked by all threads together.

A forward pass is hundreds of operations of some microseconds. Handing each to a thread pool costs more than many of
them take, so the threads are handed the whole list: each walks it from end to end, does its share of every operation
and waits for the others where the next one needs what they made.

    ops      int64[count, 3]: address of a C function `void(parameters, thread, threads)`, address of its parameters
             (int64s; what they mean is the function's own affair), 1 where all must wait for each other afterwards
    sync     int64[SYNC]: where the threads meet; fields on cache lines of their own

A waiting thread first spins, then gives its core to any other process that wants it at every look. Between lists
it does so for about a millisecond and then sleeps, so an idle process uses no CPU.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import threading

import numpy as np

from quantkit.jit import kernel
from quantkit.simd import atomic_add, atomic_load, atomic_store, call3, load_int, pause, store_int

ARRIVED, TURN, JOB, OPS, COUNT, YIELD = 0, 64, 128, 192, 200, 208  # byte offsets in sync
SYNC = 32
SPINS = 2000  # looks before giving way; some tens of microseconds
IDLE_SPINS = 4000  # looks before a thread without work goes to sleep

_OP = 24


@kernel
def _wait_while(address, value, looks, sync):
    """Wait until the int64 at `address` is no longer `value`; at most so many looks if `looks` > 0."""
    done = 0
    while atomic_load(address) == value:
        done += 1
        if done == looks:
            return
        pause()
        if done > SPINS:
            call3(load_int(sync + YIELD), 0, 0, 0)


@kernel
def _meet(sync, threads):
    """Return when all threads are here, and what they wrote can be seen."""
    turn = atomic_load(sync + TURN)
    if atomic_add(1, sync + ARRIVED) == threads - 1:
        atomic_store(0, sync + ARRIVED)
        atomic_store(turn + 1, sync + TURN)
    else:
        _wait_while(sync + TURN, turn, 0, sync)


@kernel
def _walk(ops, count, sync, thread, threads):
    for i in range(count):
        op = ops + i * _OP
        call3(load_int(op), load_int(op + 8), thread, threads)
        if threads > 1 and (load_int(op + 16) != 0 or i == count - 1):
            _meet(sync, threads)


@kernel
def _lead(sync, ops, count, threads):
    """Publish a list and walk it with those who follow. One call, so that no signal leaves them alone with it."""
    store_int(ops, sync + OPS)
    store_int(count, sync + COUNT)
    atomic_add(1, sync + JOB)
    _walk(ops, count, sync, 0, threads)


@kernel
def _follow(sync, thread, threads, seen):
    """Walk every list that is published after job `seen`. Returns the last job once none has come for a while."""
    while True:
        _wait_while(sync + JOB, seen, IDLE_SPINS, sync)
        job = atomic_load(sync + JOB)
        if job == seen:
            return job
        seen = job
        _walk(load_int(sync + OPS), load_int(sync + COUNT), sync, thread, threads)


def _yield_function() -> int:
    """Address of the C function that gives the rest of a time slice away. Called with arguments that it ignores."""
    if sys.platform == "win32":
        function = ctypes.windll.kernel32.SwitchToThread
    else:
        function = ctypes.CDLL(None).sched_yield
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return address


class Crew:
    """`threads` threads that walk lists together: the caller's and threads - 1 more, started at the first list."""

    def __init__(self, threads: int):
        self.threads = threads
        self._memory = np.zeros(SYNC + 8, np.int64)
        self._sync = -(-self._memory.ctypes.data // 64) * 64
        self._job = (self._sync + JOB - self._memory.ctypes.data) // 8
        self._memory[self._job + (YIELD - JOB) // 8] = _yield_function()
        self._busy = threading.Lock()
        self._wake = threading.Condition()
        self._announced = 0  # number of the last list: what JOB is once it is published
        self._asleep = 0
        self._started = False

    def walk(self, ops: np.ndarray) -> None:
        """Run ops int64[count, 3], C-contiguous; the parameters they point to must stay alive meanwhile."""
        with self._busy:
            if not self._started and self.threads > 1:
                self._start()
            with self._wake:
                self._announced = int(self._memory[self._job]) + 1
                if self._asleep:
                    self._wake.notify_all()
            try:
                _lead(self._sync, ops.ctypes.data, len(ops), self.threads)
            finally:  # an interrupt may have come before it was published; nobody need stay awake for it then
                self._announced = int(self._memory[self._job])

    def _start(self) -> None:
        self._started = True
        seen = int(self._memory[self._job])
        _follow(self._sync, self.threads, self.threads, seen)  # compiled here, so that no thread comes late for that
        for thread in range(1, self.threads):
            name = f"quantkit-crew-{thread}"
            threading.Thread(target=self._work, args=(thread, seen), name=name, daemon=True).start()

    def _work(self, thread: int, seen: int) -> None:
        while True:
            seen = _follow(self._sync, thread, self.threads, seen)
            with self._wake:
                # However late a list is published after it was announced, whoever is to walk it stays awake.
                while self._announced == seen:
                    self._asleep += 1
                    self._wake.wait()
                    self._asleep -= 1


@functools.cache
def crew(threads: int) -> Crew:
    """The crew of so many threads; one for the whole process, whose lists run one after another."""
    return Crew(threads)


if hasattr(os, "register_at_fork"):  # a forked child has none of our threads
    os.register_at_fork(after_in_child=crew.cache_clear)


class OpList:
    """Operations in the making, and the memory they point to."""

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
        parameters = self.keep(np.array([values.get(name, 0) for name in names], np.int64))
        self._ops.append((function, parameters.ctypes.data, int(wait)))
        self._array = None
        return parameters

    def wait(self) -> None:
        """Let all threads wait for each other after the last operation."""
        function, parameters, _ = self._ops[-1]
        self._ops[-1] = function, parameters, 1

    def run(self) -> None:
        if self._array is None:
            self._array = np.array(self._ops, np.int64)
        crew(self.threads).walk(self._array)

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
