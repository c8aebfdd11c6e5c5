"""Importance matrices in memory: entries, merging, values for experts that saw no tokens.

Imatrix          entries by weight name, number of chunks, dataset
merge            the weighted mean of several
fill_missing     values for experts that saw no tokens, by one of POLICIES
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from quantkit.errors import DataError
from quantkit.formats.imatrix import second_moments
from quantkit.formats.imatrix.second_moments import SecondMoments

POLICIES = ("weight-one", "layer-mean", "error")
TOKEN_WEIGHTS = ("attention", "none")
DESCRIBED_DATASET = re.compile(r"(.*) \(missing experts: (weight-one|layer-mean)\)", re.DOTALL)


@dataclass
class Entry:
    """The activations that entered one weight (a matrix, or one matrix for each expert or head).

    values: float32[matrices, n], mean square of each column over the vectors seen. A matrix that saw none has the
            values that `fill_missing` gave it.
    counts: int64[matrices], vectors seen by each matrix. Legacy files do not have them; then they are `calls`.
    calls:  graph evaluations behind the values: the weight in a merge if counts are not known.
    """

    values: np.ndarray
    counts: np.ndarray
    calls: int

    @property
    def missing(self) -> list[int]:
        """Numbers of the matrices that saw no vectors."""
        return np.flatnonzero(self.counts == 0).tolist()

    def fits(self, matrices: int, columns: int) -> bool:
        """Whether the values are those of so many matrices; one row may hold all, as in legacy files."""
        return self.values.shape in ((matrices, columns), (1, matrices * columns))

    @property
    def size(self) -> str:
        """The numbers of matrices and columns, for errors."""
        return " x ".join(map(str, self.values.shape))

    def columns(self, n: int) -> np.ndarray:
        """The values as float32[matrices, n]; DataError unless they are a multiple of `n` columns."""
        if n <= 0 or self.values.size % n:
            raise DataError(f"{self.values.size} importance values do not fit rows of {n} columns")
        return self.values.reshape(-1, n)


@dataclass
class Imatrix:
    """Entries by weight name, in the order in which the weights were first used.

    chunks      number of chunks of text          chunk_size  tokens of a chunk; 0 if counts are not known
    dataset     names of the texts, joined by +   policy      what `fill_missing` applied, "" if no values were missing

    second_moments   by weight name, for weights that have them; weights that share an input share the object
    token_weights    what weighed the tokens in the inputs of queries, keys and values: one of TOKEN_WEIGHTS
    """

    entries: dict[str, Entry]
    chunks: int = 0
    dataset: str = ""
    chunk_size: int = 0
    policy: str = ""
    second_moments: dict[str, SecondMoments] = field(default_factory=dict)
    token_weights: str = "none"

    @property
    def described(self) -> str:
        """The dataset, followed by the policy for experts that saw no tokens, if one was applied."""
        return f"{self.dataset} (missing experts: {self.policy})" if self.policy else self.dataset

    def __getitem__(self, name: str) -> Entry:
        return self.entries[name]

    def __contains__(self, name: object) -> bool:
        return name in self.entries

    def __len__(self) -> int:
        return len(self.entries)


def merge(imatrices: Iterable[Imatrix], weights: Sequence[float] | None = None) -> Imatrix:
    """The weighted mean of several importance matrices; `weights` are 1 by default.

    Each matrix of an entry is weighted by the number of vectors that entered it. So the values of an expert come from
    the runs that used it. If some counts are not known (legacy files), the weight is the number of evaluations. Entries
    that only some have are included. Entries with 0 calls count as one call. Chunks are added up; datasets are joined
    by "+". DataError for other weights, and for matrices of different models.
    """
    matrices = list(imatrices)
    shares = [1.0] * len(matrices) if weights is None else list(weights)
    if not matrices or len(shares) != len(matrices):
        raise DataError(f"cannot merge {len(matrices)} importance matrices with {len(shares)} weights")
    if any(not (np.isfinite(share) and share > 0) for share in shares):
        raise DataError(f"weights of a merge must be finite and positive, got {shares}")
    found: dict[str, list[tuple[float, Entry]]] = {}
    for share, matrix in zip(shares, matrices):
        for name, entry in matrix.entries.items():
            found.setdefault(name, []).append((share, entry))
    sizes = {m.chunk_size for m in matrices}
    counted = 0 not in sizes
    entries = {name: _mean(name, parts, counted) for name, parts in found.items()}
    datasets = list(dict.fromkeys(m.dataset for m in matrices if m.dataset))
    policy = min((m.policy for m in matrices if m.policy), key=POLICIES.index, default="")  # independent of their order
    if counted and not any(entry.missing for entry in entries.values()):
        policy = ""  # what one run lacked another saw
    weights_of_tokens = {m.token_weights for m in matrices}
    if len(weights_of_tokens) > 1:
        described = ", ".join(f"{m.dataset or 'an unnamed text'}: {m.token_weights}" for m in matrices)
        raise DataError(
            f"importance matrices with different token weights cannot be merged ({described}); measure them with the "
            "same --token-weights"
        )
    chunks = sum(m.chunks for m in matrices)
    made = Imatrix(
        entries, chunks, "+".join(datasets), max(sizes) if counted else 0, policy, token_weights=min(weights_of_tokens)
    )
    return replace(made, second_moments=_merged_moments(list(zip(shares, matrices)), entries))


def _merged_moments(parts: list[tuple[float, Imatrix]], entries: dict[str, Entry]) -> dict[str, SecondMoments]:
    """The second moments of a merge: of the weights for which all parts that have the entry have them."""
    made: dict[tuple[int, ...], SecondMoments] = {}
    found = {}
    for name in entries:
        own = [(share, matrix) for share, matrix in parts if name in matrix]
        if all(name in matrix.second_moments for _, matrix in own):
            key = tuple(id(matrix.second_moments[name]) for _, matrix in own)
            if key not in made:  # of weights that share an input in all parts
                measured = [(share, m.second_moments[name], m[name].columns(m.second_moments[name].columns))
                            for share, m in own]  # fmt: skip
                made[key] = second_moments.merge(name, measured)
            found[name] = made[key]
    return found


def loses_counts(imatrices: Iterable[Imatrix]) -> bool:
    """Whether a merge loses the counts of some, because others have none."""
    return len({m.chunk_size > 0 for m in imatrices}) > 1


def _mean(name: str, parts: list[tuple[float, Entry]], counted: bool) -> Entry:
    """The weighted mean of one weight's entries, with as many matrices as the entry that has most."""
    shape = max((entry.values.shape for _, entry in parts), key=lambda s: s[0])
    if not all(entry.fits(*shape) for _, entry in parts):
        sizes = ", ".join(dict.fromkeys(entry.size for _, entry in parts))
        raise DataError(f"entry {name!r} has {sizes} values: these matrices are of different models")
    total = np.zeros(shape[0])
    values = np.zeros(shape)
    for share, entry in parts:
        seen = _spread(entry.counts, shape[0])
        weight = share * (seen if counted else max(1, entry.calls) * (seen > 0))
        total += weight
        values += weight[:, None] * entry.values.reshape(shape).astype(np.float64)
    filled = np.mean([entry.values.reshape(shape) for _, entry in parts], axis=0)  # for matrices that saw nothing
    known = total[:, None] > 0
    values = np.where(known, values / np.where(known, total[:, None], 1), filled)
    calls = sum(max(1, entry.calls) for _, entry in parts)
    counts = sum(_spread(e.counts, shape[0]) for _, e in parts) if counted else np.where(total > 0, calls, 0)
    return Entry(np.asarray(values, np.float32), np.asarray(counts, np.int64), calls)


def _spread(counts: np.ndarray, matrices: int) -> np.ndarray:
    """One count for each matrix, of an entry that may have one for all."""
    return np.broadcast_to(counts, (matrices,))


def check_policy(policy: str) -> None:
    """DataError unless `policy` is one of POLICIES."""
    if policy not in POLICIES:
        raise DataError(f"unknown policy for missing experts '{policy}'; known are {', '.join(POLICIES)}")


def fill_missing(imatrix: Imatrix, policy: str) -> Imatrix:
    """The importance matrix with values for experts that saw no tokens; its `policy` says how they were chosen.

    weight-one   ones: every column counts the same, as without an importance matrix; what llama.cpp does
    layer-mean   the mean of the layer's other experts, weighted by the vectors that each saw
    error        a DataError that names them

    Entries of which no matrix saw a vector are dropped: such tensors are quantized without importance.
    """
    check_policy(policy)
    entries, used = {}, ""
    for name, entry in imatrix.entries.items():
        missing = entry.missing
        if missing and policy == "error":
            some = ", ".join(map(str, missing[:8])) + (", …" if len(missing) > 8 else "")
            raise DataError(
                f"{name}: no token of {imatrix.dataset or 'the text'} entered {len(missing)} of {len(entry.counts)} "
                f"matrices: {some}; measure on more or more varied text, or choose --missing-experts layer-mean"
            )
        if len(missing) == len(entry.counts):
            continue
        if missing:
            values = entry.values.copy()
            mean = np.average(entry.values.astype(np.float64), axis=0, weights=entry.counts)
            values[missing] = 1.0 if policy == "weight-one" else mean
            entry, used = replace(entry, values=values), policy
        entries[name] = entry
    return replace(imatrix, entries=entries, policy=used)


def rarely_active(entry: Entry, matrices: int, threshold: int) -> list[int]:
    """Numbers of the matrices (experts) that saw fewer vectors than `threshold`.

    Without counts for each matrix, those whose values are all one or all zero: other programs fill in these for experts
    that saw nothing.
    """
    if len(entry.counts) == matrices > 1 and not (entry.counts == entry.calls).all():
        return np.flatnonzero(entry.counts < threshold).tolist()
    values = entry.values.reshape(matrices, -1)
    filled = (values == values[:, :1]).all(axis=1) & np.isin(values[:, 0], (0.0, 1.0))
    return [] if filled.all() else np.flatnonzero(filled).tolist()
