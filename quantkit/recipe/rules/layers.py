r"""Numbers of layers in patterns: the shorthand `blk.{3-18,40}.ffn`, and regular expressions that match such numbers.

    expand("blk.{3-18,40}.ffn")   r"blk\.(?:[3-9]|1[0-8]|40)\.ffn"
    regex_of({3, 4, 10})          "[34]|10"

Braces behind `blk.` or `blk\.` are always layers: a quantifier of that dot would match nothing that any file holds.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

from quantkit.recipe.errors import RecipeError

SHORTHAND = re.compile(r"blk\\?\.\{([^{}]*)\}")


def expand(pattern: str) -> str:
    """The pattern as a plain regular expression."""
    out, at = [], 0
    for found in SHORTHAND.finditer(pattern):
        out.append(f"{pattern[at : found.start()]}blk\\.(?:{regex_of(numbers(found[1], pattern))})")
        at = found.end()
        if pattern[at : at + 1] == "." and pattern[at + 1 : at + 2] not in ("*", "+", "?", "{"):
            out.append("\\")  # this dot can only mean the one behind the number
        elif pattern[at : at + 2] != "\\.":
            out.append(r"(?=\.)")
    return "".join([*out, pattern[at:]])


def named(pattern: str) -> set[int]:
    """The layers in the shorthand of a pattern; empty if it has no shorthand."""
    return {n for found in SHORTHAND.finditer(pattern) for n in numbers(found[1], pattern)}


def numbers(text: str, pattern: str = "") -> set[int]:
    """3, 4, 5 and 40 of "3-5,40". RecipeError for anything else."""
    layers: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", part.strip())
        last = int(match[2] or match[1]) if match else -1
        if match is None or last < int(match[1]):
            place = f"pattern '{pattern}': " if pattern else ""
            raise RecipeError(f"{place}'{{{text}}}' behind blk. is no list of layers such as {{3-18,40}}")
        layers.update(range(int(match[1]), last + 1))
    return layers


def regex_of(layers: Iterable[int]) -> str:
    """Alternatives that match exactly the decimal numbers given: [3-9]|1[0-8]|40."""
    units: dict[str, list[int]] = defaultdict(list)  # by what stands before the last digit
    for n in sorted(set(layers)):
        units[str(n)[:-1]].append(n % 10)
    alone = units.pop("", None)
    tens: dict[tuple[str, str], list[int]] = defaultdict(list)  # by what stands before the last two, and the last
    for before, last in units.items():
        tens[before[:-1], _digits(last)].append(int(before[-1]))
    parts = [_digits(alone)] if alone else []
    return "|".join([*parts, *(f"{before}{_digits(middle)}{last}" for (before, last), middle in tens.items())])


def _digits(found: list[int]) -> str:
    """One digit or a class of them: 4, [3459], [3-9]; never [3-59], which reads like a range of numbers."""
    if len(found) == 1:
        return str(found[0])
    in_a_row = len(found) > 2 and found[-1] - found[0] == len(found) - 1
    return f"[{found[0]}-{found[-1]}]" if in_a_row else f"[{''.join(map(str, found))}]"


def summarised(names: Iterable[str]) -> dict[str, int]:
    """How many names there are, with those that differ only in their layer as one: blk.{0-31}.attn_q.weight, 32."""
    found: dict[str, list[int]] = defaultdict(list)
    for name in names:
        layer = re.match(r"blk\.(\d+)\.(.*)", name)
        found[f"blk.#.{layer[2]}" if layer else name].append(int(layer[1]) if layer else -1)
    return {name.replace("#", f"{{{ranges(layers)}}}"): len(layers) for name, layers in found.items()}


def listed(names: Iterable[str], most: int = 3) -> str:
    """A few of these names, those that differ only in their layer as one."""
    every = sorted(names, key=lambda name: [(int(p), "") if p.isdecimal() else (-1, p) for p in name.split(".")])
    classes = [name.replace("{" + one + "}", one) if (one := _only(name)) else name for name in summarised(every)]
    more = len(classes) - most
    return ", ".join(classes if more <= 0 else [*classes[:most], f"{more} more kinds"])


def _only(name: str) -> str:
    """The layer of a summary that names a single one."""
    found = re.match(r"blk\.\{(\d+)\}", name)
    return found[1] if found else ""


def ranges(layers: Iterable[int]) -> str:
    """The shorthand's way to say it: 3-18,40."""
    runs: list[list[int]] = []
    for n in sorted(set(layers)):
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
