"""What the commands share: options spelled once, sizes, tables, JSON."""

from __future__ import annotations

import functools
import inspect
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from quantkit.cli._terminal import CONTROLS, message
from quantkit.errors import QuantkitError, printable


def checked_threads(count: int | None) -> int | None:
    """A number of threads as typed; QuantkitError for one far beyond the CPUs, a warning for one beyond them."""
    if count is None:
        return None
    from quantkit.codegen import jit

    jit.check_threads(count, "-t ")
    if count > (cpus := jit.available_cpus()):
        print(f"warning: -t {count}: this process may use {cpus} CPU(s); threads beyond wait for them", file=sys.stderr)
    return count


Threads = Annotated[
    int | None,
    typer.Option(
        "--threads", "-t", help="Threads; default: the CPUs this process may use.", min=1, callback=checked_threads
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
SplitMaxSize = Annotated[
    str | None, typer.Option(metavar="SIZE", help="Write shards of at most SIZE, as 50G or 48GiB.")
]
SplitMaxTensors = Annotated[int | None, typer.Option(metavar="N", min=1, help="Write shards of at most N tensors.")]
KeepSplit = Annotated[bool, typer.Option("--keep-split", help="Write the shards that the input has.")]
Source = Annotated[Path, typer.Argument(metavar="IN", help="A GGUF file, or any shard of a set.", show_default=False)]
Out = Annotated[Path, typer.Argument(metavar="OUT", help="The file to write.", show_default=False)]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would change and write nothing.")]
RepackPattern = Annotated[
    list[str] | None,
    typer.Option(metavar="RE,…", help="Only tensors in whose name one of these regexes is found. Repeatable."),
]


def with_options(
    command: Callable[..., None],
    parameter: str,
    options: Mapping[str, tuple[Any, Any]],
    make: Callable[[dict[str, Any]], Any],
) -> Callable[..., None]:
    """The command with these options, (annotation, default) by name, in place of a parameter.

    The parameter is what `make` makes of their values.
    """
    signature = inspect.signature(command, eval_str=True)  # here, where the command's own names are known
    parameters: list[inspect.Parameter] = []
    for own in signature.parameters.values():
        if own.name != parameter:
            parameters.append(own)
            continue
        for name, (kind, default) in options.items():
            parameters.append(own.replace(name=name, annotation=kind, default=default))

    @functools.wraps(command)
    def run(**given: Any) -> None:
        own = {name: value for name, value in given.items() if name not in options}
        command(**own, **{parameter: make({name: given[name] for name in options})})

    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12,
          "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}  # fmt: skip

_LEAST_WITHOUT_UNIT = 10**6  # 1M, gguf-split's least


def parse_size(text: str) -> int:
    """Bytes of "50G", "800M", "1.5GiB" or "1000000": M and G are decimal as in gguf-split, MiB and GiB binary.

    A small number without a unit is refused: 30 was meant as 30G, and gave hundreds of shards.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?(?:IB)?)B?", text.strip().upper())
    if match is None or match[2] not in _UNITS or float(match[1]) == 0:
        raise QuantkitError(f"'{text}' is not a size; write for example 50G (10^9 bytes each) or 48GiB")
    size = int(float(match[1]) * _UNITS[match[2]])
    if not match[2] and size < _LEAST_WITHOUT_UNIT:
        raise QuantkitError(f"'{text}' without a unit is {size} bytes; write {match[1]}G, {match[1]}M or {match[1]}GiB")
    return size


def split_limit(size: str | None, tensors: int | None, keep: bool) -> int | None:
    """The bytes of --split-max-size; bad usage when --keep-split says something else."""
    if keep and (size is not None or tensors is not None):
        raise typer.BadParameter("--keep-split and --split-max-size or --split-max-tensors contradict each other")
    return None if size is None else parse_size(size)


def print_left_out(left_out: Mapping[str, Sequence[str]], warnings: Sequence[str] = ()) -> None:
    """Tensors of a checkpoint that a GGUF does not get, by what they are, and what else was not understood."""
    for warning in warnings:
        print(f"warning: {message(warning)}", file=sys.stderr)
    for what, names in left_out.items():
        print(f"left out: {what}: {len(names)} tensors, {printable(names[0])}{' …' if names[1:] else ''}")


def comma_separated(texts: list[str] | None) -> list[str]:
    """The parts of an option that may be repeated and may hold several at once."""
    return [part for text in texts or [] for part in text.split(",") if part]


def gib(size: float) -> str:
    """Bytes as people publish them: "226.003 GiB"."""
    return f"{size / 2**30:.3f} GiB"


def mib(size: float) -> str:
    return f"{size / 2**20:.2f} MiB"


def json_text(value: Any, indent: int | None = None) -> str:
    """JSON; paths become strings, NaN and infinities, which it has not, null."""
    try:
        return json.dumps(value, ensure_ascii=False, default=_plain, allow_nan=False, indent=indent)
    except ValueError:
        known = json.loads(json.dumps(value, default=_plain), parse_constant=lambda _: None)
        return json.dumps(known, ensure_ascii=False, indent=indent)


def print_json(value: Any) -> None:
    """One JSON document on stdout; bytes of a file that are no UTF-8 become lone surrogates.

    Control characters that JSON allows as they are, DEL and C1 among them, are escaped too.
    """
    text = json_text(value)
    print(re.sub(f"[\ud800-\udfff{CONTROLS}]", lambda found: f"\\u{ord(found[0]):04x}", text))


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "tolist"):  # numpy scalars and arrays
        return value.tolist()
    raise TypeError(f"{type(value).__name__} has no JSON form")


def table(header: Sequence[str], rows: Sequence[Sequence[Any]], left: int = 1) -> str:
    """Columns of text: the first `left` flush left, the others flush right."""
    cells = [[printable(str(cell)) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        return "  ".join(f"{c:<{w}}" if i < left else f"{c:>{w}}" for i, (c, w) in enumerate(zip(row, widths))).rstrip()

    return "\n".join([line(cells[0]), line(["-" * w for w in widths]), *map(line, cells[1:])])
