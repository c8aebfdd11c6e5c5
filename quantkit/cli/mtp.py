"""`quantkit mtp`: measure the drafts of MTP layers, take the layers of a file apart, join them again."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quantkit.cli.common.command import takes_model
from quantkit.cli.common.evaluation import Batch, ChunkLimit, Context, Numerics, TextFile, on_message, required_text
from quantkit.cli.common.hub import from_hub
from quantkit.cli.common.launch import Launch, context_size, runs_a_model
from quantkit.cli.common.options import (
    DryRun,
    Json,
    Source,
    SplitMaxSize,
    SplitMaxTensors,
    Threads,
    split_limit,
)
from quantkit.cli.common.output import gib, print_json, print_table
from quantkit.cli.common.progress_options import shows_progress
from quantkit.errors import OptionError
from quantkit.progress import ProgressBar

if TYPE_CHECKING:
    from quantkit.evaluate.divergence import Estimate
    from quantkit.evaluate.mtp import Drafting, Drafts
    from quantkit.pipelines.rewrite import Rewrite
    from quantkit.runtime.model import Model

Head = Annotated[
    Path | None,
    typer.Option("--head", metavar="FILE", help="Draft with the MTP layers of this file.", show_default=False),
]
Base = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Also measure the KL divergence from the head of this file; MODEL itself: with its own trunk.",
        show_default=False,
    ),
]
BaseHead = Annotated[
    Path | None,
    typer.Option("--base-head", metavar="FILE", help="The MTP layers of --base, if not its own.", show_default=False),
]
Greedy = Annotated[
    bool, typer.Option("--greedy", help="The trunk writes the second half of each chunk: figures of greedy decoding.")
]


@shows_progress
@takes_model()
@from_hub("model")
@runs_a_model
def mtp(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL",
            help="A GGUF file, any shard of a split one, or hf://ORG/NAME/FILE.gguf.",
            show_default=False,
        ),
    ],
    file: TextFile = None,
    head: Head = None,
    draft_max: Annotated[
        int, typer.Option("--draft-max", "--draft", "-n", metavar="N", help="Tokens of a draft.", min=1)
    ] = 3,
    base: Base = None,
    base_head: BaseHead = None,
    greedy: Greedy = False,
    ctx_size: Context = 512,
    chunks: ChunkLimit = None,
    batch_size: Batch = 2048,
    numerics: Numerics = "exact",
    threads: Threads = None,
    launch: Launch = None,  # type: ignore[assignment]  # the decorator gives it
    json: Json = False,
) -> None:
    """Measure how many tokens that MTP (multi-token prediction) layers draft are accepted.

    N tokens are drafted at each position of the second half of each chunk. The table has a row for each drafted token:
    the share whose most likely token is that of the main model (the trunk), the share where this and all drafted tokens
    before agree, the mean length that greedy decoding accepts of a draft of this length, and the probability that
    sampling at temperature 1 accepts the token. With --base, it has the KL divergence from the MTP layers of another
    file. `quantkit mtp split` takes the layers out of a file or writes them alone; `quantkit mtp join` puts them into a
    file.
    """
    from quantkit.evaluate import mtp as drafts
    from quantkit.evaluate.conditions import conditions_line, evaluation_conditions
    from quantkit.evaluate.text import chunked

    text, ctx_size = required_text(file, "mtp"), context_size(ctx_size, model)
    if base_head is not None and base is None:
        raise OptionError("--base-head names the MTP layers of --base: add --base FILE")

    def opened(path: Path) -> Model:
        return launch.open(path, numerics=numerics, threads=threads, n_ctx=ctx_size)

    own = _drafting(opened(model), head)
    other = None
    if base is not None:
        same = base.exists() and model.exists() and base.samefile(model)
        other = _drafting(own.model if same else opened(base), base_head)
    cut = chunked(own.model.tokenizer, text, ctx_size, chunks)
    conditions = evaluation_conditions(own.model, ctx_size, len(cut), str(text))
    on_message(f"drafts of {draft_max} tokens over {len(cut)} chunks of {ctx_size} tokens of {text}")
    with ProgressBar("mtp") as bar:
        found = drafts.measure(
            own, cut, steps=draft_max, base=other, greedy=greedy, n_batch=batch_size,
            on_chunk=lambda so_far, done: bar.show(
                done, len(cut), values=f"accepts {so_far.length(draft_max).value:.3f}"
            ),
        )  # fmt: skip
    if json:
        record = {"model": model, "head": own.head.path, "layers": [x.block.layer for x in own.head.layers]}
        record |= {"base": base, "base_head": other and other.head.path} | found.record()
        print_json("quantkit.mtp/1", record | {"seconds": found.seconds, "conditions": conditions})
        return
    _print(found)
    on_message(conditions_line(conditions))


def _drafting(model: Model, head: Path | None) -> Drafting:
    from quantkit.evaluate.mtp import Drafting
    from quantkit.formats import gguf
    from quantkit.runtime.mtp import MtpHead

    return Drafting(model, MtpHead(model, None if head is None else gguf.open(head)))


def _print(found: Drafts) -> None:
    names = ["draft", "agrees", "accepted so far", "mean length", "accepted at T=1"]
    if found.kld is not None:
        names += ["KLD", "same first choice"]
    rows = []
    for step in range(found.steps):
        of = found.of_step(step)
        row = [str(step + 1), _percent(of["agrees"]), _percent(of["accepted"]),
               f"{of['length'].value:.4f} ± {of['length'].error:.4f}", _percent(of["overlap"])]  # fmt: skip
        if found.kld is not None:
            row += [f"{of['kld'].value:.6f} ± {of['kld'].error:.6f}", _percent(of["same_top"])]
        rows.append(row)
    print_table(names, rows)
    last = found.length(found.steps).value
    about = "" if found.greedy else "; on a text that the trunk did not write, see --greedy"
    print(f"{len(found.agrees)} positions; {1 + last:.3f} tokens for each pass of the trunk{about}")


def _percent(x: Estimate) -> str:
    return f"{100 * x.value:.3f} ± {100 * x.error:.3f} %"


# ------------------------------------------------------------------------------------------------------ apart, together


@shows_progress
@from_hub("source")
def split(
    source: Source,
    trunk: Annotated[
        Path | None, typer.Option(metavar="OUT", help="The file without MTP layers.", show_default=False)
    ] = None,
    head: Annotated[
        Path | None,
        typer.Option(metavar="OUT", help="The MTP layers alone, with embedding and output.", show_default=False),
    ] = None,
    split_max_size: SplitMaxSize = None,
    split_max_tensors: SplitMaxTensors = None,
    dry_run: DryRun = False,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Write a file without its MTP layers, or these alone, or both; bytes are copied.

    The file of the layers alone is the draft model that llama.cpp loads with -md.
    """
    from quantkit.formats import gguf
    from quantkit.pipelines.mtp import plan_head, plan_trunk

    if trunk is None and head is None:
        raise OptionError("mtp split needs --trunk OUT, --head OUT or both")
    if trunk is not None and head is not None and trunk.resolve() == head.resolve():
        raise OptionError(f"--trunk and --head are the same file, {head}; give each a name of its own")
    file = gguf.require_model(gguf.open(source))
    jobs = [(plan(file), out) for plan, out in ((plan_trunk, trunk), (plan_head, head)) if out is not None]
    limits = _limits(split_max_size, split_max_tensors)
    _write(jobs, source, dry_run, threads, json, limits)


@shows_progress
def join(
    trunk: Annotated[Path, typer.Argument(metavar="TRUNK", help="A file without MTP layers.", show_default=False)],
    head: Annotated[
        Path,
        typer.Argument(metavar="HEAD", help="MTP layers alone, or a model that has them.", show_default=False),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Output file.", show_default=False)],
    split_max_size: SplitMaxSize = None,
    split_max_tensors: SplitMaxTensors = None,
    dry_run: DryRun = False,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Join MTP layers to a model; bytes are copied. Everything but the layers is the trunk's."""
    from quantkit.formats import gguf
    from quantkit.pipelines.mtp import plan_join

    limits = _limits(split_max_size, split_max_tensors)
    job = plan_join(gguf.require_model(gguf.open(trunk)), gguf.require_model(gguf.open(head)))
    _write([(job, out)], trunk, dry_run, threads, json, limits)


def _limits(split_max_size: str | None, split_max_tensors: int | None) -> dict[str, Any]:
    """The bounds of shards, as `Rewrite.write` takes them."""
    return {
        "split_max_bytes": split_limit(split_max_size, split_max_tensors, False),
        "split_max_tensors": split_max_tensors,
    }


def _write(
    jobs: Sequence[tuple[Rewrite, Path]],
    source: Path,
    dry_run: bool,
    threads: int | None,
    json: bool,
    limits: dict[str, Any],
) -> None:
    started, rows, paths = time.perf_counter(), [], list[Path]()
    for job, out in jobs:
        if not dry_run:
            paths += job.write(out, threads=threads, progress=True, **limits)
        rows.append((out, len(job.tensors), job.nbytes))
    seconds = time.perf_counter() - started
    if json:
        files = [dict(zip(("path", "tensors", "bytes"), row)) for row in rows]
        print_json("quantkit.mtp-files/1", {"source": source, "files": files, "paths": paths, "seconds": seconds})
        return
    for out, tensors, nbytes in rows:
        print(f"{out}: {tensors} tensors, {gib(nbytes)}")
    for path in paths:
        print(f"wrote {path} in {seconds:.1f} s")


SUBCOMMANDS = {"split": split, "join": join}
