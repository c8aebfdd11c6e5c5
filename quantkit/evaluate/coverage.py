"""What an importance matrix tells of the text that made it: which experts saw how much, and how its columns differ.

coverage            share of a weight's matrices (experts) that saw at least `threshold` vectors
effective experts   2^H, H the entropy in bits of the vectors' spread over the experts: as many experts, used evenly,
                    would be as hard to tell apart; of E experts E if all saw the same, 1 if one saw all
effective columns   2^H / n of the importance's spread over the n columns, mean over the experts by what they saw: 1
                    if all columns matter the same, when an importance matrix changes nothing
similarity          cosine of a weight's importances (mean over its experts) with those of the same weight in the
                    nearest layer before that has one: how alike the inputs of neighbouring layers are
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from quantkit.errors import DataError
from quantkit.formats.imatrix import Entry, Imatrix, few


@dataclass(frozen=True)
class Coverage:
    """One entry. `counts` is int64[matrices]; `layer` None and `similarity` None where there is no such thing.

    counted: whether each matrix's vectors were counted; of legacy files `counts` are evaluations, the same for all
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
    share_of_top: float  # what the hundredth part of the columns that matter most holds of all

    @property
    def covered(self) -> float:
        return 1 - len(self.few) / len(self.counts)

    def to_json(self) -> dict[str, Any]:
        tokens = {"min": int(self.counts.min()), "median": float(np.median(self.counts)), "max": int(self.counts.max())}
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
    """One row an entry, in their order. Matrices with fewer than `threshold` vectors are named in `few`."""
    means = {name: _mean(entry) for name, entry in imatrix.entries.items()}
    return [_row(imatrix, name, entry, means, threshold) for name, entry in imatrix.entries.items()]


def parted(imatrix: Imatrix, shapes: Mapping[str, tuple[int, ...]]) -> Imatrix:
    """The same with entries of legacy files parted into their matrices, by the shapes of a model's tensors.

    DataError where an entry has other values than its tensor has columns and matrices, or no entry has a tensor.
    """
    if shapes.keys().isdisjoint(imatrix.entries):
        raise DataError(
            f"none of the {len(imatrix)} entries, as {next(iter(imatrix.entries), 'none')}, is that of one of the "
            f"model's {len(shapes)} tensors; it was measured on another model"
        )
    entries = {}
    for name, entry in imatrix.entries.items():
        shape = shapes.get(name)
        if shape is None or len(shape) < 2:
            entries[name] = entry
            continue
        matrices = int(np.prod(shape[:-2]))
        if entry.values.size != matrices * shape[-1]:
            raise DataError(
                f"{name}: the importance matrix has {entry.values.size} values, the model's tensor needs {matrices} x "
                f"{shape[-1]} = {matrices * shape[-1]}; it was measured on another model"
            )
        counts = np.broadcast_to(entry.counts, (matrices,)).copy()
        entries[name] = Entry(entry.columns(shape[-1]), counts, entry.calls)
    return Imatrix(entries, imatrix.chunks, imatrix.dataset, imatrix.chunk_size, imatrix.policy)


def _row(imatrix: Imatrix, name: str, entry: Entry, means: dict[str, np.ndarray], threshold: int) -> Coverage:
    matrices, columns = entry.values.shape
    counts = np.broadcast_to(entry.counts, (matrices,))
    layer, kind = _place(name)
    values = np.sort(entry.values.reshape(-1).astype(np.float64))
    top = values[-max(1, values.size // 100) :].sum() / (values.sum() or 1.0)
    counted = imatrix.chunk_size > 0
    return Coverage(
        name, layer, kind, columns, counts, counted, entry.calls,
        few(entry, matrices, threshold) if matrices > 1 else [],
        _effective(counts) if matrices > 1 and counted else None,
        _effective_columns(entry),
        _similarity(name, means),
        float(values.mean()), float(values[-1]), float(top),
    )  # fmt: skip


def _place(name: str) -> tuple[int | None, str]:
    found = re.match(r"blk\.(\d+)\.(.*?)(?:\.weight)?$", name)
    return (int(found[1]), found[2]) if found else (None, name.removesuffix(".weight"))


def _mean(entry: Entry) -> np.ndarray:
    """float64[n]: over the matrices, by what they saw; all count the same where none saw anything."""
    weights = np.broadcast_to(entry.counts, len(entry.values)).astype(np.float64)
    return np.average(entry.values.astype(np.float64), axis=0, weights=weights if weights.any() else None)


def _effective(parts: np.ndarray) -> float:
    """2^H of what parts are of their sum; 0 where all are 0."""
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
