"""A prompt to pieces of text, with log-probabilities of its own tokens (echo) and of those that follow.

The log-probability of a token is its logit minus the log of the sum of exponentials, in float64, of the model's own
distribution: before temperature, top-k and the like. The first token of a prompt has none.

The logits of a prompt are computed for so many positions at a time that they take LOGITS_BYTES at most, whatever the
context and the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from quantkit.errors import DataError
from quantkit.inputs import arguments
from quantkit.runtime.generate import Sampler, TextModel
from quantkit.runtime.kv.cache import Cache
from quantkit.serve.api_error import ApiError
from quantkit.serve.requests import Request
from quantkit.tokenizers.tokenizer import Tokenizer

PROMPT_TOKENS = 512  # computed between two looks at whether the client is still there
LOGITS_BYTES = 64 << 20  # of a prompt's logits
MAX_LOGPROBS = 1 << 20  # of an answer


class Cancelled(Exception):
    """The client has left, or the server stops."""


@dataclass(frozen=True)
class Prompt:
    """A prompt as tokens.

    text      as written; None for one that was given as tokens
    has_bos   whether the first token is a BOS that is not part of the text
    limit     of tokens to generate
    """

    tokens: list[int]
    text: str | None
    has_bos: bool
    limit: int


@dataclass(frozen=True)
class ScoredToken:
    """A token with its log-probability.

    data      bytes of its text
    offset    characters of the answer before it
    logprob   natural logarithm; None for the first token of a prompt
    top       the most likely tokens of this position, as (bytes, log-probability), most likely first
    """

    data: bytes
    offset: int
    logprob: float | None
    top: list[tuple[bytes, float]]


@dataclass
class Piece:
    """A piece of an answer.

    tokens      with log-probabilities, if they are asked for
    finish      of the last piece: "stop" (a token that ends replies, or a stop string) or "length"
    generated   of the last piece: number of tokens, with the one that ended the reply
    """

    text: str = ""
    tokens: list[ScoredToken] = field(default_factory=list)
    finish: str | None = None
    generated: int = 0


def prepare(model: TextModel, request: Request) -> list[Prompt]:
    """The prompts of a request as tokens. ApiError (400) or QuantkitError for those that the model cannot take."""
    prompts = [_prompt(model, request, prompt) for prompt in request.prompts]
    if request.top is not None:
        tokens = sum(prompt.limit + (len(prompt.tokens) if request.echo else 0) for prompt in prompts)
        if tokens * (request.top + 1) > MAX_LOGPROBS:
            raise ApiError(
                400,
                f"the answer may have {tokens} tokens with {request.top + 1} log-probabilities each; at most "
                f"{MAX_LOGPROBS} are sent: send fewer prompts in a request, or lower max_tokens or logprobs",
            )
    return prompts


def _prompt(model: TextModel, request: Request, prompt: str | list[int]) -> Prompt:
    tokenizer = model.tokenizer
    has_bos = False
    if request.messages is not None:
        text = tokenizer.apply_chat_template(request.messages)
        tokens = tokenizer.encode(text, bos=False, special=True)
    elif isinstance(prompt, str):
        tokens, has_bos = tokenizer.encode_prompt(prompt)
    else:
        tokens = arguments.integers(prompt, f"tokens of a vocabulary of {model.vocab_size}", model.vocab_size).tolist()
    if not tokens:
        raise DataError("the prompt has no tokens; pass some text")
    asked = request.max_tokens
    if len(tokens) + (1 if asked is None else asked) > model.n_ctx:
        about = "" if asked is None else f" and max_tokens is {asked}"
        raise ApiError(
            400, f"the prompt has {len(tokens)} tokens{about}; the context holds {model.n_ctx} (quantkit serve -c)",
            "context_length_exceeded",
        )  # fmt: skip
    limit = model.n_ctx - len(tokens) if asked is None else asked
    return Prompt(tokens, prompt if isinstance(prompt, str) else None, has_bos, limit)


def complete(
    model: TextModel, cache: Cache, prompt: Prompt, request: Request, is_cancelled: Callable[[], bool]
) -> Iterator[Piece]:
    """Run a prompt and generate. The last piece, and no other, has `finish`. Cancelled where `is_cancelled` says so."""
    cache.clear()
    texts = _Texts(model.tokenizer, prompt, request.echo)
    scores = request.top is not None
    echoed, logits = _prefill(model, cache, prompt, request, texts, is_cancelled)
    if request.echo:
        yield Piece(texts.prompt, echoed)
    stops, sampler = _StopStrings(request.stop), Sampler(request.sampling)
    history, waiting = list(prompt.tokens), list[ScoredToken]()
    sent = texts.length  # characters
    finish, count = "length", 0
    while count < prompt.limit:
        if is_cancelled():
            raise Cancelled
        token = sampler(logits, history)
        history.append(token)
        count += 1
        if scores:
            waiting.append(_score(model.tokenizer, logits, token, request.top or 0, texts.length))
        if token in model.tokenizer.eos_ids:
            finish = "stop"
            break
        text = stops.push(texts.push(token))
        sent += len(text)
        if stops.found:
            yield Piece(text, [scored for scored in waiting if scored.offset < sent], "stop", count)
            return
        if text:
            yield Piece(text, [scored for scored in waiting if scored.offset < sent])
            waiting = [scored for scored in waiting if scored.offset >= sent]
        if count < prompt.limit:
            logits = model.forward([token], cache, "last")[0]
    text = stops.push(texts.finish())
    if stops.found:
        sent += len(text)
        yield Piece(text, [scored for scored in waiting if scored.offset < sent], "stop", count)
    else:
        yield Piece(text + stops.finish(), waiting, finish, count)


def _prefill(
    model: TextModel, cache: Cache, prompt: Prompt, request: Request, texts: _Texts, is_cancelled: Callable[[], bool]
) -> tuple[list[ScoredToken], np.ndarray]:
    """The scored tokens of the prompt, if they are asked for, and float32[vocab] logits after it."""
    tokens, found = prompt.tokens, list[ScoredToken]()
    scores = request.echo and request.top is not None
    step = max(1, min(PROMPT_TOKENS, LOGITS_BYTES // (4 * model.vocab_size))) if scores else PROMPT_TOKENS
    if scores:
        found.append(ScoredToken(model.tokenizer.token_bytes(tokens[0]), 0, None, []))
    for start in range(0, len(tokens), step):
        if is_cancelled():
            raise Cancelled
        logits = model.forward(tokens[start : start + step], cache, "all" if scores else "last")
        following = tokens[start + 1 : start + step + 1] if scores else []
        for i, token in enumerate(following):
            offset = texts.offsets[start + 1 + i]
            found.append(_score(model.tokenizer, logits[i], token, request.top or 0, offset))
    return found, logits[-1]


def _score(tokenizer: Tokenizer, logits: np.ndarray, token: int, top: int, offset: int) -> ScoredToken:
    """A token with its log-probability under float32[vocab] logits, and the `top` most likely ones."""
    wide = logits.astype(np.float64)
    largest = wide.max()
    total = largest + math.log(np.exp(wide - largest).sum())
    if not math.isfinite(total):
        raise DataError(f"log-probabilities are not finite: the largest logit is {largest}")
    likely: list[int] = []
    if top := min(top, len(logits)):
        some = np.argpartition(-wide, top - 1)[:top]
        likely = some[np.lexsort((some, -wide[some]))].tolist()
    pairs = [(tokenizer.token_bytes(i), float(wide[i] - total)) for i in likely]
    return ScoredToken(tokenizer.token_bytes(token), offset, float(wide[token] - total), pairs)


class _Texts:
    """The text of a sequence as it grows.

    prompt    the prompt's text: as it was written, or what its tokens say
    offsets   of each of the prompt's tokens, in characters
    length    characters of the answer so far: of an echoed prompt, and of what is generated
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Prompt, echo: bool):
        self._decoder = tokenizer.decode_stream(special=False)
        self.offsets, pieces, at = list[int](), list[str](), 0
        for i, token in enumerate(prompt.tokens):
            self.offsets.append(at)
            pieces.append(self._decoder.push(token))
            if tokenizer.is_control(token) and not (i == 0 and prompt.has_bos):
                pieces[-1] += tokenizer.token_bytes(token).decode(errors="replace")
            at += len(pieces[-1])
        self.prompt = "".join(pieces) if prompt.text is None else prompt.text
        self.length = len(self.prompt) if echo else 0

    def push(self, token: int) -> str:
        """The text that a generated token completes."""
        text = self._decoder.push(token)
        self.length += len(text)
        return text

    def finish(self) -> str:
        """What is left of an unfinished character."""
        return self._decoder.finish()


class _StopStrings:
    """Ends a text before the first stop string. What may be the beginning of one is held back."""

    def __init__(self, stops: tuple[str, ...]):
        self._stops, self._held = stops, ""
        self.found = False

    def push(self, text: str) -> str:
        """The text that can be sent now."""
        self._held += text
        places = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        self.found = bool(places)
        end = min(places) if places else len(self._held) - self._begun()
        text, self._held = self._held[:end], self._held[end:]
        return text

    def _begun(self) -> int:
        """Length of the longest end of what is held that begins a stop string."""
        ends = (n for stop in self._stops for n in range(1, len(stop)) if self._held.endswith(stop[:n]))
        return max(ends, default=0)

    def finish(self) -> str:
        """What is held back."""
        text, self._held = self._held, ""
        return text
