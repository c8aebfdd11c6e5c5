"""`quantkit perplexity`: perplexity, KL divergence base files, KL divergence, multiple-choice tasks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quantkit.cli.common.cluster import Cluster, connected
from quantkit.cli.common.command import in_sections, takes_model
from quantkit.cli.common.evaluation import (
    Batch,
    ByCategory,
    ByPosition,
    Chat,
    ChunkBar,
    ChunkLimit,
    Context,
    Numerics,
    Score,
    Tasks,
    TextFile,
    ThreadsBatch,
    on_message,
    required_text,
    scores_tasks,
)
from quantkit.cli.common.hub import from_hub
from quantkit.cli.common.launch import Launch, context_size, runs_a_model
from quantkit.cli.common.options import Json, Threads
from quantkit.cli.common.output import print_json, print_table
from quantkit.cli.common.progress_options import shows_progress
from quantkit.errors import OptionError
from quantkit.progress import ProgressBar

if TYPE_CHECKING:
    from quantkit.evaluate.breakdown import Part
    from quantkit.evaluate.divergence import Divergence, DivergenceOptions
    from quantkit.evaluate.perplexity import Perplexity, PerplexityOptions
    from quantkit.evaluate.progress import ChunkProgress
    from quantkit.evaluate.tasks import Score as TaskScore

_MIN_POSITIONS = 100


@shows_progress
@in_sections(
    Evaluation=["file", "chat", "score", "by_category", "ctx_size", "chunks", "batch_size", "ppl_stride", "jsonl",
                "ppl_output_type", "by_layer", "numerics"],
    KL_divergence=["kl_divergence_base", "kl_divergence", "kl_divergence_bound", "by_position"],
)  # fmt: skip
@takes_model()
@from_hub("model")
@runs_a_model
@scores_tasks
def perplexity(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL",
            help="A GGUF file, any shard of a split one, or hf://ORG/NAME/FILE.gguf.",
            show_default=False,
        ),
    ],
    file: TextFile = None,
    chat: Chat = False,
    score: Score = None,
    by_category: ByCategory = False,
    ctx_size: Context = 512,
    chunks: ChunkLimit = None,
    batch_size: Batch = 2048,
    ppl_stride: Annotated[
        int,
        typer.Option(
            metavar="STRIDE",
            help="Windows of -c + STRIDE / 2 tokens, STRIDE apart; the last STRIDE tokens are scored.",
            min=0,
        ),
    ] = 0,
    jsonl: Annotated[
        Path | None,
        typer.Option(help="Write a JSON line per chunk; the same command resumes from it.", metavar="FILE"),
    ] = None,
    tasks: Tasks | None = None,  # the decorator gives it
    ppl_output_type: Annotated[
        int, typer.Option(help="0: [chunk]PPL,… in one line; 1: one line per chunk.", min=0, max=1)
    ] = 0,
    kl_divergence_base: Annotated[
        Path | None,
        typer.Option(
            "--kl-divergence-base",
            "--save-all-logits",
            metavar="FILE",
            help="Base file to write, or to read with --kl-divergence.",
        ),
    ] = None,
    kl_divergence: Annotated[
        bool, typer.Option("--kl-divergence", help="Compute the KL divergence from the base file, on the text in it.")
    ] = False,
    kl_divergence_bound: Annotated[
        float,
        typer.Option(
            metavar="NATS", help="For a base file named .qkld: target error of the mean KLD, in nats.", min=1e-7
        ),
    ] = 1e-3,
    by_position: ByPosition = False,
    by_layer: Annotated[
        bool,
        typer.Option(
            "--by-layer", help="Run all chunks through one layer before the next, for models larger than memory."
        ),
    ] = False,
    numerics: Numerics = "exact",
    threads: Threads = None,
    threads_batch: ThreadsBatch = None,
    cluster: Cluster = None,
    launch: Launch = None,  # type: ignore[assignment]  # the decorator gives it
    json: Json = False,
) -> None:
    """Measure perplexity, or KL divergence from another model.

    Protocol, output and base files are those of llama-perplexity: the second half of each chunk of -c tokens is scored.
    A base file named .qkld has 1/20 of the size or less, and results from it include a bound on the error against an
    exact base. With --jsonl, an interrupted base file is resumed too. With --chat, each conversation is a sequence of
    its own, cut after -c tokens. A .qkld records which tokens are scored; llama.cpp's base files cannot.
    """
    from quantkit.evaluate.conditions import conditions_line
    from quantkit.evaluate.divergence import DivergenceOptions
    from quantkit.evaluate.perplexity import PerplexityOptions

    if tasks and kl_divergence:
        raise typer.BadParameter(f"--{tasks.kind} and --kl-divergence: pass only one")
    if tasks and cluster:
        raise typer.BadParameter(f"--{tasks.kind} runs on this machine; remove --cluster")
    if tasks:
        others = {"--chat": chat, "--score": score, "--by-category": by_category, "--chunks": chunks,
                  "--ppl-stride": ppl_stride, "--jsonl": jsonl, "--kl-divergence-base": kl_divergence_base,
                  "--by-layer": by_layer}  # fmt: skip
        if unused := [name for name, value in others.items() if value]:
            raise typer.BadParameter(f"--{tasks.kind} scores the tasks of its file; remove {', '.join(unused)}")
    if by_position and not kl_divergence:
        raise typer.BadParameter("--by-position shows a divergence: add --kl-divergence")
    threads, ctx_size = threads_batch or threads, context_size(ctx_size, model)
    schema = "quantkit.perplexity/1"
    found: Perplexity | Divergence | TaskScore
    if tasks:
        schema = "quantkit.perplexity-tasks/1"
        found = _score(model, tasks, tasks.file(file), numerics, threads, launch, quiet=json)
    elif kl_divergence:
        schema = "quantkit.perplexity-kl-divergence/1"
        if kl_divergence_base is None:
            raise OptionError("--kl-divergence needs the base to compare with: --kl-divergence-base FILE")
        others = {"-f": file, "--chunks": chunks, "--ppl-stride": ppl_stride, "--by-category": by_category}
        for name in [name for name, value in others.items() if value]:
            on_message(f"warning: {name} has no effect: the chunks are those of the base file")
        compared = DivergenceOptions(
            batch_size=batch_size, jsonl=jsonl, by_layer=by_layer, numerics=numerics, threads=threads, score=score,
            chat=chat,
        )  # fmt: skip
        found = _diverge(model, kl_divergence_base, compared, launch, by_position, quiet=json, cluster=cluster)
    else:
        options = PerplexityOptions(
            ctx_size=ctx_size, chunks=chunks, batch_size=batch_size, ppl_stride=ppl_stride, jsonl=jsonl,
            kl_divergence_base=kl_divergence_base, kl_divergence_bound=kl_divergence_bound, chat=chat, score=score,
            by_category=by_category, by_layer=by_layer, numerics=numerics, threads=threads,
        )  # fmt: skip
        found = _measure(model, required_text(file, "perplexity"), options, launch, ppl_output_type, quiet=json,
                         cluster=cluster)  # fmt: skip
    if json:
        record = {"path": model, **found.record(), "seconds": found.seconds, "conditions": found.conditions}
        if kl_divergence:
            record |= _parts_record(found)  # type: ignore[arg-type]
        print_json(schema, record)
    else:
        on_message(conditions_line(found.conditions))


def _measure(
    model: Path, text: Path, options: PerplexityOptions, launch: Launch, style: int, quiet: bool,
    cluster: str | None,
) -> Perplexity:  # fmt: skip
    """Measure the perplexity and print it, unless quiet; `style` is --ppl-output-type."""
    from quantkit.evaluate.perplexity import perplexity as measure

    def show(progress: ChunkProgress[Perplexity]) -> None:
        so_far = progress.so_far
        if not quiet and style == 0:
            bar.print_value(progress, so_far.value)
            return
        if not quiet:
            mean, error = so_far.nll.mean(), so_far.mean_error
            tokens = (progress.done - 1) * so_far.n_ctx
            print(f"{tokens:8d}  {so_far.value:.4f}  {mean:4f}  {error:4f}", flush=True)
        bar.show(progress, so_far.value)

    with connected(cluster, on_message) as client, ChunkBar("perplexity", "PPL") as bar:
        found = measure(
            model, text, options, progress=show, on_message=on_message, on_layer=bar.on_layer, open_model=launch.open,
            client=client,
        )  # fmt: skip
        in_bar = bar.replaces_values and style == 0
    if not quiet:
        estimate = f"Final estimate: PPL over {found.chunks} chunks for n_ctx={found.n_ctx} = {found}"
        if options.ppl_stride:  # llama-perplexity prints no estimate for windows
            print(f"[{found.chunks}]{found.value:.4f}" if in_bar else "")
        else:
            print(estimate if in_bar else f"\n{estimate}")
    return found


def _parts(found: Divergence) -> dict[str, list[Part]]:
    """The divergence by position, and by category if the base file has categories."""
    from quantkit.evaluate.breakdown import by_category, by_position

    assert found.chunks is not None
    depths, counts, choice = found.chunks.depths, found.chunks.counts, found.chunks.choice
    parts = {"by_position": by_position(found, depths, counts)}
    return parts | ({"by_category": by_category(found, choice.labels, counts)} if choice and choice.labels else {})


def _parts_record(found: Divergence) -> dict[str, object]:
    from quantkit.evaluate.comparison import part_record

    return {name: [part_record(part) for part in parts] for name, parts in _parts(found).items()}


def _diverge(
    model: Path, base: Path, options: DivergenceOptions, launch: Launch, by_position: bool, quiet: bool,
    cluster: str | None,
) -> Divergence:  # fmt: skip
    """Measure the divergence from a base file and print it, unless quiet."""
    from quantkit.evaluate.divergence import divergence
    from quantkit.evaluate.report import divergence_text
    from quantkit.evaluate.report.tables import part_table

    def show(progress: ChunkProgress[Divergence]) -> None:
        if not quiet:
            if progress.done == 1 + progress.resumed:
                print(f"\n{divergence_text.CHUNK_HEADER}")
            print(divergence_text.chunk_line(progress.done, progress.so_far), flush=True)
        bar.show(progress, progress.so_far.mean_kld.value)

    with connected(cluster, on_message) as client, ChunkBar("KL divergence", "KLD", 5) as bar:
        found = divergence(
            model, base, None, options, progress=show, on_message=on_message, on_layer=bar.on_layer,
            open_model=launch.open, client=client,
        )  # fmt: skip
    if quiet:
        return found
    if len(found) >= _MIN_POSITIONS:
        print(f"\n{divergence_text.report(found)}")
    else:
        print(
            f"\nPPL of the base {found.ppl_base.value:.4f} ± {found.ppl_base.error:.4f}; {len(found)} positions, "
            f"the full report needs at least {_MIN_POSITIONS}"
        )
    if found.bound_terms is not None:
        low, high = found.limits
        span = f"from an exact base {low:.6f} to {high:.6f}"
        print(f"\nKLD {found.mean_kld.value:.6f}; {span}: within {found.bound:.6f}")
    for name, parts in _parts(found).items():
        if by_position or name != "by_position":
            print()
            print_table(*part_table([(None, parts)]))
    return found


def _score(
    model: Path, tasks: Tasks, file: Path, numerics: str, threads: int | None, launch: Launch, quiet: bool
) -> TaskScore:
    """Score the tasks of a file and print the score, unless quiet."""
    from quantkit.evaluate.tasks import score_tasks

    def show(score: TaskScore, count: int) -> None:
        if not quiet:
            print(f"{score.tasks}\t{100 * score.accuracy:.8f}", flush=True)
        bar.show(score.tasks, count, values=f"accuracy {100 * score.accuracy:.2f} %")

    with ProgressBar(tasks.kind) as bar:
        score = score_tasks(
            model, tasks.kind, file, tasks.limit, numerics=numerics, threads=threads, progress=show,
            on_message=on_message, open_model=launch.open,
        )  # fmt: skip
    value, error = 100 * score.accuracy, 100 * score.error
    if not quiet and tasks.kind == "winogrande" and score.tasks >= _MIN_POSITIONS:
        print(f"\nFinal Winogrande score({score.tasks} tasks): {value:.4f} +/- {error:.4f}")
    if not quiet and tasks.kind == "multiple-choice":
        spread = 100 * (score.chance * (1 - score.chance) / max(1, score.tasks - 1)) ** 0.5
        print(f"\nFinal result: {value:.4f} +/- {error:.4f}")
        print(f"Random chance: {100 * score.chance:.4f} +/- {spread:.4f}")
    return score
