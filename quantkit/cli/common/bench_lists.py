"""The options of `bench` that take a list of values: `-fa 0,1 -ctk f16,q8_0` times all four combinations.

`integers` reads lists of numbers with the ranges of llama-bench:

    16,64       both
    16-19       16, 17, 18, 19
    16-64+16    16, 32, 48, 64
    16-64*2     16, 32, 64
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, NamedTuple, get_args

import typer

from quantkit.cli.common import without_effect
from quantkit.cli.common.run_options import GPU_LAYERS, CacheTypeName, is_layer_count

PANEL = "Lists: all combinations are timed"
_MAX_RANGE = 10_000  # numbers
_SWITCH = {"1": True, "on": True, "true": True, "0": False, "off": False, "false": False}
_FLASH = {"on": "on", "1": "on", "auto": "on", "off": "off", "0": "off"}
_TYPES = {name.lower(): name for name in get_args(CacheTypeName)}


class _List(NamedTuple):
    """An option with a list of values: its flags, metavar and help; `read` gives the value of an item, or None."""

    flags: tuple[str, ...]
    metavar: str
    help: str
    read: Callable[[str], Any]


def _integer(least: int, most: int | None = None) -> Callable[[str], int | None]:
    def read(text: str) -> int | None:
        fits = text.isdecimal() and int(text) >= least and (most is None or int(text) <= most)
        return int(text) if fits else None

    return read


def integers(option: str, text: str, minimum: int) -> list[int]:
    """The integers of a comma-separated list of numbers and ranges."""
    found: list[int] = []
    for part in text.split(","):
        numbers = _range(part.strip())
        if numbers is None or not numbers or numbers[0] < minimum:
            raise typer.BadParameter(
                f"{option} {text}: write integers of at minimum {minimum}, comma-separated, for example 512,1024, or a "
                "range: 16-64+16 or 16-64*2"
            )
        found += numbers
    return found


def _range(text: str) -> list[int] | None:
    """The numbers of N, FIRST-LAST, FIRST-LAST+STEP or FIRST-LAST*FACTOR; None for another text or an endless range."""
    match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9})(?:([+*])(\d{1,9}))?)?", text)
    if match is None:
        return None
    number, last = int(match[1]), int(match[2] or match[1])
    step = int(match[4] or 1)
    is_endless = step < 1 or (match[3] == "*" and (step < 2 or number == 0))
    if is_endless or last - number > _MAX_RANGE * step:
        return None
    found = []
    while number <= last:
        found.append(number)
        number = number * step if match[3] == "*" else number + step
    return found


def _parts(text: str) -> list[str]:
    """The items of a list, with those of its ranges."""
    parts = [part.strip() for part in text.split(",")]
    return [item for part in parts for item in (list(map(str, _range(part) or ())) or [part])]


def _layers(text: str) -> str | None:
    return text if is_layer_count(text) else None


_LISTS: dict[str, _List] = {
    "gpu_layers": _List(GPU_LAYERS, "N,…", "Layers on the GPU, or all.", _layers),
    "flash_attn": _List(
        ("--flash-attn", "-fa"), "on|off,…", "Flash attention; -fa alone means on, -no-fa off.", _FLASH.get
    ),
    "cache_type_k": _List(("--cache-type-k", "-ctk"), "TYPE,…", "Types of the K cache.", _TYPES.get),
    "cache_type_v": _List(("--cache-type-v", "-ctv"), "TYPE,…", "Types of the V cache.", _TYPES.get),
    "mla": _List(("--mla-use", "-mla"), "0..3,…", "MLA: what is cached and how it attends.", _integer(0, 3)),
    "attention_max_batch": _List(
        ("--attention-max-batch", "-amb"), "MIB,…", "Memory for scores, and for expanded keys and values.", _integer(0)
    ),
    "fused_moe": _List(("--fused-moe", "-fmoe"), "1|0,…", "Fused operations of experts.", _SWITCH.get),
    "run_time_repack": _List(("--run-time-repack", "-rtr"), "1|0,…", "Interleave rows in memory.", _SWITCH.get),
    "mmap": _List(("--mmap", "-mmp"), "1|0,…", "Map the file, or read it into memory.", _SWITCH.get),
    "huge_pages": _List(
        ("--transparent-huge-pages", "-thp"), "1|0,…", "Read the file into huge pages.", _SWITCH.get
    ),
}  # fmt: skip


def _option(about: _List) -> Any:
    return Annotated[
        str | None,
        typer.Option(
            *about.flags, metavar=about.metavar, help=about.help, show_default=False, rich_help_panel=PANEL
        ),
    ]  # fmt: skip


def _without_effect(*flags: str) -> Any:
    return Annotated[
        str | None,
        typer.Option(
            *flags,
            metavar="N,…",
            help=without_effect.TOKENS_AT_A_TIME,
            show_default=False,
            rich_help_panel=without_effect.PANEL,
        ),
    ]


OPTIONS: dict[str, tuple[Any, Any]] = {
    **{name: (_option(about), None) for name, about in _LISTS.items()},
    "no_fused_moe": (
        Annotated[bool, typer.Option("--no-fused-moe", "-no-fmoe", help="Same as -fmoe 0.", rich_help_panel=PANEL)],
        False,
    ),
    "no_mmap": (Annotated[bool, typer.Option("--no-mmap", help="Same as -mmp 0.", rich_help_panel=PANEL)], False),
    "batch_size": (_without_effect("--batch-size", "-b"), None),
    "ubatch_size": (_without_effect("--ubatch-size", "-ub"), None),
}
_DEFAULTS = {"gpu_layers": None, "flash_attn": "on", "cache_type_k": None, "cache_type_v": None, "mla": 3,
             "attention_max_batch": 256, "fused_moe": True, "run_time_repack": False, "mmap": True,
             "huge_pages": False}  # fmt: skip


def combinations(given: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The values of all options, with one value of each list at a time."""
    values = {name: _values(about, given[name], _DEFAULTS[name]) for name, about in _LISTS.items()}
    if given["no_fused_moe"]:
        values["fused_moe"] = [False]
    if given["no_mmap"]:
        values["mmap"] = [False]
    for chosen in itertools.product(*values.values()):
        yield {**given, **dict(zip(values, chosen))}


def _values(about: _List, text: str | None, default: Any) -> list[Any]:
    """The values of a list; bad usage for an item that is not valid."""
    if text is None:
        return [default]
    parts = _parts(text)
    found = [about.read(part.lower()) for part in parts]
    if None in found:
        raise typer.BadParameter(
            f"{about.flags[-1]} {text}: '{parts[found.index(None)]}' is not valid; write {about.metavar}"
        )
    return list(dict.fromkeys(found))
