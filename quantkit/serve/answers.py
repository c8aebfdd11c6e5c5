"""Answers in the JSON of OpenAI's API: whole ones and the chunks of a stream, of completions and of chats."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from quantkit.serve.generation import Piece, ScoredToken
from quantkit.serve.requests import Request

Record = dict[str, Any]


@dataclass
class Answer:
    """What all records of one answer have in common, and the pieces of its choices so far.

    `choices` are pieces, joined, by the number of the prompt.
    """

    request: Request
    model: str
    prompt_tokens: int
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))
    choices: dict[int, Piece] = field(default_factory=dict)
    generated: int = 0

    def add(self, index: int, piece: Piece) -> None:
        """Append a piece to a choice."""
        whole = self.choices.setdefault(index, Piece())
        whole.text += piece.text
        whole.tokens += piece.tokens
        whole.finish = piece.finish
        self.generated += piece.generated

    def record(self) -> Record:
        """The whole answer."""
        choices = [self._choice(index, piece) for index, piece in sorted(self.choices.items())]
        return self._head("chat.completion") | {"choices": choices, "usage": self._usage()}

    def chunks(self, index: int, piece: Piece) -> Iterator[Record]:
        """The chunks of a stream for a piece. Of a chat, the role comes first and the end is a chunk of its own."""
        self.generated += piece.generated
        if not self.request.is_chat:
            yield self._chunk([self._choice(index, piece)])
            return
        if index not in self.choices:
            self.choices[index] = Piece()
            yield self._chunk([self._delta(index, {"role": "assistant", "content": ""})])
        if piece.text or piece.tokens:
            yield self._chunk([self._delta(index, {"content": piece.text}, piece.tokens)])
        if piece.finish:
            yield self._chunk([self._delta(index, {}, finish=piece.finish)])

    def usage_chunk(self) -> Record:
        """The chunk of stream_options.include_usage, the last one."""
        return self._chunk([]) | {"usage": self._usage()}

    def _chunk(self, choices: list[Record]) -> Record:
        return self._head("chat.completion.chunk") | {"choices": choices}

    def _head(self, chat: str) -> Record:
        prefix, kind = ("chatcmpl", chat) if self.request.is_chat else ("cmpl", "text_completion")
        return {"id": f"{prefix}-{self.id}", "object": kind, "created": self.created, "model": self.model}

    def _usage(self) -> Record:
        total = self.prompt_tokens + self.generated
        return {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.generated, "total_tokens": total}

    def _choice(self, index: int, piece: Piece) -> Record:
        scores = self.request.top is not None
        if self.request.is_chat:
            said: Record = {"message": {"role": "assistant", "content": piece.text}}
            logprobs = {"content": chat_logprobs(piece.tokens)} if scores else None
        else:
            said = {"text": piece.text}
            logprobs = completion_logprobs(piece.tokens) if scores else None
        return {"index": index, **said, "logprobs": logprobs, "finish_reason": piece.finish}

    def _delta(
        self, index: int, delta: Record, tokens: list[ScoredToken] | None = None, finish: str | None = None
    ) -> Record:
        logprobs = {"content": chat_logprobs(tokens)} if self.request.top is not None and tokens else None
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}


def completion_logprobs(tokens: list[ScoredToken]) -> Record:
    """`logprobs` of a completion. The top ones of a token include itself; the first of a prompt has null for both."""
    top: list[dict[str, float] | None] = []
    for scored in tokens:
        if scored.logprob is None:
            top.append(None)
            continue
        likely = {token_text(data): value for data, value in reversed(scored.top)}  # of equal texts the likelier
        likely = dict(reversed(likely.items()))
        top.append(likely if token_text(scored.data) in likely else likely | {token_text(scored.data): scored.logprob})
    return {
        "tokens": [token_text(scored.data) for scored in tokens],
        "token_logprobs": [scored.logprob for scored in tokens],
        "top_logprobs": top,
        "text_offset": [scored.offset for scored in tokens],
    }


def chat_logprobs(tokens: list[ScoredToken]) -> list[Record]:
    """`logprobs.content` of a chat."""
    return [
        _of_token(scored.data, scored.logprob) | {"top_logprobs": [_of_token(*pair) for pair in scored.top]}
        for scored in tokens
    ]


def _of_token(data: bytes, logprob: float | None) -> Record:
    return {"token": token_text(data), "logprob": logprob, "bytes": list(data)}


def token_text(data: bytes) -> str:
    r"""The text of a token, or `bytes:\xe2\x80`, as OpenAI writes a part of a character."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
