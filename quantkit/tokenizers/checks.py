"""Checks of a file's tokenizer before the `tokenizers` library gets it.

The library trusts its input: an inconsistent table of replacements makes it panic or abort the process, a chain of
replacements turns ten characters into ten million, and an expression that backtracks runs for days. So only known steps
are passed on, within limits that published tokenizers do not approach:

    tokens            MAX_TOKEN characters; the longest published ones have about 256
    steps             MAX_STEPS, of the library's kinds; MAX_GROWTH characters for one, by all steps together
    expressions       at most one part that repeats without limit, so that searching is quadratic at worst, or one of
                      the published ones (pretokenizers.py)
    charsmap          every index that a lookup may compute lies in the table, every text it may give in the texts
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
MAX_PART = 64  # characters of a replacement, or of what is put before a text
MAX_REPLACEMENT = 128  # bytes of a text in a charsmap
_MAX_DEPTH = 8  # sequences within sequences

# Normalizers, and how many characters they make of one at most. Replace and Precompiled are worked out.
_GROWTH = {"NFC": 3, "NFD": 4, "NFKC": 18, "NFKD": 18, "Lowercase": 3, "Strip": 1, "StripAccents": 1, "Nmt": 1,
           "BertNormalizer": 12, "ByteLevel": 4, "Prepend": 1, "Replace": 1, "Precompiled": 1}  # fmt: skip
_PRE_TOKENIZERS = frozenset((
    "Metaspace", "Split", "Digits", "Whitespace", "WhitespaceSplit", "Punctuation", "ByteLevel", "BertPreTokenizer",
    "CharDelimiterSplit", "UnicodeScripts",
))  # fmt: skip
_OWN = frozenset((r"\A +| +\z", " {2,}"))  # hf_tokenizer.normalizer_steps


# ----------------------------------------------------------------------------------------------------------------- keys


def check_tokens(metadata: Mapping[str, object]) -> None:
    """FormatError where a token is longer than MAX_TOKEN. `archs.common.checked.check_tokenizer` checks all kinds."""
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
    """FormatError or UnsupportedError where a normalizer of a tokenizer.json is not passed on; `where` it stands."""
    growth = 1
    for each in _steps(step, "normalizers", where):
        kind = each["type"]
        if kind not in _GROWTH:
            raise UnsupportedError(f"{where}: a step of type '{printable(kind)}'; known: {', '.join(_GROWTH)}")
        growth *= _GROWTH[kind]
        if kind == "Replace":
            growth *= max(1, -(-len(_text(each, "content", where)) // _least(each, where)))
        elif kind == "Prepend":
            _text(each, "prepend", where)
        elif kind == "Precompiled":
            growth *= check_charsmap(_decoded(each, where), where)
        if growth > MAX_GROWTH:
            raise FormatError(f"{where}: its steps make over {MAX_GROWTH} characters of one, up to {growth}")


def check_pre_tokenizer(step: object, where: str) -> None:
    """The same of a pre-tokenizer."""
    for each in _steps(step, "pretokenizers", where):
        kind = each["type"]
        if kind not in _PRE_TOKENIZERS:
            known = ", ".join(sorted(_PRE_TOKENIZERS))
            raise UnsupportedError(f"{where}: a step of type '{printable(kind)}'; known: {known}")
        if kind == "Split":
            _least(each, where)


def _steps(step: object, name: str, where: str, depth: int = 0) -> Iterator[Json]:
    """The steps of a step, sequences resolved."""
    found = _nested(step, name, where, depth)
    for count, each in enumerate(found, 1):
        if count > MAX_STEPS:
            raise FormatError(f"{where}: over {MAX_STEPS} steps")
        yield each


def _nested(step: object, name: str, where: str, depth: int) -> Iterator[Json]:
    if step is None:
        return
    if not isinstance(step, dict) or not isinstance(step.get("type"), str) or depth > _MAX_DEPTH:
        raise FormatError(f"{where}: {_shown(step)} is no step of a tokenizer.json, or nested over {_MAX_DEPTH} deep")
    if step["type"] != "Sequence":
        yield step
        return
    inner = step.get(name)
    if not isinstance(inner, list):
        raise FormatError(f"{where}: a sequence whose {name} are {_shown(inner)}, no list")
    for each in inner:
        yield from _nested(each, name, where, depth + 1)


def _text(step: Json, key: str, where: str) -> str:
    found = step.get(key)
    if not isinstance(found, str) or len(found) > MAX_PART:
        raise FormatError(
            f"{where}: {step['type']}'s {key} is {_shown(found)}; it should be up to {MAX_PART} characters"
        )
    return found


def _least(step: Json, where: str) -> int:
    """The least number of characters that a step's pattern matches."""
    pattern = step.get("pattern")
    if isinstance(pattern, dict) and len(pattern) == 1:
        if isinstance(text := pattern.get("String"), str) and text:
            return len(text)
        if isinstance(text := pattern.get("Regex"), str):
            _check_expression(text, where)
            return 1
    raise FormatError(f"{where}: {step['type']}'s pattern is {_shown(pattern)}, neither text nor an expression")


def _check_expression(text: str, where: str) -> None:
    """One of the published ones, or one that repeats without limit in one place at most."""
    if text in _OWN or any(text in (*entry.splits, *sum(entry.equivalents, ())) for entry in pretokenizers.TABLE):
        return
    if "\\g" in text or "\\k" in text or repeats(text) > 1:  # calls of groups, which may recurse, and back references
        raise UnsupportedError(
            f"{where}: the expression '{printable(text[:100])}' is not a published one, and it may take for ever: it "
            "repeats in more than one place, calls groups, or has options"
        )


# ------------------------------------------------------------------------------------------------------------- charsmap


def _decoded(step: Json, where: str) -> bytes:
    import base64

    try:
        return base64.b64decode(step.get("precompiled_charsmap") or "", validate=True)
    except (ValueError, TypeError) as error:
        raise FormatError(f"{where}: its precompiled_charsmap is not base64: {error}") from None


def check_charsmap(data: bytes, where: str) -> int:
    """How many characters a SentencePiece table of replacements makes of one at most; FormatError where it is none.

    The bytes: the size of a double-array trie, u32; the trie, u32 units; the replacements, each text ended by a zero.
    A lookup goes from unit i to i ^ offset ^ (byte of the text), so each 256 units that it may reach must be there.
    """

    def refuse(why: str) -> FormatError:
        return FormatError(f"{where}: its table of replacements (precompiled_charsmap) is damaged: {why}")

    size = int.from_bytes(data[:4], "little")
    if len(data) < 8 or size % 4 or not 4 <= size <= len(data) - 4:
        raise refuse(f"a trie of {size} bytes in {len(data)}")
    units = np.frombuffer(data, "<u4", size // 4, 4).astype(np.int64)
    texts = data[4 + size :]
    target = np.arange(len(units)) ^ ((units >> 10) << ((units & 1 << 9) >> 6))
    inner = units < 1 << 31
    inner[0] = True  # from which every lookup starts, whatever it says
    if (wrong := np.flatnonzero(inner & ((target | 255) >= len(units)))).size:
        raise refuse(f"unit {wrong[0]} leads to unit {target[wrong[0]]} of {len(units)}")
    values = np.unique(units[target[inner & (units >> 8 & 1 == 1)]] & ((1 << 31) - 1))
    try:
        texts.decode()
    except UnicodeDecodeError as error:
        raise refuse(f"its texts are not UTF-8 ({error})") from None
    return max([1, *map(_lengths(texts, refuse), values.tolist())])


def _lengths(texts: bytes, refuse: Callable[[str], FormatError]) -> Callable[[int], int]:
    """What gives the characters of the replacement at a place."""

    def length(start: int) -> int:
        end = texts.find(b"\0", start, start + MAX_REPLACEMENT + 1)
        if start >= len(texts) or texts[start] & 0xC0 == 0x80:
            raise refuse(f"a replacement at byte {start} of {len(texts)}")
        if end < 0 and len(texts) - start > MAX_REPLACEMENT:
            raise refuse(f"a replacement of over {MAX_REPLACEMENT} bytes at byte {start}")
        return len(texts[start : end if end >= 0 else len(texts)].decode())

    return length
