"""`quantkit imatrix`: collect an importance matrix. Its subcommands are in `_imatrix_files`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from quantkit.cli._imatrix_files import (
    FEW_TOKENS,
    Missing,
    convert,
    few_experts_lines,
    merge,
    numbers,
    show,
)
from quantkit.cli.common.cluster import Cluster, check_cluster, connected
from quantkit.cli.common.command import in_sections, takes_model
from quantkit.cli.common.evaluation import Batch, ChunkBar, ChunkLimit, Context, Numerics, ThreadsBatch, on_message
from quantkit.cli.common.hub import from_hub
from quantkit.cli.common.launch import Launch, context_size, device_text, runs_a_model
from quantkit.cli.common.options import Json, Threads, parse_size
from quantkit.cli.common.output import print_json, print_table
from quantkit.cli.common.progress_options import shows_progress
from quantkit.errors import OptionError, QuantkitError
from quantkit.progress import ProgressBar

if TYPE_CHECKING:
    from quantkit.evaluate.imatrix.run import ImatrixOptions, ImatrixRun
    from quantkit.evaluate.perplexity import Perplexity
    from quantkit.evaluate.progress import ChunkProgress


@shows_progress
@in_sections(
    Text=["file", "shares", "chat", "parse_special", "ctx_size", "chunks", "from_chunk"],
    Saving=["output", "output_format", "in_file", "output_frequency", "save_frequency", "restart"],
    Second_moments=["second_moments", "second_moments_size", "token_weights", "dry_run"],
)
@takes_model()
@from_hub("model")
@runs_a_model
def imatrix(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL",
            help="A GGUF file, any shard of a split one, or hf://ORG/NAME/FILE.gguf.",
            show_default=False,
        ),
    ],
    file: Annotated[
        list[Path] | None,
        typer.Option(
            "--file", "-f", metavar="FILE", help="Text file, UTF-8; - is stdin. Repeatable.", show_default=False
        ),
    ] = None,
    shares: Annotated[
        str | None,
        typer.Option("--shares", metavar="N,N,…", help="Weight of each text; default: its length."),
    ] = None,
    chat: Annotated[
        bool,
        typer.Option("--chat", help="Format texts with the model's chat template: .jsonl of messages, or paragraphs."),
    ] = False,
    parse_special: Annotated[
        bool, typer.Option("--parse-special", help="Parse control tokens in texts, such as <|im_start|>.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "--output-file",
            "-o",
            metavar="FILE",
            help="Output file: llama.cpp's GGUF format for .gguf, else the legacy format; default: imatrix.dat.",
            show_default=False,
        ),
    ] = None,
    output_format: Annotated[
        Literal["gguf", "dat"] | None,
        typer.Option("--output-format", help="Format of the output; the name of -o must agree.", show_default=False),
    ] = None,
    ctx_size: Context = 512,
    chunks: ChunkLimit = None,
    from_chunk: Annotated[
        int, typer.Option("--from-chunk", "--chunk", metavar="N", help="Skip the first N chunks of each text.", min=0)
    ] = 0,
    process_output: Annotated[
        bool | None,
        typer.Option(
            "--process-output/--no-process-output",
            help="Also collect for output.weight, or the embedding that serves as it. Default: with second moments.",
            show_default=False,
        ),
    ] = None,
    missing_experts: Missing = "weight-one",
    no_ppl: Annotated[bool, typer.Option("--no-ppl", help="Do not compute the perplexity.")] = False,
    layer_similarity: Annotated[
        bool,
        typer.Option(
            "--layer-similarity", "-lsim", help="Also print the cosine similarity of each layer's input and output."
        ),
    ] = False,
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
    second_moments: Annotated[
        str | None,
        typer.Option(
            "--second-moments",
            metavar="FORM",
            help="Also collect second moments, for quantize: full, rank:N, blocks:N or auto. Needs -o X.gguf.",
        ),
    ] = None,
    second_moments_size: Annotated[
        str | None,
        typer.Option(
            "--second-moments-size",
            metavar="SIZE",
            help="Memory limit for second moments, for example 8G; auto stays within it.",
        ),
    ] = None,
    token_weights: Annotated[
        Literal["attention", "none"] | None,
        typer.Option(
            help="Weight of tokens in the inputs of queries, keys and values: the attention that they receive, or "
            "none: all alike. Default: attention with --second-moments, else none, as in llama-imatrix."
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Only print the sizes of second moments; MODEL may be a checkpoint's folder or config.json.",
        ),
    ] = False,
    batch_size: Batch = 2048,
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
    """Collect an importance matrix of a model over texts.

    It holds the mean squared activation of each column of each weight. In models with experts, each expert has its own
    values. `quantkit imatrix show FILE` shows the contents of a matrix and the experts with too few tokens; `imatrix
    merge` merges several; `imatrix convert` changes the format.

    With --chat, texts are conversations: a .jsonl file has one per line, with "messages" of "role" and "content"; in
    other texts, paragraphs alternate between user and assistant. --chunks and --from-chunk count per text,
    --output-frequency and --save-frequency over all texts.

    OUTPUT appears when the run is complete. An interrupted run leaves OUTPUT.resume, from which the same command
    resumes and gives the same bytes, and OUTPUT.partial, the importance matrix of the chunks so far. With --by-layer,
    one layer is in memory at a time; the run is then saved after layers, in OUTPUT.resume and OUTPUT.states.
    """
    from quantkit.evaluate.imatrix import run

    limit = parse_size(second_moments_size, "--second-moments-size") if second_moments_size else None
    if second_moments_size is not None and second_moments is None:
        raise OptionError("--second-moments-size limits second moments: add --second-moments auto")
    check_cluster(cluster)
    if layer_similarity and (numerics != "exact" or device_text(launch.given)):
        raise OptionError(
            "--layer-similarity is measured on the CPU with exact numerics; remove --numerics fast and the devices, or "
            "measure it in a run of its own"
        )
    if dry_run:
        _print_sizes(model, second_moments, limit, process_output, json)
        return
    texts = list(file or [])
    if not texts:
        raise OptionError("imatrix needs a text: pass it with -f FILE")
    options = run.ImatrixOptions(
        shares=numbers("--shares", shares, len(texts)), chat=chat, parse_special=parse_special,
        ctx_size=context_size(ctx_size, model), chunks=chunks,
        from_chunk=from_chunk, process_output=process_output, missing_experts=missing_experts, no_ppl=no_ppl,
        in_file=tuple(in_file or ()), output_frequency=output_frequency, save_frequency=save_frequency,
        restart=restart, by_layer=by_layer, second_moments=second_moments or "", second_moments_size=limit,
        token_weights=token_weights or "", batch_size=batch_size, numerics=numerics, threads=threads_batch or threads,
    )  # fmt: skip
    target = _output(output, output_format)
    complete: set[str] = set()  # texts whose perplexity is printed

    def show_chunk(progress: ChunkProgress[Perplexity | None]) -> None:
        if progress.so_far is None or json:
            bar.show(progress, None if progress.so_far is None else progress.so_far.value)
            return
        bar.print_value(progress, progress.so_far.value)
        if progress.done == progress.chunks:
            if not bar.replaces_values:
                print()
            print(f"Final estimate: PPL = {progress.so_far}")
            complete.add(progress.text)

    with connected(cluster, on_message) as client, ChunkBar("imatrix", "PPL") as bar:
        found = run.imatrix(
            model, texts, target, options, progress=show_chunk, on_message=on_message, on_layer=bar.on_layer,
            open_model=launch.open, client=client,
        )  # fmt: skip
    for text, ppl in found.perplexities.items():
        if text not in complete and not json:  # an earlier run had completed it
            print(f"Final estimate: PPL = {ppl}")
    similar = _similarity(model, texts, options, launch) if layer_similarity else []
    _report(found, similar, json)


def _print_sizes(model: Path, form: str | None, limit: int | None, process_output: bool | None, json: bool) -> None:
    """What --second-moments takes, in each form or in the one that is asked for."""
    from quantkit.evaluate.imatrix.collect import collects_output
    from quantkit.evaluate.imatrix.second_moments import MomentsForm, measured_shapes, plan_forms, sizes
    from quantkit.pipelines import planning

    shapes = measured_shapes(planning.open_model(model).tensors, collects_output(process_output, with_moments=True))
    if not shapes:
        raise QuantkitError(f"{model}: no matrices in blocks, so nothing to measure")
    rows = []
    for text in [form] if form else ["full", "rank:128", "rank:32", "blocks:1024", "blocks:256", "blocks:64"]:
        memory, stored = sizes(shapes, plan_forms(shapes, MomentsForm.parse(text), limit))
        rows.append((text, memory, stored))
    if json:
        forms = [dict(zip(("form", "memory_bytes", "file_bytes"), row)) for row in rows]
        print_json("quantkit.imatrix-sizes/1", {"path": model, "weights": len(shapes), "forms": forms})
        return
    cells = [(text, f"{memory / 1e9:,.2f} GB", f"{stored / 1e9:,.2f} GB") for text, memory, stored in rows]
    print_table(("second moments", "memory, a text", "in the file"), cells)


def _output(path: Path | None, form: str | None) -> Path:
    """The output file; bad usage if its name says another format than --output-format."""
    from quantkit.formats.imatrix import form_of

    path = path or Path(f"imatrix.{form or 'dat'}")
    if form is not None and (form_of(path) == "gguf") != (form == "gguf"):
        raise typer.BadParameter(
            f"--output-format {form}: the name of the output decides, and {path} is {form_of(path)}; "
            f"write -o {path.with_suffix('.' + form)}"
        )
    return path


def _similarity(model: Path, texts: list[Path], options: ImatrixOptions, launch: Launch) -> list[float]:
    """The similarity of input and output of each layer, over all texts, in a run of its own."""
    from quantkit.evaluate.imatrix.run import chunks_of_texts
    from quantkit.evaluate.layer_similarity import layer_similarity
    from quantkit.evaluate.text import join

    opened = launch.open(model, numerics=options.numerics, threads=options.threads, n_ctx=options.ctx_size)
    chunks = join(chunks_of_texts(opened.tokenizer, texts, options), ", ".join(map(str, texts)))
    with ProgressBar("layer similarity") as bar:
        return layer_similarity(opened, chunks, options.batch_size, lambda done: bar.show(done, len(chunks)))


def _print_similarity(similar: list[float]) -> None:
    """Print the layers, those that change their input most first, as llama-imatrix -lsim does."""
    if not similar:
        return
    print("sorted layer importances")
    order = sorted(range(len(similar)), key=lambda layer: abs(similar[layer]))
    for number, layer in enumerate(order):
        print(f"{number:3d}: Layer {layer:3d}, <cos_sim> = {similar[layer]:g}")


def _report(found: ImatrixRun, similar: list[float], json: bool) -> None:
    from quantkit.evaluate.conditions import conditions_line
    from quantkit.evaluate.imatrix.coverage import coverage

    rows = coverage(found.matrix, FEW_TOKENS)
    if json:
        scored = {
            text: {"ppl": ppl.value, "ppl_error_over_tokens": ppl.error} for text, ppl in found.perplexities.items()
        }
        one = next(iter(scored.values())) if len(scored) == 1 else {}
        record = {"path": found.path, "tensors": len(found.matrix), "missing_experts": found.matrix.policy or None}
        few = {row.name: row.few for row in rows if row.few}
        record |= {**one, "texts": scored, "few_experts": few, "seconds": found.seconds}
        record |= {"layer_similarity": similar} if similar else {}
        print_json("quantkit.imatrix/1", record | {"conditions": found.conditions})
        return
    _print_similarity(similar)
    print(f"{found.path}: {len(found.matrix)} entries, {found.seconds:.1f} s")
    for line in few_experts_lines(rows, FEW_TOKENS):
        print(line)
    if found.matrix.policy:
        print(f"experts without tokens: {found.matrix.policy}")
    on_message(conditions_line(found.conditions))


SUBCOMMANDS = {"show": show, "merge": merge, "convert": convert}
