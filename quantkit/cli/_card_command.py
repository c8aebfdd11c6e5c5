"""The `quantkit quantize` command that a model card prints: one that gives the types of the file when it is pasted.

A file says what command made it, in the first line of its recipe. That text may be anybody's, and the file may have
changed since, so it is read as a plan's flags, the plan is made, and the command is printed only where it gives the
types that the file has. Otherwise a rule for each class of tensors does.
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


class _Way(NamedTuple):
    """Type, flags and recipe of a command, and the option that passes the recipe."""

    kind: str
    options: Options
    recipe: Recipe
    option: str

    def plan(self, file: GGUF, importance: bool) -> Plan:
        """What it makes of the model in BF16."""
        from quantkit.cli._planning import Model, complete_imatrix
        from quantkit.recipe import plan

        source = _bf16(file)
        imatrix = complete_imatrix(Model(source, file.metadata, None)) if importance else None
        return plan(source, self.kind, self.recipe, metadata=file.metadata, imatrix=imatrix, options=self.options)

    def gives(self, file: GGUF, importance: bool) -> bool:
        """Whether those are the types of the file. Tensors that no command changes are the model's own."""
        try:
            planned = self.plan(file, importance).tensors
        except QuantkitError:  # it contradicts itself, or this model
            return False
        return all(t.type is file.tensors[t.name].type for t in planned if not t.reason.startswith("kept: "))


def requantize(file: GGUF) -> list[str]:
    """Words behind `quantkit quantize IN OUT`; none where no command gives the file's types."""
    m = file.metadata
    had = "quantize.imatrix.file" in m
    for way in _ways(file):
        for importance in dict.fromkeys((had, True)):  # without one where that will do
            if way.gives(file, importance):
                words = [way.kind, str(way.options), way.option]
                if importance:
                    words.append(f"--imatrix {_imatrix(str(m.get('quantize.imatrix.file', HIDDEN)))}")
                if m.get("quantkit.effort") in ("fast", "best"):
                    words.append(f"--effort {m['quantkit.effort']}")
                if len(file.paths) > 1:
                    words.append(f"--split-max-tensors {max(file.shards)}")
                return [word for word in words if word]
    return []


def argument(name: str) -> str:
    """A file's name as a word for a shell that no command takes for an option."""
    return shlex.quote(f"./{name}" if name.startswith("-") else name)


def base(path: str) -> str:
    """The last part of a path: whose disk it was on is nobody's business."""
    return re.split(r"[/\\]", path)[-1]


def _imatrix(path: str) -> str:
    return "IMATRIX.dat" if path == HIDDEN else argument(base(path))


def _ways(file: GGUF) -> Iterator[_Way]:
    """The command that the file says, the same with rows interleaved, then one rule for each class of tensors."""
    from quantkit.recipe import Options, find
    from quantkit.recipe.forms import pinned

    name = argument(file.paths[0].name)
    made = _MADE_BY.match(str(file.metadata.get("quantkit.recipe", "")))
    if made:
        try:
            options, recipe = Options.parse(made[2]), find(file.paths[0])
        except QuantkitError:  # not a text that quantkit wrote
            pass
        else:
            yield _Way(shlex.quote(made[1]), options, recipe, f"--recipe {name}")
            yield _Way(shlex.quote(made[1]), replace(options, repack=True), recipe, f"--recipe {name}")
    rules = pinned((t.name, t.type) for t in file.tensors.values())
    carried = f"--recipe {name}" if "quantkit.recipe" not in file.metadata else ""
    yield _Way("Q8_0", Options(), rules, carried or f"--custom-q {shlex.quote(rules.one_line())}")


def _bf16(file: GGUF) -> list[TensorSpec]:
    """The tensors of a model of which the file may have been made."""
    bf16, f32 = types.layout("bf16"), types.layout("f32")
    return [TensorSpec(t.name, t.shape, bf16 if len(t.shape) > 1 else f32) for t in file.tensors.values()]
