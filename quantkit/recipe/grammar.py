"""Recipes: ordered rules `REGEX=TYPE`, read from a --custom-q string or a file, and printed back.

    blk\\.\\d+\\.ffn_down_exps\\.weight=iq5_k     # one rule a line, comments behind a #
    blk\\.\\d+\\.ffn_(gate|up)_exps\\.weight=iq4_k
    .*=q8_0

Lines may hold several rules parted by commas, and a --custom-q string is such a line. A rule is split at its first `=`,
so a pattern holds neither `=` nor `,`. Patterns are ECMAScript, found anywhere in the tensor's name, case-sensitive;
the first rule that matches a tensor decides. Types are spelled in any case. `parse(str(recipe)) == recipe`.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from quantkit import types
from quantkit.errors import QuantkitError
from quantkit.recipe.ecmascript import compile_pattern
from quantkit.recipe.errors import RecipeError
from quantkit.types import QuantType


@dataclass(frozen=True)
class Rule:
    """Tensors whose name holds `pattern` get `type`."""

    pattern: str
    type: QuantType

    def __post_init__(self) -> None:
        if not self.pattern or self.pattern != self.pattern.strip() or re.search(r"[=,\n\r]|\s#", self.pattern):
            raise RecipeError(
                f"pattern '{self.pattern}': a pattern is not empty and holds no '=', ',' or line break, no blank at "
                "its ends, and no blank before a '#'"
            )
        if self.pattern.startswith("#"):
            raise RecipeError(f"pattern '{self.pattern}': a line that begins with # is a comment; write [#]")
        _ = self.regex

    @functools.cached_property
    def regex(self) -> re.Pattern[str]:
        return compile_pattern(self.pattern)

    def matches(self, name: str) -> bool:
        return self.regex.search(name) is not None

    def __str__(self) -> str:
        return f"{self.pattern}={self.type.name}"


@dataclass(frozen=True)
class Recipe:
    """Rules in order of precedence, and what its author says about them (`about`, the comments that open the file)."""

    rules: tuple[Rule, ...] = ()
    about: str = ""

    def __str__(self) -> str:
        """The file form."""
        story = [f"# {line}".rstrip() for line in self.about.split("\n")] if self.about else []
        return "".join(f"{line}\n" for line in (*story, *self.rules))

    def one_line(self) -> str:
        """The --custom-q form."""
        return ",".join(map(str, self.rules))

    def __add__(self, other: Recipe) -> Recipe:
        """Both recipes' rules, this one's first."""
        return Recipe(self.rules + other.rules, "\n".join(filter(None, (self.about, other.about))))


def parse(text: str, where: str = "") -> Recipe:
    """Read a recipe from a string or the text of a file. RecipeError names `where`, the line and the rule."""
    rules: list[Rule] = []
    about: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        bare = line.strip()
        if bare.startswith("#"):
            if not rules:
                about.append(bare.lstrip("#").strip())
            continue
        for item in re.split(r"\s#", line, maxsplit=1)[0].split(","):
            if item.strip():
                try:
                    rules.append(_rule(item.strip()))
                except QuantkitError as error:
                    place = f"{where}, line {number}: " if where else ""
                    raise RecipeError(f"{place}{error}") from None
    return Recipe(tuple(rules), "\n".join(about).strip("\n"))


def _rule(item: str) -> Rule:
    pattern, equals, name = (part.strip() for part in item.partition("="))
    if not equals or not pattern or not name:
        raise RecipeError(
            f"'{item}' is not REGEX=TYPE; rules are parted by commas, so a pattern cannot hold one: write xx?, "
            "not x{1,2}"
        )
    return Rule(pattern, types.layout(name))
