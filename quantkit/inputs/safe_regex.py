r"""Regular expressions from users and files, which may be hostile: the time of a search is bounded for any pattern.

    pattern = compile("ffn_(up|gate)_exps", "--custom-q")
    pattern.search("blk.0.ffn_up_exps.weight")      a match object or None, as from re

Python's `re` backtracks: `([a-z_.0-9]*)*!` takes years on a name of 30 characters, and `re` cannot be stopped. So
`_Scan` first bounds, from the pattern's text alone, in how many ways it can match. Nearly all patterns in use have few
ways on texts as short as tensor names, and `re` searches for them. RE2, whose time is linear, is used for the others
and for longer texts. It has no lookahead, lookbehind or back references: a pattern that needs these and has too many
ways is refused, with the reason.

The package `regex` with a time limit is no alternative: each search takes ten times as long, and `(a{65000}){65000}`
fills the memory while it is compiled, where the limit does not apply.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from math import comb
from typing import Any, NoReturn

from quantkit.errors import DataError, QuantkitError, printable

MAX_LENGTH = 1 << 13  # characters of a pattern
_MAX_DEPTH = 50  # groups within groups
_MAX_WAYS = 10**6  # steps that `re` may take for a search, at worst: some milliseconds
_LONGEST = 1 << 16  # characters of a text for `re`; names are shorter
_COUNTED = re.compile(r"\{(\d*)(,?)(\d*)\}")
_PLAIN_GROUP = re.compile(r"\((?:\?(?:[:=!]|<[=!]|P<\w+>))?")
_FOR_RE2 = re.compile(r"\\(?:u([0-9a-fA-F]{4})|(.))", re.DOTALL)


class Pattern:
    """A compiled pattern. Errors quote it and name `where` it comes from."""

    __slots__ = ("_compiled", "_error", "_linear", "_longest", "_text", "_where", "_written")

    def __init__(self, text: str, where: str, ascii: bool, error: type[QuantkitError], written: str):
        self._text, self._where, self._error, self._written = text, where, error, written or text
        self._linear: Any = None
        if len(text) > MAX_LENGTH:
            self._refuse(f"has {len(text)} characters; up to {MAX_LENGTH} are allowed")
        try:
            self._longest = _longest(_Scan(text).ways())
            self._compiled = re.compile(text, re.ASCII if ascii else 0)
        except re.error as failure:
            at = f" at position {failure.pos}" if failure.pos is not None else ""
            self._refuse(f"is not a regular expression: {failure.msg}{at}")
        except (OverflowError, RecursionError) as failure:
            self._refuse(f"is not a regular expression: {failure}")

    def search(self, text: str) -> Any:
        """The first match anywhere in a text, or None."""
        return (self._compiled if len(text) <= self._longest else self._by_re2(text)).search(text)

    def match(self, text: str) -> Any:
        """The match at the beginning of a text, or None."""
        return (self._compiled if len(text) <= self._longest else self._by_re2(text)).match(text)

    def _by_re2(self, text: str) -> Any:
        """The pattern compiled by RE2; an error that quotes the text if RE2 cannot express the pattern."""
        if self._linear is None:
            import re2

            options = re2.Options()
            options.log_errors = False
            try:
                self._linear = re2.compile(_FOR_RE2.sub(_escape_of_re2, self._text), options)
            except re2.error as failure:
                reason = (
                    failure.args[0].decode(errors="replace") if isinstance(failure.args[0], bytes) else str(failure)
                )
                name = printable(text if len(text) <= 100 else f"{text[:100]}…")
                self._refuse(
                    f"could take forever on '{name}', of {len(text)} characters: it repeats a repeated part, or "
                    f"repeats too often, and a linear search cannot replace that ({reason}); repeat single characters "
                    "only, or leave out lookaheads and back references"
                )
        return self._linear

    def _refuse(self, what: str) -> NoReturn:
        shown = printable(self._written if len(self._written) <= 200 else f"{self._written[:200]}…")
        raise self._error(f"{f'{self._where}: ' if self._where else ''}pattern '{shown}' {what}")


@functools.lru_cache(maxsize=512)
def compile(
    text: str, where: str = "", ascii: bool = True, error: type[QuantkitError] = DataError, written: str = ""
) -> Pattern:
    r"""A pattern in the syntax of `re`, safe to search with.

    where    what the pattern is part of, for errors; they are of type `error`
    ascii    whether \d, \w, \s and \b mean ASCII
    written  the pattern as the user wrote it, if `text` was made from it
    """
    return Pattern(text, where, ascii, error, written)


def repeats(text: str) -> float:
    """How many parts of an expression repeat without limit, one after the other; infinite if one is inside another.

    With n such parts, an engine that backtracks takes time proportional to length^(n + 1) on a text.
    """
    if len(text) > MAX_LENGTH:
        return float("inf")
    try:
        ways = _Scan(text).ways()
    except RecursionError:
        return float("inf")
    return ways.spans if ways.factor < 1000 else float("inf")


def _escape_of_re2(found: re.Match[str]) -> str:
    if found[1]:
        return rf"\x{{{found[1]}}}"
    return r"\z" if found[2] == "Z" else found[0]


@dataclass(frozen=True)
class _Ways:
    """An upper bound of the ways in which a part of a pattern can match a text.

    It is `factor` times the number of ways to place `spans` runs of any length (`a*` is one run) in the text.
    """

    factor: int = 1
    spans: float = 0  # infinite where the number may grow exponentially
    empty: bool = False  # whether the part can match the empty string

    def __mul__(self, other: _Ways) -> _Ways:
        """One part after the other."""
        return _Ways(min(self.factor * other.factor, _MAX_WAYS), self.spans + other.spans, self.empty and other.empty)

    @property
    def single(self) -> bool:
        return self.factor == 1 and not self.spans


_ENDLESS = _Ways(spans=float("inf"), empty=True)


def _longest(ways: _Ways) -> int:
    """The longest text on which a search takes at most _MAX_WAYS steps; -1 if there is none."""
    if ways.spans > 20:
        return -1
    places = int(ways.spans) + 1  # and where the match begins

    def steps(length: int) -> int:
        return ways.factor * comb(length + places, places)

    low, high = -1, _LONGEST
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if steps(middle) <= _MAX_WAYS else (low, middle - 1)
    return low


class _Scan:
    """Reads a pattern once and counts how it may branch and repeat.

    Syntax that it does not know, such as inline flags, counts as endless. Syntax errors are left to `re`.
    """

    def __init__(self, text: str):
        self._text, self._at, self._depth = text, 0, 0

    def ways(self) -> _Ways:
        ways = self._alternatives()
        return ways if self._at == len(self._text) else _ENDLESS  # an unmatched ), which `re` refuses

    def _alternatives(self) -> _Ways:
        """Alternatives up to a ) or the end. Of those that begin with different characters only one can match."""
        of_start: dict[str, list[_Ways]] = {}
        while True:
            start = self._first()
            of_start.setdefault(start, []).append(self._sequence())
            if self._text[self._at : self._at + 1] != "|":
                break
            self._at += 1
        unknown = of_start.pop("", [])
        known = max((sum(ways.factor for ways in group) for group in of_start.values()), default=0)
        every = [ways for group in (unknown, *of_start.values()) for ways in group]
        factor = sum(ways.factor for ways in unknown) + known
        return _Ways(min(factor, _MAX_WAYS), max(ways.spans for ways in every), any(ways.empty for ways in every))

    def _first(self) -> str:
        """The character that an alternative begins with; "" if that can be more than one."""
        text, at = self._text, self._at
        size = 2 if text[at : at + 1] == "\\" and not text[at + 1 : at + 2].isalnum() else 1
        found, following = text[at : at + size], text[at + size : at + size + 1]
        plain = len(found) == 2 or (found and found not in r".^$*+?{}[]\|()")
        return found[-1] if plain and following not in ("*", "?", "{") else ""

    def _sequence(self) -> _Ways:
        ways = _Ways(empty=True)
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            ways *= self._repeated(self._atom())
        return ways

    def _atom(self) -> _Ways:
        character = self._text[self._at]
        if character == "(":
            return self._group()
        if character == "[":
            self._pass_class()
            return _Ways()
        if character == "\\":
            following = self._text[self._at + 1 : self._at + 2]
            self._at += 2
            return _Ways(empty=following in "bBAZ" or following.isdigit())  # a boundary, or a back reference
        self._at += 1
        return _Ways(empty=character in "^$")

    def _group(self) -> _Ways:
        opening = _PLAIN_GROUP.match(self._text, self._at)
        assert opening is not None  # it begins with (
        known = opening[0] != "(" or self._text[self._at + 1 : self._at + 2] != "?"
        is_lookaround = opening[0][-1] in "=!"
        self._at = opening.end()
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise RecursionError(f"over {_MAX_DEPTH} groups within groups")
        inside = self._alternatives()
        self._depth -= 1
        self._at += 1  # the )
        if not known:
            return _ENDLESS
        return _Ways(inside.factor, inside.spans, inside.empty or is_lookaround)

    def _pass_class(self) -> None:
        """Skip a [ up to its ]. A ] that comes first is a character of the class."""
        at = self._at + 1
        at += self._text[at : at + 1] == "^"
        at += self._text[at : at + 1] == "]"
        while at < len(self._text) and self._text[at] != "]":
            at += 2 if self._text[at] == "\\" else 1
        self._at = at + 1

    def _repeated(self, part: _Ways) -> _Ways:
        """A part with the quantifiers after it."""
        while quantifier := self._quantifier():
            part = _repeat(part, *quantifier)
        return part

    def _quantifier(self) -> tuple[int, int | None] | None:
        """The smallest and the largest number of repetitions (None: no limit); None if no quantifier is here."""
        character = self._text[self._at : self._at + 1]
        if character in ("*", "+", "?"):
            self._at += 1
            found: tuple[int, int | None] = {"*": (0, None), "+": (1, None), "?": (0, 1)}[character]
        elif (counted := _COUNTED.match(self._text, self._at)) and counted[0] not in ("{}", "{,}"):
            self._at = counted.end()
            minimum = int(counted[1] or 0)
            found = (minimum, minimum if not counted[2] else int(counted[3]) if counted[3] else None)
        else:
            return None
        if self._text[self._at : self._at + 1] in ("?", "+"):  # lazy, possessive: no more ways than without
            self._at += 1
        return found


def _repeat(part: _Ways, minimum: int, maximum: int | None) -> _Ways:
    empty = part.empty or minimum == 0
    if (maximum is None or maximum > 1) and (part.empty or (maximum is None and not part.single)):
        return _ENDLESS
    if maximum is None:
        return _Ways(spans=1, empty=empty)
    if part.single:
        return _Ways(max(1, maximum - minimum + 1), empty=empty)
    if maximum > 20:
        return _ENDLESS
    factor = sum(part.factor**count for count in range(minimum, maximum + 1))
    return _Ways(max(1, min(factor, _MAX_WAYS)), part.spans * maximum, empty)
