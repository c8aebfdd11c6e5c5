"""Scores of an indexer (`archs.common.blocks.Indexer`) for a few tokens, over the keys that a cache holds.

    score[token, t] = scale * sum over heads h of weights[token, h] * max(0, q[token, h] . key t)

The keys of a layer are uint8[n_ctx, row bytes], of a type that `attention.row_reader` reads. A thread block takes KEYS
of them, one to a lane, which it decodes into shared memory once; its warps share the heads, HEADS at a time. Positions
come from memory, so that a graph can be replayed: blocks of keys after a token's own end at once, and so do all of a
token that has no more positions than are selected.

Grid: (n / KEYS, tokens).
"""

from __future__ import annotations

import functools

import numpy as np

from quantkit.runtime.kernels.cuda.attention import row_reader
from quantkit.runtime.kernels.cuda.hardware import cuda
from quantkit.runtime.kernels.cuda.kernel import CudaKernel

THREADS = 128
KEYS = 32
HEADS = 4  # of a warp at a time: each value of a key that is loaded is multiplied so often


@functools.cache
def scores(kind: str, dim: int) -> CudaKernel:
    """(q, weights, keys, row_bytes, heads, positions, top_k, scale, n, out)

    q float32[tokens, heads, dim]; weights float32[tokens, heads]; keys uint8 of a layer; positions int32[tokens]; out
    float32[tokens, n], of which those after a token's own position are not written. Tokens with up to top_k positions
    get zeros.
    """
    read, runs, pitch = row_reader(kind), -(-dim // 32), dim | 1
    warps = THREADS // 32
    at_once = HEADS * warps
    tile_size, query_size = KEYS * pitch, at_once * dim

    def kernel(q, weights, keys, row_bytes, heads, positions, top_k, scale, n, out):
        tile = cuda.shared.array(tile_size, np.float32)
        query = cuda.shared.array(query_size, np.float32)
        partial = cuda.shared.array(THREADS, np.float32)
        thread, lane, warp = cuda.threadIdx.x, cuda.threadIdx.x % 32, cuda.threadIdx.x // 32
        first, token = cuda.blockIdx.x * KEYS, cuda.blockIdx.y
        position = positions[token]
        if first > position:
            return
        count = min(KEYS, min(n, position + 1) - first)
        at = np.int64(token) * n + first + lane
        if position < top_k:
            if warp == 0 and lane < count:
                out[at] = np.float32(0)
            return
        for i in range(thread, count * runs, THREADS):
            read(keys, (np.int64(first) + i // runs) * row_bytes, row_bytes, i % runs, dim, tile, i // runs * pitch)
        total = np.float32(0)
        key = min(lane, count - 1) * pitch
        products = cuda.local.array(HEADS, np.float32)
        for head in range(0, heads, at_once):
            cuda.syncthreads()
            for i in range(thread, query_size, THREADS):
                own = min(head + i // dim, heads - 1)
                query[i] = q[(np.int64(token) * heads + own) * dim + i % dim]
            cuda.syncthreads()
            for j in range(HEADS):
                products[j] = np.float32(0)
            for d in range(dim):
                value = tile[key + d]
                for j in range(HEADS):
                    products[j] += query[(warp * HEADS + j) * dim + d] * value
            for j in range(HEADS):
                own = head + warp * HEADS + j
                if own < heads and (products[j] > np.float32(0) or products[j] != products[j]):
                    total += products[j] * weights[token * heads + own]
        partial[thread] = total
        cuda.syncthreads()
        if warp == 0 and lane < count:
            for i in range(1, warps):
                total += partial[32 * i + lane]
            out[at] = total * scale

    return CudaKernel(f"index_scores_{kind}_{dim}", kernel, "f32[] f32[] u8[] i64 i32 i32[] i32 f32 i32 f32[]")
