r"""Recipes: ordered rules `REGEX=TYPE`, read from a --custom-q string or a file, and printed back.

    # The comments before the first rule are the description of the recipe.
    down := iq5_k                              # a setting, changed by --set down=iq6_k
    blk.{3-18}.ffn_down_exps.weight=q6_K       # layers 3 to 18: a shorthand for blk\.(?:[3-9]|1[0-8])\.
    blk\.\d+\.ffn_down_exps\.weight=${down}    # one rule per line, comments after a #
    .*=q8_0

A line may contain several rules, separated by commas or blanks. So these are recipes too: a --custom-q string, a
--tensor-type-file of llama.cpp, a Thireus `.recipe` (rules `^name$=type`), and a published shell script with its rules
between `custom="` and `"`. A rule is split at its first `=`, so a pattern contains no `=`, `,` or blank. Patterns are
ECMAScript, case-sensitive, and match anywhere in the tensor's name. The first rule that matches a tensor decides. Types
are not case-sensitive.

`parse(str(recipe)) == recipe`, comments and settings included; `one_line()` is for tools that support neither those nor
the shorthand.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from quantkit import types
from quantkit.errors import QuantkitError, UnknownNameError
from quantkit.inputs.safe_regex import Pattern
from quantkit.recipe.errors import RecipeError
from quantkit.recipe.rules import layers
from quantkit.recipe.rules.ecmascript import compile_pattern
from quantkit.types import QuantType

_SETTING = re.compile(r"\s*([A-Za-z]\w*)\s*:=\s*(.*)")
_USE = re.compile(r"\$\{(\w*)\}")
_RULES = re.compile(rf"(?:{layers.SHORTHAND.pattern}|[^,\s])+")
# A lookbehind lets a search start only where a run begins: without it, long runs take quadratic time.
_NOTE = re.compile(r"(?<!\s)\s+#\s*")
# Text in a comment that can only be a rule: REGEX=TYPE.
_HIDDEN = re.compile(r"(?<![^,\s=])[^,\s=]+\s*=\s*(?:(?:i?q|tq|b?f|mxfp)\d\w*|\$\{\w+\})", re.IGNORECASE)
_JOINED = "where lines are joined to one, remove comments before that (sed 's/ *#.*//'), or pass the file itself"


@dataclass(frozen=True)
class Rule:
    """Tensors whose name matches `pattern` get `type`.

    `template` is the rule before settings are substituted, `remark` the comment above it, `note` the comment after it.
    None of them counts when rules are compared.
    """

    pattern: str
    type: QuantType
    template: str = field(default="", compare=False)
    remark: str = field(default="", compare=False)
    note: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        bare = layers.SHORTHAND.sub("", self.pattern)
        if not self.pattern or re.search(r"[=,\s]", bare):
            raise RecipeError(f"pattern '{self.pattern}': a pattern is not empty and contains no '=', ',' or blank")
        if self.pattern.startswith("#"):
            raise RecipeError(f"pattern '{self.pattern}': a line that begins with # is a comment; write [#]")
        _ = self.regex

    @functools.cached_property
    def regex(self) -> Pattern:
        """The compiled pattern."""
        return compile_pattern(self.expanded)

    @property
    def expanded(self) -> str:
        """The pattern without shorthand."""
        return layers.expand(self.pattern)

    def matches(self, name: str) -> bool:
        """Whether the pattern is found in a tensor's name."""
        return self.regex.search(name) is not None

    def __str__(self) -> str:
        return f"{self.pattern}={self.type.name}"


@dataclass(frozen=True)
class Setting:
    """A value that rules refer to as ${name}."""

    name: str
    value: str
    remark: str = field(default="", compare=False)
    note: str = field(default="", compare=False)


@dataclass(frozen=True)
class Recipe:
    """Rules in order of precedence, and their description (`about`, the comments at the start of the file)."""

    rules: tuple[Rule, ...] = ()
    about: str = ""
    settings: tuple[Setting, ...] = ()
    end: str = field(default="", compare=False)  # comments after the last rule

    def __str__(self) -> str:
        """The file form."""
        lines = _comment(self.about)
        for setting in self.settings:
            lines += [*_comment(setting.remark), f"{setting.name} := {setting.value}{_trailing(setting.note)}"]
        for rule in self.rules:
            lines += [*_comment(rule.remark), f"{rule.template or rule}{_trailing(rule.note)}"]
        return "".join(f"{line}\n" for line in [*lines, *_comment(self.end)])

    def one_line(self) -> str:
        """The --custom-q form, as every tool reads it."""
        return ",".join(f"{rule.expanded}={rule.type.name}" for rule in self.rules)

    def __add__(self, other: Recipe) -> Recipe:
        """Both recipes' rules, this one's first."""
        about = "\n".join(filter(None, (self.about, other.about)))
        mine = {setting.name: setting.value for setting in self.settings}
        theirs = {setting.name: setting.value for setting in other.settings}
        if any(mine.get(name, value) != value for name, value in theirs.items()):
            rules = tuple(replace(rule, template="") for rule in self.rules + other.rules)
            return Recipe(rules, about, (), other.end or self.end)
        settings = self.settings + tuple(setting for setting in other.settings if setting.name not in mine)
        return Recipe(self.rules + other.rules, about, settings, other.end or self.end)


def _comment(text: str) -> list[str]:
    return [f"#{'' if line.startswith('#') else ' '}{line}".rstrip() for line in text.split("\n")] if text else []


def _trailing(note: str) -> str:
    return f"  # {note}" if note else ""


def parse(text: str, where: str = "", settings: Mapping[str, str] | None = None, *, printed: bool = False) -> Recipe:
    """Parse a recipe from a string or the text of a file; `settings` replaces the values of some settings.

    A comment that contains rules is an error if the line may be several joined lines, because then the rules after
    the `#` are lost. `printed`: the text is that of a Recipe, so this check is not needed.
    RecipeError names `where`, the line and the rule; UnknownNameError a setting that the recipe does not have.
    """
    return _Parser(where, dict(settings or {}), printed).recipe(text)


def _unwrapped(lines: list[str]) -> list[str]:
    """The lines of a recipe; in a published shell script, those between NAME=" and the closing quote."""
    if (quoted := _quoted(lines, 0)) is None:
        return lines
    others: set[int] = set()  # lines of further quoted texts
    found = _quoted(lines, quoted.stop)
    while found is not None:
        others.update(found)
        found = _quoted(lines, found.stop)
    for i, line in enumerate(map(str.strip, lines)):  # outside of quotes NAME=VALUE is shell syntax
        if i not in quoted and _HIDDEN.fullmatch(line) and (i in others or not re.match(r"\w+=", line)):
            raise RecipeError(f"line {i + 1}: '{line}' is outside the quotes that begin in line {quoted.start + 1}")
    about = [line if line.startswith("#") and not line.startswith("#!") else "" for line in lines[: quoted.start]]
    return [*about, "", *lines[quoted.start + 1 : quoted.stop - 1]]


def _quoted(lines: list[str], start: int) -> range | None:
    """The first lines from `start` on that begin with NAME=" and end with the closing quote; None if there are none."""
    first = next((i for i in range(start, len(lines)) if re.fullmatch(r"\s*\w+=[\"']\s*", lines[i])), None)
    if first is None:
        return None
    quote = lines[first].rstrip()[-1]
    end = next((i for i in range(first + 1, len(lines)) if lines[i].strip() == quote), len(lines))
    return range(first, end + 1)


class _Parser:
    """Parser of one text. The comments since the last statement become the remark of the next."""

    def __init__(self, where: str, given: dict[str, str], printed: bool):
        self.where, self.given, self.printed = where, given, printed
        self.alone = False  # whether the text is a single line
        self.rules: list[Rule] = []
        self.settings: dict[str, Setting] = {}
        self.about: str | None = None
        self.comments: list[str] = []

    def recipe(self, text: str) -> Recipe:
        lines = self._lines(text)
        self.alone = sum(not line.isspace() for line in lines if line) == 1
        for number, line in enumerate(lines, 1):
            try:
                self._line(line.strip())
            except QuantkitError as error:
                place = f"{self.where}, line {number}: " if self.where else ""
                raise RecipeError(f"{place}{error}") from None
        if unknown := [name for name in self.given if name not in self.settings]:
            known = ", ".join(self.settings) or "none"
            raise UnknownNameError(
                f"setting of {self.where or 'this recipe'} (it has: {known})", unknown[0], self.settings
            )
        end = self._remark()
        about = end if self.about is None else self.about
        return Recipe(tuple(self.rules), about, tuple(self.settings.values()), "" if self.about is None else end)

    def _lines(self, text: str) -> list[str]:
        try:
            return _unwrapped(text.splitlines())
        except RecipeError as error:
            raise RecipeError(f"{self.where}, {error}" if self.where else str(error)) from None

    def _line(self, line: str) -> None:
        if line.startswith("#"):
            if self.alone:
                self._refuse_hidden_rules(line)
            self.comments.append(line[1:].removeprefix(" "))
            return
        if not line:
            return
        if self.about is None:
            self.about = self._remark()
        statement, *notes = _NOTE.split(line, maxsplit=1)
        note = notes[0] if notes else ""
        self._refuse_hidden_rules(note)
        if setting := _SETTING.fullmatch(statement):
            self._setting(setting[1], setting[2].strip(), note)
            return
        items = [found[0] for found in _RULES.finditer("=".join(part.strip() for part in statement.split("=")))]
        self.rules += [self._rule(item, note if item is items[-1] else "") for item in items]

    def _refuse_hidden_rules(self, comment: str) -> None:
        """Raise RecipeError for rules in a comment, which may be there because lines were joined."""
        if self.printed:
            return
        after_commas = (part.strip() for part in comment.split(",")[1:])
        found = _HIDDEN.findall(comment) if self.alone else [part for part in after_commas if _HIDDEN.fullmatch(part)]
        if found:
            raise RecipeError(
                f"a comment ends with its line, so the # in front of '{', '.join(found)}' drops {len(found)} rule(s); "
                f"{_JOINED}"
            )

    def _remark(self) -> str:
        text, self.comments = "\n".join(line.rstrip() for line in self.comments).strip("\n"), []
        return text

    def _setting(self, name: str, value: str, note: str) -> None:
        if name in self.settings:
            raise RecipeError(f"setting {name} is defined twice")
        if self.rules:
            raise RecipeError(f"setting {name} is after a rule; settings come first")
        value = self.given.get(name, value)
        if not value or re.search(r"[\s=#]", value):
            raise RecipeError(f"setting {name} := '{value}': a value is not empty and contains no blank, '=' or '#'")
        self.settings[name] = Setting(name, value, self._remark(), note)

    def _rule(self, item: str, note: str) -> Rule:
        if item.startswith("#"):
            raise RecipeError(f"'{item}' begins a comment between rules of one line; {_JOINED}")
        filled = _USE.sub(self._value, item)
        pattern, equals, name = filled.partition("=")
        if not equals or not pattern or not name:
            raise RecipeError(
                f"'{item}' is not REGEX=TYPE; rules are comma-separated, so a pattern cannot contain a comma: write "
                "xx?, not x{1,2}"
            )
        return Rule(pattern, types.layout(name), item if filled != item else "", self._remark(), note)

    def _value(self, use: re.Match[str]) -> str:
        if use[1] not in self.settings:
            raise UnknownNameError("setting", use[1], self.settings)
        return self.settings[use[1]].value
