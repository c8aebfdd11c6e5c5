"""Bytes of the host on their way through a GPU, in two turns: the next ones travel while the last are worked on.

staging = Staging(gpu, nbytes)
staging.send(0, arrays)                  begins to copy them: to pinned memory, and from there by a stream of its own
for turn in range(count):
    tensors = staging.get(turn)          uint8 on the GPU, which work launched from now on waits for
    ...                                  launches
    staging.done(turn)                   when these are over, the memory may be written again
    staging.send(turn + 1, arrays)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from quantkit.codegen import thread_pool

if TYPE_CHECKING:
    import torch

    from quantkit.runtime.kernels.cuda.device import Gpu

ALIGNED = 256  # where an array begins: kernels load 16 bytes at a time
PIECE = 1 << 20  # bytes that a thread copies at least


def size_of(sizes: Sequence[int]) -> int:
    """Bytes that arrays of these sizes take."""
    return sum(-(-size // ALIGNED) * ALIGNED for size in sizes)


def _copy(source: np.ndarray, target: np.ndarray) -> None:
    """By several threads: a bus to a GPU is faster than one of them."""

    def some(start: int, stop: int) -> None:
        target[start:stop] = source[start:stop]

    thread_pool.over_rows(some, len(source), multiple=PIECE)


class Staging:
    """Two buffers of `nbytes` of pinned memory, and two on the GPU. Each turn that is sent must be got and done.

    Events that were not recorded yet count as over, so that the first two turns wait for nothing. Torch's allocator
    of pinned memory waits, before it gives memory to others, for copies from it that were begun.
    """

    def __init__(self, gpu: Gpu, nbytes: int):
        self.gpu, self.nbytes = gpu, nbytes
        self._pinned = [gpu.pinned(nbytes) for _ in range(2)]
        self._there = [gpu.empty(nbytes, kind="uint8") for _ in range(2)]
        self._copied, self._used = ([gpu.event() for _ in range(2)] for _ in range(2))
        self._stream = gpu.stream()
        self._places: list[list[tuple[int, int]]] = [[], []]
        self._stream.wait_stream(gpu.current_stream())  # whose memory this was, and is again after the last `get`

    def send(self, turn: int, arrays: Sequence[np.ndarray]) -> None:
        """Begin to copy uint8 arrays. Waits until the copy of two turns ago has left pinned memory."""
        side, places = turn % 2, []
        self._copied[side].synchronize()
        pinned, at = self._pinned[side].numpy(), 0
        for array in arrays:
            _copy(array.reshape(-1), pinned[at : at + array.size])
            places.append((at, array.size))
            at += size_of([array.size])
        self._places[side] = places
        with self.gpu.on(self._stream):
            self._stream.wait_event(self._used[side])
            self._there[side][:at].copy_(self._pinned[side][:at], non_blocking=True)
            self._copied[side].record(self._stream)

    def get(self, turn: int) -> list[torch.Tensor]:
        """The arrays of a turn."""
        side = turn % 2
        self.gpu.current_stream().wait_event(self._copied[side])
        return [self._there[side][at : at + size] for at, size in self._places[side]]

    def done(self, turn: int) -> None:
        """What was launched so far is the last that reads the arrays of a turn."""
        self._used[turn % 2].record(self.gpu.current_stream())
