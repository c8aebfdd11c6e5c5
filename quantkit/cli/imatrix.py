"""`quantkit imatrix`: collect, show, merge and convert importance matrices."""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quantkit.cli._evaluation import (
    Batch,
    ChunkLimit,
    Context,
    Numerics,
    Running,
    conditions,
    conditions_line,
    result_conditions,
)
from quantkit.cli._runtime import Launch, runs_a_model
from quantkit.cli._shared import Json, Threads, print_json, table
from quantkit.errors import QuantkitError

if TYPE_CHECKING:
    from quantkit.evaluate.collect_imatrix import Progress, Saved
    from quantkit.evaluate.coverage import Coverage
    from quantkit.evaluate.text import Chunks
    from quantkit.formats.imatrix import Imatrix

FEW_TOKENS = 32  # the mean of 32 squares of normal numbers has a relative error of 1/4; as in recipe.lint

_UNCOUNTED = ("note: a legacy importance matrix has no token counts per expert, so a merged one has none either; "
              "entries are weighted by their calls")  # fmt: skip

Output = Annotated[
    Path, typer.Option("--output", "-o", help="Output file: llama.cpp's GGUF format for .gguf, else the legacy format.")
]
Missing = Annotated[
    str,
    typer.Option(
        metavar="POLICY",
        help="For experts without tokens: weight-one, layer-mean (mean of the layer's other experts) or error.",
    ),
]
TheModel = Annotated[
    Path | None, typer.Option("--model", "-m", metavar="GGUF", help="The model, to split legacy entries by expert.")
]


@runs_a_model
def imatrix(
    model: Annotated[Path, typer.Argument(help="A GGUF file, or any shard of a split one.")],
    file: Annotated[
        list[Path] | None, typer.Option("--file", "-f", help="Text file, UTF-8. Repeatable.", show_default=False)
    ] = None,
    shares: Annotated[
        str | None,
        typer.Option("--shares", metavar="N,N,…", help="Weight of each text; default: its length."),
    ] = None,
    chat: Annotated[
        bool,
        typer.Option("--chat", help="Format texts with the model's chat template: .jsonl of messages, or paragraphs."),
    ] = False,
    output: Output = Path("imatrix.dat"),
    ctx_size: Context = 512,
    chunks: ChunkLimit = None,
    from_chunk: Annotated[
        int, typer.Option("--from-chunk", "--chunk", metavar="N", help="Skip the first N chunks of each text.", min=0)
    ] = 0,
    process_output: Annotated[bool, typer.Option("--process-output", help="Also collect for output.weight.")] = False,
    missing_experts: Missing = "weight-one",
    no_ppl: Annotated[bool, typer.Option("--no-ppl", help="Do not compute the perplexity.")] = False,
    in_file: Annotated[
        list[Path] | None, typer.Option("--in-file", help="Add to this importance matrix. Repeatable.")
    ] = None,
    output_frequency: Annotated[
        int,
        typer.Option(
            "--output-frequency",
            "-ofreq",
            metavar="N",
            help="Save to OUTPUT.resume and OUTPUT.partial every N chunks.",
            min=1,
        ),
    ] = 10,
    save_frequency: Annotated[
        int,
        typer.Option(
            "--save-frequency", metavar="N", help="Save a copy as OUTPUT.at_CHUNKS every N chunks; 0: none.", min=0
        ),
    ] = 0,
    restart: Annotated[bool, typer.Option("--restart", help="Discard the state of an interrupted run.")] = False,
    batch_size: Batch = 2048,
    numerics: Numerics = "exact",
    threads: Threads = None,
    launch: Launch = None,  # type: ignore[assignment]  # the decorator gives it
    json: Json = False,
) -> None:
    """Collect an importance matrix: the mean squared activation of each column of each weight over a text.

    In models with experts, each expert has its own values. With --chat, texts are conversations: a .jsonl file has one
    per line, with "messages" of "role" and "content"; in other texts, paragraphs alternate between user and assistant.
    --chunks and --from-chunk count per text, --output-frequency and --save-frequency over all texts. OUTPUT appears
    when the run is complete. An interrupted run leaves OUTPUT.resume, from which the same command resumes and gives the
    same bytes, and OUTPUT.partial, the importance matrix of the chunks so far. `quantkit imatrix show FILE` shows the
    contents of a matrix and the experts with too few tokens; `imatrix merge` merges several; `imatrix convert` changes
    the format.
    """
    from quantkit.evaluate import collect_imatrix as collecting
    from quantkit.evaluate.text import chunked
    from quantkit.formats import gguf
    from quantkit.formats import imatrix as files

    texts = list(file or [])
    if not texts:
        raise QuantkitError("imatrix needs a text: pass it with -f FILE")
    files.check_policy(missing_experts)
    weights = _numbers("--shares", shares, len(texts))
    _check_names(output, [*gguf.open(model).paths, *texts], in_file or [], save_frequency)
    before = [files.read(path) for path in in_file or []]
    if any(matrix.chunk_size == 0 for matrix in before):
        print(_UNCOUNTED, file=sys.stderr)
    for path, matrix in zip(in_file or [], before):  # before the run, not after it
        _require_fit(path, matrix, model)
    loaded = launch.open(model, numerics=numerics, threads=threads, n_ctx=ctx_size)
    chunk_sets = [chunked(loaded.tokenizer, text, ctx_size, chunks, from_chunk, chat) for text in texts]
    how = conditions(loaded, ctx_size, sum(map(len, chunk_sets)), ", ".join(map(str, texts)))
    settings = result_conditions(how) | {
        "texts": texts, "shares": weights, "chunk": from_chunk, "output": process_output, "ppl": not no_ppl,
        "batch": batch_size, "chat": chat, "each": [len(chunk_set) for chunk_set in chunk_sets],
    }  # fmt: skip
    run = collecting.fingerprint([*gguf.open(model).paths, *texts, *(in_file or [])], settings)
    checkpointer = _Checkpointer(
        output, run, chunk_sets, weights, before, missing_experts, output_frequency, save_frequency, restart
    )
    started = time.monotonic()
    parts, scored = [], {}
    for number, chunk_set in enumerate(chunk_sets):
        progress = checkpointer.text(number, process_output)
        size = f"{len(chunk_set)} chunks of {ctx_size} tokens"
        print(f"importance matrix over {size} of {chunk_set.source}, batch {batch_size}", file=sys.stderr)
        with checkpointer.interrupted():
            part, ppl = collecting.collect(
                loaded, chunk_set, process_output=process_output, with_perplexity=not no_ppl, n_batch=batch_size,
                on_chunk=_shown(Running(len(chunk_set) - progress.done, ctx_size, batch_size), progress.done, json),
                on_batch=functools.partial(checkpointer.batch, number), progress=progress,
            )  # fmt: skip
        parts.append(part)
        if ppl:
            scored[chunk_set.source] = {"ppl": ppl.value, "ppl_error": ppl.error}
            if not json:
                print(f"\nFinal estimate: PPL = {ppl}")
    result = checkpointer.finish(parts)
    _report(output, result, scored, time.monotonic() - started, how, json)


def _shown(running: Running, first: int, json: bool) -> Callable[[int, Any, Any], None]:
    """A callback that prints a chunk's perplexity and the time left; the run starts after `first` chunks."""

    def show(index: int, so_far: Any, collector: Any) -> None:
        if so_far is not None and not json:
            print(f"[{index}]{so_far.value:.4f},", end="", flush=True)
        running.tick(index - first)

    return show


def _require_fit(path: Path, matrix: Imatrix, model: Path) -> None:
    """Raise QuantkitError if an importance matrix was measured on another model."""
    from quantkit.evaluate.coverage import split_by_matrix
    from quantkit.formats import gguf

    try:
        split_by_matrix(matrix, {tensor.name: tensor.shape for tensor in gguf.open(model).tensors.values()})
    except QuantkitError as error:
        raise QuantkitError(f"{path}: {error}") from None


class _Checkpointer:
    """Saves the state of a run beside its output, resumes it, and writes the output.

    OUTPUT.resume    the run's state, saved every `every` chunks and at the end of a text
    OUTPUT.partial   the importance matrix of the chunks so far; both are removed when OUTPUT is written
    OUTPUT.at_N      with `copies`, the matrix of the first N chunks, named as in llama-imatrix; not removed
    """

    def __init__(
        self, output: Path, run: str, chunk_sets: Sequence[Chunks], shares: list[float] | None,
        before: Sequence[Imatrix], policy: str, every: int, copies: int, restart: bool,
    ):  # fmt: skip
        from quantkit.evaluate.collect_imatrix import Saved

        self.output, self.chunk_sets, self.shares, self.before = output, chunk_sets, shares, list(before)
        self.policy, self.every, self.copies = policy, every, copies
        self.path, self.partial = _beside(output, "resume"), _beside(output, "partial")
        self.saved = Saved(run)
        if self.path.exists() and not restart:
            self.saved = self._resumed(run)
        self._seen = self.done

    @property
    def done(self) -> int:
        """Number of chunks done, over all texts."""
        return sum(text.done for text in self.saved.texts)

    def _resumed(self, run: str) -> Saved:
        from quantkit.evaluate.collect_imatrix import Saved

        saved = Saved.load(self.path)
        if saved.run != run:
            raise QuantkitError(
                f"{self.path}: saved by a run with another model, text, version or options; run that command again "
                "to resume it, or add --restart to discard it"
            )
        done = " and ".join(str(text.done) for text in saved.texts)
        print(f"{self.path}: resumed after {done} chunks", file=sys.stderr)
        return saved

    def text(self, number: int, process_output: bool) -> Progress:
        """The progress of a text, added to the saved state if new."""
        from quantkit.evaluate.collect_imatrix import Collector, Progress

        if number == len(self.saved.texts):
            self.saved.texts.append(Progress(Collector(process_output)))
        return self.saved.texts[number]

    def batch(self, number: int, state: Progress) -> None:
        """After a batch, save what is due: a copy, the state, the matrix so far."""
        before, self._seen = self._seen, self.done
        if self.copies and self._seen // self.copies > before // self.copies:
            self._write_so_far(_beside(self.output, f"at_{self._seen}"))
        ended = state.done == len(self.chunk_sets[number])
        if ended and number + 1 == len(self.chunk_sets):
            return  # the output is next
        if ended or self._seen // self.every > before // self.every:
            self.saved.save(self.path)
            self._write_so_far(self.partial)

    def _write_so_far(self, path: Path) -> None:
        """Write the matrix so far; not if the policy is `error` and experts still lack tokens."""
        parts = [
            text.collector.result(chunk_set.source, chunk_set.n_ctx)
            for text, chunk_set in zip(self.saved.texts, self.chunk_sets)
        ]
        made = self._made(parts)
        if self.policy == "error" and any(entry.missing for entry in made.entries.values()):
            print(f"{path}: not written, experts lack tokens so far (--missing-experts error)", file=sys.stderr)
            return
        self._write(path, made)

    def _made(self, parts: Sequence[Imatrix]) -> Imatrix:
        from quantkit.evaluate.collect_imatrix import pooled
        from quantkit.formats.imatrix import merge

        made = pooled(parts, self.shares[: len(parts)] if self.shares else None)
        return merge([*self.before, made]) if self.before else made

    def _write(self, path: Path, made: Imatrix) -> Imatrix:
        from quantkit.formats import imatrix as files

        result = files.fill_missing(made, self.policy)
        files.write(path, result, files.form_of(self.output))
        return result

    def finish(self, parts: list[Imatrix]) -> Imatrix:
        """Write the matrix of all texts and remove the saved state. If that fails, save the state instead."""
        try:
            result = self._write(self.output, self._made(parts))
        except QuantkitError as error:
            self.saved.save(self.path)
            raise QuantkitError(
                f"{error}; the measurements are saved in {self.path}: fix the cause and run the command again "
                "(--missing-experts may differ), or discard them with --restart"
            ) from None
        self.path.unlink(missing_ok=True)
        self.partial.unlink(missing_ok=True)
        return result

    @contextlib.contextmanager
    def interrupted(self) -> Iterator[None]:
        """On an interrupt, print what is saved and where."""
        try:
            yield
        except KeyboardInterrupt:
            if self.path.exists():
                matrix = f", their importance matrix is {self.partial}" if self.partial.exists() else ""
                print(
                    f"\n{self.path}: contains the saved chunks{matrix}; run the same command to resume",
                    file=sys.stderr,
                )
            raise


def _beside(output: Path, what: str) -> Path:
    """The path OUTPUT.what."""
    return output.with_name(f"{output.name}.{what}")


def _check_names(output: Path, inputs: Sequence[Path], in_files: Sequence[Path], copies: int) -> None:
    """Raise QuantkitError, before the run, if the run would write to one of its input files.

    The output itself may be an --in-file, since it is written last. The files saved during the run may not.
    """
    from quantkit.formats.atomic import check_outputs

    check_outputs([output], inputs)
    check_outputs([_beside(output, "resume"), _beside(output, "partial")], [*inputs, *in_files])
    taken = _beside(output.resolve(), "at_").name
    for path in in_files if copies else ():
        if path.resolve().parent == output.resolve().parent and path.resolve().name.startswith(taken):
            raise QuantkitError(f"{path}: --save-frequency writes files with such names; rename it or the output")


def _report(
    output: Path, result: Imatrix, scored: dict[str, Any], seconds: float, how: dict[str, Any], json: bool
) -> None:
    from quantkit.evaluate.coverage import coverage

    rows = coverage(result, FEW_TOKENS)
    few = _few_experts(rows, FEW_TOKENS)
    if json:
        one = next(iter(scored.values())) if len(scored) == 1 else {}
        print_json("quantkit.imatrix/1",
                   {"output": output, "entries": len(result), "policy": result.policy, **one, "texts": scored,
                    "few_experts": {row.name: row.few for row in rows if row.few}, "conditions": how})  # fmt: skip
        return
    print(f"{output}: {len(result)} entries, {seconds:.1f} s")
    for line in few:
        print(line)
    if result.policy:
        print(f"experts without tokens: {result.policy}")
    print(conditions_line(how), file=sys.stderr)


def _few_experts(rows: Sequence[Coverage], threshold: int) -> list[str]:
    """One line per layer for experts with too few tokens; weights with the same experts share a line."""
    groups: dict[tuple[int | None, tuple[int, ...], int], list[str]] = {}
    for row in rows:
        if row.few:
            groups.setdefault((row.layer, tuple(row.few), len(row.counts)), []).append(row.kind)
    lines = []
    for (layer, experts, count), kinds in groups.items():
        place = f"layer {layer}: " if layer is not None else ""
        named = ", ".join(map(str, experts[:24])) + (", …" if len(experts) > 24 else "")
        lines.append(f"{place}{len(experts)} of {count} experts saw fewer than {threshold} tokens "
                     f"({', '.join(kinds)}): {named}")  # fmt: skip
    return lines


def show(
    file: Annotated[Path, typer.Argument(help="Importance matrix, GGUF or legacy.")],
    model: TheModel = None,
    threshold: Annotated[
        int, typer.Option(metavar="N", help="List experts with fewer than N tokens.", min=1)
    ] = FEW_TOKENS,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a plot as PNG, SVG or PDF.", show_default=False)
    ] = None,
    json: Json = False,
) -> None:
    """Show the contents of an importance matrix: token counts by weight and expert, and the spread over columns.

    tokens: minimum / median / maximum over experts; covered: share of experts with enough tokens; experts: effective
    number of experts (2 to the power of the entropy of the token counts); columns: effective number of columns, as a
    share of all; similar: cosine similarity with the previous layer.
    """
    from quantkit.evaluate.coverage import coverage, split_by_matrix
    from quantkit.formats.imatrix import read

    if plot is not None:
        from quantkit.evaluate.plots import plot_importance, require_picture

        require_picture(plot)
    found = read(file)
    if model is not None:
        import quantkit

        found = split_by_matrix(found, {t.name: t.shape for t in quantkit.open(model).tensors.values()})
    rows = coverage(found, threshold)
    if plot is not None:
        title = f"{file.name}: {len(found)} entries, {found.chunks} chunks of {found.dataset or 'an unnamed text'}"
        plot_importance(plot, rows, title)
    if json:
        about = {"chunks": found.chunks, "chunk_size": found.chunk_size, "dataset": found.dataset,
                 "missing_experts": found.policy or None, "threshold": threshold}  # fmt: skip
        print_json("quantkit.imatrix-show/1", {"file": file, **about, "entries": [row.to_json() for row in rows]})
        return
    _print_rows(rows)
    for line in _few_experts(rows, threshold):
        print(line)
    print(_summary(found))


def _print_rows(rows: Sequence[Coverage]) -> None:
    header = ("weight", "matrices", "columns", "tokens", "covered", "experts", "columns", "similar", "mean", "top 1 %")
    cells = []
    for r in rows:
        few, most, middle = int(r.counts.min()), int(r.counts.max()), int(sorted(r.counts)[len(r.counts) // 2])
        tokens = "" if not r.counted else str(most) if few == most else f"{few} / {middle} / {most}"
        stacked = len(r.counts) > 1
        cells.append((
            r.name, len(r.counts), r.columns, tokens, f"{100 * r.covered:.1f} %" if stacked else "",
            "" if r.effective_experts is None else f"{r.effective_experts:.1f}", f"{100 * r.effective_columns:.1f} %",
            "" if r.similarity is None else f"{r.similarity:.3f}", f"{r.mean:.4g}", f"{100 * r.share_of_top:.1f} %",
        ))  # fmt: skip
    print(table(header, cells), end="\n\n")


def _summary(found: Imatrix) -> str:
    size = f" of {found.chunk_size} tokens" if found.chunk_size else " without token counts"
    policy = f", experts without tokens: {found.policy}" if found.policy else ""
    return f"{len(found)} entries, {found.chunks} chunks{size}, dataset {found.dataset or 'unnamed'}{policy}"


def merge(
    files: Annotated[list[Path], typer.Argument(help="Importance matrices of the same model, GGUF or legacy.")],
    output: Output = Path("imatrix.dat"),
    weights: Annotated[str | None, typer.Option(metavar="N,N,…", help="Extra weight of each file; default: 1.")] = None,
    missing_experts: Missing = "weight-one",
) -> None:
    """Merge importance matrices of one model: the mean, each expert weighted by its tokens.

    Legacy files have no token counts. If one is among the files, entries are weighted by their calls.
    """
    from quantkit.formats import imatrix as formats

    read = [formats.read(path) for path in files]
    if formats.loses_counts(read):
        print(_UNCOUNTED, file=sys.stderr)
    merged = formats.merge(read, _numbers("--weights", weights, len(files)))
    merged = formats.fill_missing(merged, missing_experts)
    formats.write(output, merged)
    print(f"{output}: {len(merged)} entries, {merged.chunks} chunks from {len(files)} files")


def convert(
    file: Annotated[Path, typer.Argument(metavar="IN", help="Importance matrix, GGUF or legacy.")],
    output: Annotated[Path, typer.Argument(metavar="OUT", help="Output file: GGUF for .gguf, else legacy.")],
    model: TheModel = None,
) -> None:
    """Convert an importance matrix between the GGUF and the legacy format.

    Legacy files do not store the number of experts of an entry; --model gives it, so that the GGUF file has values per
    expert. They store no token counts either; each call counts as 512 tokens.
    """
    from quantkit.evaluate.coverage import split_by_matrix
    from quantkit.formats import imatrix as formats

    found = formats.read(file)
    if model is not None:
        import quantkit

        found = split_by_matrix(found, {t.name: t.shape for t in quantkit.open(model).tensors.values()})
    formats.write(output, found)
    print(f"{output}: {_summary(found)}")


def _numbers(flag: str, text: str | None, count: int) -> list[float] | None:
    """The numbers of an option with one positive number per file; bad usage for others."""
    if text is None:
        return None
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if len(found) != count or any(not 0 < value < float("inf") for value in found):
        raise typer.BadParameter(f"{flag} '{text}': write {count} positive numbers, comma-separated, one for each file")
    return found


SUBCOMMANDS = {"show": show, "merge": merge, "convert": convert}
