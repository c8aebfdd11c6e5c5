"""A GPU among the devices of -sm graph: `rank.Rank` with the kernels of `cuda_worker.CudaWorker`.

Its steps are launched one by one, for a single token too: sums over devices stand between them, so layers are no CUDA
graph here.
"""

from __future__ import annotations

from quantkit.runtime.cuda.gpu_worker import CudaWorker
from quantkit.runtime.parallel.rank import Rank


class CudaRank(Rank, CudaWorker):
    """What a GPU computes of layers that devices share."""
