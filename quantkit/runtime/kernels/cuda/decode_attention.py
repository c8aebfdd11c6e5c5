"""Softmax attention of one token over a cache of floats or q8_0: what `attention.attend` does, for decoding.

Lanes, eight dimensions each, share a key; so a warp reads 32 * 8 / dim keys at once, in loads of 16 bytes. Each such
group of lanes goes through its keys with an online softmax of its own for the query heads that share the key/value
head, in registers. At the end a block merges its groups in shared memory, and `attention.merge` the blocks:

    m' = max(m, score);  sum = sum e^(m - m') + e^(score - m');  acc = acc e^(m - m') + e^(score - m') value

Grid: (splits of the keys, 1, kv heads).
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from quantkit.runtime.kernels.cuda.floats import numbers_of
from quantkit.runtime.kernels.cuda.hardware import (
    cuda,
    float_of_half,
    inlined,
    lanes_sum,
    load_floats,
    load_words,
)
from quantkit.runtime.kernels.cuda.kernel import CudaKernel

THREADS = 256  # as many keys at once as shared memory can merge, so that few loads wait for others
DIMS = (64, 128, 256)  # 8, 16 or 32 lanes
CACHES = ("f32", "f16", "bf16", "q8_0")
MAX_GROUP = 8  # query heads of a key/value head: registers bound it
_MAX_GROUP_OF_ALL = 5  # of which THREADS have room in shared memory; more have half as many threads
_EACH = 8  # dimensions of a lane
_MASKED = np.float32(-3.4e38)


def suits(k_kind: str, v_kind: str, dims: tuple[int, int], group: int) -> bool:
    """Whether there is a kernel for such a cache and `group` query heads to a key/value head."""
    return {k_kind, v_kind} <= set(CACHES) and dims[0] == dims[1] and dims[0] in DIMS and group <= MAX_GROUP


def threads_of(group: int) -> int:
    """Threads of a block."""
    return THREADS if group <= _MAX_GROUP_OF_ALL else THREADS // 2


def _reader(kind: str) -> Any:
    """Device function (data, at, lane) -> dimensions 8 lane … of the row at byte `at`, as eight float32."""
    if kind == "f32":

        def singles(data, at, lane):
            a, b, c, d = load_floats(data, at + 32 * lane)
            e, f, g, h = load_floats(data, at + 32 * lane + 16)
            return a, b, c, d, e, f, g, h

        return inlined(singles)
    if kind == "q8_0":

        def byte(data, at):
            value = np.int32(data[at])
            return np.float32(value - 256 if value > 127 else value)

        byte = inlined(byte)

        def codes(data, at, lane):
            block = at + 34 * (lane >> 2)
            scale = float_of_half(np.uint16(np.uint32(data[block]) | np.uint32(data[block + 1]) << np.uint32(8)))
            first = block + 2 + 8 * (lane & 3)
            a, b, c, d = byte(data, first), byte(data, first + 1), byte(data, first + 2), byte(data, first + 3)
            e, f, g, h = byte(data, first + 4), byte(data, first + 5), byte(data, first + 6), byte(data, first + 7)
            return scale * a, scale * b, scale * c, scale * d, scale * e, scale * f, scale * g, scale * h

        return inlined(codes)
    two = numbers_of(kind)

    def halves(data, at, lane):
        w0, w1, w2, w3 = load_words(data, at + 16 * lane)
        a, b = two(w0)
        c, d = two(w1)
        e, f = two(w2)
        g, h = two(w3)
        return a, b, c, d, e, f, g, h

    return inlined(halves)


@functools.cache
def attend_one(k_kind: str, v_kind: str, dim: int, group: int) -> CudaKernel:
    """(q, k, v, k_bytes, v_bytes, n_ctx, positions, window, scale, splits, maximum, denominator, acc)

    As `attention.attend` for one token: q float32[heads, dim]; results of each split maximum, denominator
    float32[splits, kv heads, group], acc with [.., dim].
    """
    assert suits(k_kind, v_kind, (dim, dim), group)
    lanes = dim // _EACH
    threads = threads_of(group)
    at_once = 32 // lanes  # keys of a warp
    groups = threads // 32 * at_once
    read_k, read_v = _reader(k_kind), _reader(v_kind)
    shared_acc, shared_rows, of_lane = groups * group * dim, groups * group, group * _EACH

    @inlined
    def load(read, data, row, nbytes, lane, into):
        into[0], into[1], into[2], into[3], into[4], into[5], into[6], into[7] = read(data, row * nbytes, lane)

    def kernel(q, k, v, k_bytes, v_bytes, n_ctx, positions, window, scale, splits, maximum, denominator, acc):
        merged = cuda.shared.array(shared_acc, np.float32)
        maxima = cuda.shared.array(shared_rows, np.float32)
        sums = cuda.shared.array(shared_rows, np.float32)  # the simulator tells shared arrays apart by their lines
        portions = cuda.shared.array(shared_rows, np.float32)
        thread, split, head = cuda.threadIdx.x, cuda.blockIdx.x, cuda.blockIdx.z
        lane, number = thread % lanes, thread // lanes
        query, total = cuda.local.array(of_lane, np.float32), cuda.local.array(of_lane, np.float32)
        largest, share = cuda.local.array(group, np.float32), cuda.local.array(group, np.float32)
        key, value = cuda.local.array(_EACH, np.float32), cuda.local.array(_EACH, np.float32)
        for r in range(group):
            largest[r], share[r] = _MASKED, np.float32(0)
            for i in range(_EACH):
                query[r * _EACH + i] = q[(np.int64(head) * group + r) * dim + _EACH * lane + i] * scale
                total[r * _EACH + i] = np.float32(0)
        low = max(0, positions[0] + 1 - window)
        count = positions[0] + 1 - low
        each = (count + splits - 1) // splits
        begin = low + split * each
        end = min(begin + each, low + count)
        for start in range(begin, end, groups):
            row = np.int64(head) * n_ctx + min(start + number, end - 1)
            load(read_k, k, row, k_bytes, lane, key)
            load(read_v, v, row, v_bytes, lane, value)
            is_own = start + number < end
            for r in range(group):
                score = np.float32(0)
                for i in range(_EACH):
                    score += query[r * _EACH + i] * key[i]
                score = lanes_sum(score, lanes)
                if not is_own:
                    score = _MASKED
                new = max(largest[r], score)
                new = score if score != score else new
                before = np.float32(math.exp(largest[r] - new))
                portion = np.float32(math.exp(score - new)) if is_own else np.float32(0)
                largest[r], share[r] = new, share[r] * before + portion
                for i in range(_EACH):
                    total[r * _EACH + i] = total[r * _EACH + i] * before + portion * value[i]
        for r in range(group):
            maxima[number * group + r], sums[number * group + r] = largest[r], share[r]
            for i in range(_EACH):
                merged[(number * group + r) * dim + _EACH * lane + i] = total[r * _EACH + i]
        cuda.syncthreads()
        result = (np.int64(split) * cuda.gridDim.z + head) * group
        for i in range(thread, shared_rows, threads):  # what each of the groups counts for
            top = maxima[i % group]
            for g in range(1, groups):
                top = max(top, maxima[g * group + i % group])
            portions[i] = np.float32(math.exp(maxima[i] - top))
            if i < group:
                maximum[result + i] = top
        cuda.syncthreads()
        for i in range(thread, group * dim, threads):
            r, out = i // dim, np.float32(0)
            for g in range(groups):
                out += merged[g * group * dim + i] * portions[g * group + r]
            acc[result * dim + i] = out
        if thread < group:
            whole = np.float32(0)
            for g in range(groups):
                whole += sums[g * group + thread] * portions[g * group + thread]
            denominator[result + thread] = whole

    name = f"attend_one_{k_kind}_{v_kind}_{dim}_{group}"
    return CudaKernel(name, kernel, "f32[] u8[] u8[] i64 i64 i32 i32[] i32 f32 i32 f32[] f32[] f32[]")
