"""A GPU that numba's simulator plays: kernels run on torch's tensors in the host's memory.

`play(monkeypatch)` is the one place that puts it where models look for GPUs. Nothing in the package knows of it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from quantkit.errors import UnsupportedError
from quantkit.runtime import cuda_worker
from quantkit.runtime.kernels.cuda import device, elementwise
from quantkit.runtime.kernels.cuda.device import Gpu

_NUMBERS = {"u8": "u1", "i8": "i1", "u16": "u2", "u32": "u4", "i32": "i4", "i64": "i8", "f32": "f4"}


class _Event:
    def synchronize(self) -> None:
        pass

    def record(self, stream: Any) -> None:
        pass


class _Stream:
    def wait_stream(self, other: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass


class SimulatedGpu(Gpu):
    """Launches are counted by kernel: `launched`."""

    capability = (9, 0)
    memory = 1 << 30
    count = 2

    def __init__(self, index: int = 0):
        import torch

        if index >= self.count:
            raise UnsupportedError(f"no CUDA GPU number {index}: there are {self.count}, counted from 0")
        self.torch, self.index, self.name = torch, index, "numba's simulator"
        self.place = torch.device("cpu")
        self.launched: dict[str, int] = {}

    def pinned(self, nbytes: int) -> Any:
        return self.empty(nbytes, kind="uint8")

    def stream(self) -> Any:
        return _Stream()

    def current_stream(self) -> Any:
        return _Stream()

    def on(self, stream: Any) -> Any:
        return contextlib.nullcontext()

    def event(self) -> Any:
        return _Event()

    def free_bytes(self) -> int:
        return self.memory

    def synchronize(self) -> None:
        pass

    def launch(self, kernel: Any, blocks: int | Sequence[int], threads: int, *arguments: Any) -> None:
        self.launched[kernel.name] = self.launched.get(kernel.name, 0) + 1
        given = []
        for parameter, value in zip(kernel.parameters, arguments, strict=True):
            if parameter.endswith("[]"):
                assert value.is_contiguous(), kernel.name
                value = value.reshape(-1).numpy().view(_NUMBERS[parameter[:-2]])
            else:
                value = np.dtype(_NUMBERS[parameter]).type(value)
                value = value if parameter == "f32" else int(value)
            given.append(value)
        kernel.simulate(blocks if isinstance(blocks, int) else tuple(blocks), threads, *given)


def play(monkeypatch: pytest.MonkeyPatch) -> Any:
    """GPUs 0 and 1 are simulated from now on; gives the function that opens them."""
    opened = functools.cache(SimulatedGpu)
    monkeypatch.setattr(cuda_worker, "gpu", opened)
    # A simulated block costs as much as its threads, so there are few.
    monkeypatch.setattr(device, "_GRID_Y", 2)
    monkeypatch.setattr(elementwise, "THREADS", 32)
    monkeypatch.setattr(elementwise, "WARPS", 1)
    return opened
