"""tiktoken files (tiktoken.model, hy.tiktoken): one token a line, in base64, with its rank.

tiktoken repeatedly merges the neighbours whose joint token has the lowest rank. A word that is a token stays that
token. To get equivalent merges, the bytes of each token are merged with only the tokens of lower rank. If two parts
remain, they are the merge that makes the token. If more remain, no merge makes it, and it occurs only as a whole word.
The pre-tokenizer is in the checkpoint's Python code, which is not run; the class in tokenizer_config.json tells it.
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
_RESERVED = {"TikTokenTokenizer": 256}  # control tokens after the ranks; named <|reserved_token_ID|> by default


def find(directory: Path) -> Path | None:
    """The path of a checkpoint's tiktoken file; None if it has none."""
    return next(iter([*directory.glob("tiktoken.model"), *sorted(directory.glob("*.tiktoken"))]), None)


def tokenizer_json(path: Path, settings: Json, pre: str | None = None) -> dict[str, Any]:
    """The tokenizer.json equivalent to a tiktoken file (`path`) and tokenizer_config.json (`settings`).

    `pre` names the pre-tokenizer. Without it, the class does; UnsupportedError for an unknown class.
    """
    kind = pretokenizers.tokenizer_class(path, settings, _BY_CLASS, pre)
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
    """The rank of every token, lowest first."""
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
        raise FormatError(
            f"{path}: {len(missing)} single bytes are no tokens, {missing[0]!r} the first; all 256 have to be"
        )
    return dict(sorted(found.items(), key=lambda item: item[1]))


def _parts(token: bytes, ranks: Mapping[bytes, int]) -> list[bytes]:
    """The parts that remain when a token's bytes are merged with tokens of lower rank only; two if a merge makes it."""
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
    """GPT-2's printable alphabet, a character for each byte: itself if printable in Latin-1, else from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return tuple(chr(byte if byte in printable else next(others)) for byte in range(256))
