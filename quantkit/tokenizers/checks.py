"""Checks of a file's tokenizer before the `tokenizers` library gets it.

The library trusts its input: an inconsistent table of replacements makes it panic or abort the process, a chain of
replacements turns ten characters into ten million, and a regular expression that backtracks runs for days. So it gets
known steps only, within limits far above those of published tokenizers:

    tokens            MAX_TOKEN characters; the longest published ones have about 256
    steps             MAX_STEPS of known types; all steps together make at most MAX_GROWTH characters of one
    expressions       at most one part that repeats without limit, so that a search takes quadratic time at worst, or an
                      expression of a published tokenizer (pretokenizers.py)
    charsmap          every index that a lookup can compute is within the table, every replacement within the texts
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np

from quantkit.errors import FormatError, UnsupportedError, printable
from quantkit.inputs.json_input import Json
from quantkit.inputs.safe_regex import repeats
from quantkit.tokenizers import pretokenizers

MAX_TOKEN = 1024  # characters
MAX_STEPS = 32  # of a normalizer or a pre-tokenizer
MAX_GROWTH = 1000  # characters that one character may become
MAX_PART = 64  # characters of a replacement or of a prepended text
MAX_REPLACEMENT = 128  # bytes of a text in a charsmap
_MAX_DEPTH = 8  # sequences within sequences

# Normalizers, and how many characters they make of one at most. Replace and Precompiled are multiplied by theirs.
_GROWTH = {"NFC": 3, "NFD": 4, "NFKC": 18, "NFKD": 18, "Lowercase": 3, "Strip": 1, "StripAccents": 1, "Nmt": 1,
           "BertNormalizer": 12, "ByteLevel": 4, "Prepend": 1, "Replace": 1, "Precompiled": 1}  # fmt: skip
_PRE_TOKENIZERS = frozenset((
    "Metaspace", "Split", "Digits", "Whitespace", "WhitespaceSplit", "Punctuation", "ByteLevel", "BertPreTokenizer",
    "CharDelimiterSplit", "UnicodeScripts",
))  # fmt: skip
_OWN = frozenset((r"\A +| +\z", " {2,}"))  # hf_tokenizer.normalizer_steps


# ----------------------------------------------------------------------------------------------------------------- keys


def check_tokens(metadata: Mapping[str, object]) -> None:
    """FormatError if a token is longer than MAX_TOKEN. `archs.common.checked.check_tokenizer` checks the types."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and max(map(len, tokens), default=0) > MAX_TOKEN:
        i, token = next((i, token) for i, token in enumerate(tokens) if len(token) > MAX_TOKEN)
        raise FormatError(
            f"token {i} of tokenizer.ggml.tokens has {len(token)} characters, up to {MAX_TOKEN} are read; it begins "
            f"with '{printable(token[:40])}'"
        )


def _shown(value: object) -> str:
    return printable(repr(value)[:60])


# ---------------------------------------------------------------------------------------------------------------- steps


def check_normalizer(step: object, where: str) -> None:
    """FormatError or UnsupportedError if the library must not get this normalizer. `where` begins the message."""
    growth = 1
    for each in _steps(step, "normalizers", where):
        kind = each["type"]
        if kind not in _GROWTH:
            raise UnsupportedError(f"{where}: a step of type '{printable(kind)}'; known: {', '.join(_GROWTH)}")
        growth *= _GROWTH[kind]
        if kind == "Replace":
            growth *= max(1, -(-len(_text(each, "content", where)) // _min_length(each, where)))
        elif kind == "Prepend":
            _text(each, "prepend", where)
        elif kind == "Precompiled":
            growth *= check_charsmap(_decoded(each, where), where)
        if growth > MAX_GROWTH:
            raise FormatError(f"{where}: its steps make over {MAX_GROWTH} characters of one, up to {growth}")


def check_pre_tokenizer(step: object, where: str) -> None:
    """FormatError or UnsupportedError if the library must not get this pre-tokenizer."""
    for each in _steps(step, "pretokenizers", where):
        kind = each["type"]
        if kind not in _PRE_TOKENIZERS:
            known = ", ".join(sorted(_PRE_TOKENIZERS))
            raise UnsupportedError(f"{where}: a step of type '{printable(kind)}'; known: {known}")
        if kind == "Split":
            _min_length(each, where)


def _steps(step: object, name: str, where: str, depth: int = 0) -> Iterator[Json]:
    """The steps of a step, sequences resolved."""
    nested = _nested(step, name, where, depth)
    for count, each in enumerate(nested, 1):
        if count > MAX_STEPS:
            raise FormatError(f"{where}: over {MAX_STEPS} steps")
        yield each


def _nested(step: object, name: str, where: str, depth: int) -> Iterator[Json]:
    if step is None:
        return
    if not isinstance(step, dict) or not isinstance(step.get("type"), str) or depth > _MAX_DEPTH:
        raise FormatError(
            f"{where}: {_shown(step)} is not a step of a tokenizer.json, or is nested over {_MAX_DEPTH} deep"
        )
    if step["type"] != "Sequence":
        yield step
        return
    inner = step.get(name)
    if not isinstance(inner, list):
        raise FormatError(f"{where}: a sequence whose {name} are {_shown(inner)}, not a list")
    for each in inner:
        yield from _nested(each, name, where, depth + 1)


def _text(step: Json, key: str, where: str) -> str:
    value = step.get(key)
    if not isinstance(value, str) or len(value) > MAX_PART:
        raise FormatError(
            f"{where}: {step['type']}'s {key} is {_shown(value)}; it should be up to {MAX_PART} characters"
        )
    return value


def _min_length(step: Json, where: str) -> int:
    """The smallest number of characters that a step's pattern matches."""
    pattern = step.get("pattern")
    if isinstance(pattern, dict) and len(pattern) == 1:
        if isinstance(text := pattern.get("String"), str) and text:
            return len(text)
        if isinstance(text := pattern.get("Regex"), str):
            _check_expression(text, where)
            return 1
    raise FormatError(
        f"{where}: {step['type']}'s pattern is {_shown(pattern)}, neither a string nor a regular expression"
    )


def _check_expression(text: str, where: str) -> None:
    """UnsupportedError unless the expression is a published one or repeats without limit in at most one place."""
    if text in _OWN or any(text in (*entry.splits, *sum(entry.equivalents, ())) for entry in pretokenizers.TABLE):
        return
    if "\\g" in text or "\\k" in text or repeats(text) > 1:  # calls of groups, which may recurse, and back references
        raise UnsupportedError(
            f"{where}: the expression '{printable(text[:100])}' is not a published one; a search could take forever: "
            "it repeats in more than one place, calls groups, or has options"
        )


# ------------------------------------------------------------------------------------------------------------- charsmap


def _decoded(step: Json, where: str) -> bytes:
    import base64

    try:
        return base64.b64decode(step.get("precompiled_charsmap") or "", validate=True)
    except (ValueError, TypeError) as error:
        raise FormatError(f"{where}: its precompiled_charsmap is not base64: {error}") from None


def check_charsmap(data: bytes, where: str) -> int:
    """The most characters that a SentencePiece charsmap makes of one. FormatError if it is damaged.

    The bytes: the size of a double-array trie, u32; the trie, u32 units; the replacements, each text ended by a zero.
    A lookup goes from unit i to i ^ offset ^ (byte of the text), so all 256 units that it may reach must exist.
    """

    def refuse(why: str) -> FormatError:
        return FormatError(f"{where}: its table of replacements (precompiled_charsmap) is damaged: {why}")

    size = int.from_bytes(data[:4], "little")
    if len(data) < 8 or size % 4 or not 4 <= size <= len(data) - 4:
        raise refuse(f"a trie of {size} bytes in {len(data)}")
    units = np.frombuffer(data, "<u4", size // 4, 4).astype(np.int64)
    texts = data[4 + size :]
    target = np.arange(len(units)) ^ ((units >> 10) << ((units & 1 << 9) >> 6))
    used = units < 1 << 31
    used[0] = True  # every lookup starts here
    if (wrong := np.flatnonzero(used & ((target | 255) >= len(units)))).size:
        raise refuse(f"unit {wrong[0]} leads to unit {target[wrong[0]]} of {len(units)}")
    values = np.unique(units[target[used & (units >> 8 & 1 == 1)]] & ((1 << 31) - 1))
    try:
        texts.decode()
    except UnicodeDecodeError as error:
        raise refuse(f"its texts are not UTF-8 ({error})") from None
    return max([1, *map(_lengths(texts, refuse), values.tolist())])


def _lengths(texts: bytes, refuse: Callable[[str], FormatError]) -> Callable[[int], int]:
    """A function from the offset of a replacement to its length in characters."""

    def length(start: int) -> int:
        end = texts.find(b"\0", start, start + MAX_REPLACEMENT + 1)
        if start >= len(texts) or texts[start] & 0xC0 == 0x80:
            raise refuse(f"a replacement at byte {start} of {len(texts)}")
        if end < 0 and len(texts) - start > MAX_REPLACEMENT:
            raise refuse(f"a replacement of over {MAX_REPLACEMENT} bytes at byte {start}")
        return len(texts[start : end if end >= 0 else len(texts)].decode())

    return length
