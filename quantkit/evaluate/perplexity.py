"""Perplexity by llama-perplexity's protocol, so that figures are comparable with published ones.

Each chunk is a fresh sequence. Its second half is scored, unless --score says otherwise: with first = n_ctx // 2, the
logits at first … n_ctx - 2 predict the tokens first + 1 … n_ctx - 1. Over all scored tokens,

    nll = -log softmax(logits)[target]          float32 exponentials, float64 sum
    PPL = exp(mean nll)
    +/- = PPL * sqrt((mean nll² - (mean nll)²) / (count - 1))
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from quantkit.errors import DataError, OptionError, UnknownNameError
from quantkit.evaluate.base_files import base_writer
from quantkit.evaluate.chat_chunks import chat_chunks
from quantkit.evaluate.chunk_log import ChunkLog, run_log
from quantkit.evaluate.chunk_runs import Here, MeasureChunks
from quantkit.evaluate.conditions import Conditions, evaluation_conditions
from quantkit.evaluate.corpus import texts_by_category
from quantkit.evaluate.layers.layer_by_layer import chunks_layer_by_layer
from quantkit.evaluate.layers.on_workers import LayersOnWorkers
from quantkit.evaluate.models import (
    ChunkModel,
    OnLayer,
    OnMessage,
    OpenModel,
    layer_messages,
    no_message,
    open_model,
)
from quantkit.evaluate.nll import negative_log_likelihood
from quantkit.evaluate.on_workers import ClusterRuns, MeasureOnWorkers, WorkerModel, require_path, with_workers
from quantkit.evaluate.progress import ChunkClock, ChunkProgress
from quantkit.evaluate.statistics import perplexity_of
from quantkit.evaluate.text import DEFAULT_BATCH, DEFAULT_CONTEXT, Chunks, chunked, cut, join, score_chunks, windows
from quantkit.formats.atomic import check_outputs
from quantkit.formats.kld.base_file import BaseEncoder, BaseWriter
from quantkit.formats.kld.bounded_file import BoundedEncoder, BoundedWriter
from quantkit.formats.kld.chunk_file import LoggedChunks

if TYPE_CHECKING:
    from distributed import Client

    from quantkit.runtime.model import Model
    from quantkit.tokenizers.tokenizer import Tokenizer

SCORES = ("half", "all", "assistant")


@dataclass(frozen=True)
class Perplexity:
    """The perplexity of a model on a text.

    nll          float64[n_chunk, positions]: negative log-likelihood of each scored token, in nats; float64[n] where
                 `counts` are set
    n_ctx        tokens per chunk
    seconds      time of the run, without opening the model
    conditions   what the figures depend on besides the file: text, options, CPU, versions
    counts       int64[n_chunk]: the number of scored tokens of each chunk where they differ, as in conversations
    """

    nll: np.ndarray
    n_ctx: int
    seconds: float = 0.0
    conditions: Conditions = field(default_factory=dict)
    counts: np.ndarray | None = None

    @property
    def chunks(self) -> int:
        """Number of chunks."""
        return len(self.nll if self.counts is None else self.counts)

    @property
    def value(self) -> float:
        """The perplexity: exp of the mean nll."""
        return perplexity_of(float(self.nll.mean()))

    @property
    def mean_error(self) -> float:
        """Standard error of the mean nll over tokens, in nats."""
        flat = self.nll.reshape(-1)
        variance = float(np.mean(flat**2) - flat.mean() ** 2)
        return math.sqrt(variance / (flat.size - 1)) if variance > 0 and flat.size > 1 else 0.0

    @property
    def error(self) -> float:
        """Standard error of the perplexity over tokens, as llama-perplexity prints it."""
        return self.value * self.mean_error

    @property
    def running(self) -> list[float]:
        """The perplexity over the first chunk, the first two chunks, and so on."""
        return [self.after(i + 1).value for i in range(self.chunks)]

    def after(self, chunks: int) -> Perplexity:
        """The result over the first `chunks` chunks."""
        if self.counts is None:
            return replace(self, nll=self.nll[:chunks])
        counts = self.counts[:chunks]
        return replace(self, nll=self.nll[: int(counts.sum())], counts=counts)

    def record(self) -> dict[str, object]:
        """The figures by name, for JSON; the error is over tokens."""
        return {"ppl": self.value, "ppl_error_over_tokens": self.error, "running": self.running}

    def __str__(self) -> str:
        return f"{self.value:.4f} +/- {self.error:.5f}"


@dataclass(frozen=True, kw_only=True)
class PerplexityOptions:
    """Options of `perplexity`: the flags of `quantkit perplexity`.

    ctx_size              tokens per chunk
    chunks                evaluate at most this many chunks; None: all
    batch_size            tokens per batch, in whole chunks
    ppl_stride            0: score the second half of each chunk. Else windows of ctx_size + ppl_stride / 2 tokens,
                          ppl_stride apart, of which the last ppl_stride tokens are scored
    jsonl                 write a JSON line per chunk to this file, and resume from it
    kl_divergence_base    write the log-probabilities to this base file, for `divergence`
    kl_divergence_bound   for a base file named .qkld: target error of the mean KLD, in nats
    chat                  the text holds conversations, which the model's chat template formats: a chunk each, of at
                          most ctx_size tokens
    score                 the scored tokens. "half": the second half of each chunk; "all": all but the first of each;
                          "assistant": those of the assistant in conversations. None: "assistant" with `chat`, else
                          "half"
    by_category           the text is a .jsonl file with a "category" on each line, which a bounded base file records
    by_layer              run all chunks through one layer before the next; for models larger than memory
    numerics, threads     for a model given by its path: "exact" or "fast", number of threads
    """

    ctx_size: int = DEFAULT_CONTEXT
    chunks: int | None = None
    batch_size: int = DEFAULT_BATCH
    ppl_stride: int = 0
    jsonl: Path | None = None
    kl_divergence_base: Path | None = None
    kl_divergence_bound: float = 1e-3
    chat: bool = False
    score: str | None = None
    by_category: bool = False
    by_layer: bool = False
    numerics: str = "exact"
    threads: int | None = None


def perplexity(
    model: Model | str | os.PathLike[str],
    text: str | os.PathLike[str],
    options: PerplexityOptions | None = None,
    *,
    progress: Callable[[ChunkProgress[Perplexity]], None] | None = None,
    on_message: OnMessage = no_message,
    on_layer: OnLayer | None = None,
    open_model: OpenModel = open_model,
    client: Client | None = None,
) -> Perplexity:
    """Perplexity of a model on a text file (UTF-8), by llama-perplexity's protocol.

    PPL = exp(mean nll) over the scored tokens, with nll = -log softmax(logits)[token] in nats. Figures are comparable
    for the same text, context and tokenizer.

    model        an open model, or the path of a GGUF file, which `open_model` opens
    options      the command's flags; None for the defaults
    progress     called after each chunk, with the perplexity so far
    on_message   called with messages for the user: steps, resumed chunks
    on_layer     called after each layer of a run by layer with the layers that are done and all; None: `on_message`
    client       run the chunks on the workers of this dask cluster, which open the model's path with `open_model`; the
                 figures are those of a run without it

    Raises DataError for a text that is too short for one chunk, a context longer than the model's, or NaN and Inf, with
    the tensor that they come from.
    """
    o, text = options or PerplexityOptions(), Path(text)
    score = checked_score(o.score, o.chat)
    require_path(model, client)
    path = Path(os.fspath(model)) if isinstance(model, (str, os.PathLike)) else model.path
    check_outputs([o.jsonl, o.kl_divergence_base], [path, text])
    if o.ppl_stride and o.kl_divergence_base is not None:
        raise OptionError(
            "--ppl-stride and --kl-divergence-base exclude each other: base files contain second halves of chunks"
        )
    if o.ppl_stride and (o.chat or o.score is not None or o.by_category):
        raise OptionError(
            "--ppl-stride scores the ends of windows of plain text; remove --chat, --score and --by-category"
        )
    if isinstance(model, (str, os.PathLike)):
        longest = o.ctx_size + o.ppl_stride // 2
        model = open_model(path, numerics=o.numerics, threads=o.threads, n_ctx=longest)
    if o.ppl_stride:
        chunks = windows(model.tokenizer, text, o.ctx_size, o.ppl_stride, o.chunks)
    else:
        chunks = chunks_of(model.tokenizer, text, o.ctx_size, o.chunks, o.chat, score, o.by_category)
    for line in chunks.notes:
        on_message(f"note: {line}")
    about = "" if chunks.choice is None else f", {chunks.choice.about} scored"
    on_message(f"perplexity over {len(chunks)} chunks of {chunks.n_ctx} tokens, batch {o.batch_size}{about}")
    conditions = evaluation_conditions(model, chunks.n_ctx, len(chunks), str(text), chunks.choice)
    runs = None if client is None else ClusterRuns(client, on_message)
    opening = WorkerModel(open_model, path, o.numerics, o.threads, chunks.n_ctx)
    with contextlib.ExitStack() as stack:
        log = None if o.jsonl is None else _log(o.jsonl, o, model, text, chunks, conditions)
        base: BaseWriter | BoundedWriter | None = None
        if o.kl_divergence_base is not None:
            logged = None if log is None else LoggedChunks(log.texts("base"), log.chunks_per_batch)
            note = {"model": str(model.path), **conditions}
            base = base_writer(
                o.kl_divergence_base, chunks.tokens, model.vocab_size, logged, target=o.kl_divergence_bound, note=note,
                scored=chunks.choice,
            )  # fmt: skip
            stack.enter_context(base)
            if log is not None:
                log.truncate(base.done)
        done = None
        if log is not None:
            done = stack.enter_context(log).resumed(on_message)
        clock = ChunkClock(len(chunks), 0 if done is None else len(done), o.batch_size, chunks.n_ctx, str(text))

        def after_chunk(so_far: Perplexity) -> None:
            if log is not None:
                last = chunks.counts[so_far.chunks - 1]
                log.add(so_far.nll.reshape(-1)[-last:], **({"base": base.digest} if base is not None else {}))
            clock.report(progress, so_far.chunks, so_far)

        found = perplexity_of_chunks(
            model, chunks, n_batch=o.batch_size, base=base, on_chunk=after_chunk, done=done,
            run=chunk_runner(o.by_layer, on_message, on_layer, runs, opening),
        )  # fmt: skip
    return replace(found, seconds=clock.seconds, conditions=with_workers(conditions, runs))


def checked_score(score: str | None, chat: bool) -> str:
    """The value of --score, or its default. UnknownNameError for another, QuantkitError for one that does not fit."""
    if score is None:
        return "assistant" if chat else "half"
    if score not in SCORES:
        raise UnknownNameError("choice of scored tokens", score, SCORES)
    if (score == "assistant") > chat:
        raise OptionError("--score assistant is for conversations: add --chat, or use --score all or half")
    if (score == "half") and chat:
        raise OptionError("--score half is for plain text; with --chat use --score assistant or all")
    return score


def chunks_of(
    tokenizer: Tokenizer, text: Path, n_ctx: int, limit: int | None, chat: bool, score: str, by_category: bool
) -> Chunks:
    """The chunks of a text with the scored tokens that `score` names (a result of `checked_score`).

    by_category   the text is a .jsonl file with a "category" on each line; `limit` is of each category of plain text
    """
    if chat:
        return chat_chunks(tokenizer, text, n_ctx, score, limit, by_category)
    if by_category:
        parts = [
            (label, cut(tokenizer, tokenizer.encode(of_label), f"{text}: category {label}", n_ctx, limit))
            for label, of_label in texts_by_category(text).items()
        ]
        if not parts:
            raise DataError(f"{text}: no lines; name a .jsonl file of texts with categories")
        return score_chunks(
            join([part for _, part in parts], str(text)), score, [label for label, part in parts for _ in part.tokens]
        )
    chunks = chunked(tokenizer, text, n_ctx, limit)
    return score_chunks(chunks, score) if score == "all" else chunks


def _log(
    path: Path, options: PerplexityOptions, model: Model, text: Path, chunks: Chunks, conditions: Conditions
) -> ChunkLog:
    settings: dict[str, object] = {"stride": options.ppl_stride}
    if options.kl_divergence_base is not None:
        settings |= {"base": options.kl_divergence_base.suffix, "bound": options.kl_divergence_bound}
    if chunks.choice is not None:
        settings |= {"score": chunks.choice.what, "chat": chunks.choice.chat}
        if chunks.choice.labels:  # categories decide the order of chunks
            settings["categories"] = list(chunks.choice.labels)
    counts = chunks.counts.tolist()
    positions = counts[0] if chunks.choice is None else counts
    return run_log(path, model.path, text, positions, options.batch_size, conditions, settings)


def chunk_runner(
    by_layer: bool,
    on_message: OnMessage = no_message,
    on_layer: OnLayer | None = None,
    runs: ClusterRuns | None = None,
    opening: WorkerModel | None = None,
    files: Sequence[Path] = (),
) -> MeasureChunks:
    """What runs a model over chunks: all layers at once, or one layer at a time; on workers with `runs`.

    opening   how workers open the model
    files     besides the model's, what they read
    """
    if runs is not None and opening is not None:
        return LayersOnWorkers(runs, opening, files) if by_layer else MeasureOnWorkers(runs, opening, files)
    if not by_layer:
        return Here()
    return Here(functools.partial(chunks_layer_by_layer, on_layer=on_layer or layer_messages(on_message)))


class ScoredChunk(NamedTuple):
    """The result of a chunk: its nll, float64[k], and the bytes uint8[n] that a base file stores of it."""

    nll: np.ndarray
    stored: np.ndarray | None


@dataclass(frozen=True)
class _Scoring:
    """Measures the nll of a chunk's scored tokens; with an encoder also what a base file stores."""

    chunks: Chunks
    encoder: BaseEncoder | BoundedEncoder | None

    def __call__(self, index: int, logits: np.ndarray) -> ScoredChunk:
        stored = None if self.encoder is None else self.encoder.encode(logits, index)
        return ScoredChunk(negative_log_likelihood(logits, self.chunks.of(index)), stored)


def perplexity_of_chunks(
    model: ChunkModel,
    chunks: Chunks,
    *,
    n_batch: int = DEFAULT_BATCH,
    base: BaseWriter | BoundedWriter | None = None,
    on_chunk: Callable[[Perplexity], None] | None = None,
    done: Sequence[np.ndarray] | None = None,
    run: MeasureChunks | None = None,
) -> Perplexity:
    """Perplexity of a model over chunks.

    done: the nll of the first chunks (whole batches) from an earlier run, float64[n] of each.
    run: runs and measures the chunks; None: here, all layers at once.

    `base` also gets every chunk's logits. `on_chunk` is called after each chunk with the result so far. The model
    itself reports NaN and Inf and names the tensor that caused them.
    """
    counts = chunks.counts
    ends = np.cumsum(counts)
    nll = np.empty(int(ends[-1]))
    found = Perplexity(nll, chunks.n_ctx, counts=counts)
    if chunks.choice is None:
        found = Perplexity(nll.reshape(len(chunks), -1), chunks.n_ctx)
    done = done or []
    for index, of_chunk in enumerate(done):
        nll[ends[index] - counts[index] : ends[index]] = of_chunk
    scoring = _Scoring(chunks, None if base is None else base.encoder)
    for index, scored in (run or Here())(model, chunks.inputs, n_batch, chunks.rows, len(done), scoring):
        nll[ends[index] - counts[index] : ends[index]] = scored.nll
        if base is not None and scored.stored is not None:
            base.append(scored.stored)
        if on_chunk is not None:
            on_chunk(found.after(index + 1))
    return found
