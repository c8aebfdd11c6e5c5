"""`quantkit imatrix`: collect an importance matrix, show one, merge several, change its form."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Sequence
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
    from quantkit.evaluate.coverage import Coverage
    from quantkit.evaluate.imatrix import Progress, Saved
    from quantkit.evaluate.text import Chunks
    from quantkit.files.imatrix import Imatrix

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
        int, typer.Option("--output-frequency", "-ofreq", help="Save after so many chunks each.", min=1)
    ] = 10,
    restart: Annotated[bool, typer.Option("--restart", help="Begin anew where an interrupted run was saved.")] = False,
    batch_size: Batch = 2048,
    numerics: Numerics = "exact",
    threads: Threads = None,
    launch: Launch = None,  # type: ignore[assignment]  # the decorator gives it
    json: Json = False,
) -> None:
    """Collect an importance matrix: what enters each column of each weight, in the mean square, over a text.

    Of models with experts every expert has its own. With --chat texts are conversations: of a .jsonl file one a line,
    with "messages" of "role" and "content"; of other texts paragraphs in turn, user and assistant. --chunks,
    --from-chunk and the chunks saved after are counted in each text. A run that was interrupted goes on where it was
    last saved, in OUTPUT.resume, when the same command is given again, and ends with the same bytes. `quantkit imatrix
    show FILE` tells what a matrix holds and which experts saw too little; `imatrix merge` makes one of several,
    `imatrix convert` gives it the other form.
    """
    from quantkit.evaluate import imatrix as collecting
    from quantkit.evaluate.text import chunked
    from quantkit.files import gguf
    from quantkit.files import imatrix as files
    from quantkit.files.atomic import check_outputs

    texts = list(file or [])
    if not texts:
        raise QuantkitError("imatrix needs a text: pass one with -f FILE")
    files.check_policy(missing_experts)
    weights = _numbers("--shares", shares, len(texts))
    check_outputs([output], [*gguf.open(model).paths, *texts])
    before = [files.read(path) for path in in_file or []]
    if any(matrix.chunk_size == 0 for matrix in before):
        print(_UNCOUNTED, file=sys.stderr)
    for path, matrix in zip(in_file or [], before):  # now, not when the run is over
        _require_fit(path, matrix, model)
    loaded = launch.open(model, numerics=numerics, threads=threads)
    cuts = [chunked(loaded.tokenizer, text, ctx_size, chunks, from_chunk, chat) for text in texts]
    said = conditions(loaded, ctx_size, sum(map(len, cuts)), ", ".join(map(str, texts)))
    settings = deciding(said) | {
        "texts": texts, "shares": weights, "chunk": from_chunk, "output": process_output, "ppl": not no_ppl,
        "batch": batch_size, "chat": chat, "each": [len(cut) for cut in cuts],
    }  # fmt: skip
    run = collecting.fingerprint([*gguf.open(model).paths, *texts, *(in_file or [])], settings)
    keeper = _Keeper(output, run, cuts, weights, before, missing_experts, output_frequency, restart)
    keeper.early = output.resolve() not in [path.resolve() for path in in_file or []]
    started = time.monotonic()
    parts, scored = [], {}
    for number, cut in enumerate(cuts):
        progress = keeper.text(number, process_output)
        about = f"importance matrix over {len(cut)} chunks of {ctx_size} tokens of {cut.source}, batch {batch_size}"
        print(about, file=sys.stderr)
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
    from quantkit.files import gguf

    try:
        parted(matrix, {tensor.name: tensor.shape for tensor in gguf.open(model).tensors.values()})
    except QuantkitError as error:
        raise QuantkitError(f"{path}: {error}") from None


class _Keeper:
    """Saves a run beside its output, takes it up again, and writes the output."""

    def __init__(
        self, output: Path, run: str, cuts: Sequence[Chunks], shares: list[float] | None, before: Sequence[Imatrix],
        policy: str, every: int, restart: bool,
    ):  # fmt: skip
        from quantkit.evaluate.imatrix import Saved

        self.output, self.cuts, self.shares, self.before = output, cuts, shares, list(before)
        self.policy, self.every = policy, every
        self.path = output.with_name(f"{output.name}.resume")
        self.saved = Saved(run)
        self.early = True  # whether the output is written on the way: not where it is what the run began with
        self._last = (0, 0)  # text and chunks when it was saved last
        if self.path.exists() and not restart:
            self.saved = self._taken_up(run)

    def _taken_up(self, run: str) -> Saved:
        from quantkit.evaluate.imatrix import Saved

        saved = Saved.load(self.path)
        if saved.run != run:
            raise QuantkitError(
                f"{self.path}: saved by a run of another model, text, version or options; give the same command again "
                "to go on with it, or begin anew with --restart"
            )
        done = [text.done for text in saved.texts]
        print(f"{self.path}: going on behind {' and '.join(map(str, done))} chunks", file=sys.stderr)
        self._last = len(done) - 1, done[-1]
        return saved

    def text(self, number: int, process_output: bool) -> Progress:
        """What is known of a text, which is added to what is saved."""
        from quantkit.evaluate.imatrix import Collector, Progress

        if number == len(self.saved.texts):
            self.saved.texts.append(Progress(Collector(process_output)))
        return self.saved.texts[number]

    def batch(self, number: int, state: Progress) -> None:
        """Save where enough chunks were done since, or a text ends, and write the matrix so far."""
        since = state.done - (self._last[1] if self._last[0] == number else 0)
        end = state.done == len(self.cuts[number])
        if (end and number + 1 == len(self.cuts)) or (since < self.every and not end):
            return
        self.saved.save(self.path)
        self._last = number, state.done
        if self.early and self.policy != "error":  # experts may lack tokens that are still to come
            parts = [t.collector.result(c.source, c.n_ctx) for t, c in zip(self.saved.texts, self.cuts)]
            self._write(parts)

    def _write(self, parts: list[Imatrix]) -> Imatrix:
        from quantkit.evaluate.imatrix import pooled
        from quantkit.files import imatrix as files

        made = pooled(parts, self.shares[: len(parts)] if self.shares else None)
        result = files.fill_missing(files.merge([*self.before, made]) if self.before else made, self.policy)
        files.write(self.output, result)
        return result

    def finish(self, parts: list[Imatrix]) -> Imatrix:
        """Write the matrix of all texts; what was saved is done with. Where it may not be written all is saved."""
        try:
            result = self._write(parts)
        except QuantkitError as error:
            self.saved.save(self.path)
            raise QuantkitError(
                f"{error}; what was measured is kept in {self.path}: the command goes on from there with another "
                "--missing-experts, and begins anew with --restart"
            ) from None
        self.path.unlink(missing_ok=True)
        return result


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
    from quantkit.files.imatrix import read

    found = read(file)
    if model is not None:
        import quantkit

        found = parted(found, {t.name: t.shape for t in quantkit.open(model).tensors.values()})
    rows = coverage(found, threshold)
    if plot is not None:
        from quantkit.evaluate.plots import plot_importance

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
    from quantkit.files import imatrix as formats

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
    from quantkit.files import imatrix as formats

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
