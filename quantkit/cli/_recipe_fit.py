"""`quantkit recipe fit`: the recipe with the lowest predicted KL divergence that fits a size or a machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from quantkit.cli.common.cluster import Cluster, check_cluster, connected
from quantkit.cli.common.command import in_sections
from quantkit.cli.common.evaluation import on_message
from quantkit.cli.common.launch import placement_flags
from quantkit.cli.common.options import Json, Threads, comma_separated, parse_size, with_options
from quantkit.cli.common.output import gib, mib, print_json, print_table
from quantkit.cli.common.plan_options import (
    AllowRequantize,
    Bandwidth,
    CacheTypeK,
    CacheTypeV,
    Context,
    Dialect,
    FitMargin,
    ImatrixFile,
    Mla,
    NoSecondMoments,
    Ram,
    Runtime,
    Vram,
    read_vram,
)
from quantkit.cli.common.plan_tables import print_budget
from quantkit.cli.common.progress_options import shows_progress
from quantkit.cli.common.run_options import PLACEMENT
from quantkit.cli.common.terminal import message
from quantkit.progress import ProgressBar

if TYPE_CHECKING:
    from quantkit.evaluate.allocation_check import AllocationCheck
    from quantkit.pipelines.allocate import CurvePoint, RecipeFit
    from quantkit.placement.allocation.costs import Costs

_SCHEMA = "quantkit.recipe-fit/1"


@shows_progress
@in_sections(
    Limits=["size", "bpw", "vram", "ram", "fit_margin", "min_tg", "bandwidth"],
    Types_of_tensors=["types", "minimum", "maximum", "same", "layer_group", "max_types", "dialect", "runtime"],
    KV_cache=["ctx_size", "cache_type_k", "cache_type_v", "mla"],
    Proof=["verify", "verify_ctx", "verify_chunks", "verify_folder", "refine", "refined_costs", "force"],
)
def _fit(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL", help="A GGUF file, a checkpoint directory or its config.json.", show_default=False
        ),
    ],
    costs: Annotated[
        Path, typer.Option("--costs", metavar="FILE", help="Costs file of quantkit sensitivity.", show_default=False)
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the recipe; default: only print it.")
    ] = None,
    size: Annotated[str | None, typer.Option("--size", metavar="SIZE", help="Size of the file, as 100G or 93GiB.")] = (
        None
    ),
    bpw: Annotated[float | None, typer.Option("--bpw", metavar="X", help="Bits per weight of all tensors.")] = None,
    vram: Vram = None,
    ram: Ram = None,
    fit_margin: FitMargin = 1024,
    min_tg: Annotated[
        float | None,
        typer.Option("--min-tg", metavar="TOK/S", help="Predicted speed of generation to reach (see --bandwidth)."),
    ] = None,
    bandwidth: Bandwidth = None,
    types: Annotated[
        list[str] | None,
        typer.Option("--types", metavar="TYPE,…", help="Types to choose from; default: all with costs. Repeatable."),
    ] = None,
    minimum: Annotated[
        list[str] | None,
        typer.Option("--min", metavar="REGEX=TYPE", help="At least the bits of TYPE for these tensors. Repeatable."),
    ] = None,
    maximum: Annotated[
        list[str] | None,
        typer.Option("--max", metavar="REGEX=TYPE", help="At most the bits of TYPE for these tensors. Repeatable."),
    ] = None,
    same: Annotated[
        Literal["gate-up", "experts", "none"],
        typer.Option("--same", help="Tensors of a layer that get one type: gate and up, or also its experts' down."),
    ] = "gate-up",
    layer_group: Annotated[
        int, typer.Option("--layer-group", metavar="N", help="Give N neighbouring layers the same types.", min=1)
    ] = 1,
    max_types: Annotated[
        int | None, typer.Option("--max-types", metavar="N", help="Use at most N different types.", min=1)
    ] = None,
    dialect: Dialect = None,
    runtime: Runtime = "ik_llama.cpp",
    ctx_size: Context = None,
    cache_type_k: CacheTypeK = "f16",
    cache_type_v: CacheTypeV = "f16",
    mla: Mla = 3,
    placement: Any = None,
    imatrix: ImatrixFile = None,
    no_second_moments: NoSecondMoments = False,
    allow_requantize: AllowRequantize = False,
    effort: Annotated[
        Literal["fast", "normal", "best"], typer.Option(help="Effort of quantize; --verify encodes with it.")
    ] = "normal",
    seconds: Annotated[
        float, typer.Option("--seconds", metavar="X", help="Time limit of the solver for one solution.")
    ] = 60.0,
    curve: Annotated[
        Path | None,
        typer.Option("--curve", metavar="FILE", help="Plot predicted KLD over sizes to FILE.png, .svg or .pdf."),
    ] = None,
    verify: Annotated[
        Path | None,
        typer.Option("--verify", metavar="TEXT", help="Quantize, and compare with files of the same size on a text."),
    ] = None,
    verify_ctx: Annotated[int, typer.Option(metavar="N", help="Tokens per chunk of --verify.", min=4)] = 512,
    verify_chunks: Annotated[int | None, typer.Option(metavar="N", help="At most N chunks of --verify.", min=1)] = None,
    verify_folder: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Folder for the files that --verify writes and removes; with --cluster shared."
        ),
    ] = None,
    refine: Annotated[
        int | None,
        typer.Option(
            "--refine",
            metavar="N",
            help="Refine costs by what --verify measures and fit again, N times; default: 1.",
            min=0,
        ),
    ] = None,
    refined_costs: Annotated[
        Path | None, typer.Option("--refined-costs", metavar="FILE", help="Write the costs as --verify refines them.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Write the recipe even if --verify does not find it better.")
    ] = False,
    threads: Threads = None,
    cluster: Cluster = None,
    json: Json = False,
) -> None:
    """Choose the type of every tensor: the lowest predicted KL divergence that fits.

    The costs are measured by `quantkit sensitivity`. With --vram and without placement flags, experts (in dense models:
    feed-forwards) go to GPUs as far as they fit, and the flags for that are printed. The result is proven to be within
    the printed gap of the best choice. It is a recipe for `quantize --recipe`; the document of --json is a plan for
    `quantize --plan`. With --verify it is quantized and compared, on a text, with the largest stock file type and the
    best single type of at most the same size, and is not written unless it has less divergence with 95 % confidence.
    Costs of types are then refined by what was measured, a recipe is fitted to them, and the better of both is taken.
    """
    from quantkit.errors import OptionError, QuantkitError
    from quantkit.formats.atomic import check_outputs, writing
    from quantkit.pipelines import planning
    from quantkit.pipelines.allocate import FitOptions, cost_curve, fit_recipe, single_types
    from quantkit.pipelines.options import TypeOptions
    from quantkit.placement.allocation import costs as costs_file

    if verify is None and (refine is not None or refined_costs):
        raise OptionError("--refine and --refined-costs take what --verify measures; give it a text")
    if verify is None and cluster is not None:
        raise OptionError("--cluster runs what --verify measures; give it a text")
    check_cluster(cluster)
    if verify is not None and not verify.is_file():  # which would be found only after files are quantized
        raise OptionError(f"--verify {verify}: no such file; give it a text")
    if curve is not None:
        from quantkit.evaluate.report.plots import require_plot_file

        require_plot_file(curve)
    options = FitOptions(
        size=parse_size(size, "--size") if size else None, bpw=bpw, vram=read_vram(vram), ram=ram, min_tg=min_tg,
        fit_margin=fit_margin, types=tuple(comma_separated(types)), min=tuple(minimum or ()), max=tuple(maximum or ()),
        same=same, layer_group=layer_group, max_types=max_types, dialect=dialect, effort=effort,
        placement=placement, bandwidth=bandwidth, runtime=runtime, ctx_size=ctx_size, cache_type_k=cache_type_k,
        cache_type_v=cache_type_v, mla=mla,
        allow_requantize=allow_requantize, seconds=seconds,
    )  # fmt: skip
    measured, about = costs_file.read(costs), planning.open_model(model, weights=_has_weights(model))
    of_model = [
        model / "config.json" if model.is_dir() else model,
        *(about.file.paths if about.file is not None else ()),
    ]
    inputs = [costs, *of_model, *(path for path in (imatrix, verify) if path is not None)]
    check_outputs([output, refined_costs, curve], inputs)
    matrix = planning.read_imatrix(TypeOptions(imatrix=imatrix, no_second_moments=no_second_moments))
    found = fit_recipe(about, measured, options, matrix, str(imatrix or ""))
    points: list[CurvePoint] = []
    if curve is not None:
        points, single = cost_curve(about, measured, options), single_types(about, measured, options)
        _plot(curve, points, single, model)
        points += single
    check = None
    if verify is not None:
        check = _check(
            model, found, measured, verify,
            _Verify(imatrix, no_second_moments, allow_requantize, dialect, effort, threads, verify_ctx, verify_chunks,
                    verify_folder, 1 if refine is None else refine, cluster),
            lambda costs: fit_recipe(about, costs, options, matrix, str(imatrix or "")),
        )  # fmt: skip
        found = check.found
        if refined_costs is not None:
            check.costs.write(refined_costs)
            on_message(f"refined costs: {refined_costs}")
    if json:
        document = found.to_json()
        document["fit"] |= {"curve": [point.to_json() for point in points], "verify": check and check.to_json()}
        print_json(_SCHEMA, document)
    else:
        _print(found, points, check)
    if check is not None and not check.holds and not force:
        worse = ", ".join(verdict.rival for verdict in check.verdicts if not verdict.better)
        raise QuantkitError(
            f"the recipe has no less divergence than {worse} with 95 % confidence, so it is not written; verify on a "
            "longer text, measure costs with more --chunks, or pass --force"
        )
    if output is not None:
        with writing(output) as stream:
            stream.write(str(found.recipe).encode())
        on_message(f"recipe: {output}")


def _has_weights(model: Path) -> bool:
    """Whether a model is a directory with weights: the header of the file that it becomes is then known."""
    return model.is_dir() and any(any(model.glob(f"*.{ending}")) for ending in ("safetensors", "bin"))


fit = with_options(_fit, "placement", PLACEMENT, placement_flags)


@dataclasses.dataclass(frozen=True)
class _Verify:
    """The options of --verify."""

    imatrix: Path | None
    no_second_moments: bool
    allow_requantize: bool
    dialect: str | None
    effort: str
    threads: int | None
    ctx_size: int
    chunks: int | None
    folder: Path | None
    refine: int
    cluster: str | None


def _check(
    model: Path, found: RecipeFit, costs: Costs, text: Path, o: _Verify, refit: Callable[[Costs], RecipeFit]
) -> AllocationCheck:
    from quantkit.evaluate.allocation_check import check_allocation
    from quantkit.evaluate.compare import CompareOptions
    from quantkit.pipelines.options import QuantizeOptions

    quantizing = QuantizeOptions(
        imatrix=o.imatrix, no_second_moments=o.no_second_moments, allow_requantize=o.allow_requantize,
        dialect=o.dialect, effort=o.effort, threads=o.threads,
    )  # fmt: skip
    comparing = CompareOptions(ctx_size=o.ctx_size, chunks=o.chunks, noise_floor="off", threads=o.threads)
    with connected(o.cluster, on_message) as client, ProgressBar("verify") as bar:

        def show(state: Any) -> None:
            done = state.run * state.chunk.chunks + state.chunk.done
            bar.show(done, state.runs * state.chunk.chunks, label=state.model)

        return check_allocation(
            model, found, costs, text, quantizing, comparing, refit=refit, refine=o.refine, folder=o.folder,
            progress=True, on_chunk=show, on_message=on_message, client=client,
        )  # fmt: skip


def _plot(path: Path, points: list[CurvePoint], single: list[CurvePoint], model: Path) -> None:
    from quantkit.evaluate.report.plots import plot_costs

    plot_costs(path, points, {"one type": single}, f"Predicted KL divergence of {model.name} over sizes")
    on_message(f"plot: {path}")


def _print(found: RecipeFit, points: list[CurvePoint], check: AllocationCheck | None) -> None:
    from quantkit.placement.allocation.recipe import classes

    rows = [(c.name, c.described(), c.tensors, mib(c.nbytes), f"{c.cost:.5f}") for c in classes(found.tensors)]
    print_table(("tensors", "types and layers", "count", "size", "predicted KLD"), rows, left=2, end="\n\n")
    if points:
        curve = [(p.label or "allocated", f"{p.bits_per_weight:.3f}", gib(p.nbytes), f"{p.cost:.5f}") for p in points]
        print_table(("types", "bpw", "tensors", "predicted KLD"), curve, end="\n\n")
    if found.budget is not None:
        print_budget(found.budget)
    if check is not None:
        _print_check(check)
    for note in found.notes:
        print(f"note: {message(note)}")
    if found.flags:
        print(f"placement: {found.flags}")
    file = gib(found.size) if found.is_exact else f"{gib(found.size)} and the tokenizer, which config.json lacks"
    print(
        f"predicted KLD {found.cost:.5f} ± {found.error:.5f}; the best choice has at most {100 * found.gap:.3f} % less"
    )
    print(f"{found.plan.bits_per_weight:.3f} bits per weight, file {file}; TYPE for quantize: {found.file_type}")


def _print_check(check: AllocationCheck) -> None:
    from quantkit.evaluate.report.tables import table_header, table_rows

    print_table(table_header(check.comparison), table_rows(check.comparison), end="\n\n")
    for verdict in check.verdicts:
        d = verdict.separation.difference
        word = "less" if verdict.better else "not less, with 95 % confidence,"
        value, low, high = (0.0 - number for number in (d.value, d.high, d.low))  # 0.0 - 0.0 is not -0.0
        print(f"{word} divergence than {verdict.rival}: {value:+.5f} ({low:+.5f} to {high:+.5f})")
    for i, m in enumerate(check.rounds):
        what = f"recipe refined {i} times" if i else "recipe"
        print(f"{what}: measured KLD {m.kld:.5f}, predicted {m.predicted:.5f}, {m.bits_per_weight:.3f} bits per weight")
    if check.costs.factors:
        factors = ", ".join(f"{name} {factor:.2f}" for name, factor in check.costs.factors.items())
        print(f"measured costs of types are these times the predicted: {factors}")
