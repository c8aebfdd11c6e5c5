"""Top-k routing of experts on a GPU: `reference.route`, a warp for each token, without `-ser`."""

from __future__ import annotations

import functools
import math

import numpy as np

from quantkit.runtime.kernels.cuda.hardware import cuda, warp_max, warp_sum
from quantkit.runtime.kernels.cuda.kernel import CudaKernel

WARP = 32
MAX_EXPERTS = 1024  # experts
_LOWEST = np.float32(-3.4e38)
_TAKEN = np.float32(-math.inf)


@functools.cache
def route(sigmoid: bool, biased: bool) -> CudaKernel:
    """(logits, bias, experts, groups, groups_used, used, normalise, scale, chosen, weights)

    p = sigmoid(logits) or softmax(logits). Chooses the `used` largest p + bias, of equal ones the first, within the
    `groups_used` best groups of neighbours (by their best expert, with a bias by their best two). A NaN is the largest.
    chosen int32[tokens, used]; weights float32[tokens, used]: p times `scale`, with `normalise` 1 divided by their sum.
    """

    def kernel(logits, bias, experts, groups, groups_used, used, normalise, scale, chosen, weights):
        p = cuda.shared.array(MAX_EXPERTS, np.float32)
        selection = cuda.shared.array(MAX_EXPERTS, np.float32)
        group_score = cuda.shared.array(WARP, np.float32)
        token, lane = np.int64(cuda.blockIdx.x), cuda.threadIdx.x
        largest = _LOWEST
        for e in range(lane, experts, WARP):
            largest = max(largest, logits[token * experts + e])
        row_max = warp_max(largest)
        total = np.float32(0)
        for e in range(lane, experts, WARP):
            x = logits[token * experts + e]
            if sigmoid:
                p[e] = np.float32(1) / (np.float32(1) + math.exp(-x))
            else:
                p[e] = math.exp(x - row_max)
            total += p[e]
        total = warp_sum(total)
        for e in range(lane, experts, WARP):
            if not sigmoid:
                p[e] /= total
            value = p[e] + bias[e] if biased else p[e]
            selection[e] = value if value == value else np.float32(math.inf)
        cuda.syncthreads()
        size = experts // groups
        if groups_used < groups:
            if lane < groups:
                best, second = _LOWEST, _LOWEST
                for e in range(lane * size, lane * size + size):
                    if selection[e] > best:
                        best, second = selection[e], best
                    elif selection[e] > second:
                        second = selection[e]
                group_score[lane] = best + second if biased and size > 1 else best
            cuda.syncthreads()
            if lane < groups:
                better = 0
                for g in range(groups):
                    above = group_score[g] > group_score[lane]
                    if above or (group_score[g] == group_score[lane] and g < lane):
                        better += 1
                if better >= groups_used:
                    for e in range(lane * size, lane * size + size):
                        selection[e] = _TAKEN
            cuda.syncthreads()
        total = np.float32(0)
        for rank in range(used):
            best, index = _TAKEN, np.float32(-experts)
            for e in range(lane, experts, WARP):
                if selection[e] > best:
                    best, index = selection[e], -np.float32(e)
            row_max = warp_max(best)
            expert = min(experts - 1, np.int32(-warp_max(index if best == row_max else np.float32(-experts))))
            cuda.syncthreads()
            total += p[expert]
            if lane == 0:
                selection[expert] = _TAKEN
                chosen[token * used + rank] = expert
                weights[token * used + rank] = p[expert]
            cuda.syncthreads()
        factor = scale / total if normalise else scale
        for rank in range(lane, used, WARP):
            weights[token * used + rank] *= factor

    name = f"route_{'sigmoid' if sigmoid else 'softmax'}{'_biased' if biased else ''}"
    return CudaKernel(name, kernel, "f32[] f32[] i32 i32 i32 i32 i32 f32 i32[] f32[]")
