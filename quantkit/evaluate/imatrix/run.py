"""`quantkit.imatrix`: collect an importance matrix over texts, save the state on the way, write the file."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from quantkit.errors import DataError, OptionError, QuantkitError
from quantkit.evaluate.conditions import Conditions, evaluation_conditions, result_conditions
from quantkit.evaluate.corpus import require_different
from quantkit.evaluate.fingerprint import fingerprint
from quantkit.evaluate.imatrix.by_layer import CollectByLayer, LayerSaves, describe_memory
from quantkit.evaluate.imatrix.collect import (
    CollectChunks,
    CollectOptions,
    Collector,
    TextState,
    chosen_weights,
    collect,
    collects_output,
    is_collected,
    pooled,
)
from quantkit.evaluate.imatrix.coverage import split_by_matrix
from quantkit.evaluate.imatrix.layers_on_workers import CollectLayersOnWorkers
from quantkit.evaluate.imatrix.mtp import with_mtp_layers
from quantkit.evaluate.imatrix.on_workers import CollectOnWorkers
from quantkit.evaluate.imatrix.saved_run import SavedRun
from quantkit.evaluate.imatrix.second_moments import (
    InputForm,
    MomentsCollector,
    MomentsForm,
    measured_shapes,
    plan_forms,
    sizes,
)
from quantkit.evaluate.layers.layer_by_layer import check_by_layer
from quantkit.evaluate.models import OnLayer, OnMessage, OpenModel, layer_messages, no_message, open_model
from quantkit.evaluate.on_workers import ClusterRuns, WorkerModel, require_path, with_workers
from quantkit.evaluate.perplexity import Perplexity
from quantkit.evaluate.progress import ChunkClock, ChunkProgress
from quantkit.evaluate.text import DEFAULT_BATCH, DEFAULT_CONTEXT, Chunks, chunked
from quantkit.formats import gguf
from quantkit.formats import imatrix as files
from quantkit.formats.atomic import check_outputs
from quantkit.formats.imatrix import Imatrix, merge

if TYPE_CHECKING:
    from distributed import Client

    from quantkit.runtime.model import Model
    from quantkit.tokenizers.tokenizer import Tokenizer

_SAVED = "resume", "partial", "states"  # endings of the files that a run saves
UNCOUNTED = ("note: a legacy importance matrix has no token counts per expert, so a merged one has none either; "
             "entries are weighted by their calls")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ImatrixOptions:
    """Options of `imatrix`: the flags of `quantkit imatrix`.

    shares             weight of each text; None: its length
    chat               format texts with the model's chat template: .jsonl of messages, or paragraphs
    parse_special      find control tokens, such as <|im_start|>, that are written out in a text
    ctx_size           tokens per chunk
    chunks             at most this many chunks of each text; None: all
    from_chunk         skip the first chunks of each text
    process_output     also collect for output.weight, or for token_embd.weight if that is the output matrix too; None:
                       with second moments, which halve what an error there costs
    missing_experts    for experts without tokens: "weight-one", "layer-mean" or "error"
    no_ppl             do not compute the perplexity
    in_file            importance matrices to add to
    output_frequency   save the state to OUTPUT.resume and the matrix to OUTPUT.partial every so many chunks
    save_frequency     save a copy of the matrix as OUTPUT.at_CHUNKS every so many chunks; 0: none
    restart            discard the state of an interrupted run
    by_layer           run the chunks of all texts through one layer before the next; for models larger than memory. The
                       file is the same; the state is saved after layers, in OUTPUT.resume and OUTPUT.states. With a
                       client, the layers are a pipeline over workers, and nothing is saved on the way
    second_moments     also collect second moments: "full", "rank:N", "blocks:N" or "auto"; "" does not
    second_moments_size  bytes of memory that their sums may take; None: no limit
    token_weights      what weighs the tokens in the inputs of queries, keys and values: "attention", which the tokens
                       receive (`runtime.blocks.token_weights`), or "none"; "": attention with second moments
    batch_size         tokens per batch, in whole chunks
    numerics, threads  for a model given by its path: "exact" or "fast", number of threads
    """

    shares: Sequence[float] | None = None
    chat: bool = False
    parse_special: bool = False
    ctx_size: int = DEFAULT_CONTEXT
    chunks: int | None = None
    from_chunk: int = 0
    process_output: bool | None = None
    missing_experts: str = "weight-one"
    no_ppl: bool = False
    in_file: Sequence[Path] = ()
    output_frequency: int = 10
    save_frequency: int = 0
    restart: bool = False
    by_layer: bool = False
    second_moments: str = ""
    second_moments_size: int | None = None
    token_weights: str = ""
    batch_size: int = DEFAULT_BATCH
    numerics: str = "exact"
    threads: int | None = None


@dataclass(frozen=True)
class ImatrixRun:
    """The result of `imatrix`: the file's path, its matrix, the perplexity of each text, time and conditions."""

    path: Path
    matrix: Imatrix
    perplexities: dict[str, Perplexity]  # by the text's path; empty with no_ppl
    seconds: float
    conditions: Conditions


def imatrix(
    model: Model | str | os.PathLike[str],
    texts: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    options: ImatrixOptions | None = None,
    *,
    progress: Callable[[ChunkProgress[Perplexity | None]], None] | None = None,
    on_message: OnMessage = no_message,
    on_layer: OnLayer | None = None,
    open_model: OpenModel = open_model,
    client: Client | None = None,
) -> ImatrixRun:
    """Collect an importance matrix and write it: the mean squared activation of each column of each weight over texts.

    Stacked experts have values and token counts of their own. `output` appears when the run is complete: in llama.cpp's
    GGUF format if its name ends in .gguf, else in the legacy format. An interrupted run leaves OUTPUT.resume, from
    which the same call resumes and gives the same bytes, and OUTPUT.partial, the matrix of the chunks so far.

    model        an open model, or the path of a GGUF file, which `open_model` opens
    texts        one or several text files, UTF-8
    options      the command's flags; None for the defaults
    progress     called after each chunk, with the perplexity of the text so far, or None with no_ppl
    on_message   called with lines for people: what begins, what is resumed, what was saved
    on_layer     called after each layer of a run by layer with the layers that are done and all; None: `on_message`
    client       run the chunks on the workers of this dask cluster, which open the model's path with `open_model`; the
                 file is that of a run without it

    Raises DataError for a text that is too short, NaN or Inf in a weight's input, or (missing_experts="error") experts
    without tokens; QuantkitError if a file would overwrite an input, or saved state is of another run.
    """
    o, output = options or ImatrixOptions(), Path(output)
    paths = [Path(text) for text in ([texts] if isinstance(texts, (str, os.PathLike)) else texts)]
    path = Path(os.fspath(model)) if isinstance(model, (str, os.PathLike)) else model.path
    require_path(model, client)
    _check_options(o, output, paths)
    form = MomentsForm.parse(o.second_moments) if o.second_moments else None
    with_moments = form is not None
    o = replace(o, token_weights=chosen_weights(o.token_weights, with_moments),
                process_output=collects_output(o.process_output, with_moments))  # fmt: skip
    opened = gguf.open(path)
    forms = None if form is None else _plan_moments(opened, form, o, on_message)
    _check_names(output, [*opened.paths, *paths], o.in_file, o.save_frequency)
    before = _matrices_before(o, forms, path, on_message)
    if isinstance(model, (str, os.PathLike)):
        model = open_model(path, numerics=o.numerics, threads=o.threads, n_ctx=o.ctx_size)
    if _weighs(o) and not model.placement.is_cpu_only:
        raise OptionError(
            "--token-weights attention needs a model that runs on the CPU alone; leave out -ngl and -ot, or take "
            "--token-weights none"
        )
    drafts = with_mtp_layers(model, on_message) is not model
    chunk_sets = chunks_of_texts(model.tokenizer, paths, o)
    if o.by_layer:
        check_by_layer(model, o.ctx_size, model.numerics)
        here = client is None
        on_message(describe_memory(opened.tensors.values(), chunk_sets, model, forms, here))
    conditions = evaluation_conditions(model, o.ctx_size, sum(map(len, chunk_sets)), ", ".join(map(str, paths)))
    settings = _settings(conditions, o, paths, chunk_sets, forms, drafts, client)
    run = fingerprint([*opened.paths, *paths, *o.in_file], settings)
    checkpointer = _Checkpointer(output, run, chunk_sets, before, o, forms, on_message)
    started = time.monotonic()
    runs = None if client is None else ClusterRuns(client, on_message)
    with contextlib.ExitStack() as stack:
        stack.callback(setattr, model, "weighs_tokens", model.weighs_tokens)
        model.weighs_tokens = _weighs(o)
        collecting: CollectChunks | None = None
        if runs is not None:
            opening = WorkerModel(open_model, path, o.numerics, o.threads, o.ctx_size, weighs_tokens=_weighs(o))
            collecting = on_workers = _on_workers(runs, opening, chunk_sets, forms, o)
            stack.enter_context(on_workers)
        elif o.by_layer:
            on_layer = on_layer or layer_messages(on_message)
            collecting = CollectByLayer(model, chunk_sets, checkpointer.by_layer(), on_layer)
        parts, perplexities = _collect_texts(model, chunk_sets, checkpointer, collecting, o, progress, on_message)
    made = checkpointer.finish(parts)
    return ImatrixRun(output, made, perplexities, time.monotonic() - started, with_workers(conditions, runs))


def _check_options(o: ImatrixOptions, output: Path, texts: Sequence[Path]) -> None:
    """QuantkitError or OptionError for options that are wrong or do not go together."""
    if not texts:
        raise QuantkitError("imatrix needs a text: pass it with -f FILE")
    require_different(texts)
    files.check_policy(o.missing_experts)
    if o.second_moments and files.form_of(output) != "gguf":
        raise QuantkitError(f"{output}: only the GGUF form holds second moments; give the output a name in .gguf")
    if o.shares is not None and (len(o.shares) != len(texts) or any(not 0 < share < math.inf for share in o.shares)):
        raise QuantkitError(f"shares {list(o.shares)}: {len(texts)} texts need {len(texts)} positive numbers")
    if o.by_layer and o.save_frequency:
        raise OptionError(
            "--save-frequency copies the matrix after some chunks, but with --by-layer all chunks end together; drop "
            "one of them"
        )


def _weighs(o: ImatrixOptions) -> bool:
    return o.token_weights == "attention"


def _matrices_before(
    o: ImatrixOptions, forms: Mapping[str, InputForm] | None, model: Path, on_message: OnMessage
) -> list[Imatrix]:
    """The importance matrices to add to, checked before the run, not after it."""
    require_different(o.in_file)
    found = [files.read(path) for path in o.in_file]
    if any(matrix.chunk_size == 0 for matrix in found):
        on_message(UNCOUNTED)
    for path, matrix in zip(o.in_file, found):
        _require_fit(path, matrix, model)
        _require_same_measures(path, matrix, o, forms or {})
    return found


def _require_same_measures(path: Path, matrix: Imatrix, o: ImatrixOptions, forms: Mapping[str, InputForm]) -> None:
    """DataError for a matrix that cannot be merged with this run's, or without losing second moments."""
    if matrix.token_weights != o.token_weights:
        raise DataError(
            f"{path}: measured with --token-weights {matrix.token_weights}, this run has {o.token_weights}; add "
            f"--token-weights {matrix.token_weights}"
        )
    for name, entry in matrix.entries.items():
        if not is_collected(name, bool(o.process_output)):
            continue
        theirs, mine = matrix.second_moments.get(name), forms.get(name)
        has = "none" if theirs is None else theirs.form
        gets = "none" if mine is None else mine.named(entry.values.shape[-1])
        if has != gets:
            raise DataError(
                f"{path}: second moments of {name}: {has} in the file, {gets} in this run, so the sum would have none; "
                "measure both with the same --second-moments, or leave out --in-file"
            )


def _settings(
    conditions: Conditions, o: ImatrixOptions, texts: Sequence[Path], chunk_sets: Sequence[Chunks],
    forms: Mapping[str, InputForm] | None, drafts: bool, client: Client | None,
) -> dict[str, object]:  # fmt: skip
    """What the file depends on besides its inputs: a saved state with other settings is not resumed."""
    return result_conditions(conditions) | {
        "texts": texts, "shares": o.shares, "chunk": o.from_chunk, "output": o.process_output, "ppl": not o.no_ppl,
        "batch": o.batch_size, "chat": o.chat, "each": [len(chunks) for chunks in chunk_sets],
        "second moments": o.second_moments, **({"mtp": True} if drafts else {}),
        **({"special": True} if o.parse_special else {}),
        **({"token weights": o.token_weights} if _weighs(o) else {}),
        **({"by_layer": "here" if client is None else "on workers"} if o.by_layer else {}),
        "blocks": {name: form.key for name, form in forms.items()} if forms is not None else None,
    }  # fmt: skip


def _on_workers(
    runs: ClusterRuns, model: WorkerModel, chunk_sets: Sequence[Chunks], forms: Mapping[str, InputForm] | None,
    o: ImatrixOptions,
) -> CollectLayersOnWorkers | CollectOnWorkers:  # fmt: skip
    """What collects on the workers of a cluster."""
    if not o.by_layer:
        return CollectOnWorkers(runs, model, forms)
    collected = CollectOptions(bool(o.process_output), not o.no_ppl, o.batch_size)
    return CollectLayersOnWorkers(runs, model, chunk_sets, forms, collected)


def _collect_texts(
    model: Model, chunk_sets: Sequence[Chunks], checkpointer: _Checkpointer, collecting: CollectChunks | None,
    o: ImatrixOptions, progress: Callable[[ChunkProgress[Perplexity | None]], None] | None, on_message: OnMessage,
) -> tuple[list[Imatrix], dict[str, Perplexity]]:  # fmt: skip
    """The importance matrix of each text, and the perplexities by the text's path."""
    parts: list[Imatrix] = []
    perplexities: dict[str, Perplexity] = {}
    for number, chunks in enumerate(chunk_sets):
        state = checkpointer.text(number)
        size = f"{len(chunks)} chunks of {o.ctx_size} tokens"
        on_message(f"importance matrix over {size} of {chunks.source}, batch {o.batch_size}")
        clock = ChunkClock(len(chunks), state.done, o.batch_size, o.ctx_size, chunks.source)
        with checkpointer.interrupted():
            part, ppl = collect(
                model, chunks, process_output=bool(o.process_output), with_perplexity=not o.no_ppl,
                n_batch=o.batch_size, on_chunk=functools.partial(clock.report, progress),
                on_batch=None if o.by_layer else functools.partial(checkpointer.after_batch, number),
                state=state, run=collecting,
            )  # fmt: skip
        parts.append(part)
        if ppl is not None:
            perplexities[chunks.source] = ppl
    return parts, perplexities


def chunks_of_texts(tokenizer: Tokenizer, texts: Sequence[Path], options: ImatrixOptions) -> list[Chunks]:
    """The chunks of each text that a run with these options measures."""
    settings = options.ctx_size, options.chunks, options.from_chunk, options.chat, options.parse_special
    return [chunked(tokenizer, text, *settings) for text in texts]


def _plan_moments(
    model: gguf.GGUF, form: MomentsForm, o: ImatrixOptions, on_message: OnMessage
) -> dict[str, InputForm]:
    """The form of each weight's input that is measured; says what they take."""
    shapes = measured_shapes(model.tensors.values(), bool(o.process_output))
    forms = plan_forms(shapes, form, o.second_moments_size)
    memory, stored = sizes(shapes, forms)
    full = sum(not form.rank and form.block >= shapes[name][-1] for name, form in forms.items())
    on_message(
        f"second moments: {full} of {len(forms)} weights in full; {memory / 1e6:,.1f} MB of memory for a text, "
        f"{stored / 1e6:,.1f} MB in the file"
    )
    return forms


def _require_fit(path: Path, matrix: Imatrix, model: Path) -> None:
    """Raise QuantkitError if an importance matrix was measured on another model."""
    try:
        split_by_matrix(matrix, {tensor.name: tensor.shape for tensor in gguf.open(model).tensors.values()})
    except QuantkitError as error:
        raise QuantkitError(f"{path}: {error}") from None


class _Checkpointer:
    """Saves the state of a run beside its output, resumes it, and writes the output.

    OUTPUT.resume    the run's state, saved every `output_frequency` chunks and at the end of a text
    OUTPUT.partial   the importance matrix of the chunks so far
    OUTPUT.states    of a run by layer, the hidden states; these three are removed when OUTPUT is written
    OUTPUT.at_N      with `save_frequency`, the matrix of the first N chunks, named as in llama-imatrix; not removed
    """

    def __init__(
        self, output: Path, run: str, chunk_sets: Sequence[Chunks], before: Sequence[Imatrix], options: ImatrixOptions,
        forms: Mapping[str, InputForm] | None, on_message: OnMessage,
    ):  # fmt: skip
        self._forms, self._next_save = forms, 0.0  # of second moments; a time
        self.output, self.chunk_sets, self.before, self.options = output, chunk_sets, list(before), options
        self.path, self.partial, self.states = (_beside(output, what) for what in _SAVED)
        self._on_message = on_message
        self.saved = SavedRun(run)
        if self.path.exists() and not options.restart:
            self.saved = self._resumed(run)
        self._seen = self.done

    @property
    def done(self) -> int:
        """Number of chunks done, over all texts."""
        return sum(text.done for text in self.saved.texts)

    def _resumed(self, run: str) -> SavedRun:
        saved = SavedRun.load(self.path)
        if saved.run != run:
            raise QuantkitError(
                f"{self.path}: saved by a run with another model, text, version or options; run that command again "
                "to resume it, or add --restart to discard it"
            )
        done = " and ".join(str(text.done) for text in saved.texts) + " chunks"
        self._on_message(f"{self.path}: resumed after {f'{saved.layers} layers' if self.options.by_layer else done}")
        return saved

    def text(self, number: int) -> TextState:
        """The state of a text, added to the saved run if new."""
        if number == len(self.saved.texts):
            moments = MomentsCollector(self._forms) if self._forms is not None else None
            collector = Collector(bool(self.options.process_output), moments, self.options.token_weights)
            self.saved.texts.append(TextState(collector))
        return self.saved.texts[number]

    def by_layer(self) -> LayerSaves:
        """What saves a run by layer: all texts go through it together."""
        for number in range(len(self.chunk_sets)):
            self.text(number)
        return LayerSaves(self.saved, self.path, self.states)

    def after_batch(self, number: int, state: TextState) -> None:
        """After a batch, save what is due: a copy, the state, the matrix so far."""
        before, self._seen = self._seen, self.done
        every, copies = self.options.output_frequency, self.options.save_frequency
        if copies and self._seen // copies > before // copies:
            self._write_so_far(_beside(self.output, f"at_{self._seen}"))
        ended = state.done == len(self.chunk_sets[number])
        if ended and number + 1 == len(self.chunk_sets):
            return  # the output is next
        if ended or (self._seen // every > before // every and time.monotonic() >= self._next_save):
            begin = time.monotonic()
            self.saved.save(self.path)
            self._write_so_far(self.partial)
            if self._forms is not None:  # gigabytes, perhaps: saving takes a tenth of the time at most
                self._next_save = time.monotonic() + 9 * (time.monotonic() - begin)

    def _write_so_far(self, path: Path) -> None:
        """Write the matrix so far; not if the policy is `error` and experts still lack tokens."""
        parts = [
            text.collector.result(chunks.source, chunks.n_ctx)
            for text, chunks in zip(self.saved.texts, self.chunk_sets)
        ]
        merged = self._merged(parts)
        if self.options.missing_experts == "error" and any(entry.missing for entry in merged.entries.values()):
            self._on_message(f"{path}: not written, experts lack tokens so far (--missing-experts error)")
            return
        self._write(path, merged)

    def _merged(self, parts: Sequence[Imatrix]) -> Imatrix:
        shares = self.options.shares
        merged = pooled(parts, shares[: len(parts)] if shares else None)
        return merge([*self.before, merged]) if self.before else merged

    def _write(self, path: Path, merged: Imatrix) -> Imatrix:
        result = files.fill_missing(merged, self.options.missing_experts)
        files.write(path, result, files.form_of(self.output))
        return result

    def finish(self, parts: Sequence[Imatrix]) -> Imatrix:
        """Write the matrix of all texts and remove the saved state. If that fails, save the state instead."""
        try:
            result = self._write(self.output, self._merged(parts))
        except QuantkitError as error:
            self.saved.save(self.path)
            raise QuantkitError(
                f"{error}; the measurements are saved in {self.path}: fix the cause and run the command again "
                "(--missing-experts may differ), or discard them with --restart"
            ) from None
        for path in (self.path, self.partial, self.states):
            path.unlink(missing_ok=True)
        return result

    @contextlib.contextmanager
    def interrupted(self) -> Iterator[None]:
        """On an interrupt, report what is saved and where."""
        try:
            yield
        except KeyboardInterrupt:
            if self.path.exists():
                matrix = f", their importance matrix is {self.partial}" if self.partial.exists() else ""
                what = "layers" if self.options.by_layer else "chunks"
                self._on_message(f"\n{self.path}: contains the saved {what}{matrix}; run the same command to resume")
            raise


def _beside(output: Path, what: str) -> Path:
    """The path OUTPUT.what."""
    return output.with_name(f"{output.name}.{what}")


def _check_names(output: Path, inputs: Sequence[Path], in_files: Sequence[Path], copies: int) -> None:
    """Raise QuantkitError, before the run, if the run would write to one of its input files.

    The output itself may be one of `in_files`, since it is written last. The files saved during the run may not.
    """
    check_outputs([output], inputs)
    check_outputs([_beside(output, what) for what in _SAVED], [*inputs, *in_files])
    taken = _beside(output.resolve(), "at_").name
    for path in in_files if copies else ():
        if path.resolve().parent == output.resolve().parent and path.resolve().name.startswith(taken):
            raise QuantkitError(f"{path}: --save-frequency writes files with such names; rename it or the output")
