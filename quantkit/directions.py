"""The directions along which the inputs of a model's matrices are large, from its weights and an importance matrix.

An importance matrix holds the mean square of each column of an input, and nothing of how columns go together. Yet what
most matrices read is the residual state behind a norm, and the state is the sum of what the matrices before wrote to
it, attn_output and ffn_down above all. The inputs of those are nearly independent, columns of their own importance q:

    state before block i  ~  sum over earlier W of W diag(sqrt q) z        z: independent, of variance 1
    input of a reader     ~  norm's weight * state / its size

So the second moments of the state are the sum of W diag(q) W^T, and their first few eigenvectors, behind the norm's
weight, are where inputs are large. In a model whose axes are its own these are a few columns, which the importance of
the columns tells as well: then there is nothing to gain, and none are given. Where the axes were turned (QuaRot,
SpinQuant, SmolLM2 embedded into wider rows), every column is as important as any other, and half of all that inputs
hold lies along four directions, of this text or another (benchmarks/RESULTS.md, "Directions of inputs").

Embeddings add little and are left out, and so is all of W diag(sqrt q) but its largest columns, COLUMNS of them: what
makes a direction large is a few neurons that write much. The sum of squares, which would have the square of the width,
is kept as F F^T, F float64[width, RANK at most]: with new columns C beside it, the first right singular vectors of
[F, C] give the next F.

Of experts those are read that saw most, `EXPERTS` in a layer; a token's experts share it evenly, for all one knows.
Entries are rounded to 2^-14: what one CPU sums otherwise than another must not make other files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from quantkit.errors import DataError
from quantkit.files.imatrix import Imatrix
from quantkit.files.mapping import release
from quantkit.files.pipeline import Bar
from quantkit.files.provenance import Rows, row_pieces
from quantkit.types import check_finite

COUNT = 4  # directions of each matrix
COLUMNS = 32
RANK = 64
EXPERTS = 16
SPREAD = 1 / 16  # of all columns: a largest direction over fewer, by 1 / sum v^4, is no news beside their importance
_GRID = 2.0**14

_STATE = ("attn_q", "attn_k", "attn_v", "attn_qkv", "attn_gate", "attn_q_a", "attn_kv_a_mqa",
          "ssm_ba", "ssm_alpha", "ssm_beta")  # fmt: skip
_MIDDLE = ("ffn_gate", "ffn_up", "ffn_gate_exps", "ffn_up_exps", "ffn_gate_shexp", "ffn_up_shexp")


@dataclass(frozen=True)
class Half:
    """Half of a block: what reads the state behind `norm`, and what writes to it, behind the norm `after` if any."""

    norm: str
    readers: list[str]
    writers: list[str]
    after: str | None


def halves(tensors: Mapping[str, Any]) -> Iterator[Half]:
    """The halves of all blocks in the order they run, by the names of their tensors."""

    def there(block: int, *names: str) -> list[str]:
        return [full for name in names if (full := f"blk.{block}.{name}.weight") in tensors]

    block = 0
    while first := there(block, "attn_norm"):
        # Gemma has a norm behind attention; where nothing else stands before the experts it is theirs.
        between = there(block, "ffn_norm", "post_attention_norm")
        after = between[1] if len(between) > 1 else None
        yield Half(first[0], there(block, *_STATE), there(block, "attn_output", "ssm_out"), after)
        if between:
            last = there(block, "post_ffw_norm")
            writers = there(block, "ffn_down", "ffn_down_exps", "ffn_down_shexp")
            yield Half(between[0], there(block, *_MIDDLE), writers, last[0] if last else None)
        block += 1


def find(
    tensors: Mapping[str, Rows],
    metadata: Mapping[str, Any],
    imatrix: Imatrix | None,
    wanted: set[str],
    *,
    count: int = COUNT,
    threads: int | None = None,
    progress: bool = False,
) -> dict[str, np.ndarray]:
    """float32[count, n], orthonormal rows, of those of `wanted` that read the state behind writers that are known.

    None where the largest lies in a few columns (SPREAD). Without an importance matrix all inputs of writers count
    alike; a writer that an importance matrix lacks is left out.
    DataError names tensor, row and column of a weight that is not finite.
    """
    blocks = list(halves(tensors))
    last = max((i for i, half in enumerate(blocks) if wanted.intersection(half.readers)), default=0)
    blocks = blocks[: last + 1]
    state = _State(tensors, metadata, imatrix, threads)
    found: dict[str, np.ndarray] = {}
    total = sum(state.elements(name) for half in blocks[:-1] for name in half.writers)
    with Bar(total, progress, "weights") as bar:
        for half in blocks:
            if state.factor is not None and (readers := wanted.intersection(half.readers)):
                shared = state.directions(half.norm, count)
                if shared is not None:
                    found.update((name, shared) for name in readers)
            if half is not blocks[-1]:
                for name in half.writers:
                    state.add(name, half.after, bar)
    return found


class _State:
    """What was written to the residual state so far: `factor` is F."""

    def __init__(
        self, tensors: Mapping[str, Rows], metadata: Mapping[str, Any], imatrix: Imatrix | None, threads: int | None
    ):
        self._tensors, self._imatrix, self._threads = tensors, imatrix, threads
        arch = metadata.get("general.architecture")
        self._used = int(metadata.get(f"{arch}.expert_used_count", 1) or 1)
        self._scale = float(metadata.get(f"{arch}.expert_weights_scale", 1) or 1)
        self.factor: np.ndarray | None = None

    def elements(self, name: str) -> int:
        """How many weights of a writer are read, which is done twice."""
        matrices, rows, n = self._shape(name)
        return 2 * min(matrices, EXPERTS) * rows * n

    def directions(self, norm: str, count: int) -> np.ndarray | None:
        """float32[count, width]: the first left singular vectors of F behind a norm, unless they lie in few columns."""
        assert self.factor is not None
        left = _turned(self._gain(norm)[:, None] * self.factor, count)
        left /= np.maximum(np.linalg.norm(left, axis=0), np.finfo(np.float64).tiny)
        fourth = float((left[:, 0] ** 4).sum())
        if fourth == 0 or 1 / fourth < SPREAD * len(left):
            return None
        return (np.rint(left.T * _GRID) / _GRID).astype(np.float32)

    def add(self, name: str, after: str | None, bar: Bar) -> None:
        """Add what a writer writes, behind the norm `after` if there is one, which makes rows of mean square 1."""
        for matrix, weights in self._matrices(name):
            rows, n = self._tensors[name].shape[-2:]
            energies = np.zeros(n)
            for _, part in self._parts(name, matrix, bar):
                energies += np.einsum("ij,ij->j", part, part, dtype=np.float64)
            energies *= weights * weights
            largest = np.sort(np.argsort(-energies, kind="stable")[:COLUMNS])
            made = np.empty((rows, len(largest)))
            for start, part in self._parts(name, matrix, bar):
                made[start : start + len(part)] = part[:, largest]
            made *= weights[largest]
            if after and (energy := energies.sum()):
                made *= self._gain(after)[:, None] / np.sqrt(energy / rows)
            self.factor = _turned(made if self.factor is None else np.hstack([self.factor, made]), RANK)

    def _shape(self, name: str) -> tuple[int, int, int]:
        *matrices, rows, n = self._tensors[name].shape
        return int(np.prod(matrices, dtype=np.int64)), rows, n

    def _gain(self, norm: str) -> np.ndarray:
        return self._rows(norm, 0, 1, self._tensors[norm].shape[-1])[0].astype(np.float64)

    def _rows(self, name: str, start: int, stop: int, n: int) -> np.ndarray:
        """float32[rows, n]."""
        tensor = self._tensors[name]
        data = tensor.rows(start, stop)
        x = tensor.type.dequantize(data, n, threads=self._threads)
        release(data)
        try:
            check_finite(x, start)
        except DataError as error:
            raise DataError(f"{getattr(tensor, 'path', '')}: {name}: {error}") from None
        return x

    def _parts(self, name: str, matrix: int, bar: Bar) -> Iterator[tuple[int, np.ndarray]]:
        """Rows of one matrix, float32[some, n], and the first one's number."""
        rows, n = self._tensors[name].shape[-2:]
        for start, stop in row_pieces((rows, n)):
            yield start, self._rows(name, matrix * rows + start, matrix * rows + stop, n)
            bar.update((stop - start) * n, name)

    def _matrices(self, name: str) -> Iterator[tuple[int, np.ndarray]]:
        """Matrices of a writer and what their columns are multiplied by: the root of the mean square of each input."""
        matrices, _, n = self._shape(name)
        if self._imatrix is None:
            values, seen = np.ones((matrices, n)), np.ones(matrices)
        elif name not in self._imatrix.entries:
            return
        else:
            entry = self._imatrix.entries[name]
            values, seen = entry.columns(n).astype(np.float64), np.asarray(entry.counts, np.float64)
            if len(values) != matrices:
                return
            if len(seen) != matrices:  # a legacy file's, which counts no experts
                seen = np.ones(matrices)
        chosen = np.argsort(-seen, kind="stable")[:EXPERTS]
        chosen = chosen[seen[chosen] > 0]
        for matrix in sorted(chosen.tolist()):
            share = 1.0 if matrices == 1 else seen[matrix] / seen[chosen].sum() * self._scale**2 / self._used
            yield matrix, np.sqrt(values[matrix] * share)


def _turned(columns: np.ndarray, most: int) -> np.ndarray:
    """Columns of the same outer products' sum, orthogonal ones, the largest first; `most` of them at most."""
    _, vectors = np.linalg.eigh(columns.T @ columns)
    return columns @ vectors[:, ::-1][:, :most]
