"""A GPU simulated by numba's simulator: kernels run on torch tensors in the host's memory.

`play(monkeypatch)` is the one place that puts it where models look for GPUs. Nothing in the package knows of it.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from quantkit.archs.common import blocks
from quantkit.errors import UnsupportedError
from quantkit.runtime.cuda import gpu_worker
from quantkit.runtime.cuda.gpu_worker import CudaWorker
from quantkit.runtime.kernels.cuda import (
    activations,
    attention,
    decode_attention,
    device,
    elementwise,
    floats,
    fused,
    indexer,
    weights,
)
from quantkit.runtime.kernels.cuda.device import Activations, Gpu, Matrices

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


class _Tape(TorchDispatchMode):
    """A simulated CUDA graph: records the torch operations, and replays them on the tensors' current contents.

    Nothing may wait for the GPU or be copied to it meanwhile.
    """

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Callable[[], None]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        assert func is not torch.ops.aten._local_scalar_dense.default, "the host waits for a number"
        assert func is not torch.ops.aten._to_copy.default or kwargs.get("device") is None, "something is copied"
        out = func(*args, **kwargs)
        self.steps.append(lambda: self._again(func, args, kwargs, out))
        return out

    @staticmethod
    def _again(func: Any, args: Any, kwargs: Any, out: Any) -> None:
        new = func(*args, **kwargs)
        for old, made in zip(*(x if isinstance(x, (list, tuple)) else [x] for x in (out, new))):
            if isinstance(old, torch.Tensor) and old.untyped_storage().data_ptr() != made.untyped_storage().data_ptr():
                old.copy_(made)

    def replay(self) -> None:
        for step in self.steps:
            step()


class SimulatedGpu(Gpu):
    """Launches are counted by kernel: `launched`. The simulator runs one kernel at a time, in the whole process."""

    _one = threading.Lock()

    capability = (9, 0)
    memory = 1 << 30
    count = 2

    def __init__(self, index: int = 0):
        if index >= self.count:
            raise UnsupportedError(f"no CUDA GPU number {index}: there are {self.count}, counted from 0")
        self.torch, self.index, self.name = torch, index, "numba's simulator"
        self.torch_device = torch.device("cpu")
        self.launched: dict[str, int] = {}
        self.threads: list[threading.Thread] = []  # whose GPU this is
        self.tape: _Tape | None = None
        self.captured = 0

    def bind_thread(self) -> None:
        self.threads.append(threading.current_thread())

    def array(self, values: np.ndarray) -> Any:
        assert self.tape is None, "memory of the host is copied within a graph"
        return super().array(values)

    def upload(self, values: np.ndarray) -> Any:
        return self.array(values)

    def graph_pool(self) -> Any:
        return None

    def capture(self, step: Callable[[], Any], pool: Any = None) -> Any:
        step()
        self.tape, self.captured = _Tape(), self.captured + 1
        try:
            with self.tape:
                step()
            return self.tape
        finally:
            self.tape = None

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

    def multiply_bfloats(self, a: Any, b: Any) -> Any:
        return a.float() @ b.float()

    def synchronize(self) -> None:
        pass

    def launch(self, kernel: Any, blocks: int | Sequence[int], threads: int, *arguments: Any) -> None:
        given = []
        for parameter, value in zip(kernel.parameters, arguments, strict=True):
            if parameter.endswith("[]"):
                assert value.is_contiguous(), kernel.name
                value = value.reshape(-1).numpy().view(_NUMBERS[parameter[:-2]])
            else:
                value = np.dtype(_NUMBERS[parameter]).type(value)
                value = value if parameter == "f32" else int(value)
            given.append(value)
        grid = blocks if isinstance(blocks, int) else tuple(blocks)
        assert threading.current_thread() in (threading.main_thread(), *self.threads)
        with self._one:
            self.launched[kernel.name] = self.launched.get(kernel.name, 0) + 1
            kernel.simulate(grid, threads, *given)
        if self.tape is not None:
            self.tape.steps.append(lambda: kernel.simulate(grid, threads, *given))


def _small() -> dict[tuple[Any, str], Any]:
    """Constants of kernel modules for blocks of one warp: the time of a simulated block grows with its threads."""
    result: dict[tuple[Any, str], Any] = {(device, "_GRID_Y"): 2}
    for module in (activations, attention, decode_attention, elementwise, floats, fused, indexer, weights):
        result[module, "THREADS"] = 32
        for name, value in vars(module).items():  # kernels that have such numbers in them, once more
            if hasattr(value, "cache_clear") and value.__module__ == module.__name__:
                result[module, name] = functools.cache(value.__wrapped__)
    return result | {
        (attention, "ROWS"): 2,
        (indexer, "HEADS"): 2,
        (weights, "WARPS"): 1,
        (decode_attention, "_MAX_GROUP_OF_ALL"): 8,
        (floats, "ROWS_OF_BLOCK"): 1,
    }


_SMALL = _small()


def play(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Simulate GPUs 0 and 1 from now on; returns the function that opens them."""
    opened = functools.cache(SimulatedGpu)
    monkeypatch.setattr(gpu_worker, "gpu", opened)
    for (module, name), value in _SMALL.items():
        monkeypatch.setattr(module, name, value)
    return opened


def by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding, products, norms and routing by torch instead of kernels, which would take most of the time."""

    def whole(self: Matrices) -> Any:
        result = vars(self).get("_whole")
        if result is None:
            rows = self.kind.dequantize(self.data.numpy().reshape(-1, self.row_bytes), self.n).reshape(
                self.count, self.rows, self.n
            )
            result = self._whole = torch.from_numpy(rows)  # type: ignore[attr-defined]
        return result

    def decoded(self: Matrices, start: int = 0, stop: int | None = None, matrix: int = 0, exact: bool = False) -> Any:
        result = whole(self)[matrix, start:stop]
        result = result if exact else result.bfloat16()
        tape: _Tape | None = self.gpu.tape  # type: ignore[attr-defined]

        def again() -> None:  # the bytes may be others then
            del self._whole  # type: ignore[attr-defined]
            result.copy_(whole(self)[matrix, start:stop])

        if tape is not None:
            tape.steps.append(again)
        return result

    def product(self: Matrices, x: Any, ids: Any, share: int, tokens: int, out: Any) -> None:
        x = x.x if isinstance(x, Activations) else x
        vectors = x.reshape(-1, tokens, self.n)[torch.arange(len(ids)) // share]
        out.copy_((vectors @ whole(self)[ids.long()].transpose(1, 2)).view_as(out))

    def rms_norm(self: CudaWorker, x: Any, norm: blocks.Norm) -> Any:
        return x * (x.square().mean(dim=-1, keepdim=True) + norm.eps).rsqrt() * self.norm_weight(norm, x.shape[-1])

    kernels = CudaWorker.route

    def route(self: CudaWorker, part: blocks.Experts, logits: Any) -> tuple[Any, Any]:
        if part.gating != "softmax" or not part.normalise or part.choice_bias or self.expert_reduction is not None:
            return kernels(self, part, logits)
        shares, ids = logits.softmax(dim=1).topk(part.used, dim=1)
        return ids.int(), shares / shares.sum(dim=1, keepdim=True) * part.scale

    monkeypatch.setattr(CudaWorker, "rms_norm", rms_norm)
    monkeypatch.setattr(CudaWorker, "route", route)
    monkeypatch.setattr(Matrices, "decoded", decoded)
    monkeypatch.setattr(Matrices, "_product", product)
