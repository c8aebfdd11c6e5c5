"""KL divergence of a model from a base, token by token, with the statistics of ik_llama.cpp's llama-perplexity.

At every scored position, with q the model's probabilities and b the base's:

    nll      = -log q[target],  nll_base = -log b[target]
    kld      = sum of b_i (log b_i - log q_i) over i with log b_i > -16     (not renormalised: tiny negatives occur)
    same top = argmax q == argmax b, the first in a tie
    dp       = exp(-nll) - exp(-nll_base)

Errors are standard errors of a mean over n positions, err(x) = sqrt((mean x² - (mean x)²) / (n - 1)); both models see
the same tokens, so their difference uses cov(x, y) = (mean xy - mean x mean y) / (n - 1).
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from quantkit.codegen import jit, thread_pool
from quantkit.codegen.jit import kernel
from quantkit.errors import DataError, QuantkitError
from quantkit.evaluate import bounded
from quantkit.evaluate.base_files import base_reader, is_base_file
from quantkit.evaluate.chunk_log import run_log
from quantkit.evaluate.chunk_runs import Here, MeasureChunks
from quantkit.evaluate.conditions import Conditions, evaluation_conditions
from quantkit.evaluate.models import ChunkModel, OnLayer, OnMessage, OpenModel, no_message, open_model
from quantkit.evaluate.nll import first_largest, log_sum_exp_float64
from quantkit.evaluate.on_workers import ClusterRuns, WorkerModel, require_path, with_workers
from quantkit.evaluate.perplexity import PerplexityOptions, chunk_runner, perplexity
from quantkit.evaluate.progress import ChunkClock, ChunkProgress
from quantkit.evaluate.statistics import at_share, perplexity_of
from quantkit.evaluate.text import DEFAULT_BATCH, DEFAULT_CONTEXT, Chunks, with_bos
from quantkit.formats.atomic import check_outputs
from quantkit.formats.kld.base_file import BaseReader, EncodedRows
from quantkit.formats.kld.bounded_file import BoundedReader, BoundedRows
from quantkit.formats.kld.scored_tokens import ScoredTokens

if TYPE_CHECKING:
    from distributed import Client

    from quantkit.runtime.model import Model
    from quantkit.tokenizers.tokenizer import Tokenizer

_SAME_TOKENIZER = (
    0.98  # share of tokens that survive decoding and encoding by the same tokenizer; other tokenizers reach 0.9
)


@kernel
def _compare_rows(
    logits: np.ndarray, words: np.ndarray, targets: np.ndarray, nll: np.ndarray, nll_base: np.ndarray,
    kld: np.ndarray, same_top: np.ndarray,
) -> None:  # fmt: skip
    """Compare float32[rows, n] logits with the base's uint16[rows, 4 + n] words (padded); fill 4 arrays of [rows]."""
    rows, n = logits.shape
    for r in range(rows):
        row, codes, header = logits[r], words[r, 4 : 4 + n], words[r, :4].view(np.float32)
        scale, low = np.float64(header[0]), np.float64(header[1])
        log_sum = log_sum_exp_float64(row)
        kld_of_row = 0.0
        for i in range(n):
            log_b = scale * codes[i] + low
            if log_b > -16.0:
                kld_of_row += np.exp(log_b) * (log_b - (np.float64(row[i]) - log_sum))
        target = targets[r]
        nll[r] = log_sum - np.float64(row[target])
        nll_base[r] = -(scale * codes[target] + low)
        kld[r] = kld_of_row
        same_top[r] = first_largest(row) == first_largest(codes)


class RowFigures(NamedTuple):
    """Figures of scored positions, one row per position: float64, and bool for same_top.

    bound_terms: float64[rows, bounded.BOUND_TERMS], the terms of the KLD's bound; None for an exact base.
    """

    nll: np.ndarray
    nll_base: np.ndarray
    kld: np.ndarray
    same_top: np.ndarray
    bound_terms: np.ndarray | None = None


def compare_rows(logits: np.ndarray, base: EncodedRows | BoundedRows, targets: np.ndarray) -> RowFigures:
    """Figures of float32[rows, n_vocab] logits against the base's rows; targets int[rows]."""
    rows = len(logits)
    if isinstance(base, BoundedRows):
        values, bound_terms, same_top = bounded.compare_rows(logits, base, targets)
        nll, nll_base, value = values.T
        return RowFigures(nll, nll_base, value, same_top, bound_terms)
    figures = (np.empty(rows), np.empty(rows), np.empty(rows), np.empty(rows, np.bool_))
    inputs = (np.ascontiguousarray(logits), base.words, np.asarray(targets, np.int32))
    frozen = [jit.readonly(array) for array in inputs]

    def task(a: int, b: int) -> None:
        _compare_rows(*(array[a:b] for array in frozen), *(array[a:b] for array in figures))

    thread_pool.over_rows(task, rows)
    return RowFigures(*figures)


# ---------------------------------------------------------------------------------------------------------- statistics


class Estimate(NamedTuple):
    """A value and its standard error."""

    value: float
    error: float


def mean_error(x: np.ndarray) -> float:
    """Standard error of the mean; 0 for ten values or fewer, or if they do not vary."""
    variance = float(np.mean(x * x) - x.mean() ** 2)
    return math.sqrt(variance / (x.size - 1)) if x.size > 10 and variance > 0 else 0.0


def mean_covariance(x: np.ndarray, y: np.ndarray) -> float:
    """Covariance of the two means; 0 for fewer than ten values."""
    return float(np.mean(x * y) - x.mean() * y.mean()) / (x.size - 1) if x.size >= 10 else 0.0


@dataclass(frozen=True)
class Divergence:
    """The divergence of a model from a base: arrays of [n], one value per scored position, in the text's order.

    The properties are figures with standard errors over tokens, as llama-perplexity prints them. `seconds` is the time
    of the run, without opening the model; `conditions` are what the figures depend on besides the files.
    """

    nll: np.ndarray  # float64, nats
    nll_base: np.ndarray  # float64, nats
    kld: np.ndarray  # float64, nats
    same_top: np.ndarray  # bool
    bound_terms: np.ndarray | None = None  # float64[n, bounded.BOUND_TERMS]; None for an exact base
    seconds: float = 0.0
    conditions: Conditions = field(default_factory=dict)
    chunks: Chunks | None = None  # the text, with the scored tokens

    def __len__(self) -> int:
        return self.nll.size

    @property
    def dp(self) -> np.ndarray:
        """Difference of the target's probability, model minus base."""
        found: np.ndarray = np.exp(-self.nll) - np.exp(-self.nll_base)
        return found

    @property
    def ppl(self) -> Estimate:
        """Perplexity of the model."""
        value = perplexity_of(self.nll.mean())
        return Estimate(value, value * mean_error(self.nll))

    @property
    def ppl_base(self) -> Estimate:
        """Perplexity of the base."""
        value = perplexity_of(self.nll_base.mean())
        return Estimate(value, value * mean_error(self.nll_base))

    @property
    def correlation(self) -> float:
        """Correlation of the two ln PPL."""
        product = mean_error(self.nll) * mean_error(self.nll_base)
        return mean_covariance(self.nll, self.nll_base) / product if product else math.nan

    @property
    def ln_ratio(self) -> Estimate:
        """ln(PPL / PPL of the base), paired."""
        e, e_base = mean_error(self.nll), mean_error(self.nll_base)
        variance = e**2 + e_base**2 - 2 * mean_covariance(self.nll, self.nll_base)
        return Estimate(float(self.nll.mean() - self.nll_base.mean()), math.sqrt(max(0.0, variance)))

    @property
    def ratio(self) -> Estimate:
        """PPL / PPL of the base, paired."""
        value = perplexity_of(self.ln_ratio.value)
        return Estimate(value, value * self.ln_ratio.error)

    @property
    def difference(self) -> Estimate:
        """PPL - PPL of the base, paired."""
        (p, e), (p_base, e_base) = self.ppl, self.ppl_base
        variance = e**2 + e_base**2 - 2 * p * p_base * mean_covariance(self.nll, self.nll_base)
        return Estimate(p - p_base, math.sqrt(max(0.0, variance)))

    @property
    def mean_kld(self) -> Estimate:
        """Mean KL divergence, in nats."""
        return Estimate(float(self.kld.mean()), mean_error(self.kld))

    @property
    def bound(self) -> float:
        """Bound, in nats, of the distance to the mean KLD with an exact base; 0 for an exact base.

        It fails with a probability of at most `bounded_file.FAILURE_PROBABILITY`.
        """
        return 0.0 if self.bound_terms is None else bounded.bound(self.bound_terms)

    @property
    def limits(self) -> tuple[float, float]:
        """The interval that holds the mean KLD with an exact base."""
        mean = float(self.kld.mean())
        return (mean, mean) if self.bound_terms is None else (max(0.0, mean - self.bound), mean + self.bound)

    @property
    def mean_dp(self) -> Estimate:
        """Mean difference of the token's probability, model minus base."""
        return Estimate(float(self.dp.mean()), mean_error(self.dp))

    @property
    def rms_dp(self) -> Estimate:
        """Root mean square of the difference of the token's probability."""
        squares = self.dp**2
        value = math.sqrt(squares.mean())
        return Estimate(value, mean_error(squares) / (2 * value) if value else 0.0)

    @property
    def top_agreement(self) -> Estimate:
        """Fraction of positions where both models rank the same token first."""
        p = float(self.same_top.mean())
        return Estimate(p, math.sqrt(p * (1 - p) / (len(self) - 1)) if len(self) > 1 else 0.0)

    def sorted_kld(self) -> np.ndarray:
        """float32[n], ascending."""
        return np.sort(self.kld.astype(np.float32))

    def sorted_dp(self) -> np.ndarray:
        """float32[n], ascending."""
        return np.sort(self.dp.astype(np.float32))

    def first(self, n: int) -> Divergence:
        """The result over the first n positions."""
        terms = None if self.bound_terms is None else self.bound_terms[:n]
        return replace(
            self, nll=self.nll[:n], nll_base=self.nll_base[:n], kld=self.kld[:n], same_top=self.same_top[:n],
            bound_terms=terms,
        )  # fmt: skip

    def record(self) -> dict[str, float]:
        """The figures by name, for JSON: nats, shares of 1, errors over tokens."""
        kld = self.sorted_kld()
        figures = {"ppl": self.ppl, "ppl_base": self.ppl_base, "ln_ratio": self.ln_ratio, "kld": self.mean_kld,
                   "mean_dp": self.mean_dp, "rms_dp": self.rms_dp, "same_top": self.top_agreement}  # fmt: skip
        record: dict[str, float] = {
            "positions": len(self),
            "kld_bound": self.bound,
            "kld_low": self.limits[0],
            "kld_high": self.limits[1],
        }
        for name, estimate in figures.items():
            record |= {name: estimate.value, f"{name}_error_over_tokens": estimate.error}
        percentiles = {
            "kld_median": 0.5,
            "kld_p90": 0.9,
            "kld_p95": 0.95,
            "kld_p99": 0.99,
            "kld_p999": 0.999,
            "kld_max": 1,
        }
        return record | {name: at_share(kld, f) for name, f in percentiles.items()}


# ---------------------------------------------------------------------------------------------------------- evaluation


@dataclass(frozen=True, kw_only=True)
class DivergenceOptions:
    """Options of `divergence`: the flags of `quantkit perplexity --kl-divergence`.

    batch_size          tokens per batch, in whole chunks
    jsonl               write a JSON line per chunk to this file, and resume from it
    by_layer            run all chunks through one layer before the next; for models larger than memory
    numerics, threads   for models given by their paths: "exact" or "fast", number of threads
    ctx_size, chunks    for a base that is a model: tokens per chunk, at most this many chunks; a base file has its own
    score               refuse a base file whose scored tokens are others: "half", "all" or "assistant"; None: take any
    chat                refuse a base file that is not of conversations
    """

    batch_size: int = DEFAULT_BATCH
    jsonl: Path | None = None
    by_layer: bool = False
    numerics: str = "exact"
    threads: int | None = None
    ctx_size: int = DEFAULT_CONTEXT
    chunks: int | None = None
    score: str | None = None
    chat: bool = False


def divergence(
    model: Model | str | os.PathLike[str],
    base: Model | str | os.PathLike[str],
    text: str | os.PathLike[str] | None = None,
    options: DivergenceOptions | None = None,
    *,
    progress: Callable[[ChunkProgress[Divergence]], None] | None = None,
    on_message: OnMessage = no_message,
    on_layer: OnLayer | None = None,
    open_model: OpenModel = open_model,
    client: Client | None = None,
) -> Divergence:
    """KL divergence of a model from a base, token by token, in nats.

    KLD = sum over the vocabulary of p log(p / q), with p the base's and q the model's probabilities. The result also
    has both perplexities, the difference of the token's probability, and the share of equal top tokens.

    model        an open model, or the path of a GGUF file, which `open_model` opens
    base         a base file that `perplexity` wrote (its path), or a model (its path, or open) to run over `text`;
                 a base model given by its path is closed before the other model is opened
    text         for a base that is a model: a text file, UTF-8
    options      the command's flags; None for the defaults
    progress     called after each chunk, with the divergence so far
    on_message   called with messages for the user: steps, resumed chunks, warnings
    on_layer     called after each layer of a run by layer with the layers that are done and all; None: `on_message`
    client       run the chunks on the workers of this dask cluster, as in `perplexity`; they read the base file too

    Raises DataError if the vocabularies differ in size, and QuantkitError if a text is missing or given twice.
    """
    o = options or DivergenceOptions()
    require_path(model, client)
    path = Path(os.fspath(model)) if isinstance(model, (str, os.PathLike)) else model.path
    if isinstance(base, (str, os.PathLike)) and is_base_file(Path(base)):
        if text is not None:
            raise QuantkitError(f"{os.fspath(base)}: a base file has its own tokens; remove {os.fspath(text)}")
        return _from_file(model, Path(base), o, progress, on_message, on_layer, open_model, client)
    if text is None:
        raise QuantkitError(f"{path}: the divergence from a model needs a text; name one, or a base file")
    with tempfile.TemporaryDirectory(prefix="quantkit-divergence-") as folder:
        file = Path(folder) / "base.kld"
        base_options = PerplexityOptions(
            ctx_size=o.ctx_size, chunks=o.chunks, batch_size=o.batch_size, kl_divergence_base=file,
            by_layer=o.by_layer, numerics=o.numerics, threads=o.threads,
        )  # fmt: skip
        if o.chat or o.score not in (None, "half"):
            raise QuantkitError(
                f"{path}: conversations and other scored tokens need a base file; write one with `perplexity` to a "
                "name that ends in .qkld, or use `compare`"
            )
        if o.jsonl is not None:
            raise QuantkitError(f"{o.jsonl}: only runs from a base file can be resumed; write one with `perplexity`")
        perplexity(
            base, text, base_options, on_message=on_message, on_layer=on_layer, open_model=open_model, client=client
        )
        gc.collect()  # a model and its parts refer to each other; the next one needs its memory
        return _from_file(model, file, o, progress, on_message, on_layer, open_model, client)


def _from_file(
    model: Model | str | os.PathLike[str],
    path: Path,
    o: DivergenceOptions,
    progress: Callable[[ChunkProgress[Divergence]], None] | None,
    on_message: OnMessage,
    on_layer: OnLayer | None,
    open_model: OpenModel,
    client: Client | None,
) -> Divergence:
    """`divergence` from a base file."""
    model_path = Path(os.fspath(model)) if isinstance(model, (str, os.PathLike)) else model.path
    check_outputs([o.jsonl], [model_path, path])
    base = base_reader(path)
    _require_scored(base, o)
    if isinstance(model, (str, os.PathLike)):
        model = open_model(model_path, numerics=o.numerics, threads=o.threads, n_ctx=base.n_ctx)
    about = "" if base.scored is None else f", {base.scored.about} scored"
    on_message(f"KL divergence over {base.n_chunk} chunks of {base.n_ctx} tokens from {path}{about}")
    if (share := roundtrip_share(base.tokens, model.tokenizer, base.scored)) < _SAME_TOKENIZER:
        on_message(
            f"warning: {path}: decoding its tokens and encoding them again with the tokenizer of {model.path} gives "
            f"{100 * share:.1f} % of the same tokens: the base file has another tokenizer or is not from a text"
        )
    counts = base.counts.tolist()
    names = [name for name in RowFigures._fields if name != "bound_terms" or isinstance(base, BoundedReader)]
    conditions = evaluation_conditions(model, base.n_ctx, base.n_chunk, f"of {path}", base.scored)
    runs = None if client is None else ClusterRuns(client, on_message)
    with contextlib.ExitStack() as stack:
        log, done, resumed = None, None, 0
        if o.jsonl is not None:
            known = conditions | {"text": str(path)}
            positions = counts[0] if base.scored is None else counts
            log = stack.enter_context(run_log(o.jsonl, model.path, path, positions, o.batch_size, known, {}))
            if resumed := len(log.resumed(on_message)):
                done = {name: log.numbers(name) for name in names}
        clock = ChunkClock(base.n_chunk, resumed, o.batch_size, base.n_ctx, str(path))

        def after_chunk(chunks: int, so_far: Divergence) -> None:
            if log is not None:
                log.add(**{name: getattr(so_far, name)[-counts[chunks - 1] :] for name in names})
            clock.report(progress, chunks, so_far)

        opening = WorkerModel(open_model, model_path, o.numerics, o.threads, base.n_ctx)
        run = chunk_runner(o.by_layer, on_message, on_layer, runs, opening, [path])
        result = divergence_from_base(
            model, base, n_batch=o.batch_size, on_chunk=after_chunk, run=run, done=done, first=resumed
        )
    return replace(result, seconds=clock.seconds, conditions=with_workers(conditions, runs))


def _require_scored(base: BaseReader | BoundedReader, o: DivergenceOptions) -> None:
    """DataError unless the scored tokens of a base file are those that were asked for."""
    has, chat = ("half", False) if base.scored is None else (base.scored.what, base.scored.chat)
    if (o.score is not None and o.score != has) or (o.chat and not chat):
        asked = ("--chat " if o.chat else "") + (f"--score {o.score}" if o.score else "")
        raise DataError(
            f"{base.path}: made with {'--chat ' if chat else ''}--score {has}, this run asks for {asked.strip()}; "
            "remove the option, or make the base again with it"
        )


def roundtrip_share(
    tokens: np.ndarray, tokenizer: Tokenizer, scored: ScoredTokens | None = None, at_most: int = 4096
) -> float:
    """Share of int[n_chunk, n_ctx] tokens that a tokenizer reproduces from their decoded text, in any order.

    Conversations count up to their last scored token; after it may be fill.
    """
    special = scored is not None and scored.chat
    if scored is not None and special:
        tokens = np.concatenate([row[: int(scored.rows(i)[-1]) + 2] for i, row in enumerate(tokens)])
    ids = tokens.reshape(-1)[:at_most].tolist()
    text = b"".join(tokenizer.token_bytes(i) for i in ids if i < tokenizer.vocab_size).decode(errors="replace")
    again = Counter(tokenizer.encode(text, bos=False, special=special))
    return (Counter(ids) & again).total() / len(ids)


@dataclass(frozen=True)
class _Comparing:
    """Measures the figures of a chunk against an open base file."""

    base: BaseReader | BoundedReader
    chunks: Chunks

    def __call__(self, index: int, logits: np.ndarray) -> RowFigures:
        return compare_rows(logits, self.base.chunk(index), self.chunks.of(index))


def divergence_from_base(
    model: ChunkModel,
    base: BaseReader | BoundedReader,
    *,
    n_batch: int = DEFAULT_BATCH,
    on_chunk: Callable[[int, Divergence], None] | None = None,
    run: MeasureChunks | None = None,
    done: Mapping[str, np.ndarray] | None = None,
    first: int = 0,
) -> Divergence:
    """Divergence of a model from an open base file, over the file's tokens.

    run        runs and measures the chunks, as in `perplexity.perplexity_of_chunks`
    done       the arrays of a Divergence by name for the `first` chunks (whole batches), from an earlier run
    on_chunk   called after each chunk with the number of chunks done and the result so far

    Raises DataError for a base with another vocabulary.
    """
    if model.vocab_size != base.n_vocab:
        raise DataError(
            f"{base.path}: made with a vocabulary of {base.n_vocab}, the model has {model.vocab_size}; "
            "a base only fits models with the same tokenizer"
        )
    is_chat = base.scored is not None and base.scored.chat
    inputs = base.tokens if is_chat else with_bos(base.tokens, model.tokenizer)
    chunks = Chunks(base.tokens, inputs, str(base.path), choice=base.scored)
    ends = np.cumsum(base.counts)
    n = int(ends[-1])
    result = Divergence(np.empty(n), np.empty(n), np.empty(n), np.empty(n, np.bool_), chunks=chunks)
    if isinstance(base, BoundedReader):
        result = replace(result, bound_terms=np.empty((n, bounded.BOUND_TERMS)))
    for name, figures in (done or {}).items():
        getattr(result, name)[: len(figures)] = figures
    measure = _Comparing(base, chunks)
    for index, figures_of_chunk in (run or Here())(model, inputs, n_batch, chunks.rows, first, measure):
        positions = slice(ends[index] - base.counts[index], ends[index])
        for name in RowFigures._fields:
            if (values := getattr(result, name)) is not None:
                values[positions] = getattr(figures_of_chunk, name)
        if on_chunk is not None:
            on_chunk(index + 1, result.first(int(ends[index])))
    return result
