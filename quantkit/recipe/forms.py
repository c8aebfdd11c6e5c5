r"""The text formats of recipes; `parse` reads each of them.

    file            quantkit's own: comments, settings, shorthand, one rule per line
    custom-q        one line for --custom-q, rules comma-separated
    tensor-types    one rule per line, nothing else: llama.cpp's --tensor-type-file
    thireus         a `.recipe` of anchored rules ^name$=type with `##` comments

`rules_for_types` gives rules for the types that a plan or a file has, without its reasons.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

from quantkit.recipe.planning.planned import Plan
from quantkit.recipe.rules.grammar import Recipe, Rule
from quantkit.recipe.rules.layers import regex_of
from quantkit.types import QuantType

FORMS = ("file", "custom-q", "tensor-types", "thireus")


def format_recipe(recipe: Recipe, form: str) -> str:
    """The text of a recipe in one of FORMS except "thireus", which needs a plan (`thireus`)."""
    if form == "custom-q":
        return f"{recipe.one_line()}\n"
    if form == "tensor-types":
        return recipe.one_line().replace(",", "\n") + "\n"
    assert form == "file", form
    return str(recipe)


def rules_for_types(types: Iterable[tuple[str, QuantType]]) -> Recipe:
    """Rules that give every tensor its type, one per class of tensors that differ only in their layer."""
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
    """A plan as a Thireus `.recipe`: rules for all tensors, then the size of each type."""
    lines = [
        f"## Quant mix recipe of {model or 'a model'}, made by quantkit",
        "",
        *map(str, rules_for_types((t.name, t.type) for t in plan.tensors).rules),
        "",
    ]
    lines += ["## Summary of tensor counts and bpw per qtype", "#", "# QTYPE\tCount\tBPW\tAssigned GiB"]
    for use in plan.by_type():
        lines.append(f"# {use.type.name}\t{use.tensors}\t{use.bits_per_weight:.3f}\t{use.bytes / 2**30:.3f}")
    total = f"# Total\t{len(plan.tensors)}\t{plan.bits_per_weight:.3f}\t{plan.bytes_after / 2**30:.3f}"
    return "\n".join([*lines, total, "## THE END!"]) + "\n"


def _escaped(name: str) -> str:
    """A pattern that matches a name. A character that a rule cannot contain is matched by a dot."""
    return re.sub(r"[\s=,#]", ".", re.sub(r"([.\\^$*+?()\[\]{}|])", r"\\\1", name))
