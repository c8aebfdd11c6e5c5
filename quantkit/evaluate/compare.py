"""Compare models with one reference model over the same tokens: size, perplexity, divergence, throughput.

The reference is the model that the others were quantized from. Its distributions are written to a temporary base file
(16 bits per logit; the rounding adds less than 1e-8 to a mean KLD). So only one model is open at a time; tokenizers are
compared first, without opening models. All statistics are paired by token, and their errors are computed over chunks
(`statistics.py`). Only a PPL by itself has its error over tokens, for comparison with llama-perplexity's.
"""

from __future__ import annotations

import functools
import gc
import itertools
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np

from quantkit.archs.common import validate
from quantkit.errors import DataError, QuantkitError, UnsupportedError
from quantkit.evaluate.bench import Case, bench
from quantkit.evaluate.chunk_runs import Here, MeasureChunks
from quantkit.evaluate.comparison import Candidate, Comparison, Domain, NoiseFloor, Paired, Throughput
from quantkit.evaluate.conditions import evaluation_conditions
from quantkit.evaluate.corpus import read_text, require_different
from quantkit.evaluate.divergence import Divergence, Estimate, divergence_from_base
from quantkit.evaluate.layers.tensor_errors import TensorError, tensor_errors
from quantkit.evaluate.models import ChunkModel, OnMessage, OpenModel, no_message, open_model
from quantkit.evaluate.on_workers import ClusterRuns, MeasureOnWorkers, WorkerModel, with_workers
from quantkit.evaluate.perplexity import Perplexity, checked_score, chunks_of, perplexity_of_chunks
from quantkit.evaluate.progress import ChunkClock, ChunkProgress
from quantkit.evaluate.statistics import Sample
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
    return Vocabulary(described.hparams.n_vocab, Tokenizer.from_gguf(file.metadata, file.path))


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
    paths = [Path(text) for text in ([texts] if isinstance(texts, (str, os.PathLike)) else texts)]
    noise, score = _noise(o), checked_score(o.score, o.chat)
    vocabulary = read_vocabulary(first)
    for other in map(Path, models):  # checked first, because the measurements take hours
        _require_one_tokenizer(other, read_vocabulary(other), first, vocabulary, paths)
    chunks, domains = _chunks_of_texts(vocabulary.tokenizer, paths, o, score)
    for note in chunks.notes:
        on_message(f"note: {note}")
    cluster = None if client is None else ClusterRuns(client, on_message)
    count = 1 + (noise is not None) + len(models)
    noise_floor = None
    with tempfile.TemporaryDirectory(prefix="quantkit-compare-") as folder:
        runs = _Runs(first, chunks, Path(folder) / "base.kld", count, o, open_model, cluster, progress, on_message)
        candidates = [runs.reference()]
        if noise is not None:
            noise_floor = runs.noise_floor(noise)
        for number, other in enumerate(map(Path, models), count - len(models)):
            candidates.append(runs.candidate(other, number))
    names = unique_names([c.path for c in candidates])
    candidates = [replace(c, display_name=name) for c, name in zip(candidates, names)]
    layer_errors = {}
    if o.layers:
        layer_errors = _layers(
            first, dict(zip(names[1:], map(Path, models))), _first_tokens(chunks), o, open_model, on_message
        )
    return Comparison(
        candidates, chunks.n_ctx, len(chunks), runs.nll.size, domains, noise_floor, layer_errors,
        with_workers(runs.conditions, cluster),
    )  # fmt: skip


class _Runs:
    """The runs of a comparison, one model after another: the reference first, whose distributions the others need.

    base        where the reference's distributions are written
    count       the number of runs, for progress
    nll         float64[positions] of the reference, in nats, once it has run
    conditions  those of the last model that was opened
    """

    nll: np.ndarray

    def __init__(
        self,
        reference: Path,
        chunks: Chunks,
        base: Path,
        count: int,
        options: CompareOptions,
        open_model: OpenModel,
        cluster: ClusterRuns | None,
        progress: Callable[[CompareProgress], None] | None,
        on_message: OnMessage,
    ):
        self._reference, self._chunks, self._base, self._count = reference, chunks, base, count
        self._options, self._open_model, self._cluster = options, open_model, cluster
        self._progress, self._on_message = progress, on_message
        self._is_fast = options.numerics == "fast"
        self._longest = max(chunks.n_ctx, TIMED_TOKENS) if options.speed and self._is_fast else chunks.n_ctx
        self.conditions: dict[str, object] = {}

    def reference(self) -> Candidate:
        """The reference's perplexity; writes its distributions."""
        path, chunks = self._reference, self._chunks
        about = "" if chunks.choice is None else f", {chunks.choice.about} scored"
        self._on_message(f"{path.name}: perplexity over {len(chunks)} chunks of {chunks.n_ctx} tokens{about}")
        measured, speed = _run(path, self._perplexity, self._open, self._timed, self._on_message)
        self.nll = measured.nll.reshape(-1)
        return Candidate(path, *size_of(path), Estimate(measured.value, measured.error), None, speed)

    def candidate(self, path: Path, number: int) -> Candidate:
        """A model's divergence from the reference: run `number`."""
        self._on_message(f"{path.name}: KL divergence from {self._reference.name}")
        measure = functools.partial(self._divergence, path, number, None)
        measured, speed = _run(path, measure, self._open, self._timed, self._on_message)
        return Candidate(path, *size_of(path), measured.ppl, self._paired(measured), speed)

    def noise_floor(self, noise: _Noise) -> NoiseFloor:
        """The reference's divergence from itself: run 1."""
        path, o = self._reference, self._options
        self._on_message(f"{path.name}: noise floor, {noise.how}")

        def open_for_noise(path: Path) -> Model:
            return self._open_model(
                path, numerics=noise.numerics, threads=o.threads, n_ctx=self._chunks.n_ctx, cache_type=noise.cache_type
            )

        measure = functools.partial(self._divergence, path, 1, noise)
        return NoiseFloor(noise.how, self._paired(_run(path, measure, open_for_noise, None, self._on_message)[0]))

    def _perplexity(self, model: ChunkModel) -> Perplexity:
        chunks, path = self._chunks, self._reference
        after_chunk = self._clock(path, 0)
        with BaseWriter(self._base, chunks.tokens, model.vocab_size, scored=chunks.choice) as writer:
            return perplexity_of_chunks(
                model, chunks, n_batch=self._options.batch_size, base=writer,
                on_chunk=lambda so_far: after_chunk(so_far.chunks, so_far), run=self._runner(path),
            )  # fmt: skip

    def _divergence(self, path: Path, number: int, how: _Noise | None, model: ChunkModel) -> Divergence:
        base = BaseReader(self._base, self._chunks.choice)
        measured = divergence_from_base(
            model, base, n_batch=self._options.batch_size, on_chunk=self._clock(path, number),
            run=self._runner(path, [self._base], how),
        )  # fmt: skip
        return replace(measured, nll_base=self.nll)  # the base rounds each token's probability, by up to 0.0002

    def _paired(self, measured: Divergence) -> Paired:
        return Paired(measured, Sample.of(self._chunks.counts))

    def _clock(self, path: Path, number: int) -> Callable[[int, Perplexity | Divergence], None]:
        """What to call after each chunk of a run."""
        chunks, progress = self._chunks, self._progress
        clock = ChunkClock(len(chunks), 0, self._options.batch_size, chunks.n_ctx, chunks.source)

        def report(chunk: ChunkProgress[Perplexity | Divergence]) -> None:
            assert progress is not None
            progress(CompareProgress(path.name, number, self._count, chunk))

        return functools.partial(clock.report, None if progress is None else report)

    def _runner(self, path: Path, read: Sequence[Path] = (), how: _Noise | None = None) -> MeasureChunks:
        """What runs a model over the chunks; workers also read the files `read`."""
        if self._cluster is None:
            return Here()
        o = self._options
        numerics, cache_type = (o.numerics, None) if how is None else (how.numerics, how.cache_type)
        model = WorkerModel(self._open_model, path, numerics, o.threads, self._longest, cache_type)
        return MeasureOnWorkers(self._cluster, model, read)

    def _open(self, path: Path) -> Model:
        o, chunks = self._options, self._chunks
        model = self._open_model(path, numerics=o.numerics, threads=o.threads, n_ctx=self._longest)
        self.conditions = dict(evaluation_conditions(model, chunks.n_ctx, len(chunks), chunks.source, chunks.choice))
        return model

    @property
    def _timed(self) -> Callable[[Path], Model] | None:
        """What opens a model to time it, which is `_open` where that one can be timed; None: models are not timed."""
        if not self._options.speed:
            return None
        return self._open if self._is_fast else self._open_fast

    def _open_fast(self, path: Path) -> Model:
        return self._open_model(path, numerics="fast", threads=self._options.threads, n_ctx=TIMED_TOKENS)


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

    if timed_opener == opener:  # one model for both
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
    require_different(texts)
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
