"""The error of encodings in the metric of a matrix' inputs, from a sample of its rows.

    error = sum over rows of e H e^T,  e = decoded row - row,  H = E[x x^T] of the inputs

With second moments in the importance matrix, H is that (correlations shrunk, without damping); with importance alone
the diagonal of H, and without either the identity. Rows are taken at even distances. What decides is the ratio of a
type's error to that of the probe, and both are measured on the same rows: its standard error is that of a ratio of
paired means, mostly a few per cent for 128 rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from quantkit.formats.gguf import Tensor
from quantkit.pipelines.second_moments import PreparedMoments, inputs_of
from quantkit.types import QuantType

MATRICES = 8  # of a stack of experts, sampled: each has second moments of its own
_COLUMNS = 1024  # of second moments that are float64 at a time


class EncodingErrors(NamedTuple):
    """Errors of a tensor's encodings, for all its rows.

    metric    "second moments", "importance" or "plain"
    probe     the error in the probe's type
    by_type   the error in each type, and the standard error of its ratio to the probe's, times that of the probe
    """

    metric: str
    probe: float
    by_type: dict[str, tuple[float, float]]


def encoding_errors(
    tensor: Tensor,
    probe: QuantType,
    kinds: Sequence[QuantType],
    moments: PreparedMoments | None = None,
    *,
    rows: int = 128,
    in_products: bool = True,
    effort: str = "normal",
    threads: int | None = None,
) -> EncodingErrors:
    """Encode about `rows` rows of a tensor in each type; `moments` says what was measured of its inputs.

    in_products   the values count that products use, not those that a lookup of rows gives (`QuantType.dequantize`)
    """
    encoded = list(dict.fromkeys([probe, *kinds]))
    values, metric = row_errors(
        tensor, encoded, moments, rows=rows, in_products=in_products, effort=effort, threads=threads
    )
    reference, total = values[0], tensor.n_rows
    found = {kind.name.lower(): _scaled(values[encoded.index(kind)], reference, total) for kind in kinds}
    return EncodingErrors(metric, float(reference.mean()) * total, found)


def row_errors(
    tensor: Tensor,
    kinds: Sequence[QuantType],
    moments: PreparedMoments | None,
    *,
    rows: int,
    in_products: bool = True,
    effort: str = "normal",
    threads: int | None = None,
) -> tuple[np.ndarray, str]:
    """float64[types, sampled rows]: the error of each row in each type; and the metric.

    One matrix after another, so that second moments of one input are in memory, which all types share.
    """
    columns, of_matrix, count = tensor.shape[-1], tensor.shape[-2], math.prod(tensor.shape[:-2])
    chosen = np.unique(np.linspace(0, count - 1, min(count, MATRICES)).round().astype(int)).tolist()
    wanted = max(1, -(-rows // len(chosen)))
    found, metric = [], "plain"
    for matrix in chosen:
        _, importance, stored = inputs_of(tensor.name, columns, matrix, None if moments is None else moments.imatrix)
        x = _rows(tensor, matrix * of_matrix, of_matrix, wanted)
        if importance is not None:
            metric = "importance" if stored is None else "second moments"
        h = stored.dense(importance, matrix) if stored is not None and importance is not None else importance
        of_types = []
        for kind in kinds:
            data = _encoded(tensor.name, x, matrix, kind, moments, effort, threads)
            e = kind.dequantize(data, columns, products=in_products).astype(np.float64) - x
            of_types.append(_squares(e, h))
        found.append(np.stack(of_types))
    return np.concatenate(found, axis=1), metric


def _encoded(
    name: str,
    x: np.ndarray,
    matrix: int,
    kind: QuantType,
    moments: PreparedMoments | None,
    effort: str,
    threads: int | None,
) -> np.ndarray:
    """Rows of a matrix encoded as those of a file, with importance of 1 where a type requires what nobody measured."""
    importance, prepared = None, None
    if moments is not None:
        importance, prepared = moments.of_matrix(name, x.shape[1], matrix, kind, effort)
    if importance is None and kind.requires_imatrix:
        importance = np.ones(x.shape[1], np.float32)
    second_moments = prepared() if prepared is not None else None
    return kind.quantize(x, importance, second_moments=second_moments, effort=effort, threads=threads)


def _squares(e: np.ndarray, h: np.ndarray | None) -> np.ndarray:
    """float64[rows]: e H e^T of each row of float64[rows, n]; H float32[n, n], its diagonal, or None: identity."""
    if h is None or h.ndim == 1:
        found: np.ndarray = (e * e) @ (np.ones(e.shape[1]) if h is None else h.astype(np.float64))
        return found
    found = np.zeros(len(e))
    for first in range(0, len(h), _COLUMNS):
        some = slice(first, first + _COLUMNS)
        found += np.einsum("ij,ij->i", e @ h[:, some].astype(np.float64), e[:, some])
    return found


def _scaled(values: np.ndarray, reference: np.ndarray, total: int) -> tuple[float, float]:
    """The sum over all rows, and the standard error of its ratio to the probe's, times that of the probe."""
    n, base, mean = len(values), float(reference.mean()), float(values.mean())
    if n < 2 or base <= 0:
        return mean * total, 0.0
    residuals = values - mean / base * reference
    left_out = math.sqrt(max(0.0, 1 - n / total))  # nothing is uncertain if all rows are measured
    return mean * total, float(residuals.std(ddof=1)) / math.sqrt(n) * left_out * total


def _rows(tensor: Tensor, first: int, count: int, wanted: int) -> np.ndarray:
    """float32[rows, n]: rows at even distances of the `count` rows from `first`; whole groups of interleaved types."""
    group = tensor.type.interleave
    groups = count // group
    picked = np.unique(np.linspace(0, groups - 1, min(groups, -(-wanted // group))).round().astype(int))
    parts = [tensor.rows(first + int(g) * group, first + int(g + 1) * group) for g in picked]
    return tensor.type.dequantize(np.concatenate(parts), tensor.shape[-1])
