"""The thread team under random delays at each synchronisation point.

    python benchmarks/stress_team.py [--lists 1000000] [--threads 2,3,4] [--seed 1]

The kernels of runtime/kernels/cpu/thread_team.py are compiled again with a random delay at each `_sync_point`: before
and after each read and write of shared memory. Waiting threads yield and sleep after a few reads instead of thousands,
so that this happens often. A list is a chain of operations, each of which needs the results of all threads in the
previous one. The expected results are known; the exit status is 1 if one differs.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from quantkit.codegen.callbacks import callback
from quantkit.codegen.jit import kernel
from quantkit.codegen.simd import atomic_add, call3, load_int, pause, store_int
from quantkit.runtime.kernels.cpu import thread_team
from quantkit.runtime.kernels.cpu.op_list import OpList
from quantkit.runtime.kernels.cpu.operation import OPERATION, load_record

_RANDOM = thread_team.YIELD + 8  # offset of the delay counter in the sync block
_KERNELS = ("_wait_while", "_wait_for_list", "_barrier", "_execute", "_lead", "_work")


@kernel
def delay(sync: int) -> None:
    """Do nothing, pause, or yield the time slice, as a hash of a shared counter decides."""
    x = atomic_add(1, sync + _RANDOM) * 0x9E3779B97F4A7C1
    x = (x ^ (x >> 29)) * 0xBF58476D1CE4E5B
    chance = (x >> 32) & 63
    if chance < 8:
        for _ in range((x >> 40) & 255):
            pause()
    elif chance == 8:
        call3(load_int(sync + thread_team.YIELD), 0, 0, 0)


def delayed_kernels() -> SimpleNamespace:
    """The team's kernels with delays. They are not cached on disk: their source is the original kernels'."""
    from numba import njit

    spins = {"SPINS": 8, "IDLE_SPINS": 40, "SOON_SPINS": 120}
    names: dict[str, Any] = vars(thread_team) | spins | {"_sync_point": delay}
    for name in _KERNELS:
        function = FunctionType(getattr(thread_team, name).function.__code__, names)
        names[name] = njit(nogil=True, error_model="numpy")(function)
    return SimpleNamespace(**{name: names[name] for name in _KERNELS})


LINE = 64  # bytes from the number of one thread to that of the next


class ChainParameters(NamedTuple):
    source: int
    target: int


@callback(OPERATION)
def chain(parameters: Any, thread: int, threads: int) -> None:
    """Each thread writes the sum of all threads' numbers, plus its own number plus one."""
    p = load_record(ChainParameters, parameters)
    total = 0
    for i in range(threads):
        total += load_int(p.source + LINE * i)
    store_int((total + thread + 1) & 0xFFFFFF, p.target + LINE * thread)


class Chain:
    """A list of operations, each of which needs all results of the previous one."""

    def __init__(self, threads: int, operations: int):
        self.threads, self.operations = threads, operations
        self.ops = OpList(threads)
        self.buffers = [self.ops.keep(np.zeros(LINE // 8 * threads, np.int64)) for _ in range(operations + 1)]
        for source, target in zip(self.buffers, self.buffers[1:]):
            self.ops.add(chain, ChainParameters(source.ctypes.data, target.ctypes.data), barrier=True)
        self.array = np.array(self.ops._ops, np.int64)
        self.array[-1, 2] = 0  # the end of a list is always a barrier

    def check(self, first: int) -> None:
        """Compare the results of all operations with those expected for the number `first` of each thread."""
        step = LINE // 8
        wanted = np.full(self.threads, first)
        for number, buffer in enumerate(self.buffers):
            got = buffer[::step]
            if not np.array_equal(got, wanted):
                raise SystemExit(f"operation {number} of {self.operations} returned {got}, expected {wanted}")
            wanted = (wanted.sum() + np.arange(1, self.threads + 1)) & 0xFFFFFF


def stress(threads: int, lists: int, seed: int, on_message: Callable[[str], None] = lambda text: None) -> int:
    """Run so many lists of one to five operations, by a team whose kernels are delayed; check each.

    Returns the lists that the team has counted; SystemExit for a wrong result.
    """
    kernels = delayed_kernels()
    before = {name: getattr(thread_team, name) for name in ("_lead", "_work")}
    random, chains = np.random.default_rng(seed), [Chain(threads, count) for count in range(1, 6)]
    mine, begin = thread_team.ThreadTeam(threads), time.perf_counter()
    mine._fields[_RANDOM // 8] = seed << 20
    thread_team._lead, thread_team._work = kernels._lead, kernels._work
    try:
        for start in range(0, lists, 10000):
            for which, first, nap in random.integers(0, (len(chains), 1000, 500), (min(10000, lists - start), 3)):
                chosen = chains[which]
                chosen.buffers[0][:: LINE // 8] = first
                for buffer in chosen.buffers[1:]:
                    buffer[:] = -1
                mine.run(chosen.array)
                chosen.check(int(first))
                if nap < 2:
                    time.sleep(0.0005)  # long enough to fall asleep
                if nap in (1, 2):
                    mine.rouse()
            on_message(f"{threads} threads: {start + 10000} lists, {time.perf_counter() - begin:.0f} s")
        mine.close()
    finally:
        thread_team._lead, thread_team._work = before["_lead"], before["_work"]
    if mine.epoch != lists:
        raise SystemExit(f"{lists} lists were run, the epoch is {mine.epoch}")
    return mine.epoch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lists", type=int, default=1_000_000, help="of all numbers of threads together")
    parser.add_argument("--threads", default="2,3,4", help="numbers of threads, comma-separated")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    counts = [int(count) for count in args.threads.split(",")]
    for place, threads in enumerate(counts):
        share = args.lists * (place + 1) // len(counts) - args.lists * place // len(counts)
        stress(threads, share, args.seed + place, lambda text: print(f"\r{text}", end="", file=sys.stderr, flush=True))
        print(f"\r{threads} threads: {share} lists, no difference")


if __name__ == "__main__":
    main()
