"""The error of encodings in the metric of a matrix' inputs, from a sample of its rows.

    error = sum over rows of e H e^T,  e = decoded row - row,  H = E[x x^T] of the inputs

With second moments in the importance matrix, H is that (correlations shrunk, without damping); with importance alone
the diagonal of H, and without either the identity. Rows are taken at even distances. What decides is the ratio of a
type's error to that of the probe, and both are measured on the same rows: its standard error is that of a ratio of
paired means, mostly a few per cent for 128 rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from quantkit.formats.gguf import Tensor
from quantkit.formats.imatrix import Imatrix
from quantkit.pipelines.second_moments import inputs_of
from quantkit.types import QuantType

LOOKED_UP = ("token_embd.weight", "per_layer_token_embd.weight")  # unless they are the output matrix, too
MATRICES = 8  # of a stack of experts, sampled: each has second moments of its own


@dataclass(frozen=True)
class _Matrix:
    """Sampled rows float32[rows, n] of one matrix, importance float32[n] or None, H float32[n, n] or None.

    in_products   the values count that products use, not those that a lookup of rows gives (`QuantType.dequantize`)
    """

    rows: np.ndarray
    importance: np.ndarray | None
    moments: np.ndarray | None
    in_products: bool

    def errors(self, kind: QuantType, effort: str) -> np.ndarray:
        """float64[rows]: the error of each row."""
        given = self.moments if kind.uses_second_moments_at(effort) else None
        importance = self.importance
        if importance is None and kind.requires_imatrix:
            importance = np.ones(self.rows.shape[1], np.float32)
        data = kind.quantize(self.rows, importance, second_moments=given, effort=effort)
        decoded = kind.dequantize(data, self.rows.shape[1], products=self.in_products)
        e = decoded.astype(np.float64) - self.rows
        if self.moments is not None:
            found: np.ndarray = np.einsum("ij,ij->i", e @ self.moments.astype(np.float64), e)
            return found
        weights = np.ones(e.shape[1]) if self.importance is None else self.importance.astype(np.float64)
        found = (e * e) @ weights
        return found


class RowSample:
    """Sampled rows of a tensor and the metric of its inputs.

    metric   "second moments", "importance" or "plain"
    """

    def __init__(self, tensor: Tensor, imatrix: Imatrix | None, rows: int):
        self.metric = "plain"
        self.total_rows = tensor.n_rows
        columns, of_matrix, count = tensor.shape[-1], tensor.shape[-2], math.prod(tensor.shape[:-2])
        chosen = np.unique(np.linspace(0, count - 1, min(count, MATRICES)).round().astype(int)).tolist()
        per_matrix = max(1, -(-rows // len(chosen)))
        self._matrices: list[_Matrix] = []
        for matrix in chosen:
            _, importance, stored = inputs_of(tensor.name, columns, matrix, imatrix)
            moments = None
            if importance is not None:
                self.metric = "importance" if stored is None else "second moments"
                moments = None if stored is None else stored.dense(importance, matrix)
            sampled = _rows(tensor, matrix * of_matrix, of_matrix, per_matrix)
            in_products = importance is not None or tensor.name not in LOOKED_UP
            self._matrices.append(_Matrix(sampled, importance, moments, in_products))

    def row_errors(self, kind: QuantType, effort: str = "normal") -> np.ndarray:
        """float64[sampled rows]: the error of each row in a type."""
        return np.concatenate([matrix.errors(kind, effort) for matrix in self._matrices])

    def measure(
        self,
        probe: QuantType,
        kinds: Sequence[QuantType],
        effort: str = "normal",
        on_type: Callable[[str], None] = lambda name: None,
    ) -> tuple[float, dict[str, tuple[float, float]]]:
        """The error of the probe's encoding, and of each type with its standard error.

        Errors are for all rows of the tensor; the standard errors are those of the ratios to the probe.
        """
        reference = self.row_errors(probe, effort)
        found = {}
        for kind in kinds:
            values = reference if kind is probe else self.row_errors(kind, effort)
            found[kind.name.lower()] = self._scaled(values, reference)
            on_type(kind.name)
        return self._total(reference), found

    def _total(self, values: np.ndarray) -> float:
        return float(values.mean()) * self.total_rows

    def _scaled(self, values: np.ndarray, reference: np.ndarray) -> tuple[float, float]:
        """The sum over all rows, and the standard error of its ratio to the probe's, times that of the probe."""
        n, base = len(values), float(reference.mean())
        if n < 2 or base <= 0:
            return self._total(values), 0.0
        residuals = values - values.mean() / base * reference
        left_out = math.sqrt(max(0.0, 1 - n / self.total_rows))  # nothing is uncertain if all rows are measured
        return self._total(values), float(residuals.std(ddof=1)) / math.sqrt(n) * left_out * self.total_rows


def _rows(tensor: Tensor, first: int, count: int, wanted: int) -> np.ndarray:
    """float32[rows, n]: rows at even distances of the `count` rows from `first`; whole groups of interleaved types."""
    group = tensor.type.interleave
    groups = count // group
    picked = np.unique(np.linspace(0, groups - 1, min(groups, -(-wanted // group))).round().astype(int))
    parts = [tensor.rows(first + int(g) * group, first + int(g + 1) * group) for g in picked]
    return tensor.type.dequantize(np.concatenate(parts), tensor.shape[-1])
