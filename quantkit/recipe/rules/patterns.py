r"""Detect mistakes in patterns by the names they match, and propose the pattern to write instead.

    mistaken class    blk\.[0-10]\.      one of the characters 0-1 and 0, not a number; write blk\.(?:\d|10)\.
    unanchored        output\.weight     is found in attn_output.weight too; write ^output\.weight
    unescaped dot     blk.1.             . is any character: layers 10 to 19 too; write blk\.1\.
    no match          [3-5]\.*exps       \.* is any number of dots; write [3-5]\..*exps

Every proposed pattern is tried on the names and matches some of them.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from quantkit.recipe.errors import RecipeError
from quantkit.recipe.rules.ecmascript import compile_pattern
from quantkit.recipe.rules.layers import expand, listed, regex_of

_CLASS = re.compile(r"\[([0-9|,\- ]+)\]")
_RANGE = re.compile(r"(\d{1,3})-(\d{1,3})")
# Checkpoint names of tensors and their GGUF names.
_CHECKPOINT_NAMES = {
    "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output", "gate_proj": "ffn_gate",
    "up_proj": "ffn_up", "down_proj": "ffn_down", "lm_head": "^output", "embed_tokens": "token_embd",
    "q_a_proj": "attn_q_a", "q_b_proj": "attn_q_b", "kv_a_proj_with_mqa": "attn_kv_a_mqa", "kv_b_proj": "attn_kv_b",
    "experts": "_exps", "shared_expert": "_shexp", "layers": "blk",
}  # fmt: skip


@dataclass(frozen=True)
class Advice:
    """What is wrong, as the end of a sentence with its punctuation, and the pattern to write instead, if known.

    `wrong` are names that the pattern matches in addition to the intended ones, `right`.
    """

    text: str = ""
    better: str = ""
    wrong: tuple[str, ...] = ()
    right: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.text)

    def __str__(self) -> str:
        return f"{self.text}{' ' if self.better else ''}{self.better}"


_NO_ADVICE = Advice()


def advice(pattern: str, names: Sequence[str], matched: Sequence[str] | None = None) -> Advice:
    """The probable mistake in a pattern; false if there is none.

    `matched` are the names that it decides; None if it matches no name, which is then explained.
    """
    if found := mistaken_class(pattern, names):
        return found
    if matched is None:
        return why_no_match(pattern, names)
    return unescaped_dot(pattern, matched) or unanchored(pattern, matched)


def search(pattern: str) -> Callable[[str], Any]:
    """The compiled `search` of a pattern with shorthand."""
    return compile_pattern(expand(pattern)).search


def matching(pattern: str, names: Sequence[str]) -> list[str]:
    """The names that a pattern matches; none for an invalid pattern, or one that cannot be searched safely."""
    try:
        found = search(pattern)
        return [name for name in names if found(name)]
    except RecipeError:
        return []


def mistaken_class(pattern: str, names: Sequence[str]) -> Advice:
    """Classes of digits that were meant for numbers: [0-10], [12|13]."""
    wrong = [found[0] for found in _CLASS.finditer(pattern) if _numbers_meant(found[1])]
    better = _CLASS.sub(lambda found: _numbers_meant(found[1]) or found[0], pattern)
    if not wrong or not matching(better, names):
        return _NO_ADVICE
    each = "is" if len(set(wrong)) == 1 else "are each"
    explanation = f"{' and '.join(dict.fromkeys(wrong))} {each} one character of a class, not a number"
    return Advice(f": {explanation}; if you mean numbers, write", better)


def _numbers_meant(inside: str) -> str:
    """The pattern for the numbers that a class was meant for; empty for a class of characters."""
    span = _RANGE.fullmatch(inside)
    if span and len(inside) > 3:
        low, high = sorted((int(span[1]), int(span[2])))
        return f"(?:{regex_of(range(low, high + 1))})"
    if re.search(r"\d\d", inside) and ("|" in inside or "," in inside):
        return f"(?:{'|'.join(re.findall(r'[0-9]+', inside))})"
    return ""


def unescaped_dot(pattern: str, matched: Sequence[str]) -> Advice:
    """A dot that matches another character in some of the names: blk.1. also matches blk.10."""
    better = _LONE_DOT.sub(lambda found: found[1] or r"\.", pattern)
    fewer = matching(better, matched) if better != pattern else []
    if not fewer or len(fewer) == len(matched):
        return _NO_ADVICE
    others = tuple(name for name in matched if name not in fewer)
    return Advice(f" also matches {listed(others)}, because . is any character; write", better, others, tuple(fewer))


# A dot that is neither escaped, nor in a class, nor repeated; group 1 is text that is not such a dot.
_LONE_DOT = re.compile(r"(\\.|\[(?:\\.|[^\]\\])*\]|\.[*+?{])|\.")


def unanchored(pattern: str, matched: Sequence[str]) -> Advice:
    """A match that begins or ends within a word in some names and at a word boundary in others.

    A match that is within words in all names is a shorthand (`down_exps`), not a mistake.
    """
    spans = {name: found.span() for name in matched if (found := search(pattern)(name)) and found[0]}
    begins = {name for name, (a, _) in spans.items() if a and _in_word(name[a - 1]) and name[a].isalnum()}
    ends = {name for name, (_, b) in spans.items() if name[b - 1].isalnum() and name[b : b + 1].isalnum()}
    for within, mends in ((begins, _BEFORE), (ends, _AFTER)):
        wrong = [name for name in spans if name in within]
        right = [name for name in spans if name not in within]
        narrow = [name for name in right if "_norm." not in name]
        if not wrong or not right:
            continue
        for wanted in (narrow, right):
            for better in (mend.format(pattern) for mend in mends):
                if wanted and matching(better, matched) == wanted:
                    explanation = (
                        f" matches {listed(wrong)} as well as {listed(wanted)}; if you mean only the latter, write"
                    )
                    return Advice(explanation, better, tuple(wrong), tuple(wanted))
    return _NO_ADVICE


def _in_word(character: str) -> bool:
    return character.isalnum() or character == "_"


_BEFORE = ("^{}", r"^{}\.weight", r"\.{}", r"\.{}\.weight", r"(?:^|\.){}")
_AFTER = (r"{}\.", "{}$", r"{}(?:\.|$)", r"{}(?![a-z0-9])")


def why_no_match(pattern: str, names: Sequence[str]) -> Advice:
    """Why a pattern matches no name, and a pattern that does; false if no reason is found."""
    for explanation, better in _attempts(pattern, names):
        if better != pattern and matching(better, names):
            return Advice(f"; {explanation}", better)
    if "exps" in pattern and not any("exps" in name for name in names):
        return Advice("; this model is dense and has no experts")
    layers = {int(found[1]) for name in names if (found := re.match(r"blk\.(\d+)\.", name))}
    wanted = re.search(r"blk\\?\.(\d+)\\?\.", pattern)
    if wanted and layers and int(wanted[1]) not in layers:
        return Advice(f"; the model's layers are 0 to {max(layers)}")
    return _NO_ADVICE


def _attempts(pattern: str, names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Mistakes that the pattern may have, each with the pattern without it."""
    yield r"\.* is any number of dots, write", pattern.replace(r"\.*", r"\..*")
    yield "write a range of layers in braces:", re.sub(r"(blk\\?\.)(\d+-\d+)(?=\\?\.)", r"\1{\2}", pattern)
    if not any("exps" in name for name in names):
        yield "this model is dense and has no experts, write", re.sub("_?exps", "", pattern) or pattern
    of_experts = re.sub(r"(ffn_(?:\w+|\([\w|]+\)))(?=\\?\.|$)", r"\1_exps", pattern)
    yield "this model's feed-forward tensors are experts, write", of_experts
    yield "* repeats the character before it, write", re.sub(r"(?<=\w)\*|(?<!\\)\.\*(?=\.)", ".*", pattern)
    for theirs, ours in _CHECKPOINT_NAMES.items():
        if theirs in pattern:
            explanation = f"'{theirs}' is the checkpoint's name, here it is {ours.lstrip('^')}: write"
            yield from ((explanation, pattern.replace(theirs, ours)), (explanation, ours))
    yield "names are lower case, write", pattern.lower()
    words = {part for name in names for part in name.split(".") if "_" in part}
    for word in re.findall(r"[a-z]\w*_\w+", pattern):
        for near in difflib.get_close_matches(word, words, n=1, cutoff=0.7):
            yield f"did you mean {near}? write", pattern.replace(word, near)
