"""tiktoken's files (tiktoken.model, hy.tiktoken): one token a line, in base64, with its rank.

Such a tokenizer merges the neighbours whose joint token has the lowest rank; a word that is a token is that token. The
merges that say the same: every token is made of the two parts that its own bytes come down to when only tokens of lower
rank may be made. A token whose bytes come down to more parts is no one's merge, only a whole word. The pre-tokenizer
is in the checkpoint's Python file, which is not run; it is known by the class that tokenizer_config.json names.
"""

from __future__ import annotations

import base64
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantkit.errors import FormatError
from quantkit.inputs.json_input import MAX_BYTES, Json
from quantkit.inputs.regular_file import read_bytes
from quantkit.tokenizers import pretokenizers
from quantkit.tokenizers.checks import MAX_TOKEN

_BY_CLASS = {"TikTokenTokenizer": "kimi-k2", "HYTokenizer": "hunyuan"}
_RESERVED = {"TikTokenTokenizer": 256}  # control tokens after the ranks: <|reserved_token_ID|> if nothing else


def find(directory: Path) -> Path | None:
    """A checkpoint's file of ranks."""
    return next(iter([*directory.glob("tiktoken.model"), *sorted(directory.glob("*.tiktoken"))]), None)


def tokenizer_json(path: Path, settings: Json, pre: str | None = None) -> dict[str, Any]:
    """The tokenizer.json that says what the file of ranks and `settings`, tokenizer_config.json, say.

    `pre` names the pre-tokenizer instead of recognising it. UnsupportedError for a class whose way is not known.
    """
    kind = pretokenizers.class_of(path, settings, _BY_CLASS, pre)
    ranks = _ranks(path)
    alphabet = byte_alphabet()
    text = {token: "".join(alphabet[byte] for byte in token) for token in ranks}
    parts = [_parts(token, ranks) for token in ranks]
    merges = [[text[part] for part in both] for both in parts if len(both) == 2]
    model = {"type": "BPE", "vocab": {text[token]: rank for token, rank in ranks.items()}, "merges": merges}
    added = {int(i): token for i, token in settings.get("added_tokens_decoder", {}).items()}
    first = max(ranks.values()) + 1
    for i in range(first, first + _RESERVED.get(kind, 0)):
        added.setdefault(i, {"content": f"<|reserved_token_{i}|>", "special": True})
    return {
        "model": model | {"ignore_merges": True},
        "pre_tokenizer": pretokenizers.to_json(pretokenizers.get(pre or _BY_CLASS[kind])),
        "added_tokens": [{"id": i, **token} for i, token in sorted(added.items())],
    }


def _ranks(path: Path) -> dict[bytes, int]:
    """Rank of every token, lowest first."""
    found = {}
    for number, line in enumerate(read_bytes(path, MAX_BYTES).splitlines(), 1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            found[text := base64.b64decode(token, validate=True)] = int(rank)
        except ValueError:
            raise FormatError(f"{path}: line {number} is not a token in base64 and its rank: {line[:60]!r}") from None
        if len(text) > MAX_TOKEN:
            raise FormatError(f"{path}: line {number} is a token of {len(text)} bytes; up to {MAX_TOKEN} are read")
    if missing := sorted({bytes([byte]) for byte in range(256)} - set(found)):
        raise FormatError(f"{path}: {len(missing)} single bytes are no tokens, {missing[0]!r} the first; all must be")
    return dict(sorted(found.items(), key=lambda item: item[1]))


def _parts(token: bytes, ranks: Mapping[bytes, int]) -> list[bytes]:
    """The tokens of lower rank that this one's bytes come down to: two if a merge makes it."""
    parts = [bytes([byte]) for byte in token]
    never, own = 2 * len(ranks), ranks[token]
    joined = [ranks.get(token[i : i + 2], never) for i in range(len(token) - 1)]  # rank of part i with part i + 1
    while len(parts) > 2 and (rank := min(joined)) < own:
        i = joined.index(rank)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
        del joined[i]
        for j in range(max(i - 1, 0), min(i + 1, len(joined))):
            joined[j] = ranks.get(parts[j] + parts[j + 1], never)
    return parts


@functools.cache
def byte_alphabet() -> tuple[str, ...]:
    """GPT-2's printable alphabet: printable Latin-1 stands for itself, other bytes for U+0100 onward, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return tuple(chr(byte if byte in printable else next(others)) for byte in range(256))
