"""Adding up over devices by torch.distributed, each of which has a thread: NCCL between GPUs, gloo between others.

Each device has a process group of its own over one store in memory; nothing global is set up. Sums travel as f32, f16
or bf16: of GPUs alone from GPU to GPU, else through the host's memory. All threads come together before each sum, so
that when one has failed the others know, stop with it, and none waits for ever.
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
_LONGEST = datetime.timedelta(hours=1)  # that one device may wait for another

T = TypeVar("T")


class AllReduce:
    """Devices that add up, each with a thread.

    places   of each the torch.device of what it gives; None of one that gives numpy's arrays
    kind     "f32", "f16" or "bf16": what sums are rounded to on their way
    """

    def __init__(self, places: Sequence[Any], kind: str = "f32"):
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
        self._threads = [ThreadPoolExecutor(1, f"device-{rank}") for rank in range(len(places))]
        self._broken = False
        self._barrier = threading.Barrier(len(places), timeout=_LONGEST.total_seconds())
        on_gpus = all(place is not None and place.type == "cuda" for place in places)
        name = "ProcessGroupNCCL" if on_gpus else "ProcessGroupGloo"
        if not distributed.is_available() or not hasattr(distributed, name):
            what = "NCCL, which adds up between GPUs" if on_gpus else "gloo"
            raise UnsupportedError(f"-sm graph needs a torch built with {what}; take -sm layer")
        self._groups: Nccl | Gloo = (Nccl if on_gpus else Gloo)(places, self)

    def run_on_all(self, task: Callable[[int], T]) -> list[T]:
        """What `task(rank)` gives on the thread of each device, all at once; the first exception is raised again.

        All devices do the task or none. An interrupt is raised when they are done: a device that was left in the middle
        would add its sum to those of the next task.
        """
        if self._broken:
            raise QuantkitError("devices were interrupted twice while they added up, and stopped; load the model again")
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
        """Until all are done, also after an interrupt; a second one ends the waiting, and this object."""
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
        """The sum of what all devices give, float32 of x's shape, and where x is.

        Every device calls this as often as the others, on its thread, with arrays of one shape.
        """
        torch = self._torch
        given = torch.from_numpy(np.ascontiguousarray(x)) if isinstance(x, np.ndarray) else x
        flat = given.reshape(-1).to(self._groups.place(rank), self._type, copy=True)
        self.barrier()
        self._groups.allreduce(rank, flat)
        total = flat.float().reshape(given.shape)
        return np.asarray(total.numpy()) if given is not x else total.to(given.device)


class Gloo:
    """Groups over the host's memory."""

    def __init__(self, places: Sequence[Any], threads: AllReduce):
        import torch.distributed as distributed

        store = distributed.HashStore()  # type: ignore[attr-defined]  # torch lists it in no __all__
        gloo: Any = distributed.ProcessGroupGloo

        def group(rank: int) -> Any:
            options = gloo._Options()
            options._devices = [gloo.create_device(hostname="127.0.0.1")]
            options._timeout = _LONGEST
            return gloo(store, rank, len(places), options)

        self._of = threads.run_on_all(group)

    def place(self, rank: int) -> Any:
        """Where `allreduce` wants what a device gives."""
        return "cpu"

    def allreduce(self, rank: int, x: Any) -> None:
        """Put the sum in the place of x."""
        self._of[rank].allreduce([x]).wait()


class Nccl:
    """Groups of GPUs, one of each thread. Only tests that find two GPUs run it."""

    def __init__(self, places: Sequence[Any], threads: AllReduce):
        import torch.distributed as distributed

        store = distributed.HashStore()  # type: ignore[attr-defined]  # torch lists it in no __all__
        nccl: Any = distributed.ProcessGroupNCCL
        self._places, self._threads = places, threads

        def group(rank: int) -> Any:
            options = nccl.Options()
            options._timeout = _LONGEST
            return nccl(store, rank, len(places), options)

        self._of = threads.run_on_all(group)

    def place(self, rank: int) -> Any:
        """The GPU of a rank."""
        return self._places[rank]

    def allreduce(self, rank: int, x: Any) -> None:
        """As gloo's. A kernel of NCCL waits on its GPU for those of all others, and what is asked of that GPU meanwhile
        may keep others from being launched (github.com/NVIDIA/nccl/issues/613): all are launched before that."""
        work = self._of[rank].allreduce([x])
        self._threads.barrier()
        work.wait()
