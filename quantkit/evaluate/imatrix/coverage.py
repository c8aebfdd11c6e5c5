"""Statistics of an importance matrix: how many vectors each expert saw, and how importance varies over columns.

coverage            share of a weight's matrices (experts) that saw at least `threshold` vectors
effective experts   2^H, with H the entropy in bits of the distribution of vectors over experts (its perplexity): E if
                    all E experts saw equally many, 1 if a single expert saw all
effective columns   2^H / n, with H the entropy of the importance over the n columns, averaged over experts weighted by
                    their vectors: 1 if all columns matter equally; then an importance matrix changes nothing
similarity          cosine of a weight's importances (mean over its experts) with those of the same weight in the
                    nearest earlier layer that has it: how similar the inputs of neighbouring layers are
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from quantkit.errors import DataError
from quantkit.formats.imatrix import Entry, Imatrix, rarely_active


@dataclass(frozen=True)
class Coverage:
    """Statistics of one entry. `layer` and `similarity` are None if the tensor has none.

    counts   int64[matrices]
    counted  vectors were counted per matrix; in legacy files `counts` are evaluations, equal for all matrices
    """

    name: str
    layer: int | None
    kind: str
    columns: int
    counts: np.ndarray
    counted: bool
    calls: int
    few: list[int]
    effective_experts: float | None
    effective_columns: float
    similarity: float | None
    mean: float
    largest: float
    share_of_top: float  # share of the importance in the top 1 % of the columns

    @property
    def median_count(self) -> float:
        """Median of the vectors that each matrix saw."""
        return float(np.median(self.counts))

    @property
    def covered(self) -> float:
        """Share of the matrices (experts) with enough vectors."""
        return 1 - len(self.few) / len(self.counts)

    def record(self) -> dict[str, Any]:
        """The statistics by name, for JSON."""
        tokens = {"min": int(self.counts.min()), "median": self.median_count, "max": int(self.counts.max())}
        return {
            "name": self.name,
            "matrices": len(self.counts),
            "values": self.columns * len(self.counts),
            "columns": self.columns,
            "calls": self.calls,
            "tokens": tokens if self.counted else None,
            "counts": self.counts.tolist() if self.counted else None,
            "few": self.few,
            "coverage": self.covered,
            "effective_experts": self.effective_experts,
            "effective_columns": self.effective_columns,
            "similarity": self.similarity,
            "mean": self.mean,
            "max": self.largest,
            "share_of_top_1_percent": self.share_of_top,
        }


def coverage(imatrix: Imatrix, threshold: int) -> list[Coverage]:
    """One row per entry, in their order. `few` lists the matrices with fewer than `threshold` vectors."""
    means = {name: mean_importance(entry) for name, entry in imatrix.entries.items()}
    return [_row(imatrix, name, entry, means, threshold) for name, entry in imatrix.entries.items()]


def split_by_matrix(imatrix: Imatrix, shapes: Mapping[str, tuple[int, ...]]) -> Imatrix:
    """Split the entries of a legacy file into their matrices (experts), by the shapes of a model's tensors.

    Raises DataError if an entry's values do not fit its tensor, or no entry has a tensor.
    """
    if shapes.keys().isdisjoint(imatrix.entries):
        raise DataError(
            f"none of the {len(imatrix)} entries (the first is {next(iter(imatrix.entries), 'none')}) names one of "
            f"the model's {len(shapes)} tensors; it was measured on another model"
        )
    entries = {}
    for name, entry in imatrix.entries.items():
        shape = shapes.get(name)
        if shape is None or len(shape) < 2:
            entries[name] = entry
            continue
        matrices = int(np.prod(shape[:-2]))
        if not entry.fits(matrices, shape[-1]):
            raise DataError(
                f"{name}: the importance matrix has {entry.size} values, the model's tensor needs {matrices} x "
                f"{shape[-1]} = {matrices * shape[-1]}; it was measured on another model"
            )
        counts = np.broadcast_to(entry.counts, (matrices,)).copy()
        entries[name] = Entry(entry.columns(shape[-1]), counts, entry.calls)
    return replace(imatrix, entries=entries)


def _row(imatrix: Imatrix, name: str, entry: Entry, means: dict[str, np.ndarray], threshold: int) -> Coverage:
    matrices, columns = entry.values.shape
    counts = np.broadcast_to(entry.counts, (matrices,))
    layer, kind = _place(name)
    values = np.sort(entry.values.reshape(-1).astype(np.float64))
    top = values[-max(1, values.size // 100) :].sum() / (values.sum() or 1.0)
    counted = imatrix.chunk_size > 0
    return Coverage(
        name, layer, kind, columns, counts, counted, entry.calls,
        rarely_active(entry, matrices, threshold) if matrices > 1 else [],
        _effective(counts) if matrices > 1 and counted else None,
        _effective_columns(entry),
        _similarity(name, means),
        float(values.mean()), float(values[-1]), float(top),
    )  # fmt: skip


def _place(name: str) -> tuple[int | None, str]:
    found = re.match(r"blk\.(\d+)\.(.*?)(?:\.weight)?$", name)
    return (int(found[1]), found[2]) if found else (None, name.removesuffix(".weight"))


def mean_importance(entry: Entry) -> np.ndarray:
    """float64[n]: mean over the matrices, weighted by their counts, or unweighted if all counts are 0."""
    weights = np.broadcast_to(entry.counts, len(entry.values)).astype(np.float64)
    return np.average(entry.values.astype(np.float64), axis=0, weights=weights if weights.any() else None)


def _effective(parts: np.ndarray) -> float:
    """2^H, with H the entropy of the parts' shares of their sum; 0 if all parts are 0."""
    total = float(parts.sum())
    if not total:
        return 0.0
    share = parts[parts > 0] / total
    return float(2.0 ** -(share * np.log2(share)).sum())


def _effective_columns(entry: Entry) -> float:
    weights = np.broadcast_to(entry.counts, len(entry.values)).astype(np.float64)
    found = [_effective(row.astype(np.float64)) / len(row) for row in entry.values]
    return float(np.average(found, weights=weights if weights.any() else None))


def _similarity(name: str, means: Mapping[str, np.ndarray]) -> float | None:
    found = re.match(r"blk\.(\d+)\.(.*)", name)
    if not found:
        return None
    before = next((n for k in range(int(found[1]) - 1, -1, -1) if (n := f"blk.{k}.{found[2]}") in means), None)
    if before is None or means[before].shape != means[name].shape:
        return None
    a, b = means[before], means[name]
    norms = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / norms if norms else None
