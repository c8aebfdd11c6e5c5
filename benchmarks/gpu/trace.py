"""What torch's profiler says of a task: the time of each kernel, of the GPU, and of the host without its waiting.

trace = profiled(gpu, lambda: model.forward(tokens, cache))
trace.kernels     {name: (launches, seconds)}; copies and fills are kernels too
trace.gpu         seconds in which the GPU did something; None if the profiler saw nothing of it
trace.host        seconds in which the host did not wait for the GPU or a copy; the profiler adds to it
trace.wall        seconds of the task in this run; without the profiler it is faster
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from quantkit.runtime.kernels.cuda.device import Gpu

WAITS = ("Synchronize", "Memcpy")  # in names of calls of CUDA: a copy from or to pageable memory waits for the GPU


@dataclass(frozen=True)
class Trace:
    """See the module."""

    kernels: dict[str, tuple[int, float]]
    gpu: float | None
    host: float
    wall: float

    def figures(self, count: int = 1) -> dict[str, float | None]:
        """Seconds of the GPU and of the host, divided by the number of tokens."""
        return {"gpu": None if self.gpu is None else self.gpu / count, "host": self.host / count}


def profiled(gpu: Gpu, task: Callable[[], Any]) -> Trace:
    """Run a task under torch's profiler, until the GPU is ready."""
    from torch.profiler import ProfilerActivity, profile

    activity = ProfilerActivity.CPU if gpu.torch_device.type == "cpu" else ProfilerActivity.CUDA
    gpu.synchronize()
    with profile(activities=[activity]) as profiler:
        begin = time.perf_counter()
        task()
        gpu.synchronize()
        wall = time.perf_counter() - begin
    return of_events(profiler.events(), wall)


def of_events(events: Iterable[Any], wall: float) -> Trace:
    """The trace of a profiler's events, whose times are in µs."""
    kernels: dict[str, list[float]] = defaultdict(list)
    busy, waits = [], []
    for event in events:
        begin, end = event.time_range.start, event.time_range.end
        if event.device_type.name == "CUDA":
            kernels[event.name].append((end - begin) / 1e6)
            busy.append((begin, end))
        elif any(word in event.name for word in WAITS):
            waits.append((begin, end))
    counted = {name: (len(times), sum(times)) for name, times in kernels.items()}
    return Trace(counted, covered(busy) / 1e6 if busy else None, wall - covered(waits) / 1e6, wall)


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """The length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total
