"""What the commands that run a model share: options, opening it, what they say of that."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quantkit.cli._shared import mib
from quantkit.errors import UnknownNameError

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

_ATTENTION = {  # options of caches and attention, and their defaults
    "cache_type": (
        Annotated[
            str | None,
            typer.Option(
                "--cache-type",
                metavar="TYPE",
                help="Of K and V: f32 f16 bf16 q8_0 q8_KV q6_0 q5_0 q5_1 q4_0 q4_1 iq4_nl; default: f16 if fast, "
                "f32 if exact.",
            ),
        ],
        None,
    ),
    "cache_type_k": (
        Annotated[str | None, typer.Option("--cache-type-k", "-ctk", metavar="TYPE", help="Of keys alone.")],
        None,
    ),
    "cache_type_v": (
        Annotated[str | None, typer.Option("--cache-type-v", "-ctv", metavar="TYPE", help="Of values alone.")],
        None,
    ),
    "k_cache_hadamard": (
        Annotated[
            bool, typer.Option("--k-cache-hadamard", "-khad", help="Rotate keys before they are rounded for the cache.")
        ],
        False,
    ),
    "v_cache_hadamard": (Annotated[bool, typer.Option("--v-cache-hadamard", "-vhad", help="Rotate values.")], False),
    "flash_attn": (
        Annotated[
            str,
            typer.Option(
                "--flash-attn", "-fa", metavar="on|off|auto|1|0", help="Streaming softmax; off: all scores at once."
            ),
        ],
        "on",
    ),
    "attention_max_batch": (
        Annotated[
            int,
            typer.Option(
                "--attention-max-batch",
                "-amb",
                metavar="MIB",
                help="With -fa off: memory of the scores; 0: any.",
                min=0,
            ),
        ],
        256,
    ),
}
_FLASH = {"on": True, "auto": True, "1": True, "off": False, "0": False}


def with_attention(command: Callable[..., None]) -> Callable[..., None]:
    """Decorator: give a command the options of caches and attention, in place of its parameter `attention`.

    What it gets there are options of `runtime.model.load`. The command has a parameter `numerics` too.
    """
    signature = inspect.signature(command, eval_str=True)  # here, where the command's own names are known
    parameters: list[inspect.Parameter] = []
    for parameter in signature.parameters.values():
        if parameter.name != "attention":
            parameters.append(parameter)
            continue
        for name, (kind, default) in _ATTENTION.items():
            parameters.append(parameter.replace(name=name, annotation=kind, default=default))

    @functools.wraps(command)
    def run(**given: Any) -> None:
        command(**{k: v for k, v in given.items() if k not in _ATTENTION}, attention=_attention(given))

    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _attention(given: dict[str, Any]) -> dict[str, Any]:
    """Options of `runtime.model.load`; UnknownNameError before any model is opened."""
    if given["flash_attn"] not in _FLASH:
        raise UnknownNameError("choice for -fa", given["flash_attn"], _FLASH)
    found: dict[str, Any] = {
        "flash_attention": _FLASH[given["flash_attn"]],
        "attention_mib": given["attention_max_batch"],
    }
    both, k, v = (given[name] for name in ("cache_type", "cache_type_k", "cache_type_v"))
    khad, vhad = given["k_cache_hadamard"], given["v_cache_hadamard"]
    if both or k or v or khad or vhad:
        from quantkit.runtime.cache import CacheType

        both = both or ("f32" if given["numerics"] == "exact" else "f16")
        found["cache_type"] = CacheType(k or both, v or both, khad, vhad)
    return found


def attention_conditions(model: Any) -> dict[str, Any]:
    """What of a figure's conditions is said of caches and attention."""
    how = model.how
    return {"cache_type": model.cache_type, "flash_attention": "on" if how.flash else f"off, -amb {how.work_mib}"}


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


def repacked(model: Any) -> dict[str, int]:
    """The number of repacked tensors among the conditions of a figure; nothing without -rtr."""
    return {} if model.repacked is None else {"repacked": len(model.repacked)}
