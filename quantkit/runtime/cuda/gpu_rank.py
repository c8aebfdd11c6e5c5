"""A GPU among the devices of -sm graph: `rank.Rank` with the kernels of `gpu_worker.CudaWorker`.

Kernels are launched one by one, for a single token too: all-reduces between them keep layers from being one CUDA graph.
"""

from __future__ import annotations

from quantkit.runtime.cuda.gpu_worker import CudaWorker
from quantkit.runtime.parallel.rank import Rank


class CudaRank(Rank, CudaWorker):
    """Computes a GPU's shards of layers that several devices share."""
