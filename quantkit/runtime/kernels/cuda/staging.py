"""Stream arrays from the host to a GPU with double buffering: the next arrays are copied while the GPU uses the last.

staging = Staging(gpu, nbytes)
staging.send(0, arrays)                  starts to copy them: to pinned memory, and from there on a stream of its own
for index in range(count):
    tensors = staging.get(index)         uint8 on the GPU, which work launched from now on waits for
    ...                                  launches
    staging.done(index)                  when these are over, the memory may be written again
    staging.send(index + 1, arrays)
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
PIECE = 1 << 20  # bytes that a thread copies at a time


def size_of(sizes: Sequence[int]) -> int:
    """Bytes that arrays of these sizes take."""
    return sum(-(-size // ALIGNED) * ALIGNED for size in sizes)


def _copy(arrays: Sequence[np.ndarray], targets: Sequence[np.ndarray]) -> None:
    """Copy flat arrays with several threads, which start once for all: the bus is faster than one thread's copy."""
    pieces = [
        (array[start : start + PIECE], target[start : start + PIECE])
        for array, target in zip(arrays, targets)
        for start in range(0, len(array), PIECE)
    ]

    def copy_pieces(first: int, stop: int) -> None:
        for source, target in pieces[first:stop]:
            target[...] = source

    thread_pool.over_rows(copy_pieces, len(pieces), pieces=2, is_long=len(pieces) > 1)


class Staging:
    """Two buffers of `nbytes` of pinned memory, and two on the GPU. After each `send`, call `get` and `done`.

    Events that were not recorded yet count as complete, so that the first two sends wait for nothing. Torch's allocator
    of pinned memory waits for copies from a buffer before it reuses the memory.
    """

    def __init__(self, gpu: Gpu, nbytes: int):
        self.gpu, self.nbytes = gpu, nbytes
        self._pinned = [gpu.pinned(nbytes) for _ in range(2)]
        self._on_gpu = [gpu.empty(nbytes, kind="uint8") for _ in range(2)]
        self._copied, self._used = ([gpu.event() for _ in range(2)] for _ in range(2))
        self._stream = gpu.stream()
        self._extents: list[list[tuple[int, int]]] = [[], []]
        self._stream.wait_stream(gpu.current_stream())  # whose memory this was, and is again after the last `get`

    def send(self, index: int, arrays: Sequence[np.ndarray]) -> None:
        """Start to copy uint8 arrays. Waits until the copy before the last one has left pinned memory."""
        side, extents = index % 2, []
        self._copied[side].synchronize()
        pinned, offset, targets = self._pinned[side].numpy(), 0, []
        for array in arrays:
            targets.append(pinned[offset : offset + array.size])
            extents.append((offset, array.size))
            offset += size_of([array.size])
        _copy([array.reshape(-1) for array in arrays], targets)
        self._extents[side] = extents
        with self.gpu.on(self._stream):
            self._stream.wait_event(self._used[side])
            self._on_gpu[side][:offset].copy_(self._pinned[side][:offset], non_blocking=True)
            self._copied[side].record(self._stream)

    def get(self, index: int) -> list[torch.Tensor]:
        """The arrays of `send(index, …)` on the GPU; work launched from now on waits for the copy."""
        side = index % 2
        self.gpu.current_stream().wait_event(self._copied[side])
        return [self._on_gpu[side][offset : offset + size] for offset, size in self._extents[side]]

    def done(self, index: int) -> None:
        """Mark that all work that reads the arrays of `index` is launched: after it, they can be overwritten."""
        self._used[index % 2].record(self.gpu.current_stream())
