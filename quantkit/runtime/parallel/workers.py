"""Which kind of worker computes on which device. CUDA is imported for a GPU only."""

from __future__ import annotations

from quantkit.placement.devices import Device
from quantkit.runtime.blocks.block_runner import BlockRunner
from quantkit.runtime.parallel.rank import Rank
from quantkit.runtime.parallel.worker import Context, Worker


def new_worker(device: Device, split: Context, owner: BlockRunner, threads: int) -> Worker:
    """The worker of a device that runs whole layers."""
    if device.gpu is None:
        return Worker(device, split, owner, threads)
    from quantkit.runtime.cuda.gpu_worker import CudaWorker

    return CudaWorker(device, split, owner, threads)


def new_rank(number: int, device: Device, split: Context, owner: BlockRunner, threads: int) -> Rank:
    """The worker of a device that shares layers; `number` is its place among them."""
    if device.gpu is None:
        return Rank(number, device, split, owner, threads)
    from quantkit.runtime.cuda.gpu_rank import CudaRank

    return CudaRank(number, device, split, owner, threads)
