"""Sums over the vectors that enter a weight: of all products of their columns, or a sketch of them.

`ProductSums`     x x^T, whole or in blocks of columns: float32[n, n] for each block
`ProductSketch`   Y = X^T (X O) with a fixed random matrix O of SKETCH times as many columns as the rank. At the end
                  H ~ Y (O^T Y)^+ Y^T (Nystroem approximation, Tropp et al., 2017, arXiv:1706.05736). Memory is that of
                  Y, float32[n, SKETCH rank], and of one O for all inputs of a width; a wide input never has an n x n
                  matrix.

Columns are divided by their root mean square in the vectors that come first, so that large ones do not hide the others
in float32. What is left of scale is divided out at the end, when the importance is known.

Measured as in `formats.imatrix.factors`, over four inputs of SmolLM2-135M, rank 128 and 32: error under the whole H
relative to rounding without second moments, and of C outside its diagonal (Frobenius norm, relative):

    columns of the sketch     2 rank           3 rank           4 rank
    rank 128                  0.735   0.279    0.721   0.221    0.714   0.190
    rank 32                   0.809   0.512    0.799   0.467    0.791   0.431

Products are BLAS calls of fixed shapes, in panels of 256 columns, so the sums are the same for any number of threads on
one machine.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from quantkit.codegen import blas, thread_pool
from quantkit.formats.imatrix import factors
from quantkit.formats.imatrix.second_moments import pack

SKETCH = 4  # columns of the sketch for each of the rank
_PANEL = 256  # columns
_SEED = 20240917
_NOISE = 1e-6  # of the largest eigenvalue: below it is what float32 sums cannot tell


@dataclass
class ProductSums:
    """Sums of one input. blocks: for each stored matrix, float32[n, n] for each block of columns."""

    blocks: list[list[np.ndarray]]
    tokens: np.ndarray  # int64[stored]

    @classmethod
    def zeros(cls, stored: int, columns: int, block: int) -> ProductSums:
        sizes = [min(block, columns - first) for first in range(0, columns, block)]
        return cls([[np.zeros((n, n), np.float32) for n in sizes] for _ in range(stored)], np.zeros(stored, np.int64))

    def add(self, x: np.ndarray, matrix: int) -> None:
        """Add float32[tokens, columns]."""
        jobs = [
            (sums, x[:, first : first + len(sums)], a)
            for first, sums in _placed(self.blocks[matrix])
            for a in range(0, len(sums), _PANEL)
        ]

        def task(start: int, stop: int) -> None:
            for sums, part, a in jobs[start:stop]:
                sums[a : a + _PANEL, a:] += part[:, a : a + _PANEL].T @ part[:, a:]

        thread_pool.over_rows(task, len(jobs), pieces=len(jobs))
        self.tokens[matrix] += len(x)

    def add_sums(self, other: ProductSums, matrix: int) -> None:
        """Add the only matrix of `other`, with the bits that `add` of the same vectors gives."""
        for sums, more in zip(self.blocks[matrix], other.blocks[0], strict=True):
            sums += more
        self.tokens[matrix] += other.tokens[0]

    def are_finite(self) -> bool:
        return all(np.isfinite(block).all() for matrix in self.blocks for block in matrix)

    def packed(self) -> np.ndarray:
        """float16[stored, values]."""
        return np.stack([pack(blocks) for blocks in self.blocks])

    def arrays(self) -> dict[str, np.ndarray]:
        """All sums by name, for a saved run."""
        named = {f"{m}.{b}": block for m, blocks in enumerate(self.blocks) for b, block in enumerate(blocks)}
        return named | {"tokens": self.tokens}

    @classmethod
    def of_arrays(cls, arrays: Mapping[str, np.ndarray]) -> ProductSums:
        """What `arrays` gave."""
        blocks: list[list[np.ndarray]] = []
        for m in range(len(arrays["tokens"])):
            of_matrix: list[np.ndarray] = []
            while (key := f"{m}.{len(of_matrix)}") in arrays:
                of_matrix.append(arrays[key])
            blocks.append(of_matrix)
        return cls(blocks, arrays["tokens"])


def _placed(blocks: list[np.ndarray]) -> Iterator[tuple[int, np.ndarray]]:
    """Blocks with their first columns."""
    first = 0
    for sums in blocks:
        yield first, sums
        first += len(sums)


@dataclass
class ProductSketch:
    """The sketch of one input.

    products   float32[stored, n, k]        squares   float64[stored, n], of every column
    scales     float32[stored, n], what columns are divided by; 0 until the first vectors
    """

    rank: int
    products: np.ndarray
    squares: np.ndarray
    scales: np.ndarray
    tokens: np.ndarray  # int64[stored]

    @classmethod
    def zeros(cls, stored: int, columns: int, rank: int) -> ProductSketch:
        return cls(
            rank,
            np.zeros((stored, columns, sketch_columns(columns, rank)), np.float32),
            np.zeros((stored, columns)),
            np.zeros((stored, columns), np.float32),
            np.zeros(stored, np.int64),
        )

    def add(self, x: np.ndarray, matrix: int) -> None:
        """Add float32[tokens, columns]."""
        if not len(x):
            return
        squares = np.einsum("tj,tj->j", x, x, dtype=np.float64)
        if not self.tokens[matrix]:
            self.scales[matrix] = _scales(squares, len(x))
        self.squares[matrix] += squares
        self.tokens[matrix] += len(x)
        with blas.single_threaded():
            self._add_products(x / self.scales[matrix], self.products[matrix])

    @staticmethod
    def _add_products(x: np.ndarray, sums: np.ndarray) -> None:
        """sums float32[n, k] += x^T (x O)."""
        columns, k = sums.shape
        seen = x
        if k < columns:
            seen, random = np.empty((len(x), k), np.float32), random_matrix(columns, k)
            _over_panels(lambda a, b: np.matmul(x, random[:, a:b], out=seen[:, a:b]), k)

        def add(a: int, b: int) -> None:
            sums[a:b] += x[:, a:b].T @ seen

        _over_panels(add, columns)

    def are_finite(self) -> bool:
        return bool(np.isfinite(self.products).all() and np.isfinite(self.squares).all())

    def packed(self) -> np.ndarray:
        """float16[stored, columns rank]: factors of the correlations."""
        return np.stack([factors.pack(factors.fit(self._wide(m), self.rank)) for m in range(len(self.tokens))])

    def _wide(self, matrix: int) -> np.ndarray:
        """float64[n, k]: G with G G^T the approximation of the correlations."""
        y = self.products[matrix].astype(np.float64)
        columns, k = y.shape
        with blas.single_threaded():
            inner = random_matrix(columns, k).astype(np.float64).T @ y if k < columns else y
            values, vectors = np.linalg.eigh((inner + inner.T) / 2)
            known = values > _NOISE * max(values[-1], 0)
            wide = y @ (vectors[:, known] / np.sqrt(values[known]))
        root = np.sqrt(self.squares[matrix])
        ratio = np.divide(self.scales[matrix], root, out=np.zeros(columns), where=root > 0)
        return np.asarray(wide * ratio[:, None])

    def arrays(self) -> dict[str, np.ndarray]:
        """All sums by name, for a saved run."""
        names = ("products", "squares", "scales", "tokens")
        return {name: getattr(self, name) for name in names} | {"rank": np.array(self.rank)}

    @classmethod
    def of_arrays(cls, arrays: Mapping[str, np.ndarray]) -> ProductSketch:
        """What `arrays` gave."""
        names = ("products", "squares", "scales", "tokens")
        return cls(int(arrays["rank"]), *(arrays[name] for name in names))


InputSums = ProductSums | ProductSketch


def sketch_columns(columns: int, rank: int) -> int:
    """Columns of a sketch; where these are as many as the input has, the sums are those of all products."""
    return min(columns, SKETCH * rank)


def _scales(squares: np.ndarray, count: int) -> np.ndarray:
    """float32[n]: root mean squares of columns, but no less than that of all columns divided by `count`.

    So a column that is 0 or small by chance in the few vectors that come first does not outweigh the others later.
    """
    found = np.sqrt(squares / count)
    least = np.sqrt(np.mean(squares) / count) / count
    return np.maximum(found, least if 0 < least < np.inf else 1).astype(np.float32)


@functools.lru_cache(maxsize=4)
def random_matrix(columns: int, k: int) -> np.ndarray:
    """float32[columns, k] of normal random numbers, the same on every machine."""
    found = np.random.default_rng(_SEED).standard_normal((columns, k), np.float32)
    found.flags.writeable = False
    return found


def _over_panels(task: Callable[[int, int], object], columns: int) -> None:
    """Call task(start, stop) for panels of columns on several threads."""
    count = -(-columns // _PANEL)

    def panels(start: int, stop: int) -> None:
        for panel in range(start, stop):
            task(panel * _PANEL, min(columns, (panel + 1) * _PANEL))

    thread_pool.over_rows(panels, count, pieces=count)
