"""Adding up over devices: torch.distributed's gloo between the threads that play virtual devices.

Each device has a thread of its own and a process group of its own over one store in memory; nothing global is set up.
Sums travel as f32, f16 or bf16. One number more travels with each: whether a device failed, so that the others stop
with it and none waits for ever.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np

from quantkit.errors import UnknownNameError, UnsupportedError

KINDS = ("f32", "f16", "bf16")
_LONGEST = datetime.timedelta(hours=1)  # that one device may wait for another

T = TypeVar("T")


class Reduce:
    """`count` devices, each with a thread.

    kind   "f32", "f16" or "bf16": what sums are rounded to on their way
    """

    def __init__(self, count: int, kind: str = "f32"):
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
        if not distributed.is_available() or not hasattr(distributed, "ProcessGroupGloo"):
            raise UnsupportedError("-sm graph needs a torch built with gloo; take -sm layer")
        self.count, self.kind = count, kind
        self._torch = torch
        self._type = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[kind]
        self._threads = [ThreadPoolExecutor(1, f"device-{rank}") for rank in range(count)]
        store = distributed.HashStore()

        gloo: Any = distributed.ProcessGroupGloo

        def group(rank: int) -> Any:
            options = gloo._Options()
            options._devices = [gloo.create_device(hostname="127.0.0.1")]
            options._timeout = _LONGEST
            return gloo(store, rank, count, options)

        self._groups = self.each(group)

    def each(self, task: Callable[[int], T]) -> list[T]:
        """What `task(rank)` gives on the thread of each device, all at once; the first exception is raised again."""
        futures: list[Future[T]] = [thread.submit(task, rank) for rank, thread in enumerate(self._threads)]
        errors = [future.exception() for future in futures]  # waits for all of them
        for error in errors:
            if error is not None:
                raise error
        return [future.result() for future in futures]

    def add(self, rank: int, x: np.ndarray, failed: bool) -> np.ndarray | None:
        """The sum of what all devices give, float32 of x's shape; None where one of them failed.

        Every device calls this as often as the others, on its thread, with arrays of one shape.
        """
        flat = self._torch.empty(x.size + 1, dtype=self._type)
        flat[:-1] = self._torch.from_numpy(np.ascontiguousarray(x).reshape(-1))
        flat[-1] = float(failed)
        self._groups[rank].allreduce([flat]).wait()
        if float(flat[-1]):
            return None
        return np.asarray(flat[:-1].float().numpy()).reshape(x.shape)
