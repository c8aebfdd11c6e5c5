"""What the commands that run a model share: options of placement and repacking, opening it, what they say of that."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quantkit.cli._shared import mib

if TYPE_CHECKING:
    from quantkit.runtime.placement import Flags

GpuLayers = Annotated[
    int | None,
    typer.Option("--gpu-layers", "-ngl", help="Layers on the GPU, the last ones.", min=0, show_default=False),
]
OverrideTensor = Annotated[
    list[str] | None,
    typer.Option(
        "--override-tensor",
        "-ot",
        metavar="REGEX=DEVICE,…",
        help="Where tensors go; the first rule decides. Repeatable.",
    ),
]
CpuMoe = Annotated[bool, typer.Option("--cpu-moe", "-cmoe", help="All experts on the CPU.")]
NCpuMoe = Annotated[
    int, typer.Option("--n-cpu-moe", "-ncmoe", help="Experts of so many layers, the last ones, on the CPU.", min=0)
]
RunTimeRepack = Annotated[
    bool, typer.Option("--run-time-repack", "-rtr", help="Interleave rows in memory, as `repack` does in a file.")
]

FusedMoe = Annotated[
    bool,
    typer.Option("--fused-moe/--no-fused-moe", "-fmoe/-no-fmoe", help="Gate, up and activation of experts at once."),
]
ExpertReduction = Annotated[
    str | None,
    typer.Option(
        "--smart-expert-reduction",
        "-ser",
        metavar="K,t",
        help="Of the experts of a token the first K, others only above t times the first one's probability.",
    ),
]


def experts(fused_moe: bool, reduction: str | None) -> dict[str, Any]:
    """What `runtime.model.load` is told of -fmoe and -ser."""
    if reduction is None:
        return {"fused_experts": fused_moe}
    try:
        least, share = reduction.split(",")
        return {"fused_experts": fused_moe, "expert_reduction": (int(least), float(share))}
    except ValueError:
        raise typer.BadParameter(f"-ser {reduction}: write K,t, as 6,0.4") from None


def placement_flags(gpu_layers: int | None, override_tensor: list[str] | None, cpu_moe: bool, n_cpu_moe: int) -> Flags:
    """What the four options say together."""
    from quantkit.runtime.placement import ALL_LAYERS, Flags

    return Flags(gpu_layers, tuple(override_tensor or ()), ALL_LAYERS if cpu_moe else n_cpu_moe)


def open_model(path: Path, flags: Flags, repack: bool, **options: Any) -> Any:
    """`runtime.model.load` with its other options; says on stderr what was repacked, and which rules decide nothing."""
    from quantkit.runtime.model import load

    model = load(
        path,
        override_tensor=flags.override_tensor,
        gpu_layers=flags.gpu_layers,
        n_cpu_moe=flags.n_cpu_moe,
        repack=repack,
        **options,
    )
    for rule in model.placement.idle:
        print(f"warning: {rule.said} decides no tensor", file=sys.stderr)
    if model.repacked is not None:
        done = model.repacked
        print(f"repacked {len(done)} tensors, {mib(done.nbytes)}, in {done.seconds:.2f} s", file=sys.stderr)
        for (before, after), count in done.slower.items() if model.numerics == "fast" else ():
            print(
                f"warning: -rtr makes {count} tensors slower: {after} has no fast kernel here, {before} has one",
                file=sys.stderr,
            )
    return model


def repacked(model: Any) -> dict[str, Any]:
    """The number of repacked tensors, and which experts are left out, among the conditions of a figure; where any."""
    found: dict[str, Any] = {} if model.repacked is None else {"repacked": len(model.repacked)}
    if model.expert_reduction is not None:
        least, share = model.expert_reduction
        found["expert reduction"] = f"{least},{share:g}"
    return found
