"""Cut a text file into the chunks of tokens that llama.cpp's tools evaluate.

The whole text is tokenized once, with the tokenizer's own BOS and without parsing special tokens. One newline at its
end is removed, and so are the last tokens that do not fill a chunk. If the model adds BOS, the first token of every
chunk's input is replaced by BOS; the scored tokens are still the text's own.

With `chat`, the model's chat template formats conversations. The results are joined, tokenized with special tokens, and
cut like any text.
"""

from __future__ import annotations

import functools
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np

from quantkit.errors import DataError, FormatError
from quantkit.formats.atomic import os_errors
from quantkit.formats.kld.base_file import scored_rows
from quantkit.inputs import json_input

if TYPE_CHECKING:
    from quantkit.tokenizers.tokenizer import Tokenizer

DEFAULT_CONTEXT = 512
DEFAULT_BATCH = 2048


@dataclass(frozen=True)
class Chunks:
    """A text cut into chunks of equal length.

    tokens   int32[n_chunk, n_ctx], the text's own
    inputs   int32[n_chunk, n_ctx], what the model gets: the same, with BOS as first token if the model adds one
    source   name of the text
    scored   number of tokens at the end of each chunk that are scored; None: its second half
    """

    tokens: np.ndarray
    inputs: np.ndarray
    source: str
    scored: int | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def n_ctx(self) -> int:
        """Tokens per chunk."""
        return int(self.tokens.shape[1])

    @property
    def rows(self) -> slice:
        """Positions whose logits are scored; each predicts the token after it."""
        end = self.n_ctx - 1
        return scored_rows(self.n_ctx) if self.scored is None else slice(end - self.scored, end)


def read_text(path: str | os.PathLike[str]) -> str:
    """Read a UTF-8 text file, `-` for stdin, without the newline at its end. Raises DataError for other bytes."""
    data = text_bytes(path).removesuffix(b"\n")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: offset {error.start}: not UTF-8 ({error.reason}); convert the text first") from None


def text_bytes(path: str | os.PathLike[str]) -> bytes:
    """The bytes of a text file; of stdin, which is read once, for the path `-`."""
    if os.fspath(path) == "-":
        return _read_stream(sys.stdin)
    with os_errors(Path(path), "read"):
        return Path(path).read_bytes()


@functools.lru_cache(maxsize=1)
def _read_stream(stream: TextIO) -> bytes:
    return stream.buffer.read()


def with_bos(tokens: np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
    """Replace the first token of each chunk of int[n_chunk, n_ctx] by BOS, if the tokenizer adds one."""
    if not tokenizer.adds_bos:
        return tokens
    inputs = tokens.copy()
    inputs[:, 0] = tokenizer.bos_id
    return inputs


def chunked(
    tokenizer: Tokenizer,
    path: str | os.PathLike[str],
    n_ctx: int = DEFAULT_CONTEXT,
    limit: int | None = None,
    skip: int = 0,
    chat: bool = False,
) -> Chunks:
    """Tokenize a file and cut it into chunks of `n_ctx` tokens, after the first `skip` chunks and at most `limit`.

    With `chat` the file holds conversations (see `conversations`), which the model's chat template formats.
    """
    if n_ctx < 4:
        raise DataError(f"chunks of {n_ctx} tokens are too short to score; use at least 4")
    if limit is not None and limit < 1:
        raise DataError(f"a limit of {limit} chunks; use at least 1 (--chunks)")
    if chat:
        ids = []
        for messages in conversations(path):
            formatted = tokenizer.apply_chat_template(messages, add_generation_prompt=False)
            ids += tokenizer.encode(formatted, bos=False, special=True)
    else:
        ids = tokenizer.encode(read_text(path), bos=None)
    if len(ids) < (2 + skip) * n_ctx:
        raise DataError(
            f"{path}: {len(ids)} tokens, chunks of {n_ctx} need at least {(2 + skip) * n_ctx}; "
            "use a longer text or shorter chunks"
        )
    n_chunk = len(ids) // n_ctx - skip
    n_chunk = n_chunk if limit is None else min(n_chunk, limit)
    tokens = np.asarray(ids[skip * n_ctx : (skip + n_chunk) * n_ctx], np.int32).reshape(n_chunk, n_ctx)
    return Chunks(tokens, with_bos(tokens, tokenizer), str(path))


def windows(
    tokenizer: Tokenizer, path: str | os.PathLike[str], n_ctx: int, stride: int, limit: int | None = None
) -> Chunks:
    """Windows of n_ctx + stride / 2 tokens that begin `stride` apart; the last `stride` tokens of each are scored.

    This is llama-perplexity's older protocol (--ppl-stride). Every token after the first window's unscored beginning is
    scored once. BOS is only at the beginning of the text.
    """
    if not 1 <= stride < n_ctx:
        raise DataError(f"a stride of {stride} tokens, windows of {n_ctx}; it must be at least 1 and less than -c")
    ids = np.asarray(tokenizer.encode(read_text(path), bos=None), np.int32)
    window = n_ctx + stride // 2
    if len(ids) <= window:
        raise DataError(f"{path}: {len(ids)} tokens, one window needs {window}; use a longer text or a smaller -c")
    count = -(-(len(ids) - window) // stride)
    count = count if limit is None else min(count, limit)
    tokens = np.stack([ids[i * stride : i * stride + window] for i in range(count)])
    return Chunks(tokens, tokens, str(path), stride)


# ------------------------------------------------------------------------------------------------------- conversations

_ROLES = {"human": "user", "gpt": "assistant", "user": "user", "assistant": "assistant", "system": "system"}


def conversations(path: str | os.PathLike[str]) -> list[list[dict[str, Any]]]:
    """Read conversations as lists of messages with "role" and "content".

    A .jsonl file has one per line: a list of messages, an object with "messages", or an object with "conversations" of
    "from" and "value". In any other text, paragraphs (separated by blank lines) alternate between user and assistant.
    Raises DataError that names the first line of another form.
    """
    text = read_text(path).removeprefix("\ufeff")  # a byte order mark is not part of the text
    if Path(path).suffix != ".jsonl":
        paragraphs = [part.strip() for part in re.split(r"\n\s*\n", text) if part.strip()]
        pairs = [paragraphs[i : i + 2] for i in range(0, len(paragraphs), 2)]
        return [[{"role": r, "content": c} for r, c in zip(("user", "assistant"), pair)] for pair in pairs]
    return [_conversation(path, number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]


def _conversation(path: str | os.PathLike[str], number: int, line: str) -> list[dict[str, Any]]:
    try:
        found = json_input.parse(line, str(path))
        if isinstance(found, dict):
            found = found["messages"] if "messages" in found else found["conversations"]
        messages = [
            {**m, "role": m["role"], "content": m["content"]}
            if "role" in m
            else {"role": _ROLES[m["from"]], "content": m["value"]}
            for m in found
        ]
        if messages:
            return messages
    except (FormatError, KeyError, TypeError):
        pass
    raise DataError(
        f'{path}: line {number} is not a conversation: it must be a list of {{"role": …, "content": …}}, or an object '
        'with such "messages"'
    )
