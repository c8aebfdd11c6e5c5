"""Collect second moments: for every distinct input of weights, the sum of x x^T over the vectors x that enter.

Weights that get the same array one after the other (q, k and v; gate and up) share an input: it is summed once. Of the
matrices of a stack (experts) that share an input with the next weight (gate and up), all are summed together: they see
the same hidden states. Inputs that belong to one expert (down) have sums of their own.

What is summed depends on the form in which an input is stored (`InputForm`): all products, those within blocks, or a
sketch of them (`input_sums`).
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from quantkit.errors import DataError, OptionError, QuantkitError
from quantkit.evaluate.imatrix.coverage import mean_importance
from quantkit.evaluate.imatrix.input_sums import InputSums, ProductSketch, ProductSums, sketch_columns
from quantkit.formats.imatrix import Entry, Imatrix, SecondMoments
from quantkit.formats.imatrix.factors import RANK
from quantkit.formats.imatrix.second_moments import BLOCK, stored_values
from quantkit.repack.eligible import EMBEDDING, OUTPUT

FORMS = "full, rank, rank:N, blocks, blocks:N or auto"
OUTPUT_NAMES = (OUTPUT, EMBEDDING)  # the second where a model has no matrix for the output alone
_NOT_MEASURED = re.compile(
    r"\.(ffn_gate_inp(_shexp)?|nextn\.embed_tokens"  # routers, and what is only looked up
    r"|ffn_gate_tid2eid|\w+_ape|\w*conv1d(_[qkv])?|ssm_norm|shortconv\.conv|altup_\w+_coef)\."  # no products
)
# Kinds of weights that get one array after another in a layer that has them.
_SAME_INPUT = (
    ("attn_q", "attn_q_a", "attn_k", "attn_v", "ssm_f_a", "attn_kv_a_mqa"),
    ("attn_qkv", "attn_gate", "ssm_beta", "ssm_alpha", "ssm_ba"),
    ("ssm_beta", "ssm_g_a"),
    ("attn_kv", "attn_compressor_kv", "attn_compressor_gate", "indexer_compressor_kv", "indexer_compressor_gate"),
    ("indexer.k_proj", "indexer.q_proj"),
    ("ple_key", "ple_value"),
    ("ffn_gate", "ffn_up"),
    ("ffn_gate_exps", "ffn_up_exps"),
    ("ffn_gate_shexp", "ffn_up_shexp"),
)


class HasShape(Protocol):
    """A tensor of a file or of a plan."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class InputForm:
    """How the second moments of an input are stored: blocks of `block` columns (one if full), or factors of `rank`."""

    block: int
    rank: int = 0

    @classmethod
    def of(cls, key: int | str) -> InputForm:
        """The form of a `key`."""
        if isinstance(key, str):
            return cls(0, int(key.removeprefix("rank:")))
        return cls(int(key))

    @property
    def key(self) -> int | str:
        """What stands for it in JSON and in hashes of settings: the columns of a block, or "rank:N"."""
        return f"rank:{self.rank}" if self.rank else self.block

    def named(self, columns: int) -> str:
        """As `SecondMoments.form`: "full", "blocks:N" or "rank:N"."""
        if self.rank:
            return f"rank:{self.rank}"
        return "full" if self.block >= columns else f"blocks:{self.block}"

    def zeros(self, stored: int, columns: int) -> InputSums:
        """Sums of nothing."""
        if self.rank:
            return ProductSketch.zeros(stored, columns, self.rank)
        return ProductSums.zeros(stored, columns, self.block)

    def memory(self, columns: int) -> int:
        """Bytes of the sums of a matrix."""
        if self.rank:
            return columns * (4 * sketch_columns(columns, self.rank) + 12)  # with squares and scales
        whole, rest = divmod(columns, min(self.block, columns))
        return 4 * (whole * min(self.block, columns) ** 2 + rest**2)

    def stored(self, columns: int) -> int:
        """Bytes in the file of a matrix."""
        return 2 * stored_values(columns, self.block, self.rank)


@dataclass(frozen=True)
class MomentsForm:
    """What `--second-moments` asks for; `auto` chooses by size.

    block   columns of a block, 0 for the full form
    rank    factors of a column, 0 for the other forms
    """

    block: int
    auto: bool = False
    rank: int = field(default=0, repr=False)  # the hash of a calibration is made of what repr shows, and of the plan

    @classmethod
    def parse(cls, text: str) -> MomentsForm:
        """Read full, rank, rank:N, blocks, blocks:N or auto; QuantkitError otherwise."""
        name, colon, size = text.partition(":")
        if text == "auto":
            return cls(0, auto=True)
        if text == "full":
            return cls(0)
        if name == "blocks" and (not colon or (size.isdecimal() and 32 <= int(size) <= 1 << 16)):
            return cls(int(size) if colon else BLOCK)
        if name == "rank" and (not colon or (size.isdecimal() and 1 <= int(size) <= 1 << 16)):
            return cls(0, rank=int(size) if colon else RANK)
        raise OptionError(f"--second-moments {text}: known are {FORMS}, N at least 32 columns or a rank of 1")

    def of(self, columns: int) -> InputForm:
        """The form of an input. It is full where factors would take as many bytes."""
        if self.rank and 2 * self.rank < columns:
            return InputForm(0, self.rank)
        return InputForm(self.block or columns)


@dataclass
class MomentsCollector:
    """Sums of all inputs by their first weight, and the other weights that have the same input.

    forms   by weight, of `plan_forms`
    """

    forms: Mapping[str, InputForm]
    sums: dict[str, InputSums] = field(default_factory=dict)
    first: dict[str, str] = field(default_factory=dict)  # of every weight: the first weight with its input
    _last: tuple[str, np.ndarray] | None = None

    def observe(self, name: str, x: np.ndarray, matrix: int, matrices: int) -> None:
        """Add float32[tokens, n] that enters matrix `matrix` of the weight `name`."""
        if name not in self.forms:
            return
        if self._last is not None and self._last[1] is x and name not in self.sums:
            self.first[name] = self.first[self._last[0]]
            return
        self._last = name, x
        self.first[name] = name
        rows = x.reshape(-1, x.shape[-1])
        if name not in self.sums:
            shared = _shares_states(name)
            self.sums[name] = self.forms[name].zeros(1 if shared else matrices, x.shape[-1])
        sums = self.sums[name]
        sums.add(rows, matrix if len(sums.tokens) > 1 else 0)

    def end_batch(self) -> None:
        """Drop the last input, which only the next calls of the same batch may share."""
        self._last = None

    def add(self, seen: MomentsObservation) -> None:
        """Add the sums of one call of a `MomentsRecorder`."""
        self.first[seen.name] = seen.first
        if seen.sums is None:
            return
        if seen.name not in self.sums:
            columns = sum(len(block) for block in seen.sums.blocks[0])
            self.sums[seen.name] = self.forms[seen.name].zeros(seen.stored, columns)
        sums = self.sums[seen.name]
        assert isinstance(sums, ProductSums)
        sums.add_sums(seen.sums, seen.matrix)

    def result(self, entries: Mapping[str, Entry], origin: str) -> dict[str, SecondMoments]:
        """By weight name. DataError that names the first weight that NaN or Inf entered."""
        made: dict[str, SecondMoments] = {}
        for name, first in self.first.items():
            if first not in made:
                sums, form = self.sums[first], self.forms[first]
                if not sums.are_finite():
                    raise DataError(f"{first}: NaN or Inf entered it, so it has no second moments")
                columns = entries[first].values.shape[1]
                block = columns if form.rank else form.block
                made[first] = SecondMoments(columns, block, sums.packed(), sums.tokens.copy(), origin, form.rank)
            made[name] = made[first]
        return {name: made[name] for name in entries if name in made}


class MomentsObservation(NamedTuple):
    """What one call of an observer adds to second moments.

    first   the first weight with the same input; `name` itself for one with sums of its own
    sums    of the input, of one stored matrix; None where those of `first` have it
    """

    name: str
    first: str
    matrix: int
    stored: int
    sums: ProductSums | None


class MomentsRecorder:
    """Observes as a `MomentsCollector` does, and keeps the sums of each call in `seen`, in their order.

    QuantkitError for factors (rank:N): a sketch depends on the vectors that came before.
    """

    def __init__(self, forms: Mapping[str, InputForm]):
        if ranked := [name for name, form in forms.items() if form.rank]:
            raise QuantkitError(
                f"second moments as factors, such as rank:{forms[ranked[0]].rank} of {ranked[0]}, depend on the order "
                "of chunks, so workers cannot sum them; take full or blocks:N, add --by-layer, or run without --cluster"
            )
        self.seen: list[MomentsObservation] = []
        self._forms, self._first = forms, dict[str, str]()
        self._own: set[str] = set()  # weights with sums
        self._last: tuple[str, np.ndarray] | None = None

    def observe(self, name: str, x: np.ndarray, matrix: int, matrices: int) -> None:
        """Keep the sums of float32[tokens, n] that enters matrix `matrix` of the weight `name`."""
        if name not in self._forms:
            return
        if self._last is not None and self._last[1] is x and name not in self._own:
            self._first[name] = self._first[self._last[0]]
            self.seen.append(MomentsObservation(name, self._first[name], 0, 0, None))
            return
        self._last, self._first[name] = (name, x), name
        self._own.add(name)
        rows, stored = x.reshape(-1, x.shape[-1]), 1 if _shares_states(name) else matrices
        sums = ProductSums.zeros(1, x.shape[-1], self._forms[name].block)
        sums.add(rows, 0)
        self.seen.append(MomentsObservation(name, name, matrix if stored > 1 else 0, stored, sums))


def _shares_states(name: str) -> bool:
    """Whether the matrices of a stack get the same hidden states: those of gate and up of experts do."""
    return any(kind in name for kind in ("ffn_gate_exps", "ffn_up_exps", "ffn_gate_up_exps"))


# --------------------------------------------------------------------------------------------------------------- sizes

# What `auto` stores where not all fits: the best first, of those that take less memory than the one before.
_SMALLER = MomentsForm(0, rank=RANK), MomentsForm(0, rank=32), MomentsForm(64)


def plan_forms(shapes: Mapping[str, tuple[int, ...]], form: MomentsForm, limit: int | None) -> dict[str, InputForm]:
    """The form of each weight's input, so that sums fit in `limit` bytes of memory.

    shapes   of the weights in the blocks of a model (rows last but one)
    limit    bytes; None: no limit

    With `auto`, inputs are full. Until all fit, those that take most memory get the first form of _SMALLER, then the
    next. QuantkitError where they do not fit.
    """
    columns = {name: shape[-1] for name, shape in shapes.items() if len(shape) > 1}
    forms = {name: form.of(n) for name, n in columns.items()}
    memory, stored = sizes(shapes, forms)
    if limit is not None and form.auto and memory > limit:
        _make_smaller(shapes, forms, limit)
        memory, stored = sizes(shapes, forms)
    if limit is not None and memory > limit:
        raise QuantkitError(
            f"second moments need {memory:,} bytes of memory ({stored:,} in the file), --second-moments-size is "
            f"{limit:,}; take --second-moments rank:32, blocks:64, or a larger size"
        )
    return forms


def _make_smaller(shapes: Mapping[str, tuple[int, ...]], forms: dict[str, InputForm], limit: int) -> None:
    """Change forms, those of weights with the same input together, until sums fit in `limit`, or none is left."""
    sharing: dict[str, list[str]] = {}
    for name in forms:
        sharing.setdefault(_first_with_input(name, shapes), []).append(name)
    memory = sizes(shapes, forms)[0]
    for smaller in _SMALLER:
        by_size = sorted(sharing, key=lambda name: -_matrices(name, shapes) * forms[name].memory(shapes[name][-1]))
        for first in by_size:
            columns, matrices = shapes[first][-1], _matrices(first, shapes)
            saved = matrices * (forms[first].memory(columns) - smaller.of(columns).memory(columns))
            if memory <= limit:
                return
            if saved > 0:
                memory -= saved
                forms.update({name: smaller.of(columns) for name in sharing[first]})


def output_matrix(names: Container[str]) -> str | None:
    """The name of the output matrix of a model that has tensors of these names; None without one."""
    return next((name for name in OUTPUT_NAMES if name in names), None)


def measured_shapes(tensors: Iterable[HasShape], process_output: bool = False) -> dict[str, tuple[int, ...]]:
    """Shapes of the weights whose inputs are measured: matrices of the blocks; with `process_output` the output matrix,
    which may be the embedding.

    Not measured: routers, which stay f32; convolutions, tables and the like, which are not multiplied as matrices. Of
    attn_kv_b and attn_k_b, attn_v_b, which may be in one file, `-mla` decides which are: all are here.
    """
    shapes = {t.name: t.shape for t in tensors if len(t.shape) > 1 and t.name.endswith(".weight")}
    output = output_matrix(shapes) if process_output else None
    return {
        name: shape
        for name, shape in shapes.items()
        if name == output or (name.startswith("blk.") and not _NOT_MEASURED.search(name))
    }


def sizes(shapes: Mapping[str, tuple[int, ...]], forms: Mapping[str, InputForm]) -> tuple[int, int]:
    """Bytes of the sums in memory, and of what is stored in the file, where weights share inputs as is usual."""
    memory = stored = 0
    for name, form in forms.items():
        if _first_with_input(name, shapes) == name:
            memory += _matrices(name, shapes) * form.memory(shapes[name][-1])
            stored += _matrices(name, shapes) * form.stored(shapes[name][-1])
    return memory, stored


def _matrices(name: str, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Matrices of a stack that are summed apart."""
    return 1 if _shares_states(name) else int(np.prod(shapes[name][:-2]))


def _first_with_input(name: str, shapes: Mapping[str, tuple[int, ...]]) -> str:
    """The first weight in _SAME_INPUT of the same layer that has the same input; `name` where there is none before."""
    for kinds in _SAME_INPUT:
        for i, kind in enumerate(kinds):
            if f".{kind}." in name:
                others = (name.replace(f".{kind}.", f".{other}.") for other in kinds[:i])
                return next((other for other in others if other in shapes), name)
    return name


# ------------------------------------------------------------------------------------------------------------- to show


@dataclass(frozen=True)
class InputMoments:
    """Statistics of the second moments of one input: of its matrix that saw most tokens, or of all that share them.

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
        entry = imatrix[name]
        own = entry.values[matrix] if len(moments.tokens) > 1 else mean_importance(entry)
        h = moments.dense(own, matrix).astype(np.float64)
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
