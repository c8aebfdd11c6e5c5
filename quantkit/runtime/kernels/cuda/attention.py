"""Softmax attention over a cache of keys and values, for decoding and prompts: grouped heads, latents, windows, sinks.

A cache of a layer is uint8[kv heads, n_ctx, row bytes] (`runtime/kv/cache.py`), of a float type or of one whose blocks
are 32 columns. The query rows of a key/value head are its `group` heads for each token: row r is of token r // group. A
thread block takes ROWS of them and a split of the keys, `keys_at_once` at a time, which it decodes into shared memory;
`merge` is the split-KV merge. Both use the online-softmax update:

    m' = max(m, new);  denominator and acc are multiplied by e^(m - m');  each key adds e^(score - m') to
    denominator, and that times its value to acc

Grid of `attend`: (splits, query rows / ROWS, kv heads). Positions come from memory, so that a graph can be replayed.
With one latent for keys and values (`values_in_keys`) the values are the keys' first elements.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from quantkit import types
from quantkit.errors import UnsupportedError
from quantkit.runtime.kernels.cuda import hardware
from quantkit.runtime.kernels.cuda.activations import store_codes
from quantkit.runtime.kernels.cuda.codecs.registry import CODECS
from quantkit.runtime.kernels.cuda.hardware import (
    bfloat_of,
    bits_of,
    cuda,
    float_of_bfloat,
    float_of_bits,
    float_of_half,
    half_of,
    inlined,
    plus,
    signed_bytes,
    times,
    warp_max,
    warp_sum,
)
from quantkit.runtime.kernels.cuda.kernel import CudaKernel

THREADS = 128  # of `merge` and `append`, and the fewest of `attend`
ROWS = 8
SHARED_FLOATS = 10_000  # of 12288 that every GPU gives a block unasked
MAX_DIM = 640
MAX_SPLITS = 512  # of the keys
CACHES = ("f32", "f16", "bf16", "q8_0", "q6_0", "q5_0", "q5_1", "q4_0", "q4_1", "iq4_nl", "q8_KV")
WRITTEN = ("f32", "f16", "bf16", "q8_0")  # of these, the ones that `row_writer` writes
_MASKED = np.float32(-3.4e38)


def keys_at_once(dim: int) -> int:
    """Number of keys that fit in shared memory beside the queries: 32, 16, 8 or 4."""
    return next(keys for keys in (32, 16, 8, 4) if keys * (dim + 1) + ROWS * dim <= SHARED_FLOATS)


def threads_of(dim_v: int) -> int:
    """Threads of a block of `attend`: each has one column of the values."""
    return max(THREADS, -(-dim_v // 32) * 32)


def row_reader(kind: str) -> Any:
    """Device function (data, at, row_bytes, c, dim, out, first): columns 32 c .. + 31 of a row to float32 memory."""
    if kind in ("f32", "f16", "bf16"):
        size = 4 if kind == "f32" else 2

        @inlined
        def read(data, at, row_bytes, c, dim, out, first):
            for i in range(32 * c, min(32 * c + 32, dim)):
                word = np.uint32(data[at + size * i]) | np.uint32(data[at + size * i + 1]) << np.uint32(8)
                if kind == "f32":
                    high = np.uint32(data[at + 4 * i + 2]) | np.uint32(data[at + 4 * i + 3]) << np.uint32(8)
                    out[first + i] = float_of_bits(np.uint32(word | high << np.uint32(16)))
                elif kind == "f16":
                    out[first + i] = float_of_half(np.uint16(word))
                else:
                    out[first + i] = float_of_bfloat(np.uint16(word))

        return read
    codec = CODECS[types.get(kind).ggml_type]
    read_packed, has_min = hardware.sub_block_reader(codec), codec.has_min

    @inlined
    def read_sub_block(data, at, row_bytes, c, dim, out, first):
        codes, scales, mins, shifts = read_packed(data, at, row_bytes, 0, c)
        for q in range(8):
            values = signed_bytes(codes[q])
            for i in range(4):
                value = times(scales[0], plus(values[i], shifts[0]))
                out[first + 32 * c + 4 * q + i] = plus(value, mins[0]) if has_min else value

    return read_sub_block


def check(kinds: tuple[str, str], dims: tuple[int, int]) -> None:
    """UnsupportedError where there is no kernel for such a cache."""
    for kind, dim in zip(kinds, dims):
        if kind not in CACHES:
            raise UnsupportedError(f"no CUDA attention over a cache of {kind}; use one of {', '.join(CACHES)}")
        if dim > MAX_DIM or (kind not in ("f32", "f16", "bf16") and dim % 32):
            raise UnsupportedError(
                f"no CUDA attention over heads of {dim} elements in {kind}: at most {MAX_DIM}, and a multiple of 32 "
                "where the type is quantized; keep the cache on the CPU (-nkvo) or choose f16"
            )


@functools.cache
def attend(k_kind: str, v_kind: str, dim_k: int, dim_v: int, values_in_keys: bool = False) -> CudaKernel:
    """(q, k, v, k_bytes, v_bytes, n_ctx, heads, group, tokens, positions, window, scale, splits, maximum, denominator,
    acc)

    q float32[tokens, heads, dim_k]; k, v uint8 of a layer; k_bytes, v_bytes of their rows; positions int32[tokens],
    neighbours; the `window` keys up to and including its own position are seen by a token. Results of each split:
    maximum, denominator float32[splits, kv heads, tokens * group], acc with [.., dim_v].
    """
    check((k_kind, v_kind), (dim_k, dim_v))
    keys = keys_at_once(max(dim_k, dim_v))
    pitch = max(dim_k, dim_v) | 1
    tile_size, query_size, score_size = keys * pitch, ROWS * dim_k, ROWS * 32
    read_k, read_v = row_reader(k_kind), row_reader(v_kind)
    runs_k, runs_v = -(-dim_k // 32), -(-dim_v // 32)
    threads = threads_of(dim_v)
    warps = threads // 32
    rounds = -(-ROWS // warps)

    @inlined
    def decode(read, data, first_row, nbytes, runs, dim, key_count, thread, tile):
        """Rows of a cache to the tile."""
        for i in range(thread, key_count * runs, threads):
            read(data, (first_row + i // runs) * nbytes, nbytes, i % runs, dim, tile, i // runs * pitch)

    @inlined
    def score_keys(query, tile, positions, first_row, last_row, group, start, key_count, window, thread, score):
        """score[row, key] of the tile's keys that a row sees, _MASKED of others."""
        for i in range(thread, ROWS * keys, threads):
            row, key = i // keys, i % keys
            position = positions[min(first_row + row, last_row) // group]
            value = _MASKED
            if key < key_count and start + key <= position and start + key > position - window:
                value = np.float32(0)
                for d in range(dim_k):
                    value += query[row * dim_k + d] * tile[key * pitch + d]
            score[row * 32 + key] = value

    @inlined
    def update(score, rescale, running_max, running_sum, lane, warp):
        """One step of the online softmax: scores become e^(score - m'), rescale is e^(m - m'). A warp takes a row."""
        for r in range(rounds):
            row = min(r * warps + warp, ROWS - 1)
            is_own_row = r * warps + warp < ROWS
            value = score[row * 32 + lane] if lane < keys else _MASKED
            new = max(running_max[row], warp_max(value))
            portion = np.float32(math.exp(value - new)) if value > _MASKED or value != value else np.float32(0)
            total = warp_sum(portion)
            cuda.syncthreads()
            if is_own_row and lane < keys:
                score[row * 32 + lane] = portion
            if is_own_row and lane == 0:
                rescale[row] = (
                    np.float32(math.exp(running_max[row] - new)) if running_sum[row] > np.float32(0) else np.float32(0)
                )
                running_sum[row] = running_sum[row] * rescale[row] + total
                running_max[row] = new

    def kernel(
        q,
        k,
        v,
        k_bytes,
        v_bytes,
        n_ctx,
        heads,
        group,
        tokens,
        positions,
        window,
        scale,
        splits,
        maximum,
        denominator,
        acc,
    ):
        tile = cuda.shared.array(tile_size, np.float32)
        query = cuda.shared.array(query_size, np.float32)
        score = cuda.shared.array(score_size, np.float32)
        rescale = cuda.shared.array(ROWS, np.float32)
        running_max = cuda.shared.array(ROWS, np.float32)
        running_sum = cuda.shared.array(ROWS, np.float32)
        thread, lane, warp = cuda.threadIdx.x, cuda.threadIdx.x % 32, cuda.threadIdx.x // 32
        split, head = cuda.blockIdx.x, cuda.blockIdx.z
        rows = tokens * group
        first_row = cuda.blockIdx.y * ROWS
        last_row = min(first_row + ROWS, rows) - 1
        for i in range(thread, query_size, threads):
            row = min(first_row + i // dim_k, last_row)
            at = (np.int64(row // group) * heads + head * group + row % group) * dim_k
            query[i] = q[at + i % dim_k] * scale
        if thread < ROWS:
            running_max[thread], running_sum[thread] = _MASKED, np.float32(0)
        acc_of_rows = cuda.local.array(ROWS, np.float32)
        for i in range(ROWS):
            acc_of_rows[i] = np.float32(0)
        column = min(thread, dim_v - 1)
        low = max(0, positions[first_row // group] + 1 - window)
        count = positions[last_row // group] + 1 - low
        each = ((count + splits - 1) // splits + keys - 1) // keys * keys
        begin = low + split * each
        end = min(begin + each, low + count)
        for start in range(begin, end, keys):
            key_count = min(keys, end - start)
            cuda.syncthreads()
            first_key = np.int64(head) * n_ctx + start
            decode(read_k, k, first_key, k_bytes, runs_k, dim_k, key_count, thread, tile)
            cuda.syncthreads()
            score_keys(query, tile, positions, first_row, last_row, group, start, key_count, window, thread, score)
            cuda.syncthreads()
            update(score, rescale, running_max, running_sum, lane, warp)
            if not values_in_keys:
                cuda.syncthreads()
                decode(read_v, v, first_key, v_bytes, runs_v, dim_v, key_count, thread, tile)
            cuda.syncthreads()
            for row in range(ROWS):
                value = acc_of_rows[row] * rescale[row]
                for key in range(key_count):
                    value += score[row * 32 + key] * tile[key * pitch + column]
                acc_of_rows[row] = value
        cuda.syncthreads()
        result = (np.int64(split) * cuda.gridDim.z + head) * rows + first_row
        if thread < ROWS and first_row + thread <= last_row:
            maximum[result + thread], denominator[result + thread] = running_max[thread], running_sum[thread]
        for row in range(ROWS):
            if thread < dim_v and first_row + row <= last_row:
                acc[(result + row) * dim_v + thread] = acc_of_rows[row]

    name = f"attend_{k_kind}_{dim_k}_{v_kind}_{dim_v}{'_latent' if values_in_keys else ''}"
    arrays = "f32[] u8[] u8[] i64 i64 i32 i32 i32 i32 i32[] i32 f32 i32 f32[] f32[] f32[]"
    return CudaKernel(name, kernel, arrays)


@functools.cache
def merge(sinks: bool, quantized: bool = False) -> CudaKernel:
    """(maximum, denominator, acc, splits, heads, group, tokens, dim_v, sink, out, codes, scales, sums): merge the
    splits of the keys.

    out float32[tokens, heads, dim_v]; sink float32[heads] counts as a key without a value. With `quantized` the last
    three are `out` by `activations`, and dim_v is a multiple of 32; otherwise they are not touched.
    Grid: (rows, kv heads).
    """

    def kernel(maximum, denominator, acc, splits, heads, group, tokens, dim_v, sink, out, codes, scales, sums):
        portions = cuda.shared.array(MAX_SPLITS, np.float32)
        row, head, lane = cuda.blockIdx.x, cuda.blockIdx.y, cuda.threadIdx.x & 31
        rows = tokens * group
        query_head = head * group + row % group
        largest = _MASKED
        for s in range(lane, splits, 32):  # every warp: the loads of all splits are under way together
            start = (np.int64(s) * cuda.gridDim.y + head) * rows + row
            if denominator[start] > np.float32(0) or denominator[start] != denominator[start]:
                largest = max(largest, maximum[start])
        largest = warp_max(largest)
        if sinks:
            largest = max(largest, sink[query_head])
        total = np.float32(0)
        for s in range(lane, splits, 32):
            start = (np.int64(s) * cuda.gridDim.y + head) * rows + row
            portion = np.float32(0)
            if denominator[start] > np.float32(0) or denominator[start] != denominator[start]:
                portion = np.float32(math.exp(maximum[start] - largest))
                total += denominator[start] * portion
            portions[s] = portion
        total = warp_sum(total)
        if sinks:
            total += np.float32(math.exp(sink[query_head] - largest))
        cuda.syncthreads()
        first = (np.int64(row // group) * heads + query_head) * dim_v
        for start in range(0, dim_v, THREADS):  # all threads as often: `store_codes` is for all of a block
            d = start + cuda.threadIdx.x
            value = np.float32(0)
            if d < dim_v:
                at, step = (np.int64(head) * rows + row) * dim_v + d, np.int64(cuda.gridDim.y) * rows * dim_v
                s = 0
                while s + 4 <= splits:  # four loads under way together
                    a, b, c, e = acc[at], acc[at + step], acc[at + 2 * step], acc[at + 3 * step]
                    value += a * portions[s] + b * portions[s + 1] + (c * portions[s + 2] + e * portions[s + 3])
                    at += 4 * step
                    s += 4
                while s < splits:
                    value += acc[at] * portions[s]
                    at += step
                    s += 1
                value = value / total
                out[first + d] = value
            if quantized:
                store_codes(value, first + d, d < dim_v, codes, scales, sums)

    name = f"merge{'_sinks' if sinks else ''}{'_quantized' if quantized else ''}"
    return CudaKernel(name, kernel, "f32[] f32[] f32[] i32 i32 i32 i32 i32 f32[] f32[] i8[] f32[] f32[]")


@functools.cache
def append(kind: str) -> CudaKernel:
    """(x, heads, dim, row_bytes, n_ctx, positions, tokens, cache): float32[tokens, heads, dim] to rows of a cache.

    A warp takes 32 columns.
    """
    write = row_writer(kind)

    def kernel(x, heads, dim, row_bytes, n_ctx, positions, tokens, cache):
        lane = cuda.threadIdx.x % 32
        number = cuda.blockIdx.x * (THREADS // 32) + cuda.threadIdx.x // 32
        runs = (dim + 31) // 32
        inside = number < tokens * heads * runs
        number = min(number, tokens * heads * runs - 1)
        run, row = number % runs, number // runs
        token, head, column = row // heads, row % heads, 32 * run + lane
        value = x[np.int64(row) * dim + column] if column < dim else np.float32(0)
        start = (np.int64(head) * n_ctx + positions[token]) * row_bytes
        write(value, inside and column < dim, run, lane, start, cache)

    return CudaKernel(f"append_{kind}", kernel, "f32[] i32 i32 i64 i32 i32[] i32 u8[]")


def row_writer(kind: str) -> Any:
    """Device function (value, inside, run, lane, start, cache): column 32 run + lane of the row at byte `start`.

    All threads of a block call it together, a warp with the 32 columns of a run. q8_0 as
    `runtime/kernels/kv_rounding.py` has it, but for scales next to the end of a half's range. UnsupportedError for
    types that it does not write.
    """
    if kind not in WRITTEN:
        raise UnsupportedError(f"no CUDA kernel writes a cache of {kind}; use f32, f16, bf16 or q8_0")
    if kind == "q8_0":

        @inlined
        def write_codes(value, inside, run, lane, start, cache):
            scale = warp_max(abs(value)) * np.float32(1 / 127)
            if warp_sum(value - value) != np.float32(0):
                scale = np.float32(math.nan)
            inverse = np.float32(1) / scale if scale >= np.float32(2.0**-120) else np.float32(0)
            # Adding and subtracting 3 * 2^22 rounds to the nearest integer, ties to even.
            code = np.int32(plus(plus(times(value, inverse), np.float32(12582912)), np.float32(-12582912)))
            if inside:
                cache[start + 34 * run + 2 + lane] = np.uint8(code & 255)
                if lane < 2:
                    cache[start + 34 * run + lane] = np.uint8(np.uint32(half_of(scale)) >> np.uint32(8 * lane) & 255)

        return write_codes
    size = 4 if kind == "f32" else 2
    convert = {"f32": bits_of, "f16": half_of, "bf16": bfloat_of}[kind]

    @inlined
    def write(value, inside, run, lane, start, cache):
        if inside:
            word = np.uint32(convert(value))
            for i in range(size):
                at = start + size * (32 * run + lane) + i
                cache[at] = np.uint8(word >> np.uint32(8 * i) & np.uint32(255))

    return write
