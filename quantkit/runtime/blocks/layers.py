"""What a forward pass is made of: embedding, linear, norm, rope, attention. Float32 activations throughout.

A batch is float32[tokens, n]; the tokens of several sequences may stand one after another, and only attention cares.

Threads are the pool's, and each multiplies with a BLAS that keeps to its own thread (callers hold
`blas.single_threaded()`): BLAS's own threads are no faster, and much slower when they have to share their cores.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from quantkit import types
from quantkit.archs.common import blocks
from quantkit.codegen import jit
from quantkit.errors import DataError
from quantkit.formats.gguf import Tensor
from quantkit.runtime.kernels import kv_rounding, reference
from quantkit.runtime.kv.cache import Cache

FEW_TOKENS = 32  # batches up to this are bound by decoding, not by multiplying
PANEL_ELEMENTS = 1 << 21  # decoded at a time for larger batches: 8 MiB, so that they stay in the last level of cache
TILE_TOKENS = TILE_ROWS = 256  # multiplied at a time, by each thread
STRIP_ELEMENTS = 1 << 17  # decoded at a time for smaller ones, by each thread: 512 KiB, for its own cache
QUERY_ROWS = 384  # of a head's scores worked on at a time
KEY_ROWS = 512
QUERIES_TOGETHER, KEYS_TOGETHER = 6, 128  # kernels round queries and positions up to multiples of them
ROWS_TOGETHER = 16  # the largest group; matrices of all types are cut at multiples of it: repacked, they round the same
SERIAL_ELEMENTS = 1 << 15  # less work than that is not worth waking threads for

_local = threading.local()


def _scratch(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """float32 memory of this thread, used again and again: fresh pages for every panel cost as much as decoding."""
    size = math.prod(shape)
    held = getattr(_local, name, None)
    if held is None or held.size < size:
        held = np.empty(size, np.float32)
        setattr(_local, name, held)
    return held[:size].reshape(shape)


def _over_tokens(task: Callable[[int, int], None], x: np.ndarray, threads: int) -> None:
    jit.over_rows(task, len(x), threads=threads if x.size > SERIAL_ELEMENTS else 1, pieces=1)


def silent() -> np.errstate:
    """numpy says nothing about NaN and Inf inside: the model looks for them itself, and names where they come from."""
    return np.errstate(over="ignore", invalid="ignore")


def is_finite(x: np.ndarray) -> bool:
    """Whether no element is NaN or Inf. One sum tells, unless it overflows."""
    with silent():
        return bool(np.isfinite(x.sum()) or np.isfinite(x).all())


# --------------------------------------------------------------------------------------------------------------- linear


def vector(tensor: Tensor) -> np.ndarray:
    """float32[n] of a norm's weight, a bias or rope factors."""
    return jit.readonly(np.ascontiguousarray(tensor.dequantize().reshape(-1)))


class Linear:
    """y = scale x W^T + bias of activations, W decoded exactly; `fast` numerics: as kernels/dispatch.py says."""

    def __init__(self, tensor: Tensor, numerics: str, threads: int, bias: np.ndarray | None = None, scale: float = 1.0):
        self.tensor = tensor
        self.numerics = numerics
        self.threads = threads
        self.rows, self.columns = tensor.shape
        self.panel_rows = _whole_rows(PANEL_ELEMENTS, self.columns)
        self.bias, self.scale = bias, scale

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """float32[tokens, rows] of float32[tokens, columns]."""
        out = np.empty((len(x), self.rows), np.float32)
        if self._quantized is not None:
            self._quantized(x, out)
        elif len(x) <= FEW_TOKENS:
            self._row_by_row(x, out)
        else:
            self._panel_by_panel(x, out)
        if self.scale != 1:
            out *= np.float32(self.scale)
        if self.bias is not None:
            out += self.bias
        return out

    @functools.cached_property
    def _quantized(self) -> Callable[[np.ndarray, np.ndarray], None] | None:
        """The kernel that quantizes activations; None where decoding is as fast, or the numerics are exact."""
        if self.numerics != "fast":
            return None
        from quantkit.runtime.kernels import dispatch  # loads numba

        return dispatch.linear(self.tensor, self.threads)

    def _panel_by_panel(self, x: np.ndarray, out: np.ndarray) -> None:
        """All threads decode a panel, then all multiply by it."""
        for start in range(0, self.rows, self.panel_rows):
            stop = min(self.rows, start + self.panel_rows)
            _multiply(x, self._decoded(start, stop, self.threads), out[:, start:stop], self.threads)

    def _row_by_row(self, x: np.ndarray, out: np.ndarray) -> None:
        """Each thread decodes some rows and multiplies by them while they are in its own cache."""

        def task(begin: int, end: int) -> None:
            with silent():
                for start in range(begin, end, step):
                    stop = min(end, start + step)
                    np.matmul(x, self._decoded(start, stop, 1).T, out=out[:, start:stop])

        step = _whole_rows(STRIP_ELEMENTS, self.columns)
        jit.over_rows(task, self.rows, multiple=step, threads=self.threads)

    def _decoded(self, start: int, stop: int, threads: int) -> np.ndarray:
        """float32[stop - start, columns], valid until this thread asks for the next panel. F32 is used in place."""
        data = self.tensor.rows(start, stop)
        if self.tensor.type.name == "f32":
            return data.view(np.float32)
        panel = _scratch("panel", (stop - start, self.columns))
        return self.tensor.type.dequantize(data, self.columns, out=panel, threads=threads, products=True)


def _whole_rows(elements: int, columns: int) -> int:
    """How many rows make about so many elements."""
    return max(1, elements // columns // ROWS_TOGETHER) * ROWS_TOGETHER


def _multiply(x: np.ndarray, panel: np.ndarray, out: np.ndarray, threads: int) -> None:
    """out = x panel^T in tiles. Their size is the same for any number of threads, and so are the results."""
    tiles = [(t, r) for r in range(0, len(panel), TILE_ROWS) for t in range(0, len(x), TILE_TOKENS)]

    def task(begin: int, end: int) -> None:
        with silent():
            for t, r in tiles[begin:end]:
                a, b = slice(t, t + TILE_TOKENS), slice(r, r + TILE_ROWS)
                np.matmul(x[a], panel[b].T, out=out[a, b])

    jit.over_rows(task, len(tiles), threads=threads)


def embed(tensor: Tensor, tokens: np.ndarray) -> np.ndarray:
    """float32[tokens, n_embd]: the rows of the embedding that int[tokens] name. Only their groups are decoded."""
    group = tensor.type.interleave
    wanted, place = np.unique(tokens // group, return_inverse=True)
    data = tensor.data.reshape(-1, group, tensor.data.shape[1])[wanted]
    rows = tensor.type.dequantize(data.reshape(-1, data.shape[2]), tensor.shape[1])
    return rows[place.reshape(-1) * group + tokens % group]


# ------------------------------------------------------------------------------------------------ norm, swiglu and rope


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float, threads: int) -> np.ndarray:
    out = np.empty_like(x)
    _over_tokens(lambda a, b: reference.rms_norm(x[a:b], weight, eps, out[a:b]), x, threads)
    return out


ACTIVATIONS = {
    "swiglu": reference.swiglu,
    "geglu": reference.geglu,
    "relu2": reference.relu2,
    "swiglu_oai": reference.swiglu_oai,
}


def activate(name: str, gate: np.ndarray, up: np.ndarray, threads: int) -> np.ndarray:
    """act(gate) * up as blocks name it; overwrites `gate`."""
    kernel = ACTIVATIONS[name]
    _over_tokens(lambda a, b: kernel(gate[a:b], up[a:b]), gate, threads)
    return gate


def without_gates(projected: np.ndarray, heads: int) -> np.ndarray:
    """The queries float32[tokens, heads * dim] of queries and gates of each head, float32[tokens, heads * 2 * dim]."""
    both = projected.reshape(len(projected), heads, 2, -1)
    return np.ascontiguousarray(both[:, :, 0]).reshape(len(projected), -1)


def gate(x: np.ndarray, projected: np.ndarray, dim: int, threads: int) -> None:
    """Multiply x float32[tokens, heads * dim], in place, by the sigmoids of the gates beside those queries."""
    _over_tokens(lambda a, b: reference.gate(x[a:b], projected[a:b], dim, 2 * dim, dim), x, threads)


def sigmoid(x: np.ndarray) -> np.ndarray:
    with silent():
        return 1 / (1 + np.exp(-x))


def rope_tables(rope: blocks.Rope, n_ctx: int, factors: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin, float32[n_ctx, dim/2], of the angle position * frequency of each pair. Worked out in float64.

    `factors` float32[dim/2] divide the frequencies. With YaRN, a pair's frequency moves from f * scale to f as its
    number j falls from `high` to `low`, the pairs that turn beta_slow and beta_fast times within the original context.
    """
    pair = np.arange(rope.dim // 2)
    frequency = rope.base ** (-2.0 * pair / rope.dim)
    if factors is not None:
        frequency = frequency / factors
    size = 1.0
    if rope.yarn is None:
        frequency = frequency * rope.scale
    else:
        low, high = (_pair_that_turns(rope, turns) for turns in (rope.yarn.beta_fast, rope.yarn.beta_slow))
        if rope.yarn.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, rope.dim - 1)
        kept = 1 - np.clip((pair - low) / max(0.001, high - low), 0, 1)
        kept = kept * rope.yarn.ext_factor
        frequency = frequency * (rope.scale * (1 - kept) + kept)
        size = rope.yarn.attn_factor * (1 + 0.1 * math.log(1 / rope.scale) if rope.yarn.ext_factor else 1)
    angle = np.arange(n_ctx)[:, None] * frequency
    cos, sin = (np.float32(f(angle) * size) for f in (np.cos, np.sin))
    return jit.readonly(cos), jit.readonly(sin)


def _pair_that_turns(rope: blocks.Rope, turns: float) -> float:
    """The (fractional) number of the pair that turns so many times within YaRN's original context."""
    assert rope.yarn is not None
    return rope.dim * math.log(rope.yarn.original_context / (turns * 2 * math.pi)) / (2 * math.log(rope.base))


def turn(
    x: np.ndarray, style: str, head_dim: int, tables: tuple[np.ndarray, np.ndarray], positions: np.ndarray, threads: int
) -> None:
    """Rope, in place: x float32[tokens, heads * head_dim], positions int64[tokens]."""
    cos, sin = tables
    step, stride = (2, 1) if style == "norm" else (1, cos.shape[1])
    _over_tokens(lambda a, b: reference.rope(x[a:b], head_dim, cos, sin, positions[a:b], step, stride), x, threads)


# ------------------------------------------------------------------------------------------------------------ attention


class Span(NamedTuple):
    """Rows start … stop of a batch are the next tokens of the sequence that `cache` holds."""

    start: int
    stop: int
    cache: Cache


def batches(parts: Sequence[tuple[np.ndarray, Cache]], most: int) -> Iterator[tuple[np.ndarray, list[Span], list[int]]]:
    """(tokens, their spans, which parts they are of), up to `most` tokens at a time."""
    taken: list[np.ndarray] = []
    spans: list[Span] = []
    which: list[int] = []
    used = 0
    for i, (ids, cache) in enumerate(parts):
        done = 0
        while done < len(ids):
            some = ids[done : done + most - used]
            taken.append(some)
            spans.append(Span(used, used + len(some), cache))
            which.append(i)
            done, used = done + len(some), used + len(some)
            if used == most:
                yield np.concatenate(taken), spans, which
                taken, spans, which, used = [], [], [], 0
    if used:
        yield np.concatenate(taken), spans, which


def temper(q: np.ndarray, beta: float, length: int, spans: Sequence[Span]) -> None:
    """Multiply queries float32[tokens, n] at position p by 1 + beta ln(1 + floor(p / length)), in place."""
    for span in spans:
        position = np.arange(span.cache.length, span.cache.length + span.stop - span.start)
        factor = 1 + beta * np.log1p(np.floor(position / length))
        q[span.start : span.stop] *= factor.astype(np.float32)[:, None]


@dataclass(frozen=True)
class Attending:
    """How attention is computed: the same numbers but for rounding.

    flash      with a streaming softmax, KEY_ROWS positions at a time; else plainly, all scores of a query at once
    work_mib   MiB that the scores of plain attention may take, those of all threads together; 0: no bound
    """

    flash: bool = True
    work_mib: int = 256

    def query_rows(self, group: int, n_ctx: int, threads: int) -> int:
        """Rows of queries worked on at a time, over up to `n_ctx` positions; at most QUERY_ROWS.

        DataError where not even the queries that share one key fit the bound.
        """
        if self.flash or not self.work_mib:
            return QUERY_ROWS
        row = 4 * threads * (-(-n_ctx // KEYS_TOGETHER) * KEYS_TOGETHER)
        rows = (self.work_mib << 20) // row // QUERIES_TOGETHER * QUERIES_TOGETHER
        if rows < group:
            least = -(-group // QUERIES_TOGETHER) * QUERIES_TOGETHER * row
            raise DataError(
                f"-amb {self.work_mib}: plain attention's scores over {n_ctx} positions take {-(-least >> 20)} MiB "
                f"at the least with {threads} threads; give it that, fewer positions (-c), or flash attention (-fa 1)"
            )
        return min(QUERY_ROWS, rows)


class Heads(NamedTuple):
    """The heads of an attention, as blocks.Attention has them. Values may be the first elements of the keys.

    sinks   float32[heads]
    """

    heads: int
    kv_heads: int
    head_dim_k: int
    head_dim_v: int
    scale: float
    window: int | None = None
    values_in_keys: bool = False
    sinks: np.ndarray | None = None

    @classmethod
    def of(cls, part: blocks.Attention, sinks: np.ndarray | None = None) -> Heads:
        sizes = (part.heads, part.kv_heads, part.head_dim_k, part.head_dim_v)
        return cls(*sizes, part.scale, part.window, sinks=sinks)


def remember(k: np.ndarray, v: np.ndarray | None, cache: Cache, layer: int) -> None:
    """Keep keys and values float32[tokens, heads * dim] of a layer from the cache's `length` on; None: no values."""
    kinds = cache.type.k, cache.type.v
    for x, into, kind, block in zip((k, v), (cache.k[layer], cache.v[layer]), kinds, cache.rotations):
        if x is None:
            continue
        heads = x.reshape(len(x), len(into), -1).transpose(1, 0, 2)
        rows = np.ascontiguousarray(heads).reshape(-1, heads.shape[2])
        if block:
            rows = kv_rounding.rotate(rows, block)
        into[:, cache.length : cache.length + len(x)] = kv_rounding.encode(kind, rows).reshape(len(into), len(x), -1)


def attend(
    part: Heads, layer: int, q: np.ndarray, spans: Sequence[Span], threads: int, how: Attending = Attending()
) -> np.ndarray:
    """softmax(q k^T * scale) v for every query head, float32[tokens, heads * head_dim_v]; q as it comes out of rope.

    The caches hold the keys and values of the batch's own tokens already, from their `length` on.
    """
    out = np.empty((len(q), part.heads * part.head_dim_v), np.float32)
    group = part.heads // part.kv_heads
    most = max(span.cache.length + span.stop - span.start for span in spans)
    step = max(1, how.query_rows(group, most, threads) // group)
    work = [
        (span, head, first, min(span.stop, first + step))
        for span in spans
        for first in reversed(range(span.start, span.stop, step))  # the most keys first, the fewest fill the gaps
        for head in range(part.kv_heads)
    ]

    def task(begin: int, end: int) -> None:
        with silent():
            for item in work[begin:end]:
                _attend_head(part, layer, q, out, KEY_ROWS if how.flash else most, *item)

    scores = part.heads * sum((s.stop - s.start) * (s.cache.length + s.stop - s.start) for s in spans)
    jit.over_rows(task, len(work), threads=threads if scores > SERIAL_ELEMENTS else 1)
    return out


def _attend_head(
    part: Heads,
    layer: int,
    q: np.ndarray,
    out: np.ndarray,
    key_rows: int,
    span: Span,
    head: int,
    first: int,
    stop: int,
) -> None:
    """`attend` for tokens first … stop and the query heads that share key/value head `head`, `key_rows` at a time."""
    group = part.heads // part.kv_heads
    tokens, mine = stop - first, slice(head * group, (head + 1) * group)
    position = span.cache.length + first - span.start
    window = part.window or span.cache.n_ctx
    rotate_k, rotate_v = span.cache.rotations
    rotate_v = rotate_k if part.values_in_keys else rotate_v
    queries = q.reshape(len(q), part.heads, -1)[first:stop, mine].reshape(tokens * group, -1) * np.float32(part.scale)
    if rotate_k:
        queries = kv_rounding.rotate(queries, rotate_k)
    top = np.zeros(tokens * group, np.float32)
    total = np.zeros(tokens * group, np.float32)
    acc = np.zeros((tokens * group, part.head_dim_v), np.float32)
    for key in range(max(0, position + 1 - window), position + tokens, key_rows):
        end = min(key + key_rows, position + tokens)
        keys = _decoded(span.cache.k[layer][head, key:end], span.cache.type.k, part.head_dim_k, "keys")
        scores = np.matmul(queries, keys.T, out=_scratch("scores", (tokens * group, end - key)))
        reference.softmax_step(scores, group, position - key, window, top, total, acc)
        if part.values_in_keys:
            values = keys[:, : part.head_dim_v]
        else:
            values = _decoded(span.cache.v[layer][head, key:end], span.cache.type.v, part.head_dim_v, "values")
        acc += np.matmul(scores, values, out=_scratch("products", acc.shape))
    if part.sinks is not None:
        sinks = np.tile(part.sinks[mine], tokens)
        new = np.maximum(top, sinks)
        shrink = np.exp(top - new)
        acc *= shrink[:, None]
        total = total * shrink + np.exp(sinks - new)
    acc /= total[:, None]
    if rotate_v:
        acc = kv_rounding.rotate(acc, rotate_v)
    out.reshape(len(out), part.heads, -1)[first:stop, mine] = acc.reshape(tokens, group, -1)


def _decoded(rows: np.ndarray, kind: str, dim: int, scratch: str) -> np.ndarray:
    """float32[rows, dim] of some rows of one head of a cache, as the type itself decodes them."""
    if kind == "f32":
        return rows.view(np.float32)
    return types.get(kind).dequantize(rows, dim, out=_scratch(scratch, (len(rows), dim)), threads=1)
