"""`quantkit imatrix`: collect an importance matrix, show one, merge several, change its form."""

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
    deciding,
)
from quantkit.cli._runtime import Launch, runs_a_model
from quantkit.cli._shared import Json, Threads, print_json, table
from quantkit.errors import QuantkitError

if TYPE_CHECKING:
    from quantkit.evaluate.collect_imatrix import Progress, Saved
    from quantkit.evaluate.coverage import Coverage
    from quantkit.evaluate.text import Chunks
    from quantkit.formats.imatrix import Imatrix

FEW_TOKENS = 32  # the mean of so many squares of normal numbers is off by a quarter; as quantkit's lint has it

_UNCOUNTED = ("note: a legacy importance matrix does not say what each expert saw, so neither does one that it is "
              "part of; entries are weighed by their calls")  # fmt: skip

Output = Annotated[
    Path, typer.Option("--output", "-o", help="The importance matrix: llama.cpp's GGUF form for .gguf, else legacy.")
]
Missing = Annotated[
    str,
    typer.Option(
        metavar="POLICY",
        help="Experts that saw no token: weight-one, layer-mean (of the layer's others), or error.",
    ),
]
TheModel = Annotated[
    Path | None, typer.Option("--model", "-m", metavar="GGUF", help="The model; parts legacy entries into experts.")
]


@runs_a_model
def imatrix(
    model: Annotated[Path, typer.Argument(help="GGUF file, or any shard of one.")],
    file: Annotated[
        list[Path] | None, typer.Option("--file", "-f", help="Text, UTF-8. Repeatable.", show_default=False)
    ] = None,
    shares: Annotated[
        str | None,
        typer.Option("--shares", metavar="N,N,…", help="How much each text weighs; default: by its length."),
    ] = None,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat", help="Write texts through the model's chat template: .jsonl of messages, or paragraphs."
        ),
    ] = False,
    output: Output = Path("imatrix.dat"),
    ctx_size: Context = 512,
    chunks: ChunkLimit = None,
    from_chunk: Annotated[int, typer.Option("--from-chunk", "--chunk", help="Skip so many chunks.", min=0)] = 0,
    process_output: Annotated[bool, typer.Option("--process-output", help="Also the output matrix.")] = False,
    missing_experts: Missing = "weight-one",
    no_ppl: Annotated[bool, typer.Option("--no-ppl", help="Do not compute the perplexity on the way.")] = False,
    in_file: Annotated[
        list[Path] | None, typer.Option("--in-file", help="Importance matrix to begin with; may be repeated.")
    ] = None,
    output_frequency: Annotated[
        int,
        typer.Option(
            "--output-frequency", "-ofreq", help="Save to OUTPUT.resume and OUTPUT.partial every N chunks.", min=1
        ),
    ] = 10,
    save_frequency: Annotated[
        int,
        typer.Option("--save-frequency", help="Keep a copy as OUTPUT.at_CHUNKS every N chunks; 0: none.", min=0),
    ] = 0,
    restart: Annotated[bool, typer.Option("--restart", help="Discard what an interrupted run saved.")] = False,
    batch_size: Batch = 2048,
    numerics: Numerics = "exact",
    threads: Threads = None,
    launch: Launch = None,  # type: ignore[assignment]  # the decorator gives it
    json: Json = False,
) -> None:
    """Collect an importance matrix: what enters each column of each weight, in the mean square, over a text.

    Of models with experts every expert has its own. With --chat texts are conversations: of a .jsonl file one a line,
    with "messages" of "role" and "content"; of other texts paragraphs in turn, user and assistant. --chunks and
    --from-chunk are counted in each text, --output-frequency and --save-frequency over all. OUTPUT appears when the run
    is complete. An interrupted run leaves OUTPUT.resume, from which the same command resumes and ends with the same
    bytes, and OUTPUT.partial, the importance matrix of the chunks so far. `quantkit imatrix show FILE` tells what a
    matrix holds and which experts saw too little; `imatrix merge` makes one of several, `imatrix convert` gives it the
    other form.
    """
    from quantkit.evaluate import collect_imatrix as collecting
    from quantkit.evaluate.text import chunked
    from quantkit.formats import gguf
    from quantkit.formats import imatrix as files

    texts = list(file or [])
    if not texts:
        raise QuantkitError("imatrix needs a text: pass one with -f FILE")
    files.check_policy(missing_experts)
    weights = _numbers("--shares", shares, len(texts))
    _check_names(output, [*gguf.open(model).paths, *texts], in_file or [], save_frequency)
    before = [files.read(path) for path in in_file or []]
    if any(matrix.chunk_size == 0 for matrix in before):
        print(_UNCOUNTED, file=sys.stderr)
    for path, matrix in zip(in_file or [], before):  # now, not when the run is over
        _require_fit(path, matrix, model)
    loaded = launch.open(model, numerics=numerics, threads=threads, n_ctx=ctx_size)
    cuts = [chunked(loaded.tokenizer, text, ctx_size, chunks, from_chunk, chat) for text in texts]
    said = conditions(loaded, ctx_size, sum(map(len, cuts)), ", ".join(map(str, texts)))
    settings = deciding(said) | {
        "texts": texts, "shares": weights, "chunk": from_chunk, "output": process_output, "ppl": not no_ppl,
        "batch": batch_size, "chat": chat, "each": [len(cut) for cut in cuts],
    }  # fmt: skip
    run = collecting.fingerprint([*gguf.open(model).paths, *texts, *(in_file or [])], settings)
    keeper = _Keeper(output, run, cuts, weights, before, missing_experts, output_frequency, save_frequency, restart)
    started = time.monotonic()
    parts, scored = [], {}
    for number, cut in enumerate(cuts):
        progress = keeper.text(number, process_output)
        about = f"importance matrix over {len(cut)} chunks of {ctx_size} tokens of {cut.source}, batch {batch_size}"
        print(about, file=sys.stderr)
        with keeper.interrupted():
            part, ppl = collecting.collect(
                loaded, cut, process_output=process_output, with_perplexity=not no_ppl, n_batch=batch_size,
                on_chunk=_shown(Running(len(cut) - progress.done, ctx_size, batch_size), progress.done, json),
                on_batch=functools.partial(keeper.batch, number), progress=progress,
            )  # fmt: skip
        parts.append(part)
        if ppl:
            scored[cut.source] = {"ppl": ppl.value, "ppl_error": ppl.error}
            if not json:
                print(f"\nFinal estimate: PPL = {ppl}")
    result = keeper.finish(parts)
    _report(output, result, scored, time.monotonic() - started, said, json)


def _shown(running: Running, first: int, json: bool) -> Callable[[int, Any, Any], None]:
    """What tells a chunk's perplexity and how long the rest takes, of a run that began behind `first` chunks."""

    def show(index: int, so_far: Any, collector: Any) -> None:
        if so_far is not None and not json:
            print(f"[{index}]{so_far.value:.4f},", end="", flush=True)
        running.tick(index - first)

    return show


def _require_fit(path: Path, matrix: Imatrix, model: Path) -> None:
    """QuantkitError where an importance matrix was measured on another model."""
    from quantkit.evaluate.coverage import parted
    from quantkit.formats import gguf

    try:
        parted(matrix, {tensor.name: tensor.shape for tensor in gguf.open(model).tensors.values()})
    except QuantkitError as error:
        raise QuantkitError(f"{path}: {error}") from None


class _Keeper:
    """Saves a run beside its output, resumes it, and writes the output.

    OUTPUT.resume    the run's state, after every `every` chunks and where a text ends
    OUTPUT.partial   the importance matrix of the chunks so far, written with it; both go when OUTPUT is written
    OUTPUT.at_N      with `copies`, the matrix of the first N chunks, as llama-imatrix names it; these stay
    """

    def __init__(
        self, output: Path, run: str, cuts: Sequence[Chunks], shares: list[float] | None, before: Sequence[Imatrix],
        policy: str, every: int, copies: int, restart: bool,
    ):  # fmt: skip
        from quantkit.evaluate.collect_imatrix import Saved

        self.output, self.cuts, self.shares, self.before = output, cuts, shares, list(before)
        self.policy, self.every, self.copies = policy, every, copies
        self.path, self.partial = _beside(output, "resume"), _beside(output, "partial")
        self.saved = Saved(run)
        if self.path.exists() and not restart:
            self.saved = self._resumed(run)
        self._seen = self.done

    @property
    def done(self) -> int:
        """Chunks of all texts that were measured."""
        return sum(text.done for text in self.saved.texts)

    def _resumed(self, run: str) -> Saved:
        from quantkit.evaluate.collect_imatrix import Saved

        saved = Saved.load(self.path)
        if saved.run != run:
            raise QuantkitError(
                f"{self.path}: saved by a run of another model, text, version or options; give the same command again "
                "to resume it, or discard it with --restart"
            )
        done = " and ".join(str(text.done) for text in saved.texts)
        print(f"{self.path}: resumed after {done} chunks", file=sys.stderr)
        return saved

    def text(self, number: int, process_output: bool) -> Progress:
        """What is known of a text, which is added to what is saved."""
        from quantkit.evaluate.collect_imatrix import Collector, Progress

        if number == len(self.saved.texts):
            self.saved.texts.append(Progress(Collector(process_output)))
        return self.saved.texts[number]

    def batch(self, number: int, state: Progress) -> None:
        """Save what is due after a batch: a copy, the state, the matrix so far."""
        before, self._seen = self._seen, self.done
        if self.copies and self._seen // self.copies > before // self.copies:
            self._write_so_far(_beside(self.output, f"at_{self._seen}"))
        ended = state.done == len(self.cuts[number])
        if ended and number + 1 == len(self.cuts):
            return  # the output is next
        if ended or self._seen // self.every > before // self.every:
            self.saved.save(self.path)
            self._write_so_far(self.partial)

    def _write_so_far(self, path: Path) -> None:
        """The matrix of what was measured; none where it may not lack experts, whose tokens may still come."""
        parts = [text.collector.result(cut.source, cut.n_ctx) for text, cut in zip(self.saved.texts, self.cuts)]
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
        """Write the matrix of all texts and remove what was saved. Where it cannot be written the state is saved."""
        try:
            result = self._write(self.output, self._made(parts))
        except QuantkitError as error:
            self.saved.save(self.path)
            raise QuantkitError(
                f"{error}; what was measured is kept in {self.path}: mend this and give the command again, "
                "--missing-experts may be another; --restart discards it"
            ) from None
        self.path.unlink(missing_ok=True)
        self.partial.unlink(missing_ok=True)
        return result

    @contextlib.contextmanager
    def interrupted(self) -> Iterator[None]:
        """Say, where the run is interrupted, what of it is saved and under which names."""
        try:
            yield
        except KeyboardInterrupt:
            if self.path.exists():
                matrix = f", their importance matrix is {self.partial}" if self.partial.exists() else ""
                print(
                    f"\n{self.path}: has the chunks that were saved{matrix}; the same command resumes it",
                    file=sys.stderr,
                )
            raise


def _beside(output: Path, what: str) -> Path:
    """A file beside the output: its name, a dot and what this one is."""
    return output.with_name(f"{output.name}.{what}")


def _check_names(output: Path, inputs: Sequence[Path], in_files: Sequence[Path], copies: int) -> None:
    """QuantkitError, before the run, where a file that it writes is one that it reads.

    The output itself may be an --in-file: it is written when all is done. What is saved on the way is not.
    """
    from quantkit.formats.atomic import check_outputs

    check_outputs([output], inputs)
    check_outputs([_beside(output, "resume"), _beside(output, "partial")], [*inputs, *in_files])
    taken = _beside(output.resolve(), "at_").name
    for path in in_files if copies else ():
        if path.resolve().parent == output.resolve().parent and path.resolve().name.startswith(taken):
            raise QuantkitError(f"{path}: --save-frequency writes files of such names; rename it, or the output")


def _report(
    output: Path, result: Imatrix, scored: dict[str, Any], seconds: float, said: dict[str, Any], json: bool
) -> None:
    from quantkit.evaluate.coverage import coverage

    rows = coverage(result, FEW_TOKENS)
    few = _few_experts(rows, FEW_TOKENS)
    if json:
        one = next(iter(scored.values())) if len(scored) == 1 else {}
        print_json({"output": output, "entries": len(result), "policy": result.policy, **one, "texts": scored,
                    "few_experts": {row.name: row.few for row in rows if row.few}, "conditions": said})  # fmt: skip
        return
    print(f"{output}: {len(result)} entries, {seconds:.1f} s")
    for line in few:
        print(line)
    if result.policy:
        print(f"experts that saw no token: {result.policy}")
    print(conditions_line(said), file=sys.stderr)


def _few_experts(rows: Sequence[Coverage], threshold: int) -> list[str]:
    """Experts that saw too little, a line a layer; weights of one layer that lack the same ones in one."""
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
    file: Annotated[Path, typer.Argument(help="Importance matrix of either form.")],
    model: TheModel = None,
    threshold: Annotated[
        int, typer.Option(metavar="N", help="Name experts that saw fewer tokens.", min=1)
    ] = FEW_TOKENS,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a picture, PNG, SVG or PDF.", show_default=False)
    ] = None,
    json: Json = False,
) -> None:
    """Show what an importance matrix holds: by weight and expert how much text it saw, and how its columns differ.

    tokens are the fewest, the median and the most that an expert saw; covered the share of experts that saw enough;
    experts how many, used evenly, would spread the tokens as they are (2 to the entropy); columns the same of columns,
    in parts of all; similar the cosine with the layer before.
    """
    from quantkit.evaluate.coverage import coverage, parted
    from quantkit.formats.imatrix import read

    if plot is not None:
        from quantkit.evaluate.plots import plot_importance, require_picture

        require_picture(plot)
    found = read(file)
    if model is not None:
        import quantkit

        found = parted(found, {t.name: t.shape for t in quantkit.open(model).tensors.values()})
    rows = coverage(found, threshold)
    if plot is not None:
        title = f"{file.name}: {len(found)} entries, {found.chunks} chunks of {found.dataset or 'a text not named'}"
        plot_importance(plot, rows, title)
    if json:
        about = {"chunks": found.chunks, "chunk_size": found.chunk_size, "dataset": found.dataset,
                 "missing_experts": found.policy or None, "threshold": threshold}  # fmt: skip
        print_json({"file": file, **about, "entries": [row.to_json() for row in rows]})
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
    size = f" of {found.chunk_size} tokens" if found.chunk_size else ", which counts no tokens"
    policy = f", experts that saw no token: {found.policy}" if found.policy else ""
    return f"{len(found)} entries, {found.chunks} chunks{size}, dataset {found.dataset or 'not named'}{policy}"


def merge(
    files: Annotated[list[Path], typer.Argument(help="Importance matrices of the same model, of either form.")],
    output: Output = Path("imatrix.dat"),
    weights: Annotated[
        str | None, typer.Option(metavar="N,N,…", help="How much each counts, beside what it saw.")
    ] = None,
    missing_experts: Missing = "weight-one",
) -> None:
    """Merge importance matrices of one model: the mean, each expert weighed by what it saw.

    Where a legacy file is among them, which counts no tokens, entries are weighed by their calls.
    """
    from quantkit.formats import imatrix as formats

    read = [formats.read(path) for path in files]
    if formats.uncounted(read):
        print(_UNCOUNTED, file=sys.stderr)
    merged = formats.merge(read, _numbers("--weights", weights, len(files)))
    merged = formats.fill_missing(merged, missing_experts)
    formats.write(output, merged)
    print(f"{output}: {len(merged)} entries, {merged.chunks} chunks, of {len(files)} files")


def convert(
    file: Annotated[Path, typer.Argument(metavar="IN", help="Importance matrix of either form.")],
    output: Annotated[Path, typer.Argument(metavar="OUT", help="GGUF form for .gguf, else legacy.")],
    model: TheModel = None,
) -> None:
    """Give an importance matrix the other form, or the same anew.

    Legacy files do not say how many experts an entry has: --model tells it, so that the GGUF form has them one by one.
    They count no tokens either: each call is taken for 512.
    """
    from quantkit.evaluate.coverage import parted
    from quantkit.formats import imatrix as formats

    found = formats.read(file)
    if model is not None:
        import quantkit

        found = parted(found, {t.name: t.shape for t in quantkit.open(model).tensors.values()})
    formats.write(output, found)
    print(f"{output}: {_summary(found)}")


def _numbers(flag: str, text: str | None, count: int) -> list[float] | None:
    """The numbers of an option that has one for each file; bad usage for other than positive ones."""
    if text is None:
        return None
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if len(found) != count or any(not 0 < value < float("inf") for value in found):
        raise typer.BadParameter(f"{flag} '{text}': {count} positive numbers parted by commas, one for each file")
    return found


SUBCOMMANDS = {"show": show, "merge": merge, "convert": convert}
