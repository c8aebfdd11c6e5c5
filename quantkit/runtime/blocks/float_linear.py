"""Matrix products with weights decoded to float32, and rows of the embedding.

Threads are the pool's, and each multiplies with a BLAS that keeps to its own thread (callers hold
`blas.single_threaded()`): BLAS's own threads are no faster, and much slower when they have to share their cores.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import numpy as np

from quantkit.archs.common import blocks
from quantkit.codegen import jit, thread_pool
from quantkit.formats.gguf import Tensor
from quantkit.runtime.blocks.float_ops import ignore_nonfinite, scratch
from quantkit.runtime.parallel import tensor_shards

FEW_TOKENS = 32  # batches up to this are bound by decoding, not by multiplying
PANEL_ELEMENTS = 1 << 21  # decoded at a time for larger batches: 8 MiB, so that they stay in the last-level cache
TILE_TOKENS = TILE_ROWS = 256  # multiplied at a time, by each thread
STRIP_ELEMENTS = 1 << 17  # decoded at a time for smaller ones, by each thread: 512 KiB, for its own cache
ROWS_TOGETHER = 16  # the largest group; matrices of all types are cut at multiples of it: repacked, they round the same


Weights = Mapping[str, Tensor]


def matrix(tensors: Mapping[str, Tensor], linear: blocks.Linear) -> Tensor:
    """The matrix of a product: a tensor, some rows of one, or a matrix of a stack."""
    tensor = tensors[linear.weight]
    if linear.number is not None:
        return tensor_shards.matrix(tensor, linear.number)
    return tensor if linear.rows is None else tensor_shards.part(tensor, 0, *linear.rows)


def bias(tensors: Mapping[str, Tensor], linear: blocks.Linear) -> np.ndarray | None:
    """float32[rows] that is added to a product, times its factor; None without a bias."""
    if linear.bias is None:
        return None
    first, last = linear.rows or (0, None)
    whole = vector(tensors[linear.bias])
    return (
        whole
        if linear.rows is None and linear.factor == 1
        else jit.readonly(np.ascontiguousarray(whole[first:last] * np.float32(linear.factor)))
    )


def scale(tensors: Mapping[str, Tensor], linear: blocks.Linear, number: int = 0) -> float:
    """The number that a product is multiplied by; of experts, that of expert `number`."""
    return linear.factor * (float(vector(tensors[linear.scale])[number]) if linear.scale else 1.0)


def vector(tensor: Tensor) -> np.ndarray:
    """float32[n] of a norm's weight, a bias or rope factors."""
    result: np.ndarray = jit.readonly(np.ascontiguousarray(tensor.dequantize().reshape(-1)))
    return result


class FloatLinear:
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
            with ignore_nonfinite():
                for start in range(begin, end, step):
                    stop = min(end, start + step)
                    np.matmul(x, self._decoded(start, stop, 1).T, out=out[:, start:stop])

        step = _whole_rows(STRIP_ELEMENTS, self.columns)
        thread_pool.over_rows(task, self.rows, multiple=step, threads=self.threads)

    def _decoded(self, start: int, stop: int, threads: int) -> np.ndarray:
        """float32[stop - start, columns], valid until this thread asks for the next panel. F32 is used in place."""
        data = self.tensor.rows(start, stop)
        if self.tensor.type.name == "f32":
            return data.view(np.float32)
        panel = scratch("panel", (stop - start, self.columns))
        return self.tensor.type.dequantize(data, self.columns, out=panel, threads=threads, products=True)


def _whole_rows(elements: int, columns: int) -> int:
    """The number of rows of about `elements` elements, a multiple of ROWS_TOGETHER."""
    return max(1, elements // columns // ROWS_TOGETHER) * ROWS_TOGETHER


def _multiply(x: np.ndarray, panel: np.ndarray, out: np.ndarray, threads: int) -> None:
    """out = x panel^T in tiles. Their size is the same for any number of threads, and so are the results."""
    tiles = [(t, r) for r in range(0, len(panel), TILE_ROWS) for t in range(0, len(x), TILE_TOKENS)]

    def task(begin: int, end: int) -> None:
        with ignore_nonfinite():
            for t, r in tiles[begin:end]:
                a, b = slice(t, t + TILE_TOKENS), slice(r, r + TILE_ROWS)
                np.matmul(x[a], panel[b].T, out=out[a, b])

    thread_pool.over_rows(task, len(tiles), threads=threads)


def embed(tensors: Weights, head: blocks.Head | blocks.MtpLayer | blocks.LayerInput, tokens: np.ndarray) -> np.ndarray:
    """float32[tokens, n_embd]: rows of the embedding that int[tokens] name, scaled. Only their groups are decoded."""
    x = embedding_rows(tensors[head.embedding], tokens)
    if head.embedding_factor is not None:
        x *= vector(tensors[head.embedding_factor])[0]
    return x if head.embedding_scale == 1 else x * np.float32(head.embedding_scale)


def embedding_rows(tensor: Tensor, tokens: np.ndarray) -> np.ndarray:
    """float32[tokens, columns]: the rows of a table that int[tokens] name."""
    group = tensor.type.interleave
    groups, index_of = np.unique(tokens // group, return_inverse=True)
    data = tensor.groups(groups)
    rows = tensor.type.dequantize(data.reshape(-1, data.shape[2]), tensor.shape[1])
    result: np.ndarray = rows[index_of.reshape(-1) * group + tokens % group]
    return result
