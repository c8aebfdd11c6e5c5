"""KL divergence of a model from a base, token by token, and the statistics that ik_llama.cpp's llama-perplexity prints.

At every scored position, with q the model's probabilities and b the base's:

    nll      = -log q[target],  nll_base = -log b[target]
    kld      = sum of b_i (log b_i - log q_i) over i with log b_i > -16     (not renormalised: tiny negatives occur)
    same top = argmax q == argmax b, the first of equals
    dp       = exp(-nll) - exp(-nll_base)

Errors are standard errors of a mean over n positions, err(x) = sqrt((mean x² - (mean x)²) / (n - 1)); both models see
the same tokens, so their difference uses cov(x, y) = (mean xy - mean x mean y) / (n - 1).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from quantkit.codegen import jit, thread_pool
from quantkit.codegen.jit import kernel
from quantkit.errors import DataError
from quantkit.evaluate import bounded
from quantkit.evaluate.perplexity import Run, evaluate_chunks, first_largest, log_total
from quantkit.evaluate.statistics import at_share, perplexity_of
from quantkit.evaluate.text import DEFAULT_BATCH, with_bos
from quantkit.formats.kld.base_file import BaseReader, BaseWriter, EncodedRows, scored_rows
from quantkit.formats.kld.bounded_file import BoundedReader, BoundedRows, BoundedWriter, is_bounded
from quantkit.formats.kld.chunk_file import LoggedChunks


@kernel
def _compare_rows(logits, words, targets, nll, nll_base, kld, same_top):
    """Compare float32[rows, n] logits with the base's uint16[rows, 4 + n] words (padded); fill 4 arrays of [rows]."""
    rows, n = logits.shape
    for r in range(rows):
        row, codes, header = logits[r], words[r, 4 : 4 + n], words[r, :4].view(np.float32)
        scale, low = np.float64(header[0]), np.float64(header[1])
        log_sum = log_total(row)
        found = 0.0
        for i in range(n):
            log_b = scale * codes[i] + low
            if log_b > -16.0:
                found += np.exp(log_b) * (log_b - (np.float64(row[i]) - log_sum))
        target = targets[r]
        nll[r] = log_sum - np.float64(row[target])
        nll_base[r] = -(scale * codes[target] + low)
        kld[r] = found
        same_top[r] = first_largest(row) == first_largest(codes)


class RowFigures(NamedTuple):
    """Figures of scored positions, one row per position: float64, and bool for same_top.

    doubts: float64[rows, bounded.BOUND_TERMS], the terms of the KLD's bound; None for an exact base.
    """

    nll: np.ndarray
    nll_base: np.ndarray
    kld: np.ndarray
    same_top: np.ndarray
    doubts: np.ndarray | None = None


def compare_rows(logits: np.ndarray, base: EncodedRows | BoundedRows, targets: np.ndarray) -> RowFigures:
    """Figures of float32[rows, n_vocab] logits against the base's rows; targets int[rows]."""
    rows = len(logits)
    if isinstance(base, BoundedRows):
        values, doubts, same_top = bounded.compare_rows(logits, base, targets)
        nll, nll_base, value = values.T
        return RowFigures(nll, nll_base, value, same_top, doubts)
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
    """Result of a comparison: arrays of [n], one value per scored position, in the text's order."""

    nll: np.ndarray  # float64, nats
    nll_base: np.ndarray  # float64, nats
    kld: np.ndarray  # float64, nats
    same_top: np.ndarray  # bool
    doubts: np.ndarray | None = None  # float64[n, bounded.BOUND_TERMS]; None for an exact base

    def __len__(self) -> int:
        return self.nll.size

    @property
    def dp(self) -> np.ndarray:
        """Difference of the target's probability, model minus base."""
        return np.exp(-self.nll) - np.exp(-self.nll_base)

    @property
    def ppl(self) -> Estimate:
        value = perplexity_of(self.nll.mean())
        return Estimate(value, value * mean_error(self.nll))

    @property
    def ppl_base(self) -> Estimate:
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
        return Estimate(float(self.kld.mean()), mean_error(self.kld))

    @property
    def bound(self) -> float:
        """Bound, in nats, of the distance to the mean KLD with an exact base; 0 for an exact base.

        It fails with a probability of at most `bounded_file.MISSED`.
        """
        return 0.0 if self.doubts is None else bounded.bound(self.doubts)

    @property
    def limits(self) -> tuple[float, float]:
        """The interval that holds the mean KLD with an exact base."""
        mean = float(self.kld.mean())
        return (mean, mean) if self.doubts is None else (max(0.0, mean - self.bound), mean + self.bound)

    @property
    def mean_dp(self) -> Estimate:
        return Estimate(float(self.dp.mean()), mean_error(self.dp))

    @property
    def rms_dp(self) -> Estimate:
        squares = self.dp**2
        value = math.sqrt(squares.mean())
        return Estimate(value, mean_error(squares) / (2 * value) if value else 0.0)

    @property
    def top_agreement(self) -> Estimate:
        """Fraction of positions where both models rank the same token first."""
        p = float(self.same_top.mean())
        return Estimate(p, math.sqrt(p * (1 - p) / (len(self) - 1)) if len(self) > 1 else 0.0)

    def sorted_kld(self) -> np.ndarray:
        return np.sort(self.kld.astype(np.float32))

    def sorted_dp(self) -> np.ndarray:
        return np.sort(self.dp.astype(np.float32))

    def first(self, n: int) -> Divergence:
        """The result over the first n positions."""
        return replace(self, **{f.name: a[:n] for f in fields(self) if (a := getattr(self, f.name)) is not None})


# ---------------------------------------------------------------------------------------------------------- evaluation


def base_writer(
    path: Path, tokens: np.ndarray, n_vocab: int, logged: LoggedChunks | None = None, **bounded_options: Any
) -> BaseWriter | BoundedWriter:
    """A writer of the bounded format for names that end in `.qkld`, of ik_llama.cpp's format for others."""
    if path.suffix == ".qkld":
        return BoundedWriter(path, tokens, n_vocab, logged=logged, **bounded_options)
    return BaseWriter(path, tokens, n_vocab, logged=logged)


def base_reader(path: Path) -> BaseReader | BoundedReader:
    """Open a base file of either format, detected by its first bytes."""
    return BoundedReader(path) if is_bounded(path) else BaseReader(path)


def known_share(tokens: np.ndarray, tokenizer: Any, at_most: int = 4096) -> float:
    """Share of int[n_chunk, n_ctx] tokens that a tokenizer reproduces after detokenizing them, in any order."""
    ids = tokens.reshape(-1)[:at_most].tolist()
    text = b"".join(tokenizer.token_bytes(i) for i in ids if i < tokenizer.vocab_size).decode(errors="replace")
    again = Counter(tokenizer.encode(text, bos=False))
    return (Counter(ids) & again).total() / len(ids)


def divergence(
    model: Any,
    base: BaseReader | BoundedReader,
    *,
    n_batch: int = DEFAULT_BATCH,
    on_chunk: Callable[[int, Divergence], None] | None = None,
    run: Run = evaluate_chunks,
    done: Mapping[str, np.ndarray] | None = None,
) -> Divergence:
    """Compare a model with a base file (ik_llama.cpp's format or a bounded one) over the file's tokens.

    run: runs the chunks, as in `perplexity.perplexity`.
    done: the arrays of a Divergence by name, [k, positions, …], for the first k chunks (whole batches).

    `on_chunk(chunks done, result so far)` is called after each chunk. Raises DataError for a base with another
    vocabulary.
    """
    if model.vocab_size != base.n_vocab:
        raise DataError(
            f"{base.path}: made with a vocabulary of {base.n_vocab}, the model has {model.vocab_size}; "
            "a base only fits models with the same tokenizer"
        )
    inputs = with_bos(base.tokens, model.tokenizer)
    rows = scored_rows(base.n_ctx)
    k = base.rows_per_chunk
    n = base.n_chunk * k
    result = Divergence(np.empty(n), np.empty(n), np.empty(n), np.empty(n, np.bool_))
    if isinstance(base, BoundedReader):
        result = replace(result, doubts=np.empty((n, bounded.BOUND_TERMS)))
    done = done or {}
    first = len(done.get("nll", ()))
    for name, figures in done.items():
        whole = getattr(result, name)
        whole[: first * k] = figures.reshape(first * k, *whole.shape[1:])
    for index, logits in run(model, inputs, n_batch, None, first):
        found = compare_rows(logits, base.chunk(index), base.tokens[index, rows.start + 1 :])
        here = slice(index * k, (index + 1) * k)
        for name in RowFigures._fields:
            if (whole := getattr(result, name)) is not None:
                whole[here] = getattr(found, name)
        if on_chunk is not None:
            on_chunk(index + 1, result.first((index + 1) * k))
    return result


# -------------------------------------------------------------------------------------------------------- printed form


def summary(d: Divergence) -> dict[str, float]:
    """The figures of the report by name, in nats and probabilities."""
    kld = d.sorted_kld()
    figures = {"ppl": d.ppl, "ppl_base": d.ppl_base, "ln_ratio": d.ln_ratio, "kld": d.mean_kld, "mean_dp": d.mean_dp,
               "rms_dp": d.rms_dp, "same_top": d.top_agreement}  # fmt: skip
    found: dict[str, float] = {
        "positions": len(d),
        "kld_bound": d.bound,
        "kld_low": d.limits[0],
        "kld_high": d.limits[1],
    }
    for name, estimate in figures.items():
        found |= {name: estimate.value, f"{name}_error": estimate.error}
    percentiles = {"kld_median": 0.5, "kld_p90": 0.9, "kld_p95": 0.95, "kld_p99": 0.99, "kld_p999": 0.999, "kld_max": 1}
    return found | {name: at_share(kld, f) for name, f in percentiles.items()}


CHUNK_HEADER = (
    "chunk             PPL               ln(PPL(Q)/PPL(base))          KL Divergence"
    "              Δp RMS            Same top p"
)


def chunk_line(index: int, so_far: Divergence) -> str:
    """The line that llama-perplexity prints after each chunk: running values."""
    ppl, ratio, kld, rms, top = so_far.ppl, so_far.ln_ratio, so_far.mean_kld, so_far.rms_dp, so_far.top_agreement
    return (
        f"{index:4d}    {ppl.value:9.4f} ± {ppl.error:9.4f}    {ratio.value:10.5f} ± {ratio.error:10.5f}"
        f"    {kld.value:10.5f} ± {kld.error:10.5f}    {100 * rms.value:6.3f} ± {100 * rms.error:6.3f} %"
        f"    {100 * top.value:6.3f} ± {100 * top.error:6.3f} %"
    )


def _bound_line(d: Divergence) -> str:
    low, high = d.limits
    return f"Bound of KLD: {d.bound:9.6f} (an exact base gives {low:.6f} to {high:.6f})"


def report(d: Divergence) -> str:
    """The final report of llama-perplexity, with the same labels, which other tools parse."""

    def with_error(label: str, e: Estimate) -> str:
        return f"{label:<30}: {e.value:10.6f} ± {e.error:10.6f}"

    kld, dp = d.sorted_kld(), 100 * d.sorted_dp()
    lines = [
        "====== Perplexity statistics ======",
        with_error("Mean PPL(Q)", d.ppl),
        with_error("Mean PPL(base)", d.ppl_base),
        f"{'Cor(ln(PPL(Q)), ln(PPL(base)))':<30}: {100 * d.correlation:6.2f}%",
        with_error("Mean ln(PPL(Q)/PPL(base))", d.ln_ratio),
        with_error("Mean PPL(Q)/PPL(base)", d.ratio),
        with_error("Mean PPL(Q)-PPL(base)", d.difference),
        "",
        "====== KL divergence statistics ======",
        f"Mean    KLD: {d.mean_kld.value:10.6f} ± {d.mean_kld.error:10.6f}",
        *([] if d.doubts is None else [_bound_line(d)]),
        f"Maximum KLD: {kld[-1]:10.6f}",
        *(f"{100 * f:4.1f}%   KLD: {at_share(kld, f):10.6f}" for f in (0.999, 0.99, 0.95, 0.9)),
        f"Median  KLD: {at_share(kld, 0.5):10.6f}",
        *(f"{100 * f:4.1f}%   KLD: {at_share(kld, f):10.6f}" for f in (0.1, 0.05, 0.01, 0.001)),
        f"Minimum KLD: {kld[0]:10.6f}",
        "",
        "====== Token probability statistics ======",
        f"Mean    Δp: {100 * d.mean_dp.value:6.3f} ± {100 * d.mean_dp.error:5.3f} %",
        f"Maximum Δp: {dp[-1]:6.3f}%",
        *(f"{100 * f:4.1f}%   Δp: {at_share(dp, f):6.3f}%" for f in (0.999, 0.99, 0.95, 0.9, 0.75)),
        f"Median  Δp: {at_share(dp, 0.5):6.3f}%",
        *(f"{100 * f:4.1f}%   Δp: {at_share(dp, f):6.3f}%" for f in (0.25, 0.1, 0.05, 0.01, 0.001)),
        f"Minimum Δp: {dp[0]:6.3f}%",
        f"RMS Δp    : {100 * d.rms_dp.value:6.3f} ± {100 * d.rms_dp.error:5.3f} %",
        f"Same top p: {100 * d.top_agreement.value:6.3f} ± {100 * d.top_agreement.error:5.3f} %",
    ]
    return "\n".join(lines)
