r"""ECMAScript regular expressions, as C++ `std::regex` reads them, translated to Python's `re`.

Recipes are shared between tools, so a pattern must mean here what it means there. The two languages agree on nearly
all that users write; this module rewrites what is spelled differently and refuses what only Python would accept:

    same          literals . ^ $ | ( ) (?: ) (?= ) (?! ) * + ? {n,m} and their lazy forms, [a-z] [^x], \d \w \s \b \1
    rewritten     [[:digit:]] and the other classes of C++; an unescaped [ inside a class; ASCII meaning of \d \w \s
    refused       lookbehind, named groups, inline flags, conditionals, comments, atomic groups, possessive
                  quantifiers, \A \Z, [] and [^], a { that opens no quantifier
"""

from __future__ import annotations

import re

from quantkit.inputs.safe_regex import MAX_LENGTH, Pattern, compile
from quantkit.recipe.errors import RecipeError

_CLASSES = {"alnum": "a-zA-Z0-9", "alpha": "a-zA-Z", "digit": "0-9", "d": "0-9", "lower": "a-z", "upper": "A-Z",
            "xdigit": "0-9a-fA-F", "space": r"\s", "s": r"\s", "w": r"\w", "blank": r" \t",
            "punct": re.escape("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")}  # fmt: skip
_ESCAPES = frozenset("dDsSwWbBfnrtv0")
_QUANTIFIER = re.compile(r"\{\d+(,\d*)?\}")
_REFUSED_GROUPS = (
    (r"\(\?<[=!]", "lookbehind does not exist in ECMAScript as C++ has it; match more and anchor with ^ instead"),
    (r"\(\?(P|<)", "named groups do not exist in ECMAScript as C++ has it; use (...)"),
    (r"\(\?[aiLmsux-]+[:)]", "inline flags do not exist in ECMAScript; write both cases, as in [kK]"),
    (r"\(\?[#(>]", "comments, conditionals and atomic groups do not exist in ECMAScript"),
)


def compile_pattern(pattern: str, where: str = "") -> Pattern:
    """Compile an ECMAScript pattern to a matcher with bounded time (quantkit/inputs/safe_regex.py).

    Raises RecipeError with `where`, the pattern and the position, for what C++ `std::regex` would not accept.
    """
    if len(pattern) > MAX_LENGTH:
        raise RecipeError(f"pattern '{pattern[:80]}…' has {len(pattern)} characters; up to {MAX_LENGTH} are allowed")
    return compile(_translate(pattern), where, error=RecipeError, written=pattern)


def _translate(pattern: str) -> str:
    """The same pattern for Python's `re`."""
    out: list[str] = []
    at = 0
    while at < len(pattern):
        if pattern[at] == "[":
            text, at = _class(pattern, at)
        elif pattern[at] == "\\":
            text, at = _escape(pattern, at, _ESCAPES)
        elif pattern[at] == "(":
            text, at = _group(pattern, at)
        elif pattern[at] in "*+?{":
            text, at = _repeat(pattern, at)
        else:
            text, at = pattern[at], at + 1
        out.append(text)
    return "".join(out)


def _refuse(pattern: str, at: int, why: str) -> RecipeError:
    return RecipeError(f"pattern '{pattern}', position {at}: {why}")


def _group(pattern: str, at: int) -> tuple[str, int]:
    for refused, why in _REFUSED_GROUPS:
        if re.match(refused, pattern[at:]):
            raise _refuse(pattern, at, why)
    size = 3 if pattern[at : at + 2] == "(?" else 1
    return pattern[at : at + size], at + size


def _repeat(pattern: str, at: int) -> tuple[str, int]:
    """The quantifier at `at` with its lazy mark, and the position after it."""
    end = at + 1
    if pattern[at] == "{":
        found = _QUANTIFIER.match(pattern, at)
        if found is None:
            raise _refuse(pattern, at, "'{' opens no quantifier such as {2,3}; write \\{ for the character")
        end = found.end()
    if pattern[end : end + 1] == "?":
        end += 1
    if pattern[end : end + 1] in ("*", "+", "?", "{"):
        raise _refuse(pattern, end, "a quantifier cannot follow a quantifier")
    return pattern[at:end], end


def _escape(pattern: str, at: int, letters: frozenset[str]) -> tuple[str, int]:
    letter = pattern[at + 1 : at + 2]
    if not letter:
        raise _refuse(pattern, at, "the pattern ends with a backslash that escapes nothing")
    if code := re.match(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|[1-9])", pattern[at:]):
        return code[0], at + code.end()
    if letter.isalnum() and letter not in letters:
        raise _refuse(pattern, at, f"\\{letter} has no meaning in ECMAScript")
    return "\\" + letter, at + 2


def _class(pattern: str, at: int) -> tuple[str, int]:
    """Translate the bracket expression at `at`; returns it and the position after it."""
    start = at
    negated = pattern[at + 1 : at + 2] == "^"
    at += 2 if negated else 1
    out = ["[^" if negated else "["]
    if pattern[at : at + 1] == "]":
        raise _refuse(pattern, start, "an empty class [] or [^]; write \\] for the character")
    while at < len(pattern) and pattern[at] != "]":
        if named := re.match(r"\[:(\w+):\]", pattern[at:]):
            if named[1] not in _CLASSES:
                raise _refuse(pattern, at, f"[:{named[1]}:] is not a class; known: {', '.join(_CLASSES)}")
            out.append(_CLASSES[named[1]])
            at += named.end()
        elif pattern[at] == "\\":
            text, at = _escape(pattern, at, _ESCAPES - {"B"})
            out.append(text)
        else:
            out.append("\\" + pattern[at] if pattern[at] in "[&~|" else pattern[at])
            at += 1
    if at >= len(pattern):
        raise _refuse(pattern, start, "this [ is never closed")
    return "".join(out) + "]", at + 1
