r"""The forms that recipes are passed around in, each read back by `parse`.

    file            quantkit's own: story, settings, shorthand, a rule a line
    custom-q        one line for --custom-q, rules parted by commas
    tensor-types    a rule a line, nothing else: llama.cpp's --tensor-type-file
    thireus         a `.recipe` of anchored rules ^name$=type with `##` comments

`pinned` names every tensor of a plan or a file: the types that it has, without asking why.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

from quantkit.recipe.grammar import Recipe, Rule
from quantkit.recipe.layers import regex_of
from quantkit.recipe.planned import Plan
from quantkit.types import QuantType

FORMS = ("file", "custom-q", "tensor-types", "thireus")


def printed(recipe: Recipe, form: str) -> str:
    """A recipe in one of FORMS but "thireus", which takes a plan (`thireus`)."""
    if form == "custom-q":
        return f"{recipe.one_line()}\n"
    if form == "tensor-types":
        return recipe.one_line().replace(",", "\n") + "\n"
    assert form == "file", form
    return str(recipe)


def pinned(types: Iterable[tuple[str, QuantType]]) -> Recipe:
    """Rules that give every tensor its type, tensors that differ in their layer only in one."""
    layers: dict[tuple[str, QuantType], list[int]] = defaultdict(list)
    for name, kind in types:
        found = re.match(r"blk\.(\d+)\.(.*)", name)
        layers[found[2] if found else name, kind].append(int(found[1]) if found else -1)
    rules = []
    for (name, kind), found_in in layers.items():
        before = "" if found_in == [-1] else rf"blk\.({regex_of(found_in)})\."
        rules.append(Rule(f"^{before}{_escaped(name)}$", kind))
    return Recipe(tuple(rules))


def thireus(plan: Plan, model: str = "") -> str:
    """A plan as a Thireus `.recipe`: rules for all tensors, then how much of it each type is."""
    lines = [
        f"## Quant mix recipe of {model or 'a model'}, made by quantkit",
        "",
        *map(str, pinned((t.name, t.type) for t in plan.tensors).rules),
        "",
    ]
    lines += ["## Summary of tensor counts and bpw per qtype", "#", "# QTYPE\tCount\tBPW\tAssigned GiB"]
    for use in plan.by_type():
        lines.append(f"# {use.type.name}\t{use.count}\t{use.bits_per_weight:.3f}\t{use.bytes / 2**30:.3f}")
    total = f"# Total\t{len(plan.tensors)}\t{plan.bits_per_weight:.3f}\t{plan.bytes_after / 2**30:.3f}"
    return "\n".join([*lines, total, "## THE END!"]) + "\n"


def _escaped(name: str) -> str:
    """The pattern of a name. What rules cannot hold, in a stranger's file, is matched as any character."""
    return re.sub(r"[\s=,#]", ".", re.sub(r"([.\\^$*+?()\[\]{}|])", r"\\\1", name))
