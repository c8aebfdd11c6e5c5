"""Softmax attention of one token over a cache of floats or q8_0: what `attention.attend` and `attention.merge` do, in
one launch, for decoding.

Lanes, eight dimensions each, share a key; so a warp reads 32 * 8 / dim keys at once, in loads of 16 bytes. Each such
group of lanes goes through its keys with an online softmax of its own for the query heads that share the key/value
head, in registers. At the end a block merges its groups in shared memory. The block of a key/value head that ends last
merges the blocks, each with a split of the keys: it is the one that gets the last of the head's tickets.

    m' = max(m, score);  sum = sum e^(m - m') + e^(score - m');  acc = acc e^(m - m') + e^(score - m') value

Grid: (splits of the keys, 1, kv heads).
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from quantkit.runtime.kernels.cuda.activations import store_codes
from quantkit.runtime.kernels.cuda.attention import counts, weighted_sum
from quantkit.runtime.kernels.cuda.floats import numbers_of
from quantkit.runtime.kernels.cuda.hardware import (
    cuda,
    float_of_half,
    inlined,
    lanes_sum,
    load_floats,
    load_words,
    warp_max,
    warp_sum,
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


@inlined
def weigh_splits(maximum, denominator, splits, group, warps, has_sinks, sinks, portions, totals):
    """What each split counts for to portions[row * splits + split], and the sums to totals[row]; a warp for each row.

    All threads of a block call it together, as they do `warp_sum`.
    """
    warp, lane, head, heads = cuda.threadIdx.x // 32, cuda.threadIdx.x % 32, cuda.blockIdx.z, cuda.gridDim.z
    for start in range(0, group, warps):
        row, is_own = min(start + warp, group - 1), start + warp < group
        largest = sinks[head * group + row] if has_sinks else _MASKED
        for s in range(lane, splits, 32):
            at = (s * heads + head) * group + row
            if counts(denominator[at]):
                largest = max(largest, maximum[at])
        largest = warp_max(largest)
        total = np.float32(0)
        for s in range(lane, splits, 32):
            at = (s * heads + head) * group + row
            portion = np.float32(0)
            if counts(denominator[at]):
                portion = np.float32(math.exp(maximum[at] - largest))
                total += denominator[at] * portion
            if is_own:
                portions[row * splits + s] = portion
        total = warp_sum(total)
        if has_sinks:
            total += np.float32(math.exp(sinks[head * group + row] - largest))
        if is_own and lane == 0:
            totals[row] = total


@functools.cache
def attend_one(k_kind: str, v_kind: str, dim: int, group: int) -> CudaKernel:
    """(q, k, v, k_bytes, v_bytes, n_ctx, positions, window, scale, splits, maximum, denominator, acc, tickets,
    has_sinks, sinks, out, codes, scales, sums)

    As `attention.attend` and `attention.merge` for one token: q float32[heads, dim]; out float32[heads, dim], and the
    same by `activations`; sinks float32[heads] where `has_sinks` is not 0. Between blocks: maximum, denominator
    float32[splits, kv heads, group], acc with [.., dim]; tickets uint32[kv heads], which are 0 before and after.
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

    @inlined
    def add_key(key, value, is_own, query, largest, share, total):
        """A step of the online softmax, for the query heads of a group of lanes."""
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

    @inlined
    def merge_groups(merged, maxima, shares, portions, result, maximum, denominator, acc):
        """The groups of lanes of a block, to its part of `maximum`, `denominator` and `acc`."""
        thread = cuda.threadIdx.x
        for i in range(thread, shared_rows, threads):  # what each of the groups counts for
            top = maxima[i % group]
            for g in range(1, groups):
                top = max(top, maxima[g * group + i % group])
            portions[i] = np.float32(math.exp(maxima[i] - top))
            if i < group:
                maximum[result + i] = top
        cuda.syncthreads()
        for i in range(thread, group * dim, threads):
            r, place, value = i // dim, i % dim, np.float32(0)
            for g in range(groups):
                value += merged[g * group * dim + i] * portions[g * group + r]
            acc[(result + r) * dim + place % lanes * _EACH + place // lanes] = value
        if thread < group:
            whole = np.float32(0)
            for g in range(groups):
                whole += shares[g * group + thread] * portions[g * group + thread]
            denominator[result + thread] = whole

    def kernel(
        q,
        k,
        v,
        k_bytes,
        v_bytes,
        n_ctx,
        positions,
        window,
        scale,
        splits,
        maximum,
        denominator,
        acc,
        tickets,
        has_sinks,
        sinks,
        out,
        codes,
        scales,
        sums,
    ):
        merged = cuda.shared.array(shared_acc, np.float32)
        maxima = cuda.shared.array(shared_rows, np.float32)
        shares = cuda.shared.array(shared_rows, np.float32)  # the simulator tells shared arrays apart by their lines
        portions = cuda.shared.array(shared_rows, np.float32)
        ticket = cuda.shared.array(1, np.uint32)
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
            add_key(key, value, start + number < end, query, largest, share, total)
        for r in range(group):
            maxima[number * group + r], shares[number * group + r] = largest[r], share[r]
            for i in range(_EACH):  # neighbouring lanes to neighbouring banks
                merged[(number * group + r) * dim + i * lanes + lane] = total[r * _EACH + i]
        cuda.syncthreads()
        result = (np.int64(split) * cuda.gridDim.z + head) * group
        merge_groups(merged, maxima, shares, portions, result, maximum, denominator, acc)
        cuda.threadfence()  # before the ticket says that they are there
        cuda.syncthreads()
        if thread == 0:
            ticket[0] = cuda.atomic.inc(tickets, head, np.uint32(splits - 1))  # the last one makes it 0 again
        cuda.syncthreads()
        if ticket[0] == splits - 1:
            cuda.threadfence()
            weigh_splits(maximum, denominator, splits, group, threads // 32, has_sinks, sinks, merged, shares)
            cuda.syncthreads()
            first, step = np.int64(head) * group * dim, np.int64(cuda.gridDim.z) * group * dim
            for start in range(0, group * dim, threads):  # all threads as often: `store_codes` is for all of a block
                i = start + thread
                y, inside, r = np.float32(0), i < group * dim, min(i // dim, group - 1)
                if inside:
                    y = weighted_sum(acc, first + i, step, splits, merged, r * splits) / shares[r]
                    out[first + i] = y
                store_codes(y, first + i, inside, codes, scales, sums)

    name = f"attend_one_{k_kind}_{v_kind}_{dim}_{group}"
    results = "f32[] f32[] f32[] u32[] i32 f32[] f32[] i8[] f32[] f32[]"
    return CudaKernel(name, kernel, f"f32[] u8[] u8[] i64 i64 i32 i32[] i32 f32 i32 {results}")
