"""Compare models with one reference model over the same tokens: size, perplexity, divergence, throughput.

The reference model's distributions are written to a temporary base file (16 bits per logit; the rounding adds less than
1e-8 to a mean KLD). So only one model is open at a time; tokenizers are compared first, without opening models. All
statistics are paired by token, and their errors are computed over chunks (`statistics.py`). Only a PPL by itself has
its error over tokens, for comparison with llama-perplexity's.
"""

from __future__ import annotations

import gc
import math
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from quantkit.archs.common import validate
from quantkit.errors import DataError, printable
from quantkit.evaluate import divergence as kld
from quantkit.evaluate.bench import Case, bench
from quantkit.evaluate.divergence import Divergence, Estimate
from quantkit.evaluate.perplexity import Perplexity, perplexity
from quantkit.evaluate.statistics import LEAST_UNITS, Interval, Rank, Sample, rank
from quantkit.evaluate.text import DEFAULT_BATCH, DEFAULT_CONTEXT, Chunks, chunked, read_text
from quantkit.formats import gguf
from quantkit.formats.kld.base_file import BaseReader, BaseWriter

TIMED_TOKENS = 512  # tokens of the timed prompt
_COMPARED_LETTERS = 1 << 16  # characters of each text that tokenizers are compared on

Opener = Callable[[Path], Any]
OnMessage = Callable[[str], None]
Result = TypeVar("Result")


class Vocabulary(NamedTuple):
    """A model's tokenizer and vocabulary size."""

    size: int
    tokenizer: Any


def vocabulary_of(path: Path) -> Vocabulary:
    """The vocabulary in a file's metadata; the model is not opened."""
    from quantkit.tokenizers.tokenizer import Tokenizer

    file = gguf.require_model(gguf.open(path))
    described = validate.describe(file.metadata, file.tensors, file.path)
    return Vocabulary(described.hparams.n_vocab, Tokenizer.from_gguf(file.metadata))


class Throughput(NamedTuple):
    """Tokens a second."""

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
        d, s = self.divergence, self.sample
        found = {"ln_ratio": s.mean(d.nll - d.nll_base), "kld": s.mean(d.kld)}
        shares = (("kld_median", 0.5), ("kld_p90", 0.9), ("kld_p95", 0.95), ("kld_p99", 0.99), ("kld_p999", 0.999))
        found |= {name: s.quantile(d.kld, share) for name, share in shares}
        return found | {"same_top": s.mean(d.same_top), "mean_dp": s.mean(d.dp), "rms_dp": s.root_mean_square(d.dp)}

    @property
    def largest(self) -> float:
        return float(self.divergence.kld.max())

    def of(self, domain: Domain) -> Paired:
        """The same figures over the chunks of one text."""
        here = slice(domain.first * self.sample.per_chunk, (domain.first + domain.chunks) * self.sample.per_chunk)
        d = self.divergence
        part = Divergence(d.nll[here], d.nll_base[here], d.kld[here], d.same_top[here])
        return Paired(part, Sample(domain.chunks, self.sample.per_chunk))

    def record(self) -> dict[str, Any]:
        found: dict[str, Any] = {"positions": len(self.divergence)}
        for name, figure in self.figures.items():
            found |= _named(name, figure)
        found |= _named("ppl_difference", self.ppl_difference)
        ppl, ppl_base = self.divergence.ppl, self.divergence.ppl_base
        return found | {"kld_max": self.largest, "ppl": ppl.value, "ppl_base": ppl_base.value}

    @property
    def ppl_difference(self) -> Interval:
        """PPL minus the reference's PPL; the error is to first order, from each token's contribution."""
        d = self.divergence
        p, p_base = d.ppl.value, d.ppl_base.value
        moved = self.sample.mean(p * (d.nll - d.nll.mean()) - p_base * (d.nll_base - d.nll_base.mean()))
        return Interval(p - p_base, moved.error, p - p_base + moved.low, p - p_base + moved.high)


def _named(name: str, figure: Interval) -> dict[str, Any]:
    """A figure for JSON: null in place of NaN, which JSON lacks."""
    value, error, low, high = (x if math.isfinite(x) else None for x in figure)
    return {name: value, f"{name}_error": error, f"{name}_95": [low, high]}


@dataclass(frozen=True)
class Candidate:
    """The measurements of one model. The reference itself has no divergence."""

    path: Path
    size_bytes: int  # of all shards
    bits_per_weight: float
    ppl: Estimate
    paired: Paired | None = None
    throughput: Throughput | None = None
    shown: str = ""  # its name in tables if the file's name is ambiguous

    @property
    def name(self) -> str:
        return printable(self.shown or self.path.stem)  # a file name need not be UTF-8

    @property
    def divergence(self) -> Divergence | None:
        return None if self.paired is None else self.paired.divergence

    def record(self, domains: Sequence[Domain] = ()) -> dict[str, Any]:
        """The figures by name, for JSON."""
        found: dict[str, Any] = {"file": self.path.name, "path": str(self.path), "size_bytes": self.size_bytes,
                                 "bits_per_weight": self.bits_per_weight}  # fmt: skip
        if self.paired is not None:
            found |= self.paired.record()
            if len(domains) > 1:
                found["domains"] = {d.name: self.paired.of(d).record() for d in domains}
        found |= {"ppl": self.ppl.value, "ppl_error": self.ppl.error}
        if self.throughput is not None:
            found |= {"prompt_tokens_per_second": self.throughput.prompt,
                      "generation_tokens_per_second": self.throughput.generation}  # fmt: skip
        return found


@dataclass(frozen=True)
class Noise:
    """The noise floor: the reference against itself with other numerics. Smaller differences are not significant."""

    how: str
    paired: Paired


@dataclass(frozen=True)
class Comparison:
    """The reference first, then the models in the order given."""

    candidates: list[Candidate]
    n_ctx: int
    chunks: int
    positions: int
    domains: list[Domain] = field(default_factory=list)
    noise: Noise | None = None

    @property
    def sample(self) -> Sample:
        return Sample(self.chunks, self.positions // self.chunks)

    @cached_property
    def ranks(self) -> list[Rank]:
        """The ranks of the candidates after the reference, best first; `model` 0 is the first of them."""
        return rank(self.sample, [c.divergence.kld for c in self.candidates if c.divergence is not None])

    def record(self) -> dict[str, Any]:
        """The comparison as JSON data."""
        found: dict[str, Any] = {"models": [c.record(self.domains) for c in self.candidates]}
        if self.noise is not None:
            found["noise_floor"] = {"how": self.noise.how, **self.noise.paired.record()}
        found["ranks"] = [
            {"file": self.candidates[r.model + 1].path.name, "name": self.candidates[r.model + 1].name,
             "place": r.place,
             "difference_to_next": None if r.to_next is None else _named("kld", r.to_next.difference),
             "separated_from_next": None if r.to_next is None else r.to_next.separated,
             "more_tokens": None if r.to_next is None else r.to_next.more_tokens}
            for r in self.ranks
        ]  # fmt: skip
        return found


def compare(
    reference: str | os.PathLike[str],
    models: Sequence[str | os.PathLike[str]],
    texts: Sequence[str | os.PathLike[str]],
    *,
    open_model: Opener,
    open_fast: Opener | None = None,
    noise: tuple[str, Opener] | None = None,
    n_ctx: int = DEFAULT_CONTEXT,
    limit: int | None = None,
    n_batch: int = DEFAULT_BATCH,
    on_message: OnMessage = lambda line: None,
    read_vocabulary: Callable[[Path], Vocabulary] = vocabulary_of,
) -> Comparison:
    """Measure every model against the reference. One model is open at a time.

    texts       each is a domain of its own, with at most `limit` chunks
    open_model  opens a model to measure its quality
    open_fast   if given, opens a model to measure its throughput; if it is the same function as `open_model`, each
                model is opened once for both
    noise       (label, opener): opens the reference with other numerics, for the noise floor
    on_message  called with a line of text before each step
    """
    first = Path(reference)
    vocabulary = read_vocabulary(first)
    for other in map(Path, models):  # checked first, because the measurements take hours
        _require_one_tokenizer(other, read_vocabulary(other), first, vocabulary, texts)
    chunks, domains = _gathered(vocabulary.tokenizer, texts, n_ctx, limit)
    with tempfile.TemporaryDirectory(prefix="quantkit-compare-") as folder:
        path = Path(folder) / "base.kld"

        def measured(model: Any) -> Perplexity:
            with BaseWriter(path, chunks.tokens, model.vocab_size) as writer:
                return perplexity(model, chunks, n_batch=n_batch, base=writer)

        on_message(f"{first.name}: perplexity over {len(chunks)} chunks of {n_ctx} tokens")
        found, speed = _run(first, measured, open_model, open_fast, on_message)
        base = BaseReader(path)
        sample = Sample(len(chunks), found.nll.shape[1])

        def against(model: Any) -> Divergence:  # the base rounds each token's probability, by up to 0.0002
            return replace(kld.divergence(model, base, n_batch=n_batch), nll_base=found.nll.reshape(-1))

        candidates = [Candidate(first, *size_of(first), Estimate(found.value, found.error), None, speed)]
        floor = None
        if noise is not None:
            on_message(f"{first.name}: noise floor, {noise[0]}")
            floor = Noise(noise[0], Paired(_run(first, against, noise[1], None, on_message)[0], sample))
        for other in map(Path, models):
            on_message(f"{other.name}: KL divergence from {first.name}")
            divergence, speed = _run(other, against, open_model, open_fast, on_message)
            candidates.append(Candidate(other, *size_of(other), divergence.ppl, Paired(divergence, sample), speed))
    names = unique_names([c.path for c in candidates])
    candidates = [replace(c, shown=name) for c, name in zip(candidates, names)]
    return Comparison(candidates, n_ctx, len(chunks), found.nll.size, domains, floor)


def _run(
    path: Path, measure: Callable[[Any], Result], opener: Opener, open_fast: Opener | None, on_message: OnMessage
) -> tuple[Result, Throughput | None]:
    """The result of `measure` for a model, and its throughput if `open_fast` is given. No model stays open."""

    def timed(model: Any) -> Throughput:
        on_message(f"{path.name}: throughput")
        return throughput(model)

    if open_fast is opener:
        return _closing(opener, path, lambda model: (measure(model), timed(model)))
    found = _closing(opener, path, measure)
    return found, None if open_fast is None else _closing(open_fast, path, timed)


def _closing(opener: Opener, path: Path, use: Callable[[Any], Result]) -> Result:
    """Open a model, apply `use` to it and free its memory, which the next model needs."""
    try:
        return use(opener(path))
    finally:
        gc.collect()  # a model and its parts refer to each other


def _require_one_tokenizer(
    path: Path, own: Vocabulary, first: Path, reference: Vocabulary, texts: Sequence[str | os.PathLike[str]]
) -> None:
    """Raise DataError if a model has another vocabulary than the reference, or tokenizes a text differently."""
    needs = "models are compared token by token, so they must share a tokenizer"
    if own.size != reference.size:
        raise DataError(f"{path}: has a vocabulary of {own.size}, {first} has {reference.size}; {needs}")
    for text in texts:
        beginning = read_text(text)[:_COMPARED_LETTERS]
        theirs, ours = (_without_bos(v.tokenizer, v.tokenizer.encode(beginning)) for v in (own, reference))
        if theirs != ours:
            at = next((i for i, (a, b) in enumerate(zip(theirs, ours)) if a != b), min(len(theirs), len(ours)))
            raise DataError(
                f"{path}: tokenizes {text} to {len(theirs)} tokens, {first} to {len(ours)}; the first difference is at "
                f"token {at}; {needs}"
            )


def _without_bos(tokenizer: Any, ids: list[int]) -> list[int]:
    return ids[1:] if tokenizer.adds_bos and ids[:1] == [tokenizer.bos_id] else ids


def _gathered(
    tokenizer: Any, texts: Sequence[str | os.PathLike[str]], n_ctx: int, limit: int | None
) -> tuple[Chunks, list[Domain]]:
    """The chunks of all texts in order, and the range of each text."""
    if not texts:
        raise DataError("no text to compare models on; name at least one")
    parts = [chunked(tokenizer, text, n_ctx, limit) for text in texts]
    firsts = np.cumsum([0, *map(len, parts)])
    names = unique_names(texts, lambda path: path.name)
    domains = [Domain(name, int(a), len(part)) for name, a, part in zip(names, firsts, parts)]
    tokens, inputs = (np.concatenate([getattr(part, name) for part in parts]) for name in ("tokens", "inputs"))
    return Chunks(tokens, inputs, ", ".join(map(str, texts))), domains


def unique_names(
    paths: Sequence[str | os.PathLike[str]], name: Callable[[Path], str] = lambda path: path.stem
) -> list[str]:
    """Short names of files, by default without extension; the whole path for a name that occurs twice."""
    short = [name(path) for path in dict.fromkeys(map(Path, paths))]
    return [name(path) if short.count(name(path)) == 1 else str(path) for path in map(Path, paths)]


def size_of(path: Path) -> tuple[int, float]:
    """(bytes of all files of a model, bits per weight over all its tensors)."""
    file = gguf.open(path)
    weights = sum(int(np.prod(t.shape, dtype=np.int64)) for t in file.tensors.values())
    return file.size, 8 * sum(t.nbytes for t in file.tensors.values()) / max(1, weights)


def throughput(model: Any, n_prompt: int = TIMED_TOKENS, n_generate: int = 64, repeat: int = 3) -> Throughput:
    """Median speed of a prompt of random tokens and of generation, each from an empty cache."""
    prompt, generation = bench(model, [Case(min(n_prompt, model.n_ctx_train), 0), Case(0, n_generate)], repeat)
    return Throughput(prompt.tokens_per_second, generation.tokens_per_second)


# -------------------------------------------------------------------------------------------------------------- tables


def table_header(comparison: Comparison) -> list[str]:
    timed = any(c.throughput for c in comparison.candidates)
    return ["file", "GiB", "bpw", "PPL", "PPL - ref", "ln(PPL/ref)", "KLD mean", "median", "p90", "p99", "max",
            "same top %", "RMS Δp %", *(["PP t/s", "TG t/s"] if timed else []), "place"]  # fmt: skip


def table_rows(comparison: Comparison) -> list[list[str]]:
    """One row of text per candidate, and one for the noise floor; `±` is one standard error."""
    timed = any(c.throughput for c in comparison.candidates)
    places = {r.model + 1: str(r.place) for r in comparison.ranks}
    rows = []
    for i, c in enumerate(comparison.candidates):
        cells = [c.name, f"{c.size_bytes / 2**30:.3f}", f"{c.bits_per_weight:.3f}",
                 f"{c.ppl.value:.4f} ± {c.ppl.error:.4f}", *_paired_cells(c.paired)]  # fmt: skip
        if timed:
            speed = c.throughput
            cells += [f"{speed.prompt:.0f}", f"{speed.generation:.1f}"] if speed else ["-", "-"]
        rows.append([*cells, places.get(i, "-")])
    if comparison.noise is not None:
        d = comparison.noise.paired
        ppl = d.divergence.ppl
        cells = [f"noise floor: {comparison.noise.how}", "-", "-", f"{ppl.value:.4f} ± {ppl.error:.4f}"]
        rows.insert(1, [*cells, *_paired_cells(d), *(["-", "-"] if timed else []), "-"])
    return rows


def _paired_cells(paired: Paired | None) -> list[str]:
    """The cells from PPL - ref to RMS Δp."""
    if paired is None:
        return ["reference", *["-"] * 8]
    f, difference = paired.figures, paired.ppl_difference
    return [
        f"{difference.value:+.4f} ± {difference.error:.4f}",
        f"{f['ln_ratio'].value:+.5f} ± {f['ln_ratio'].error:.5f}",
        f"{f['kld'].value:.6f} ± {f['kld'].error:.6f}",
        *(f"{f[name].value:.6f}" for name in ("kld_median", "kld_p90", "kld_p99")),
        f"{paired.largest:.6f}",
        *(f"{100 * f[name].value:.2f} ± {100 * f[name].error:.2f}" for name in ("same_top", "rms_dp")),
    ]


def domain_rows(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    """A header, and one row per text and model; no rows for a single text."""
    header = ["text", "file", "tokens", "PPL", "PPL - ref", "ln(PPL/ref)", "KLD mean", "median", "p90", "p99", "max",
              "same top %", "RMS Δp %"]  # fmt: skip
    rows = []
    for domain in comparison.domains if len(comparison.domains) > 1 else ():
        for c in comparison.candidates:
            if c.paired is not None:
                part = c.paired.of(domain)
                ppl = part.divergence.ppl
                rows.append([domain.name, c.name, str(len(part.divergence)), f"{ppl.value:.4f} ± {ppl.error:.4f}",
                             *_paired_cells(part)])  # fmt: skip
    return header, rows


def verdicts(comparison: Comparison) -> list[str]:
    """Sentences: which model is closer, which are indistinguishable, and which are within the noise floor."""
    said, names = [], [c.name for c in comparison.candidates[1:]]
    for r, following in zip(comparison.ranks, comparison.ranks[1:]):
        a, b, s = names[r.model], names[following.model], r.to_next
        assert s is not None
        margin = f"{s.difference.value:.6f} ± {s.difference.error:.6f} nats a token"
        if s.separated:
            said.append(f"{a} is closer to the reference than {b}: by {margin}")
        elif s.more_tokens:
            said.append(
                f"{a} and {b} are indistinguishable: {margin}; about {s.more_tokens:,} more tokens would separate them"
            )
        else:
            said.append(f"{a} and {b} are indistinguishable: {margin}; even 100 times the tokens would not suffice")
    if comparison.noise is not None:
        floor = max(0.0, comparison.noise.paired.figures["kld"].value)  # a base that rounds gives tiny negatives
        said += [
            f"{c.name} is within the noise floor of {floor:.6f} nats: other numerics change the reference as much"
            for c in comparison.candidates
            if c.paired is not None and c.paired.figures["kld"].value <= floor
        ]
    if comparison.chunks < LEAST_UNITS:
        said.append(
            f"errors are too small: {comparison.chunks} chunks do not show how passages differ; use {LEAST_UNITS} or "
            "more (--chunks, shorter chunks with -c, or a longer text)"
        )
    return said


def model_card(comparison: Comparison, conditions: str) -> str:
    """A Markdown block for a model card: sizes, quality figures and all their conditions."""
    lines = []
    for c in comparison.candidates[1:]:
        lines += [f"## {c.name} {c.size_bytes / 2**30:.3f} GiB ({c.bits_per_weight:.3f} BPW)", ""]
        lines += [f"Final estimate: PPL = {c.ppl.value:.4f} +/- {c.ppl.error:.5f}", ""]
        assert c.paired is not None
        f = c.paired.figures
        low, high = f["kld"].low, f["kld"].high
        lines += [
            f"KLD from {comparison.candidates[0].name}: {f['kld'].value:.6f} (95 %: {low:.6f} to {high:.6f}), "
            f"p99 {f['kld_p99'].value:.6f}, same top token {100 * f['same_top'].value:.2f} %, "
            f"RMS Δp {100 * f['rms_dp'].value:.2f} %",
            "",
        ]
    lines += [f"- {line}" for line in verdicts(comparison)]
    return "\n".join([*lines, "", f"Measured over {comparison.positions} tokens; {conditions}."])
