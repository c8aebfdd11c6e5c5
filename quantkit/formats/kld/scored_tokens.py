"""`ScoredTokens`: which tokens of each chunk are scored, where it is not the second half of every chunk.

The formula of a figure does not change; only the tokens do, over which it is averaged. So a base file records them: a
run that reads the file scores the same ones.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from quantkit.errors import DataError

CHOICES = ("half", "all", "assistant")


@dataclass(frozen=True)
class ScoredTokens:
    """The scored tokens of chunks.

    mask     bool[n_chunk, n_ctx]: whether a token is scored. The logits at t - 1 predict token t, so the first is not
    what     "half": the second half of each chunk; "all"; "assistant": what the assistant writes in conversations
    chat     whether each chunk is a conversation, with the special tokens of its template, rather than a piece of text
    labels   the category of each chunk; empty without categories

    Raises DataError for a chunk without a scored token.
    """

    mask: np.ndarray
    what: str
    chat: bool = False
    labels: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.what not in CHOICES or self.mask.ndim != 2 or self.mask.dtype != np.bool_:
            raise DataError(f"scored tokens: expected bool[n_chunk, n_ctx] and one of {CHOICES}, got '{self.what}'")
        if self.labels and len(self.labels) != len(self.mask):
            raise DataError(f"scored tokens: {len(self.labels)} categories for {len(self.mask)} chunks")
        if self.mask[:, 0].any() or not self.mask.any(axis=1).all():
            raise DataError("scored tokens: the first token of a chunk cannot be scored, and one of the others must be")

    @cached_property
    def counts(self) -> np.ndarray:
        """int64[n_chunk]: the number of scored tokens of each chunk."""
        return np.asarray(np.count_nonzero(self.mask, axis=1), np.int64)

    def rows(self, index: int) -> np.ndarray:
        """int64[k]: the positions of a chunk whose logits predict its scored tokens."""
        return np.asarray(np.flatnonzero(self.mask[index]) - 1)

    @property
    def about(self) -> str:
        """What is scored, in words, for conditions and messages."""
        if not self.chat:
            return "all tokens of a chunk" if self.what == "all" else "the second half of each chunk"
        return "the assistant's tokens" if self.what == "assistant" else "all tokens of a conversation"

    def to_json(self) -> dict[str, Any]:
        """As a JSON object; `from_json` is its inverse."""
        bits = base64.b64encode(np.packbits(self.mask, axis=1).tobytes()).decode()
        return {"what": self.what, "chat": self.chat, "labels": list(self.labels), "mask": bits}

    @classmethod
    def from_json(cls, data: Mapping[str, Any], n_chunk: int, n_ctx: int) -> ScoredTokens:
        """Read what `to_json` gives. ValueError, KeyError, TypeError or DataError for anything else."""
        bits = np.frombuffer(base64.b64decode(data["mask"]), np.uint8).reshape(n_chunk, -1)
        if bits.shape[1] != -(-n_ctx // 8):
            raise ValueError(f"a mask of {8 * bits.shape[1]} tokens for chunks of {n_ctx}")
        mask = np.unpackbits(bits, axis=1, count=n_ctx).astype(np.bool_)
        return cls(mask, str(data["what"]), bool(data["chat"]), tuple(map(str, data["labels"])))


def scored_rows(n_ctx: int) -> slice:
    """Positions of a chunk whose logits are scored: those in the second half that predict a token of the chunk."""
    return slice(n_ctx // 2, n_ctx - 1)


def rows_per_chunk(n_ctx: int) -> int:
    """Number of rows of a chunk of `n_ctx` tokens: that of its scored positions."""
    return n_ctx - 1 - n_ctx // 2


def logit_rows(n_ctx: int, n_chunk: int, scored: ScoredTokens | None) -> slice | list[np.ndarray]:
    """The positions whose logits are scored: a slice for all chunks alike, or int64[k] for each chunk."""
    return scored_rows(n_ctx) if scored is None else [scored.rows(i) for i in range(n_chunk)]


def row_counts(n_ctx: int, n_chunk: int, scored: ScoredTokens | None) -> np.ndarray:
    """int64[n_chunk]: the number of scored tokens of each chunk."""
    return np.full(n_chunk, rows_per_chunk(n_ctx), np.int64) if scored is None else scored.counts
