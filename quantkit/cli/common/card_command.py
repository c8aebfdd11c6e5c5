"""The `quantkit quantize` command in a model card, which reproduces the types of the file.

The first line of a file's recipe holds the command that wrote the file. That text is untrusted, and the file may have
changed since. So it is parsed as the flags of a plan, the plan is computed, and the command is printed only if the plan
gives the types of the file. Otherwise the command has one rule for each class of tensors.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from quantkit import types
from quantkit.errors import QuantkitError
from quantkit.formats.gguf import GGUF, TensorSpec

if TYPE_CHECKING:
    from quantkit.recipe import Options, Plan, Recipe

HIDDEN = "top_secret"  # quantize --hide-imatrix
_MADE_BY = re.compile(r"# quantkit quantize (\S+)[ \t]*([^\n]*)")


class _Command(NamedTuple):
    """The file type, flags and recipe of a `quantize` command, and the option that passes the recipe."""

    kind: str
    options: Options
    recipe: Recipe
    option: str

    def plan(self, file: GGUF, importance: bool) -> Plan:
        """The plan of this command for the model in BF16."""
        from quantkit.pipelines.planning import complete_imatrix
        from quantkit.recipe import plan

        source = _bf16(file)
        imatrix = complete_imatrix(source) if importance else None
        return plan(source, self.kind, self.recipe, metadata=file.metadata, imatrix=imatrix, options=self.options)

    def reproduces(self, file: GGUF, importance: bool) -> bool:
        """Whether the plan gives the types of the file. Tensors that no command quantizes are not compared."""
        try:
            planned = self.plan(file, importance).tensors
        except QuantkitError:  # flags that contradict each other or this model
            return False
        return all(t.type is file.tensors[t.name].type for t in planned if not t.reason.startswith("kept: "))


def requantize(file: GGUF) -> list[str]:
    """The arguments after `quantkit quantize IN OUT`; empty if no command reproduces the file's types."""
    m = file.metadata
    has_imatrix = "quantize.imatrix.file" in m
    for command in _candidates(file):
        for importance in dict.fromkeys((has_imatrix, True)):  # without an importance matrix if possible
            if command.reproduces(file, importance):
                words = [command.kind, str(command.options), command.option]
                if importance:
                    words.append(f"--imatrix {_imatrix(str(m.get('quantize.imatrix.file', HIDDEN)))}")
                if m.get("quantkit.effort") in ("fast", "best"):
                    words.append(f"--effort {m['quantkit.effort']}")
                if len(file.paths) > 1:
                    words.append(f"--split-max-tensors {max(file.shards)}")
                return [word for word in words if word]
    return []


def argument(name: str) -> str:
    """A file's name quoted for a shell, with `./` if it would read as an option."""
    return shlex.quote(f"./{name}" if name.startswith("-") else name)


def base(path: str) -> str:
    """The last part of a path. A model card does not publish the directories of its author."""
    return re.split(r"[/\\]", path)[-1]


def _imatrix(path: str) -> str:
    return "IMATRIX.dat" if path == HIDDEN else argument(base(path))


def _candidates(file: GGUF) -> Iterator[_Command]:
    """The command stored in the file, the same with --repack, then one rule for each class of tensors."""
    from quantkit.recipe import Options, find
    from quantkit.recipe.forms import rules_for_types

    name = argument(file.paths[0].name)
    stored = _MADE_BY.match(str(file.metadata.get("quantkit.recipe", "")))
    if stored:
        try:
            options, recipe = Options.parse(stored[2]), find(file.paths[0])
        except QuantkitError:  # quantkit did not write this text
            pass
        else:
            yield _Command(shlex.quote(stored[1]), options, recipe, f"--recipe {name}")
            yield _Command(shlex.quote(stored[1]), replace(options, repack=True), recipe, f"--recipe {name}")
    rules = rules_for_types((t.name, t.type) for t in file.tensors.values())
    recipe_option = f"--recipe {name}" if "quantkit.recipe" not in file.metadata else ""
    yield _Command("Q8_0", Options(), rules, recipe_option or f"--custom-q {shlex.quote(rules.one_line())}")


def _bf16(file: GGUF) -> list[TensorSpec]:
    """The tensors of the BF16 model that the file may come from."""
    bf16, f32 = types.layout("bf16"), types.layout("f32")
    return [TensorSpec(t.name, t.shape, bf16 if len(t.shape) > 1 else f32) for t in file.tensors.values()]
