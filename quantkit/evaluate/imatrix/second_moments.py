"""Collect second moments: for every distinct input of weights, the sum of x x^T over the vectors x that enter.

Weights that get the same array one after the other (q, k and v; gate and up) share an input: it is summed once. Of the
matrices of a stack (experts) that share an input with the next weight (gate and up), all are summed together: they see
the same hidden states. Inputs that belong to one expert (down) have sums of their own.

Sums are float32, of products that BLAS computes in panels of 256 columns, upper part only. So they are the same for any
number of threads on one machine.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from quantkit.codegen import thread_pool
from quantkit.errors import DataError, QuantkitError
from quantkit.formats.imatrix import Entry, Imatrix, SecondMoments
from quantkit.formats.imatrix.second_moments import BLOCK, pack, stored_values

FORMS = "full, blocks, blocks:N or auto"
_PANEL = 256  # columns
_ROUTER = re.compile(r"\.ffn_gate_inp(_shexp)?\.")
_SAME_INPUT = ("attn_q", "attn_k", "attn_v"), ("ffn_gate", "ffn_up"), ("ffn_gate_exps", "ffn_up_exps")


class HasShape(Protocol):
    """A tensor of a file or of a plan."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class MomentsForm:
    """What `--second-moments` asks for. `block`: columns of a block, 0 for the full form; `auto` chooses by size."""

    block: int
    auto: bool = False

    @classmethod
    def parse(cls, text: str) -> MomentsForm:
        """Read full, blocks, blocks:N or auto; QuantkitError otherwise."""
        name, colon, size = text.partition(":")
        if text == "auto":
            return cls(0, auto=True)
        if text == "full":
            return cls(0)
        if name == "blocks" and (not colon or (size.isdecimal() and 32 <= int(size) <= 1 << 16)):
            return cls(int(size) if colon else BLOCK)
        raise QuantkitError(f"--second-moments {text}: known are {FORMS}, N at least 32 columns")


@dataclass
class InputSums:
    """Sums of one input. blocks: for each stored matrix, float32[n, n] for each block of columns."""

    blocks: list[list[np.ndarray]]
    tokens: np.ndarray  # int64[stored]

    @classmethod
    def zeros(cls, stored: int, columns: int, block: int) -> InputSums:
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


def _placed(blocks: list[np.ndarray]) -> Iterator[tuple[int, np.ndarray]]:
    """Blocks with their first columns."""
    first = 0
    for sums in blocks:
        yield first, sums
        first += len(sums)


@dataclass
class MomentsCollector:
    """Sums of all inputs by their first weight, and the other weights that have the same input.

    blocks   columns of a block by weight, of `plan_blocks`
    """

    blocks: Mapping[str, int]
    sums: dict[str, InputSums] = field(default_factory=dict)
    first: dict[str, str] = field(default_factory=dict)  # of every weight: the first weight with its input
    _last: tuple[str, np.ndarray] | None = None

    def observe(self, name: str, x: np.ndarray, matrix: int, matrices: int) -> None:
        """Add float32[tokens, n] that enters matrix `matrix` of the weight `name`."""
        if name not in self.blocks:
            return
        if self._last is not None and self._last[1] is x and name not in self.sums:
            self.first[name] = self.first[self._last[0]]
            return
        self._last = name, x
        self.first[name] = name
        rows = x.reshape(-1, x.shape[-1])
        if name not in self.sums:
            shared = _shares_states(name)
            self.sums[name] = InputSums.zeros(1 if shared else matrices, x.shape[-1], self.blocks[name])
        sums = self.sums[name]
        sums.add(rows, matrix if len(sums.blocks) > 1 else 0)

    def result(self, entries: Mapping[str, Entry], origin: str) -> dict[str, SecondMoments]:
        """By weight name. DataError that names the first weight that NaN or Inf entered."""
        made: dict[str, SecondMoments] = {}
        for name, first in self.first.items():
            if first not in made:
                sums = self.sums[first]
                if not all(np.isfinite(block).all() for matrix in sums.blocks for block in matrix):
                    raise DataError(f"{first}: NaN or Inf entered it, so it has no second moments")
                packed = np.stack([pack(blocks) for blocks in sums.blocks])
                columns = entries[first].values.shape[1]
                made[first] = SecondMoments(columns, self.blocks[first], packed, sums.tokens.copy(), origin)
            made[name] = made[first]
        return {name: made[name] for name in entries if name in made}


def _shares_states(name: str) -> bool:
    """Whether the matrices of a stack get the same hidden states: those of gate and up of experts do."""
    return any(kind in name for kind in ("ffn_gate_exps", "ffn_up_exps", "ffn_gate_up_exps"))


# --------------------------------------------------------------------------------------------------------------- sizes


def plan_blocks(shapes: Mapping[str, tuple[int, ...]], form: MomentsForm, limit: int | None) -> dict[str, int]:
    """Columns of a block for each weight that is measured, float32 sums and float16 file within `limit` bytes.

    shapes   of the weights in the blocks of a model (rows last but one)
    limit    bytes of the sums in memory; None: no limit

    With `auto`, inputs are full, and the widest become blocks until all fit. QuantkitError where they do not fit.
    """
    columns = {name: shape[-1] for name, shape in shapes.items() if len(shape) > 1}
    blocks = {name: form.block or n for name, n in columns.items()}
    if form.auto and limit is not None:
        for name in sorted(columns, key=lambda name: -columns[name]):
            if sizes(shapes, blocks)[0] <= limit:
                break
            blocks[name] = min(BLOCK, columns[name])
    memory, stored = sizes(shapes, blocks)
    if limit is not None and memory > limit:
        raise QuantkitError(
            f"second moments need {memory:,} bytes of memory ({stored:,} in the file), --second-moments-size is "
            f"{limit:,}; take --second-moments blocks, smaller blocks, or a larger size"
        )
    return blocks


def measured_shapes(tensors: Iterable[HasShape]) -> dict[str, tuple[int, ...]]:
    """Shapes of the weights whose inputs are measured: matrices of the blocks but routers, which stay f32."""
    return {
        t.name: t.shape
        for t in tensors
        if len(t.shape) > 1 and t.name.startswith("blk.") and t.name.endswith(".weight") and not _ROUTER.search(t.name)
    }


def sizes(shapes: Mapping[str, tuple[int, ...]], blocks: Mapping[str, int]) -> tuple[int, int]:
    """Bytes of the sums in memory, and of the correlations in the file, where weights share inputs as is usual."""
    memory = stored = 0
    for name, block in blocks.items():
        if _is_repeated(name, shapes):
            continue
        n, matrices = shapes[name][-1], 1 if _shares_states(name) else int(np.prod(shapes[name][:-2]))
        whole, rest = divmod(n, min(block, n))
        memory += 4 * matrices * (whole * min(block, n) ** 2 + rest**2)
        stored += 2 * matrices * stored_values(n, block)
    return memory, stored


def _is_repeated(name: str, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether a weight of the same layer that comes before it in _SAME_INPUT has the same input."""
    for kinds in _SAME_INPUT:
        for i, kind in enumerate(kinds):
            if f".{kind}." in name:
                return any(name.replace(f".{kind}.", f".{other}.") in shapes for other in kinds[:i])
    return False


# ------------------------------------------------------------------------------------------------------------- to show


@dataclass(frozen=True)
class InputMoments:
    """Statistics of the second moments of one input, of its matrix that saw most tokens.

    name              the first weight that has this input; `shared_with`: the others
    effective_rank    (sum of the eigenvalues)^2 / (sum of their squares)
    first_share       the largest eigenvalue in their sum
    """

    name: str
    shared_with: list[str]
    form: str
    columns: int
    matrices: int
    tokens: int
    tokens_per_column: float
    effective_rank: float
    first_share: float
    bytes: int


def describe(imatrix: Imatrix) -> list[InputMoments]:
    """One row for each input that has second moments."""
    weights: dict[int, list[str]] = {}
    for name, moments in imatrix.second_moments.items():
        weights.setdefault(id(moments), []).append(name)
    rows = []
    for name, *others in weights.values():
        moments = imatrix.second_moments[name]
        matrix = int(np.argmax(moments.tokens))
        h = moments.dense(imatrix[name].columns(moments.columns)[matrix], matrix).astype(np.float64)
        trace = float(np.trace(h)) or 1.0
        rows.append(InputMoments(
            name, others, moments.form, moments.columns, len(moments.correlations), int(moments.tokens[matrix]),
            float(moments.tokens[matrix]) / moments.columns, trace**2 / (float((h * h).sum()) or 1.0),
            _largest_eigenvalue(h) / trace, moments.nbytes,
        ))  # fmt: skip
    return rows


def _largest_eigenvalue(h: np.ndarray) -> float:
    """By power iteration, from the sum of all columns."""
    v = np.ones(len(h)) / max(1, len(h)) ** 0.5
    value = 0.0
    for _ in range(50):
        v = h @ v
        value = float(np.linalg.norm(v))
        if not value:
            break
        v /= value
    return value
