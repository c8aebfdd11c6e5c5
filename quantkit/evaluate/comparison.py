"""The result of `compare`: figures of each model against the reference, paired by token, with errors over chunks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from quantkit.errors import printable
from quantkit.evaluate.breakdown import Part, by_position
from quantkit.evaluate.conditions import Conditions
from quantkit.evaluate.divergence import Divergence, Estimate
from quantkit.evaluate.layers.tensor_errors import TensorError
from quantkit.evaluate.statistics import Interval, ModelRank, Sample, rank


class Throughput(NamedTuple):
    """Speed in tokens per second."""

    prompt: float
    generation: float


class Domain(NamedTuple):
    """A text and its range of chunks."""

    name: str
    first: int
    chunks: int


@dataclass(frozen=True)
class Paired:
    """Figures of a model against the reference, with errors over chunks, in nats and shares of 1."""

    divergence: Divergence
    sample: Sample

    @cached_property
    def figures(self) -> dict[str, Interval]:
        """The figures by name: ln_ratio, kld and its quantiles, same_top, flips (the others), mean_dp, rms_dp."""
        d, s = self.divergence, self.sample
        figures = {"ln_ratio": s.mean(d.nll - d.nll_base), "kld": s.mean(d.kld)}
        shares = (("kld_median", 0.5), ("kld_p90", 0.9), ("kld_p95", 0.95), ("kld_p99", 0.99), ("kld_p999", 0.999))
        figures |= {name: s.quantile(d.kld, share) for name, share in shares}
        figures |= {"same_top": s.mean(d.same_top), "flips": s.mean(~d.same_top)}
        return figures | {"mean_dp": s.mean(d.dp), "rms_dp": s.root_mean_square(d.dp)}

    @property
    def largest(self) -> float:
        """The largest KLD of a token, in nats."""
        return float(self.divergence.kld.max())

    def of(self, domain: Domain) -> Paired:
        """The same figures over the chunks of one text."""
        positions, sample = self.sample.part(domain.first, domain.chunks)
        d = self.divergence
        part = Divergence(d.nll[positions], d.nll_base[positions], d.kld[positions], d.same_top[positions])
        return Paired(part, sample)

    @cached_property
    def by_position(self) -> list[Part]:
        """Mean KLD and top-1 flips by the number of tokens before a token."""
        chunks = self.divergence.chunks
        return [] if chunks is None else by_position(self.divergence, chunks.depths, chunks.counts)

    def record(self) -> dict[str, Any]:
        """The figures, errors and intervals by name, for JSON."""
        record: dict[str, Any] = {"positions": len(self.divergence)}
        for name, figure in self.figures.items():
            record |= _named(name, figure)
        record |= _named("ppl_difference", self.ppl_difference)
        if self.by_position:
            record["by_position"] = [part_record(part) for part in self.by_position]
        ppl, ppl_base = self.divergence.ppl, self.divergence.ppl_base
        return record | {"kld_max": self.largest, "ppl": ppl.value, "ppl_base": ppl_base.value}

    @property
    def ppl_difference(self) -> Interval:
        """PPL minus the reference's PPL; the error is to first order, from each token's contribution."""
        d = self.divergence
        p, p_base = d.ppl.value, d.ppl_base.value
        first_order = self.sample.mean(p * (d.nll - d.nll.mean()) - p_base * (d.nll_base - d.nll_base.mean()))
        return Interval(p - p_base, first_order.error, p - p_base + first_order.low, p - p_base + first_order.high)


def part_record(part: Part) -> dict[str, Any]:
    """A bin of positions, or a category, for JSON."""
    where = {"first": part.low, "last": part.high - 1} if part.high else {"category": part.name}
    record = where | {"sequences": part.sequences, "tokens": part.tokens}
    return record | _named("kld", part.kld) | _named("flips", part.flips)


def _named(name: str, figure: Interval) -> dict[str, Any]:
    """A figure for JSON: null in place of NaN, which JSON lacks."""
    value, error, low, high = (x if math.isfinite(x) else None for x in figure)
    return {name: value, f"{name}_error_over_chunks": error, f"{name}_interval_95": [low, high]}


@dataclass(frozen=True)
class Candidate:
    """The measurements of one model. The reference itself has no divergence."""

    path: Path
    size_bytes: int  # of all shards
    bits_per_weight: float
    ppl: Estimate
    paired: Paired | None = None
    throughput: Throughput | None = None
    display_name: str = ""  # name in tables; needed if the file's name is ambiguous

    @property
    def name(self) -> str:
        """The name in tables."""
        return printable(self.display_name or self.path.stem)  # a file name need not be UTF-8

    @property
    def divergence(self) -> Divergence | None:
        """The divergence from the reference; None for the reference itself."""
        return None if self.paired is None else self.paired.divergence

    def record(self, domains: Sequence[Domain] = ()) -> dict[str, Any]:
        """The figures by name, for JSON."""
        record: dict[str, Any] = {"name": self.name, "path": str(self.path), "bytes": self.size_bytes,
                                 "bits_per_weight": self.bits_per_weight}  # fmt: skip
        if self.paired is not None:
            record |= self.paired.record()
            if len(domains) > 1:
                record["domains"] = {d.name: self.paired.of(d).record() for d in domains}
        record |= {"ppl": self.ppl.value, "ppl_error_over_tokens": self.ppl.error}
        if self.throughput is not None:
            record |= {"prompt_tokens_per_second": self.throughput.prompt,
                      "generation_tokens_per_second": self.throughput.generation}  # fmt: skip
        return record


@dataclass(frozen=True)
class NoiseFloor:
    """The noise floor: the reference against itself with other numerics. Smaller differences are not significant."""

    how: str
    paired: Paired


@dataclass(frozen=True)
class Comparison:
    """The result of `compare`.

    candidates   the reference first, then the models in the order given
    n_ctx        tokens per chunk
    chunks       number of chunks of all texts
    positions    number of scored tokens
    domains      the texts and their ranges of chunks
    noise        the reference against itself
    layers       by model, the error that each tensor adds, if it was measured
    conditions   what the figures depend on besides the files
    """

    candidates: list[Candidate]
    n_ctx: int
    chunks: int
    positions: int
    domains: list[Domain] = field(default_factory=list)
    noise: NoiseFloor | None = None
    layers: Mapping[str, Sequence[TensorError]] = field(default_factory=dict)
    conditions: Conditions = field(default_factory=dict)

    @property
    def sample(self) -> Sample:
        """Chunks and positions, for statistics."""
        samples = (c.paired.sample for c in self.candidates if c.paired is not None)
        return next(samples, Sample(self.chunks, self.positions // self.chunks))

    @cached_property
    def ranks(self) -> list[ModelRank]:
        """The ranks of the candidates after the reference, best first; `model` 0 is the first of them."""
        return rank(self.sample, [c.divergence.kld for c in self.candidates if c.divergence is not None])

    def record(self) -> dict[str, Any]:
        """The comparison as JSON data."""
        record: dict[str, Any] = {
            "reference": str(self.candidates[0].path),
            "models": [c.record(self.domains) for c in self.candidates],
        }
        if self.noise is not None:
            record["noise_floor"] = {"how": self.noise.how, **self.noise.paired.record()}
        record["ranks"] = [
            {"name": self.candidates[r.model + 1].name, "path": str(self.candidates[r.model + 1].path),
             "place": r.place,
             "difference_to_next": None if r.to_next is None else _named("kld", r.to_next.difference),
             "separated_from_next": None if r.to_next is None else r.to_next.separated,
             "more_tokens": None if r.to_next is None else r.to_next.more_tokens}
            for r in self.ranks
        ]  # fmt: skip
        if self.layers:
            record["layers"] = {name: [error._asdict() for error in errors] for name, errors in self.layers.items()}
        return record | {"conditions": self.conditions}
