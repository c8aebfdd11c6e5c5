"""numba's CUDA simulator with greenlets in place of operating system threads.

A simulated thread runs until its next barrier, then the next thread of the block does; between two barriers the order
is first to last or last to first by turns, so that a missing barrier shows on every run. numba's own simulator starts a
system thread for each, and takes three to six times as long.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from greenlet import getcurrent, greenlet
from numba.cuda.simulator import kernel, kernelapi
from numba.cuda.simulator.kernelapi import Dim3, FakeCUDAShared


class _Thread(greenlet):
    """What `cuda.threadIdx`, `blockIdx` and `syncthreads` ask the current thread for."""

    def __init__(self, run: Callable[[], None], block: Sequence[int], thread: Sequence[int]):
        super().__init__(run)
        self.blockIdx, self.threadIdx = Dim3(*block), Dim3(*thread)

    def syncthreads(self) -> None:
        self.parent.switch()


class _Block:
    """Runs the threads of one block after the other: numba's `BlockManager`."""

    _started = 0

    def __init__(self, function: Callable[..., None], grid: Sequence[int], shape: Sequence[int], debug: bool):
        self._function, self._shape = function, shape

    def run(self, number: Sequence[int], *arguments: Any) -> None:
        threads = [_Thread(lambda: self._function(*arguments), number, place) for place in np.ndindex(*self._shape)]
        _Block._started += 1
        if _Block._started % 2:
            threads.reverse()
        while threads:
            for thread in threads:
                thread.switch()
            threads = [thread for thread in reversed(threads) if not thread.dead]


def _shared_array(self: Any, shape: int, dtype: Any) -> np.ndarray:
    """The array of the line that asks: numba's takes most of its time to find that line."""
    frame = sys._getframe(1)
    line = frame.f_code.co_filename, frame.f_lineno
    if line not in self._allocations:
        self._allocations[line] = np.empty(shape, dtype)
    result: np.ndarray = self._allocations[line]
    return result


def install() -> None:
    """Change numba's simulator in this process."""
    kernel.BlockManager = _Block
    kernelapi.threading = SimpleNamespace(current_thread=getcurrent)
    FakeCUDAShared.array = _shared_array
