r"""Patterns that do not say what their author meant: found by what they match, each with the pattern to write instead.

    mistaken class    blk\.[0-10]\.      one of the characters 0-1 and 0, not a number; write blk\.(?:\d|10)\.
    loose ends        output\.weight     is found in attn_output.weight too; write ^output\.weight
    loose dot         blk.1.             . is any character: layers 10 to 19 too; write blk\.1\.
    nothing           [3-5]\.*exps       \.* is any number of dots; write [3-5]\..*exps

Every pattern that is proposed was tried on the names: it matches some of them.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence

from quantkit.recipe.ecmascript import compile_pattern
from quantkit.recipe.errors import RecipeError
from quantkit.recipe.layers import expand, regex_of

_CLASS = re.compile(r"\[([0-9|,\- ]+)\]")
_RANGE = re.compile(r"(\d{1,3})-(\d{1,3})")
# What a checkpoint calls a tensor, and what GGUF does.
_CHECKPOINT_NAMES = {
    "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output", "gate_proj": "ffn_gate",
    "up_proj": "ffn_up", "down_proj": "ffn_down", "lm_head": "^output", "embed_tokens": "token_embd",
    "q_a_proj": "attn_q_a", "q_b_proj": "attn_q_b", "kv_a_proj_with_mqa": "attn_kv_a_mqa", "kv_b_proj": "attn_kv_b",
    "experts": "_exps", "shared_expert": "_shexp", "layers": "blk",
}  # fmt: skip


def advice(pattern: str, names: Sequence[str], matched: Sequence[str] | None = None) -> str:
    """What is probably wrong with a pattern, as the end of a sentence; "" where nothing is.

    `matched` are the names that it takes for itself; None: it matches nothing, and why is asked.
    """
    if text := mistaken_class(pattern, names):
        return f": {text}"
    if matched is None:
        return why_nothing(pattern, names)
    found = loose_dot(pattern, matched) or loose_ends(pattern, matched)
    return f" {found}" if found else ""


def search(pattern: str) -> Callable[[str], re.Match[str] | None]:
    return compile_pattern(expand(pattern)).search


def hits(pattern: str, names: Sequence[str]) -> list[str]:
    """The names that a pattern matches; none for one that is no pattern."""
    try:
        found = search(pattern)
    except RecipeError:
        return []
    return [name for name in names if found(name)]


def mistaken_class(pattern: str, names: Sequence[str]) -> str:
    """A class of digits that was meant for numbers: [0-10], [12|13]."""
    for found in _CLASS.finditer(pattern):
        inside = found[1]
        span = _RANGE.fullmatch(inside)
        if span and len(inside) > 3:
            low, high = sorted((int(span[1]), int(span[2])))
            meant = f"(?:{regex_of(range(low, high + 1))})"
        elif re.search(r"\d\d", inside) and ("|" in inside or "," in inside):
            meant = f"(?:{'|'.join(re.findall(r'[0-9]+', inside))})"
        else:
            continue
        better = pattern[: found.start()] + meant + pattern[found.end() :]
        if hits(better, names):
            return f"[{inside}] is one character of a class, not a number; if you mean numbers, write {better}"
    return ""


def loose_dot(pattern: str, matched: Sequence[str]) -> str:
    """An unescaped dot that stands for a digit of some layer's number: blk.1. is found in blk.10. too."""
    better = re.sub(r"(?<=\d)(?<!\\\d)\.(?![*+?{])", r"\\.", re.sub(r"(?<![\\.\]])blk\.(?![*+?{])", r"blk\\.", pattern))
    if better == pattern:
        return ""
    fewer = hits(better, matched)
    if fewer and len(fewer) < len(matched):
        other = next(name for name in matched if name not in fewer)
        return f"takes {other} too, as a . is any character; write {better}"
    return ""


def loose_ends(pattern: str, matched: Sequence[str]) -> str:
    """A match that begins or ends within a word of some names and at a word's border in others.

    A match that is within words in all names is a shorthand (`down_exps`), not a mistake.
    """
    spans = {name: found.span() for name in matched if (found := search(pattern)(name)) and found[0]}
    begins = {
        name: a > 0 and (name[a - 1].isalnum() or name[a - 1] == "_") and name[a].isalnum()
        for name, (a, _) in spans.items()
    }
    ends = {name: b < len(name) and name[b].isalnum() and name[b - 1].isalnum() for name, (_, b) in spans.items()}
    for within, mends in ((begins, _BEFORE), (ends, _BEHIND)):
        wrong = [name for name, inside in within.items() if inside]
        right = [name for name, inside in within.items() if not inside]
        if not wrong or not right:
            continue
        for better in (mend.format(pattern) for mend in mends):
            if hits(better, matched) == right:
                return f"takes {wrong[0]} as well as {right[0]}; if you mean only the latter, write {better}"
    return ""


_BEFORE = ("^{}", r"\.{}", r"(?:^|\.){}")
_BEHIND = (r"{}\.", "{}$", r"{}(?:\.|$)", r"{}(?![a-z0-9])")


def why_nothing(pattern: str, names: Sequence[str]) -> str:
    """Why a pattern matches none of the names, and one that does; "" where no reason is found."""
    if r"\.*" in pattern and hits(better := pattern.replace(r"\.*", r"\..*"), names):
        return rf"; \.* is any number of dots, write {better}"
    if "exps" in pattern and not any("exps" in name for name in names):
        better = re.sub("_?exps", "", pattern)
        instead = f", write {better}" if better and hits(better, names) else ""
        return f"; this model is dense and has no experts{instead}"
    if hits(better := re.sub(r"(ffn_(?:\w+|\([\w|]+\)))(?=\\?\.|$)", r"\1_exps", pattern), names) and better != pattern:
        return f"; this model's feed-forward tensors are experts, write {better}"
    if "*" in pattern and hits(better := re.sub(r"(?<![.\])}\\\w])\*|(?<=\w)\*(?=\.|_|\w)", ".*", pattern), names):
        return f"; * repeats what stands before it, write {better}"
    for theirs, ours in _CHECKPOINT_NAMES.items():
        if theirs in pattern:
            meant = next((better for better in (pattern.replace(theirs, ours), ours) if hits(better, names)), "")
            if meant:
                return f"; '{theirs}' is the checkpoint's name, here it is {ours.lstrip('^')}: write {meant}"
    if hits(better := pattern.lower(), names):
        return f"; names are lower case, write {better}"
    return _layers_missing(pattern, names) or _nearest(pattern, names)


def _layers_missing(pattern: str, names: Sequence[str]) -> str:
    """The layer that a pattern names, where the model has none of that number."""
    there = {int(found[1]) for name in names if (found := re.match(r"blk\.(\d+)\.", name))}
    wanted = re.search(r"blk\\?\.(\d+)\\?\.", pattern)
    if wanted and there and int(wanted[1]) not in there:
        return f"; the model's layers are 0 to {max(there)}"
    return ""


def _nearest(pattern: str, names: Sequence[str]) -> str:
    """The name of a class of tensors that is spelled nearly like a word of the pattern."""
    words = {part for name in names for part in name.split(".") if "_" in part}
    for word in re.findall(r"[a-z]\w*_\w+", pattern):
        near = difflib.get_close_matches(word, words, n=1, cutoff=0.7)
        if near and near[0] != word and hits(better := pattern.replace(word, near[0]), names):
            return f"; did you mean {better}?"
    return ""
