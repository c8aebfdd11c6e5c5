"""The all-reduce of -sm graph by torch.distributed: NCCL between GPUs, gloo otherwise. Each device has a thread.

Each device has a process group of its own over one store in memory; nothing global is set up. Sums are transferred as
f32, f16 or bf16: from GPU to GPU if all devices are GPUs, else through the host's memory. All threads meet at a barrier
before each sum: when one has failed, the others stop too, and none waits for ever.
"""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar, cast

import numpy as np

from quantkit.errors import QuantkitError, UnknownNameError, UnsupportedError

KINDS = ("f32", "f16", "bf16")
_TIMEOUT = datetime.timedelta(hours=1)  # that one device may wait for another

T = TypeVar("T")


class AllReduce:
    """The all-reduce over a list of devices, each of which has a thread.

    devices   for each, the torch.device of its tensors; None for one that gives numpy arrays
    kind      "f32", "f16" or "bf16": the data type of the all-reduce
    """

    def __init__(self, devices: Sequence[Any], kind: str = "f32"):
        if kind not in KINDS:
            raise UnknownNameError("type of sums over devices", kind, KINDS)
        try:
            import torch
            import torch.distributed as distributed
        except ImportError as error:
            raise UnsupportedError(
                f"-sm graph adds up through torch.distributed, and torch is not there ({error}): pip install "
                "'quantkit[torch]', or take -sm layer"
            ) from None
        self.kind, self._torch = kind, torch
        self._type = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[kind]
        self._threads = [ThreadPoolExecutor(1, f"device-{rank}") for rank in range(len(devices))]
        self._broken = False
        self._barrier = threading.Barrier(len(devices), timeout=_TIMEOUT.total_seconds())
        on_gpus = all(device is not None and device.type == "cuda" for device in devices)
        name = "ProcessGroupNCCL" if on_gpus else "ProcessGroupGloo"
        if not distributed.is_available() or not hasattr(distributed, name):
            backend = "NCCL, which adds up between GPUs" if on_gpus else "gloo"
            raise UnsupportedError(f"-sm graph needs a torch built with {backend}; take -sm layer")
        self._groups: Nccl | Gloo = (Nccl if on_gpus else Gloo)(devices, self)

    def run_on_all(self, task: Callable[[int], T]) -> list[T]:
        """Call `task(rank)` on the threads of all devices at once; returns the results, or raises the first exception.

        Either all devices run the task or none. An interrupt is raised after they have finished: a device that stopped
        in the middle would add its sum to those of the next task.
        """
        if self._broken:
            raise QuantkitError("an all-reduce was interrupted twice and cannot be used any more; load the model again")
        gate, is_open = threading.Event(), False

        def run(rank: int) -> T | None:
            gate.wait()
            if not is_open:
                return None
            try:
                return task(rank)
            except BaseException:
                self._barrier.abort()  # the others' next sum raises BrokenBarrierError
                raise

        futures: list[Future[T | None]] = []
        try:
            for rank, thread in enumerate(self._threads):
                futures.append(thread.submit(run, rank))
            is_open = True
        finally:
            gate.set()
        self._wait(futures)
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            self._barrier.reset()
            raise min(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError))
        return [cast(T, future.result()) for future in futures]

    def _wait(self, futures: Sequence[Future[T | None]]) -> None:
        """Wait for all threads, also after an interrupt. A second interrupt ends the waiting and breaks this object."""
        try:
            wait(futures)
        except BaseException:
            self._broken = True
            wait(futures)
            self._broken = False
            raise

    def barrier(self) -> None:
        """Wait until all threads are here. BrokenBarrierError where one will not come."""
        self._barrier.wait()

    def sum(self, rank: int, x: Any) -> Any:
        """The sum of x over all devices, float32 of x's shape, on x's device.

        Every device must call this equally often, on its own thread, with arrays of one shape.
        """
        torch = self._torch
        tensor = torch.from_numpy(np.ascontiguousarray(x)) if isinstance(x, np.ndarray) else x
        flat = tensor.reshape(-1).to(self._groups.device_of(rank), self._type, copy=True)
        self.barrier()
        self._groups.allreduce(rank, flat)
        total = flat.float().reshape(tensor.shape)
        return np.asarray(total.numpy()) if tensor is not x else total.to(tensor.device)


class Gloo:
    """Process groups that add in the host's memory."""

    def __init__(self, devices: Sequence[Any], threads: AllReduce):
        import torch.distributed as distributed

        store = distributed.HashStore()  # type: ignore[attr-defined]  # torch lists it in no __all__
        gloo: Any = distributed.ProcessGroupGloo

        def group(rank: int) -> Any:
            options = gloo._Options()
            options._devices = [gloo.create_device(hostname="127.0.0.1")]
            options._timeout = _TIMEOUT
            return gloo(store, rank, len(devices), options)

        self._of = threads.run_on_all(group)

    def device_of(self, rank: int) -> Any:
        """The device on which `allreduce` needs its argument."""
        return "cpu"

    def allreduce(self, rank: int, x: Any) -> None:
        """Replace x by the sum over all devices."""
        self._of[rank].allreduce([x]).wait()


class Nccl:
    """Process groups between GPUs, one per thread. Only tests that find two GPUs run it."""

    def __init__(self, devices: Sequence[Any], threads: AllReduce):
        import torch.distributed as distributed

        store = distributed.HashStore()  # type: ignore[attr-defined]  # torch lists it in no __all__
        nccl: Any = distributed.ProcessGroupNCCL
        self._torch_devices, self._threads = devices, threads

        def group(rank: int) -> Any:
            options = nccl.Options()
            options._timeout = _TIMEOUT
            return nccl(store, rank, len(devices), options)

        self._of = threads.run_on_all(group)

    def device_of(self, rank: int) -> Any:
        """The GPU of a rank."""
        return self._torch_devices[rank]

    def allreduce(self, rank: int, x: Any) -> None:
        """Replace x by the sum over all devices.

        An NCCL kernel waits on its GPU for those of all others. Other work on that GPU may meanwhile block their launch
        (github.com/NVIDIA/nccl/issues/613). So a barrier makes sure that all are launched first.
        """
        work = self._of[rank].allreduce([x])
        self._threads.barrier()
        work.wait()
