"""Compare models with one reference model over the same tokens: size, perplexity, divergence, throughput.

The reference is the model that the others were quantized from. Its distributions are written to a temporary base file
(16 bits per logit; the rounding adds less than 1e-8 to a mean KLD). So only one model is open at a time; tokenizers are
compared first, without opening models. All statistics are paired by token, and their errors are computed over chunks
(`statistics.py`). Only a PPL by itself has its error over tokens, for comparison with llama-perplexity's.
"""

from __future__ import annotations

import gc
import itertools
import math
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from quantkit.archs.common import validate
from quantkit.errors import DataError, QuantkitError, UnsupportedError, printable
from quantkit.evaluate.bench import Case, bench
from quantkit.evaluate.breakdown import Part, by_position
from quantkit.evaluate.chunk_runs import Here, MeasureChunks
from quantkit.evaluate.conditions import Conditions, evaluation_conditions
from quantkit.evaluate.corpus import read_text
from quantkit.evaluate.divergence import Divergence, Estimate, divergence_from_base
from quantkit.evaluate.layers.tensor_errors import TensorError, tensor_errors
from quantkit.evaluate.models import ChunkModel, OnMessage, OpenModel, no_message, open_model
from quantkit.evaluate.on_workers import ClusterRuns, MeasureOnWorkers, WorkerModel, with_workers
from quantkit.evaluate.perplexity import Perplexity, checked_score, chunks_of, perplexity_of_chunks
from quantkit.evaluate.progress import ChunkClock, ChunkProgress
from quantkit.evaluate.statistics import Interval, ModelRank, Sample, rank
from quantkit.evaluate.text import DEFAULT_BATCH, DEFAULT_CONTEXT, Chunks, join
from quantkit.formats import gguf
from quantkit.formats.kld.base_file import BaseReader, BaseWriter
from quantkit.runtime.kv.cache_type import CacheType
from quantkit.tokenizers.tokenizer import Tokenizer

if TYPE_CHECKING:
    from distributed import Client

    from quantkit.runtime.model import Model

TIMED_TOKENS = 512  # tokens of the timed prompt
_COMPARED_CHARACTERS = 1 << 16  # characters of each text that tokenizers are compared on

Result = TypeVar("Result")


class Vocabulary(NamedTuple):
    """A model's tokenizer and vocabulary size."""

    size: int
    tokenizer: Tokenizer


def vocabulary_of(path: Path) -> Vocabulary:
    """The vocabulary in a file's metadata; the model is not opened."""
    file = gguf.require_model(gguf.open(path))
    described = validate.describe(file.metadata, file.tensors, file.path)
    return Vocabulary(described.hparams.n_vocab, Tokenizer.from_gguf(file.metadata))


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


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """Options of `compare`: the flags of `quantkit compare`.

    ctx_size            tokens per chunk
    chunks              at most this many chunks (or conversations) of each text; None: all
    chat                texts hold conversations, which the reference's chat template formats: a chunk each
    score               the scored tokens, as in PerplexityOptions
    by_category         texts are .jsonl files with a "category" on each line; each category is a domain
    batch_size          tokens per batch, in whole chunks
    noise_floor         also compare the reference with itself under other numerics ("fast", "exact") or a cache type
                        such as "q8_0"; "auto": the other numerics; "off": do not
    layers              also measure the error that each tensor adds, on the first chunk of the first text
    speed               also time a prompt of 512 tokens and generation, with numerics fast
    numerics, threads   "exact" or "fast", number of threads
    """

    ctx_size: int = DEFAULT_CONTEXT
    chunks: int | None = None
    chat: bool = False
    score: str | None = None
    by_category: bool = False
    batch_size: int = DEFAULT_BATCH
    noise_floor: str = "auto"
    layers: bool = False
    speed: bool = False
    numerics: str = "exact"
    threads: int | None = None


@dataclass(frozen=True)
class CompareProgress:
    """The state of a comparison after a chunk.

    model       name of the model that runs
    run, runs   its number, from 0, and the number of all: the reference, its noise floor, the models
    chunk       the state of the run; `so_far` is a Perplexity for the reference and a Divergence for all others
    """

    model: str
    run: int
    runs: int
    chunk: ChunkProgress[Perplexity | Divergence]


def compare(
    reference: str | os.PathLike[str],
    models: Sequence[str | os.PathLike[str]],
    texts: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    options: CompareOptions | None = None,
    *,
    progress: Callable[[CompareProgress], None] | None = None,
    on_message: OnMessage = no_message,
    open_model: OpenModel = open_model,
    read_vocabulary: Callable[[Path], Vocabulary] = vocabulary_of,
    client: Client | None = None,
) -> Comparison:
    """Compare models with a reference model on the same texts: size, perplexity, KL divergence, same top token, speed.

    All differences are paired by token. Their errors and 95 % intervals are computed over chunks (`statistics.Sample`).
    One model is open at a time.

    reference, models   GGUF files; the models must tokenize as the reference does
    texts               one or several text files, UTF-8; each is a domain of its own
    options             the command's flags; None for the defaults
    progress            called after each chunk of each model, with the perplexity or the divergence so far
    on_message          called with a line of text before each step
    open_model          opens a file
    read_vocabulary     reads the tokenizer and the size of the vocabulary from a file
    client              run the chunks on the workers of this dask cluster, as in `perplexity`; $TMPDIR, where the
                        reference's distributions are, must be a folder that they see

    Raises DataError, before any model is opened, for a model with another tokenizer, and for a text that is too short.
    """
    o, first = options or CompareOptions(), Path(reference)
    if client is not None and (o.layers or o.speed):
        flag = "--layers" if o.layers else "--speed"
        raise UnsupportedError(f"{flag} measures on this machine, not on a cluster; run it without --cluster")
    cluster = None if client is None else ClusterRuns(client, on_message)
    paths = [Path(text) for text in ([texts] if isinstance(texts, (str, os.PathLike)) else texts)]
    noise, score = _noise(o), checked_score(o.score, o.chat)
    vocabulary = read_vocabulary(first)
    for other in map(Path, models):  # checked first, because the measurements take hours
        _require_one_tokenizer(other, read_vocabulary(other), first, vocabulary, paths)
    chunks, domains = _chunks_of_texts(vocabulary.tokenizer, paths, o, score)
    for note in chunks.notes:
        on_message(f"note: {note}")
    n_ctx = chunks.n_ctx
    longest = max(n_ctx, TIMED_TOKENS) if o.speed and o.numerics == "fast" else n_ctx
    conditions: dict[str, object] = {}
    runs = 1 + (noise is not None) + len(models)

    def clock(model: Path, run: int) -> Callable[[int, Perplexity | Divergence], None]:
        """What to call after each chunk of a run."""
        clock = ChunkClock(len(chunks), 0, o.batch_size, n_ctx, chunks.source)

        def after_chunk(done: int, so_far: Perplexity | Divergence) -> None:
            def report(chunk: ChunkProgress[Perplexity | Divergence]) -> None:
                assert progress is not None
                progress(CompareProgress(model.name, run, runs, chunk))

            clock.report(None if progress is None else report, done, so_far)

        return after_chunk

    def runner(path: Path, read: Sequence[Path] = (), how: _Noise | None = None) -> MeasureChunks:
        """What runs a model over the chunks; workers also read the files `read`."""
        if cluster is None:
            return Here()
        numerics, cache_type = (o.numerics, None) if how is None else (how.numerics, how.cache_type)
        return MeasureOnWorkers(cluster, WorkerModel(open_model, path, numerics, o.threads, longest, cache_type), read)

    def open_candidate(path: Path) -> Model:
        model = open_model(path, numerics=o.numerics, threads=o.threads, n_ctx=longest)
        names = ", ".join(map(str, paths))
        conditions.update(evaluation_conditions(model, n_ctx, len(chunks), names, chunks.choice))
        return model

    def open_fast(path: Path) -> Model:
        return open_model(path, numerics="fast", threads=o.threads, n_ctx=TIMED_TOKENS)

    timed = None if not o.speed else open_candidate if o.numerics == "fast" else open_fast
    with tempfile.TemporaryDirectory(prefix="quantkit-compare-") as folder:
        base_path = Path(folder) / "base.kld"

        def write_base(model: ChunkModel) -> Perplexity:
            after_chunk = clock(first, 0)
            with BaseWriter(base_path, chunks.tokens, model.vocab_size, scored=chunks.choice) as writer:
                return perplexity_of_chunks(
                    model, chunks, n_batch=o.batch_size, base=writer,
                    on_chunk=lambda so_far: after_chunk(so_far.chunks, so_far), run=runner(first),
                )  # fmt: skip

        about = "" if chunks.choice is None else f", {chunks.choice.about} scored"
        on_message(f"{first.name}: perplexity over {len(chunks)} chunks of {n_ctx} tokens{about}")
        reference_result, speed = _run(first, write_base, open_candidate, timed, on_message)
        base = BaseReader(base_path, chunks.choice)
        sample = Sample.of(chunks.counts)

        def measure_divergence(path: Path, run: int, how: _Noise | None = None) -> Callable[[ChunkModel], Divergence]:
            def measure(model: ChunkModel) -> Divergence:
                measured = divergence_from_base(
                    model, base, n_batch=o.batch_size, on_chunk=clock(path, run), run=runner(path, [base_path], how)
                )
                # the base rounds each token's probability, by up to 0.0002
                return replace(measured, nll_base=reference_result.nll.reshape(-1))

            return measure

        candidates = [
            Candidate(first, *size_of(first), Estimate(reference_result.value, reference_result.error), None, speed)
        ]
        noise_floor = None
        if noise is not None:
            on_message(f"{first.name}: noise floor, {noise.how}")

            def open_for_noise(path: Path) -> Model:
                return open_model(
                    path, numerics=noise.numerics, threads=o.threads, n_ctx=n_ctx, cache_type=noise.cache_type
                )

            repeated = _run(first, measure_divergence(first, 1, noise), open_for_noise, None, on_message)[0]
            noise_floor = NoiseFloor(noise.how, Paired(repeated, sample))
        for run, other in enumerate(map(Path, models), runs - len(models)):
            on_message(f"{other.name}: KL divergence from {first.name}")
            measured, speed = _run(other, measure_divergence(other, run), open_candidate, timed, on_message)
            candidates.append(Candidate(other, *size_of(other), measured.ppl, Paired(measured, sample), speed))
    names = unique_names([c.path for c in candidates])
    candidates = [replace(c, display_name=name) for c, name in zip(candidates, names)]
    layer_errors = {}
    if o.layers:
        layer_errors = _layers(
            first, dict(zip(names[1:], map(Path, models))), _first_tokens(chunks), o, open_model, on_message
        )
    return Comparison(
        candidates, n_ctx, len(chunks), reference_result.nll.size, domains, noise_floor, layer_errors,
        with_workers(conditions, cluster),
    )  # fmt: skip


class _Noise(NamedTuple):
    """How the reference runs again for the noise floor."""

    how: str
    numerics: str
    cache_type: CacheType | None


def _noise(o: CompareOptions) -> _Noise | None:
    """The second run of the reference; None for none. Raises QuantkitError if it would be the same as the first."""
    kind = o.noise_floor
    if kind == "off":
        return None
    if kind == "auto":
        kind = "fast" if o.numerics == "exact" else "exact"
    if kind == o.numerics:
        raise QuantkitError(
            f"--noise-floor {kind}: the models already run with these numerics; name others or a cache type"
        )
    if kind in ("fast", "exact"):
        return _Noise(f"numerics {kind}", kind, None)
    return _Noise(f"cache {kind}", o.numerics, CacheType(kind, kind))


def _layers(
    reference: Path, models: Mapping[str, Path], tokens: np.ndarray, o: CompareOptions, open_model: OpenModel,
    on_message: OnMessage,
) -> dict[str, list[TensorError]]:  # fmt: skip
    """By model, the error that each of its tensors adds in the reference, on int[1, n] tokens."""
    # without -rtr: the tensors are compared in the files' types
    model = open_model(reference, numerics=o.numerics, threads=o.threads, n_ctx=tokens.size, repack=False)
    errors = {}
    for name, path in models.items():
        on_message(f"{name}: error of each tensor over {tokens.size} tokens")
        errors[name] = tensor_errors(model, gguf.open(path), tokens)
    return errors


def _first_tokens(chunks: Chunks) -> np.ndarray:
    """int32[1, n]: the input of the first chunk, without its fill."""
    if chunks.choice is None:
        return chunks.inputs[:1]
    return chunks.inputs[:1, : int(chunks.choice.rows(0)[-1]) + 2]


def _run(
    path: Path,
    measure: Callable[[Model], Result],
    opener: Callable[[Path], Model],
    timed_opener: Callable[[Path], Model] | None,
    on_message: OnMessage,
) -> tuple[Result, Throughput | None]:
    """The result of `measure` for a model, and its throughput if `timed_opener` is given. No model stays open."""

    def timed(model: Model) -> Throughput:
        on_message(f"{path.name}: throughput")
        return throughput(model)

    if timed_opener is opener:  # one model for both
        return _with_model(opener, path, lambda model: (measure(model), timed(model)))
    result = _with_model(opener, path, measure)
    return result, None if timed_opener is None else _with_model(timed_opener, path, timed)


def _with_model(opener: Callable[[Path], Model], path: Path, use: Callable[[Model], Result]) -> Result:
    """Open a model, apply `use` to it and free its memory, which the next model needs."""
    try:
        return use(opener(path))
    finally:
        gc.collect()  # a model and its parts refer to each other


def _require_one_tokenizer(
    path: Path, vocabulary: Vocabulary, first: Path, reference: Vocabulary, texts: Sequence[str | os.PathLike[str]]
) -> None:
    """Raise DataError if a model has another vocabulary than the reference, or tokenizes a text differently."""
    needs = "models are compared token by token, so they must have the same tokenizer"
    if vocabulary.size != reference.size:
        raise DataError(f"{path}: has a vocabulary of {vocabulary.size}, {first} has {reference.size}; {needs}")
    for text in texts:
        beginning = read_text(text)[:_COMPARED_CHARACTERS]
        theirs, ours = (_without_bos(v.tokenizer, v.tokenizer.encode(beginning)) for v in (vocabulary, reference))
        if theirs != ours:
            at = next((i for i, (a, b) in enumerate(zip(theirs, ours)) if a != b), min(len(theirs), len(ours)))
            raise DataError(
                f"{path}: tokenizes {text} to {len(theirs)} tokens, {first} to {len(ours)}; the first difference is at "
                f"token {at}; {needs}"
            )


def _without_bos(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    return ids[1:] if tokenizer.adds_bos and ids[:1] == [tokenizer.bos_id] else ids


def _chunks_of_texts(
    tokenizer: Tokenizer, texts: Sequence[Path], o: CompareOptions, score: str
) -> tuple[Chunks, list[Domain]]:
    """The chunks of all texts in order, and the range of each text, or of each category."""
    if not texts:
        raise DataError("no text to compare models on; name at least one")
    parts = [chunks_of(tokenizer, text, o.ctx_size, o.chunks, o.chat, score, o.by_category) for text in texts]
    names = unique_names(texts, lambda path: path.name)
    domains, first = [], 0
    for name, part in zip(names, parts):
        labels = [name] * len(part)
        if part.choice is not None and part.choice.labels:
            labels = [label if len(parts) == 1 else f"{name}: {label}" for label in part.choice.labels]
        for label, group in itertools.groupby(labels):
            domains.append(Domain(label, first, len(list(group))))
            first += domains[-1].chunks
    return join(parts, ", ".join(map(str, texts))), domains


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


def throughput(model: Model, n_prompt: int = TIMED_TOKENS, n_generate: int = 64, repeat: int = 3) -> Throughput:
    """Median speed of a prompt of random tokens and of generation, each from an empty cache."""
    prompt, generation = bench(model, [Case(min(n_prompt, model.n_ctx_train), 0), Case(0, n_generate)], repeat)
    return Throughput(prompt.tokens_per_second, generation.tokens_per_second)
