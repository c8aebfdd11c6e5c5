"""Cut a text file into the chunks of tokens that llama.cpp's tools evaluate.

The whole text is tokenized once, with the tokenizer's own BOS and without parsing special tokens. One newline at its
end is removed, and so are the last tokens that do not fill a chunk. If the model adds BOS, the first token of every
chunk's input is replaced by BOS; the scored tokens are still the text's own.

`chat_chunks.py` makes chunks of conversations, each a sequence of its own. An importance matrix has them joined and
cut like any text.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from quantkit.errors import DataError
from quantkit.evaluate.corpus import conversations, read_text
from quantkit.formats.kld.scored_tokens import ScoredTokens, logit_rows, row_counts, scored_rows

if TYPE_CHECKING:
    from quantkit.tokenizers.tokenizer import Tokenizer

DEFAULT_CONTEXT = 512
DEFAULT_BATCH = 2048
_ARRAYS = ("tokens", "inputs")


@dataclass(frozen=True)
class Chunks:
    """A text cut into chunks of equal length.

    tokens   int32[n_chunk, n_ctx], the text's own
    inputs   int32[n_chunk, n_ctx], what the model gets: the same, with BOS as first token if the model adds one
    source   name of the text
    scored   number of tokens at the end of each chunk that are scored; None: its second half
    choice   the scored tokens, if they are neither; the inputs of conversations have no other BOS than their template's
    notes    what the user should know: conversations that are cut or left out
    """

    tokens: np.ndarray
    inputs: np.ndarray
    source: str
    scored: int | None = None
    choice: ScoredTokens | None = None
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def n_ctx(self) -> int:
        """Tokens per chunk."""
        return int(self.tokens.shape[1])

    @functools.cached_property
    def rows(self) -> slice | list[np.ndarray]:
        """Positions whose logits are scored, of all chunks or of each: int64[k]. Each predicts the token after it."""
        end = self.n_ctx - 1
        if self.scored is not None:
            return slice(end - self.scored, end)
        return logit_rows(self.n_ctx, len(self), self.choice)

    @property
    def counts(self) -> np.ndarray:
        """int64[n_chunk]: the number of scored tokens of each chunk."""
        if self.scored is not None:
            return np.full(len(self), self.scored, np.int64)
        return row_counts(self.n_ctx, len(self), self.choice)

    @property
    def depths(self) -> np.ndarray:
        """int64[scored tokens]: the number of tokens before each in its chunk."""
        rows = self.rows
        if isinstance(rows, slice):
            return np.tile(np.arange(rows.start, rows.stop) + 1, len(self))
        return np.concatenate(rows) + 1

    def of(self, index: int) -> np.ndarray:
        """int32[k]: the scored tokens of a chunk."""
        rows = self.rows
        positions = np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows[index]
        return np.asarray(self.tokens[index, positions + 1])


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
    special: bool = False,
) -> Chunks:
    """Tokenize a file and cut it into chunks of `n_ctx` tokens, after the first `skip` chunks and at most `limit`.

    With `chat` the file holds conversations (see `corpus.conversations`), which the model's chat template
    formats; they are joined. `special` finds control tokens written out in a text.
    """
    if chat:
        ids = _joined_conversations(tokenizer, path)
    else:
        ids = tokenizer.encode(read_text(path), bos=None, special=special)
    return cut(tokenizer, ids, str(path), n_ctx, limit, skip)


def cut(
    tokenizer: Tokenizer, ids: Sequence[int], source: str, n_ctx: int, limit: int | None = None, skip: int = 0
) -> Chunks:
    """Cut the tokens of a text into chunks, as `chunked` does."""
    if n_ctx < 4:
        raise DataError(f"chunks of {n_ctx} tokens are too short to score; use at least 4")
    if limit is not None and limit < 1:
        raise DataError(f"a limit of {limit} chunks; use at least 1 (--chunks)")
    if len(ids) < (2 + skip) * n_ctx:
        raise DataError(
            f"{source}: {len(ids)} tokens, chunks of {n_ctx} need at least {(2 + skip) * n_ctx}; "
            "use a longer text or shorter chunks"
        )
    n_chunk = len(ids) // n_ctx - skip
    n_chunk = n_chunk if limit is None else min(n_chunk, limit)
    tokens = np.asarray(ids[skip * n_ctx : (skip + n_chunk) * n_ctx], np.int32).reshape(n_chunk, n_ctx)
    return Chunks(tokens, with_bos(tokens, tokenizer), source)


def _joined_conversations(tokenizer: Tokenizer, path: str | os.PathLike[str]) -> list[int]:
    ids = []
    for conversation in conversations(path):
        formatted = tokenizer.apply_chat_template(conversation.messages, add_generation_prompt=False)
        ids += tokenizer.encode(formatted, bos=False, special=True)
    return ids


def score_chunks(chunks: Chunks, score: str, labels: Sequence[str] = ()) -> Chunks:
    """The same chunks of plain text, with "all" tokens but the first of each scored, or the second "half" of each.

    labels   the category of each chunk
    """
    mask = np.zeros(chunks.tokens.shape, np.bool_)
    mask[:, 1 if score == "all" else scored_rows(chunks.n_ctx).start + 1 :] = True
    return replace(chunks, choice=ScoredTokens(mask, score, False, tuple(labels)))


def join(parts: Sequence[Chunks], source: str) -> Chunks:
    """The chunks of several texts, made with the same options, in order; shorter ones are filled with their last token.

    The labels of parts that have none are empty.
    """
    width = max(part.n_ctx for part in parts)

    def filled(array: np.ndarray, mode: str) -> np.ndarray:
        return np.pad(array, ((0, 0), (0, width - array.shape[1])), mode=mode)  # type: ignore[call-overload,no-any-return]

    tokens, inputs = (np.concatenate([filled(getattr(part, name), "edge") for part in parts]) for name in _ARRAYS)
    notes = tuple(note for part in parts for note in part.notes)
    choices = [part.choice for part in parts if part.choice is not None]
    if len(choices) < len(parts):
        return Chunks(tokens, inputs, source, notes=notes)
    mask = np.concatenate([filled(choice.mask, "constant") for choice in choices])
    labels: list[str] = []
    if any(choice.labels for choice in choices):
        labels = [label for choice in choices for label in choice.labels or [""] * len(choice.mask)]
    choice = ScoredTokens(mask, choices[0].what, choices[0].chat, labels)
    return Chunks(tokens, inputs, source, choice=choice, notes=notes)


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
