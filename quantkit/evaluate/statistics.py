"""Standard errors and intervals of means over tokens, and tests of whether data separate two models.

Tokens of a chunk are not independent: a hard passage is hard for all of its tokens, and for every model. A standard
error over tokens, as llama-perplexity prints it, is then too small. Here the unit is the chunk, a fresh sequence with a
passage of its own. A figure's error is that of the mean of U chunk means,

    error = s / sqrt(U),   s² = sum (m_u - mean)² / (U - 1)

and its 95 % interval is t(U - 1) errors to either side (Student's t). No independence inside a chunk is assumed. With
fewer than MIN_UNITS chunks, each chunk is cut into blocks of neighbouring tokens, so that there are MIN_UNITS
units. The correlation between neighbouring blocks is then neglected. A bootstrap over chunks gives the same errors to
the second digit, and takes thousands of times as long.

Conversations have different numbers of scored tokens n_u. The mean over tokens is then a ratio of two sums over units,
and with w_u = n_u U / sum n the linearized error of a ratio (Cochran, Sampling Techniques) is

    error = s / sqrt(U),   s² = sum (w_u (m_u - mean))² / (U - 1)

Quantiles have Woodruff's interval: the share of tokens below the quantile is a mean over chunks with an error, and the
quantiles at the ends of the share's interval are the ends of the interval.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

MIN_UNITS = 8
LEVEL = 0.95


class Interval(NamedTuple):
    """A figure, its standard error, and the ends of its 95 % interval; NaN where the data do not give them."""

    value: float
    error: float
    low: float
    high: float


def student(degrees: int, level: float = LEVEL) -> float:
    """Two-sided quantile of Student's t."""
    from scipy.special import stdtrit  # half a second, which commands without statistics need not wait

    return float(stdtrit(degrees, (1 + level) / 2))


def perplexity_of(nll: float) -> float:
    """exp of a mean negative log-likelihood; inf if it overflows a float, as for broken models; NaN for NaN."""
    return math.inf if nll >= 700 else math.exp(nll)


def at_share(ordered: np.ndarray, share: float) -> float:
    """The quantile of sorted values at a share from 0 to 1, with linear interpolation."""
    x = share * (ordered.size - 1)
    k = int(x)
    return float((1 - (x - k)) * ordered[k] + (x - k) * ordered[min(k + 1, ordered.size - 1)])


@dataclass(frozen=True)
class Sample:
    """The structure of a measurement: `chunks` of `per_chunk` scored tokens each, one after another.

    counts   the number of scored tokens of each chunk where they differ; `per_chunk` is then 0
    """

    chunks: int
    per_chunk: int
    counts: tuple[int, ...] | None = None

    @classmethod
    def of(cls, counts: np.ndarray | Sequence[int]) -> Sample:
        """The structure of chunks with so many scored tokens each, at least 1."""
        numbers = tuple(int(n) for n in counts)
        return cls(len(numbers), numbers[0]) if len(set(numbers)) == 1 else cls(len(numbers), 0, numbers)

    @property
    def tokens(self) -> int:
        """Number of scored tokens."""
        return self.chunks * self.per_chunk if self.counts is None else sum(self.counts)

    def part(self, first: int, chunks: int) -> tuple[slice, Sample]:
        """The tokens of `chunks` chunks, and their structure."""
        if self.counts is None:
            return slice(first * self.per_chunk, (first + chunks) * self.per_chunk), Sample(chunks, self.per_chunk)
        counts, before = self.counts[first : first + chunks], sum(self.counts[:first])
        return slice(before, before + sum(counts)), Sample.of(counts)

    @property
    def starts(self) -> np.ndarray:
        """int[units]: the first token of each unit."""
        if self.counts is not None:
            return self._ragged_starts()
        blocks = min(max(1, -(-MIN_UNITS // self.chunks)), self.per_chunk)
        within = np.arange(blocks) * self.per_chunk // blocks
        return (np.arange(self.chunks)[:, None] * self.per_chunk + within).reshape(-1)

    def _ragged_starts(self) -> np.ndarray:
        wanted, before, starts = max(1, -(-MIN_UNITS // self.chunks)), 0, []
        for count in self.counts or ():
            blocks = min(wanted, count)
            starts += [before + i * count // blocks for i in range(blocks)]
            before += count
        return np.array(starts, np.int64)

    def means(self, x: np.ndarray) -> np.ndarray:
        """Means over the units of x[tokens]: float64[units]."""
        starts = self.starts
        sizes = np.diff(starts, append=len(x))
        return np.add.reduceat(np.asarray(x, np.float64), starts) / sizes

    def mean(self, x: np.ndarray, level: float = LEVEL) -> Interval:
        """The mean of x[tokens], with its interval."""
        means, value = self.means(x), float(np.mean(x))
        if len(means) < 3:
            return Interval(value, math.nan, math.nan, math.nan)
        if self.counts is None:
            error = float(means.std(ddof=1)) / math.sqrt(len(means))
        else:
            weights = np.diff(self.starts, append=len(x)) * (len(means) / len(x))
            variance = float(np.sum((weights * (means - value)) ** 2)) / (len(means) - 1)
            error = math.sqrt(variance / len(means))
        half_width = student(len(means) - 1, level) * error
        return Interval(value, error, value - half_width, value + half_width)

    def quantile(self, x: np.ndarray, share: float) -> Interval:
        """The quantile of x[tokens] at a share, with its interval. An end that the data do not give is NaN."""
        ordered = np.sort(x)
        value = at_share(ordered, share)
        below = self.mean(x <= value)
        half_width = (below.high - below.low) / 2
        if not half_width > 0:
            return Interval(value, math.nan, math.nan, math.nan)
        low, high = (at_share(ordered, s) if 0 < s < 1 else math.nan for s in (share - half_width, share + half_width))
        return Interval(value, (high - low) / 2 / student(len(self.starts) - 1), low, high)

    def root_mean_square(self, x: np.ndarray) -> Interval:
        """The root mean square of x[tokens], with its interval."""
        square = self.mean(np.square(x, dtype=np.float64))
        value = math.sqrt(square.value)
        low, high = (math.sqrt(max(0.0, end)) for end in (square.low, square.high))
        return Interval(value, square.error / (2 * value) if value else 0.0, low, high)


class Separation(NamedTuple):
    """Whether a figure of one model is smaller than another's, on the same tokens.

    difference   second minus first, paired by token
    separated    its interval does not contain 0
    more_tokens  0 if separated; else an estimate of how many more tokens would separate them, if the measured
                 difference is the true one; None if it is 0, or if even 100 times the tokens would not suffice
    """

    difference: Interval
    separated: bool
    more_tokens: int | None


def separate(sample: Sample, first: np.ndarray, second: np.ndarray, level: float = LEVEL) -> Separation:
    """Compare two figures float[tokens] of the same tokens."""
    found = sample.mean(np.asarray(second) - np.asarray(first), level)
    if not math.isfinite(found.error):
        return Separation(found, False, None)
    if found.low > 0 or found.high < 0:
        return Separation(found, True, 0)
    tokens, value = sample.tokens, abs(found.value)
    half_width = (found.high - found.low) / 2
    # The error falls with the root of the number of tokens. Add a tenth to be above break-even.
    factor = 1.1 * (half_width / value) ** 2 if value else math.inf
    return Separation(found, False, math.ceil(tokens * (factor - 1)) if factor <= 100 else None)


class ModelRank(NamedTuple):
    """The rank of a model, given by its index. Models that the data do not separate share a place, counted from 1."""

    model: int
    place: int
    to_next: Separation | None


def rank(sample: Sample, figures: Sequence[np.ndarray]) -> list[ModelRank]:
    """Order models by the mean of a figure float[tokens] of each, smallest first.

    Neighbours in the order are compared, each at a level that gives all comparisons together 95 % confidence
    (Bonferroni). Neighbours that are not separated share a place.
    """
    order = sorted(range(len(figures)), key=lambda i: float(np.mean(figures[i])))
    level = 1 - (1 - LEVEL) / max(1, len(order) - 1)
    found, place = [], 1
    for at, i in enumerate(order):
        to_next = separate(sample, figures[i], figures[order[at + 1]], level) if at + 1 < len(order) else None
        found.append(ModelRank(i, place, to_next))
        if to_next is not None and to_next.separated:
            place = at + 2
    return found
