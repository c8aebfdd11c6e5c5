"""Options that several commands have: their annotations and the functions that read their values."""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from quantkit.errors import OptionError


def checked_threads(count: int | None) -> int | None:
    """Check the value of -t: a warning if it exceeds the CPUs, QuantkitError if it exceeds them by far.

    -1 and 0 mean all CPUs in llama.cpp's tools, which is the default: None.
    """
    if count is None or count in (-1, 0):
        return None
    from quantkit.codegen import thread_pool

    thread_pool.check_threads(count, "-t ")
    if count > (cpus := thread_pool.available_cpus()):
        print(f"warning: -t {count}: this process may use {cpus} CPU(s); the extra threads wait", file=sys.stderr)
    return count


def unless_from_environment(read: Callable[[Any], Any] = lambda value: value) -> Callable[..., Any]:
    """The callback of an option with a variable: `read(value)`, or None for a value that comes from the variable.

    The libraries read their variables themselves, for Python's users too, and an argument counts more than a variable.
    """

    def callback(ctx: typer.Context, param: typer.CallbackParam, value: Any) -> Any:
        source = ctx.get_parameter_source(param.name or "")
        return None if source is not None and source.name == "ENVIRONMENT" else read(value)

    return callback


FastNumerics = Annotated[
    Literal["exact", "fast"],
    typer.Option("--numerics", help="exact: float32 activations; fast: quantized where that is faster."),
]
Threads = Annotated[
    int | None,
    typer.Option(
        "--threads",
        "-t",
        help="Number of threads; default, and -1: the CPUs that this process may use.",
        min=-1,
        envvar="QUANTKIT_THREADS",
        callback=unless_from_environment(checked_threads),
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
MetadataFile = Annotated[
    Path | None,
    typer.Option(
        "--metadata",
        metavar="FILE",
        help="JSON file of general.* keys that override what a checkpoint states, as of convert_hf_to_gguf.py.",
    ),
]
ModelName = Annotated[
    str | None, typer.Option(metavar="NAME", help="Value of general.name, in place of what a checkpoint states.")
]
SplitMaxSize = Annotated[
    str | None, typer.Option(metavar="SIZE", help="Write shards of at most SIZE, for example 50G or 48GiB.")
]
SplitMaxTensors = Annotated[int | None, typer.Option(metavar="N", min=1, help="Write shards of at most N tensors.")]
KeepSplit = Annotated[bool, typer.Option("--keep-split", help="Split the output into the same shards as the input.")]
Source = Annotated[
    Path,
    typer.Argument(
        metavar="IN", help="A GGUF file, any shard of a split one, or hf://ORG/NAME/FILE.gguf.", show_default=False
    ),
]
Out = Annotated[Path, typer.Argument(metavar="OUT", help="The output file.", show_default=False)]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the changes and write nothing.")]
MtpPolicy = Annotated[
    Literal["auto", "keep", "drop", "only"],
    typer.Option(
        "--mtp",
        help="MTP (multi-token prediction) layers of a checkpoint; only: these alone, with embedding and output; auto: "
        "the architecture's default.",
    ),
]
RepackPattern = Annotated[
    list[str] | None,
    typer.Option(metavar="REGEX,…", help="Interleave only tensors whose name matches one of these. Repeatable."),
]


def with_options(
    command: Callable[..., None],
    parameter: str,
    options: Mapping[str, tuple[Any, Any]],
    make: Callable[[dict[str, Any]], Any],
) -> Callable[..., None]:
    """Replace one parameter of a command by options, given as name: (annotation, default).

    An option that the command has itself is left out. `make` builds the parameter's value from the values of the
    others.
    """
    signature = inspect.signature(command, eval_str=True)  # evaluated here, in the command's own namespace
    options = {name: option for name, option in options.items() if name not in signature.parameters}
    parameters: list[inspect.Parameter] = []
    for own in signature.parameters.values():
        if own.name != parameter:
            parameters.append(own)
            continue
        for name, (kind, default) in options.items():
            parameters.append(own.replace(name=name, annotation=kind, default=default))

    @functools.wraps(command)
    def run(**given: object) -> None:
        own = {name: value for name, value in given.items() if name not in options}
        command(**own, **{parameter: make({name: given[name] for name in options})})

    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12,
          "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}  # fmt: skip

_MIN_WITHOUT_UNIT = 10**6  # 1M, the minimum of gguf-split


def parse_size(text: str, option: str) -> int:
    """Bytes of an option's "50G", "800M", "1.5GiB" or "1000000": M and G are decimal as in gguf-split, MiB and GiB
    binary.

    A small number without a unit is an error: a user who types 30 means 30G, and 30 bytes give hundreds of shards.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?(?:IB)?)B?", text.strip().upper())
    if match is None or match[2] not in _UNITS or float(match[1]) == 0:
        raise OptionError(
            f"{option} '{text}' is not a size above 0; write, for example, 50G (10^9 bytes each) or 48GiB"
        )
    size = int(float(match[1]) * _UNITS[match[2]])
    if not match[2] and size < _MIN_WITHOUT_UNIT:
        raise OptionError(
            f"{option} '{text}' without a unit is {size} bytes; write {match[1]}G, {match[1]}M or {match[1]}GiB"
        )
    return size


def split_limit(size: str | None, tensors: int | None, keep: bool) -> int | None:
    """The bytes of --split-max-size; bad usage if --keep-split contradicts it."""
    if keep and (size is not None or tensors is not None):
        raise typer.BadParameter("--keep-split and --split-max-size or --split-max-tensors contradict each other")
    return None if size is None else parse_size(size, "--split-max-size")


def comma_separated(texts: list[str] | None) -> list[str]:
    """The items of an option that is repeatable and comma-separated."""
    return [part for text in texts or [] for part in text.split(",") if part]
