"""Generate text: run a prompt as a batch, then sample token by token until an end-of-generation token.

A token is sampled from the logits of the last position by these steps, in llama.cpp's order:

    repetition penalty p   of tokens among the last `penalty_last`: logit / p if positive, logit * p if not
    top-k                  the k largest
    top-p                  the largest, until their probabilities sum up to p
    min-p                  those at least p times as probable as the largest
    temperature            probabilities of logits / t; 0 takes the largest logit after the penalty

With `ignore_eos`, tokens that end a reply are out of the question before all of these steps.

Draws come from PCG64 of the seed: the same seed, file, numerics and CPU give the same text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

from quantkit.errors import DataError
from quantkit.inputs import arguments
from quantkit.runtime.kv.cache import Cache

if TYPE_CHECKING:
    from quantkit.tokenizers.tokenizer import Tokenizer


class TextModel(Protocol):
    """What `generate` uses of a `model.Model`."""

    n_ctx: int

    @property
    def vocab_size(self) -> int:
        """Number of tokens."""

    @property
    def tokenizer(self) -> Tokenizer:
        """Encodes the prompt, decodes the reply."""

    def new_cache(self, n_ctx: int) -> Cache:
        """An empty cache."""

    def forward(self, tokens: Sequence[int], cache: Cache, logits: str) -> np.ndarray:
        """float32[1, vocab] for `logits` "last"."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is sampled. top_k 0, top_p 1, min_p 0 and penalty 1 switch their step off.

    ignore_eos   never choose a token that ends the reply
    """

    temperature: float = 0.0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    penalty: float = 1.0
    penalty_last: int = 64
    seed: int = 0
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for name, is_valid, range_ in (
            ("temperature", self.temperature >= 0, "at least 0"),
            ("top_k", self.top_k >= 0, "at least 0"),
            ("top_p", 0 <= self.top_p <= 1, "from 0 to 1"),
            ("min_p", 0 <= self.min_p <= 1, "from 0 to 1"),
            ("penalty", self.penalty > 0, "above 0"),
            ("penalty_last", self.penalty_last >= 0, "at least 0"),
            ("seed", self.seed >= 0, "at least 0"),
        ):
            if not is_valid:
                raise DataError(f"{name} is {getattr(self, name)}; it must be {range_}")


class Sampler:
    """Chooses tokens; holds the random state of one text."""

    def __init__(self, sampling: Sampling):
        self.sampling = sampling
        self._random = np.random.Generator(np.random.PCG64(sampling.seed))

    def __call__(self, logits: np.ndarray, history: Sequence[int]) -> int:
        """A token for float32[vocab] logits; `history` holds the tokens so far."""
        s = self.sampling
        if s.penalty != 1 and s.penalty_last:
            logits = penalized(logits, history[-s.penalty_last :], s.penalty)
        if s.temperature == 0:
            best = int(np.argmax(logits))  # a NaN, where there is one
            _require_number(logits[best])
            return best
        tokens = candidates(logits, s.top_k, s.top_p, s.min_p)
        weights = _softmax(logits[tokens], s.temperature)
        drawn = self._random.random() * weights.sum()
        return int(tokens[min(np.searchsorted(np.cumsum(weights), drawn, side="right"), len(tokens) - 1)])


def penalized(logits: np.ndarray, history: Iterable[int], penalty: float) -> np.ndarray:
    """A copy of float32[vocab] in which the tokens of `history` are less likely."""
    logits = logits.copy()
    tokens = np.unique(np.fromiter(history, np.int64))
    logits[tokens] = np.where(logits[tokens] > 0, logits[tokens] / penalty, logits[tokens] * penalty)
    return logits


def _without(logits: np.ndarray, tokens: Collection[int]) -> np.ndarray:
    """A copy of float32[vocab] in which `tokens` are never chosen."""
    logits = logits.copy()
    logits[list(tokens)] = -np.inf
    return logits


def candidates(logits: np.ndarray, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """int[k]: the tokens that may be drawn, most likely first; equal ones in order of number. Never empty."""
    if 0 < top_k < len(logits):
        bound = np.partition(logits, -top_k)[-top_k]
        tokens = np.flatnonzero(logits >= bound)
    else:
        tokens = np.arange(len(logits))
    tokens = tokens[np.argsort(-logits[tokens], kind="stable")][: top_k or None]
    _require_number(logits[tokens[0]] if len(tokens) else np.nan)
    p = _softmax(logits[tokens])
    if top_p < 1:
        p = p[: int(np.searchsorted(np.cumsum(p), top_p)) + 1]
    if min_p > 0:
        p = p[p >= min_p * p[0]]
    return tokens[: len(p)]


def _require_number(largest: float) -> None:
    """DataError where the largest logit is NaN or Inf, as a model may give without the checks of `--tripwire`."""
    if not np.isfinite(largest):
        raise DataError(f"no token can be chosen: the largest logit is {largest}; --tripwire layer names the cause")


def _softmax(logits: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    differences = logits.astype(np.float64) - np.float64(logits.max())
    with np.errstate(over="ignore"):  # to -Inf, near temperature 0; a logit itself would become Inf, and its weight NaN
        e = np.exp(differences / temperature)
    result: np.ndarray = e / e.sum()
    return result


@dataclass
class Generated:
    """The generated text and its timings.

    text, tokens   the reply, without the token that ended it
    stopped        "end" (a token that ends replies), "length" (n_predict) or "context" (the cache is full)
    """

    prompt_tokens: list[int]
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    stopped: str = "length"
    prompt_seconds: float = 0.0
    predict_seconds: float = 0.0  # of the steps after the prompt
    steps: int = 0

    @property
    def prompt_rate(self) -> float:
        """Tokens of the prompt per second."""
        return len(self.prompt_tokens) / self.prompt_seconds if self.prompt_seconds else 0.0

    @property
    def predict_rate(self) -> float:
        """Steps after the prompt per second."""
        return self.steps / self.predict_seconds if self.predict_seconds else 0.0


def generate(
    model: TextModel,
    prompt: str | Sequence[int],
    n_predict: int = 128,
    sampling: Sampling | None = None,
    *,
    cache: Cache | None = None,
    on_text: Callable[[str], None] | None = None,
) -> Generated:
    """Continue a prompt, text or tokens, by up to `n_predict` tokens (-1: until an end or a full cache).

    A text becomes the tokens of `Tokenizer.encode_prompt`: control tokens in it are found, and no EOS follows.
    `on_text` is called with each piece of text as soon as it is complete. `cache` may hold earlier tokens of the
    sequence; without one, an empty cache is made, of the needed size or of the model's context if that is smaller.
    """
    if isinstance(prompt, str):
        tokens, _ = model.tokenizer.encode_prompt(prompt)
    else:
        ids = arguments.integers(prompt, "tokens of the prompt", model.vocab_size)
        if ids.ndim != 1:
            raise DataError(f"the prompt is a text or a list of tokens; got shape {ids.shape}")
        tokens = ids.tolist()
    if not tokens:
        raise DataError("the prompt has no tokens; pass some text")
    n_predict = arguments.integer(n_predict, "n_predict (-1 for no limit)", -1)
    if cache is None:
        needed = len(tokens) + n_predict if n_predict >= 0 else model.n_ctx
        cache = model.new_cache(min(model.n_ctx, needed))
    result = Generated(tokens)
    started = time.perf_counter()
    logits = model.forward(tokens, cache, "last")[0]
    result.prompt_seconds = time.perf_counter() - started
    _continue(model, cache, logits, n_predict, Sampler(sampling or Sampling()), on_text, result)
    return result


def _continue(
    model: TextModel,
    cache: Cache,
    logits: np.ndarray,
    n_predict: int,
    sampler: Sampler,
    on_text: Callable[[str], None] | None,
    result: Generated,
) -> None:
    """Choose token after token into `result`, from the logits that follow the prompt."""
    decoder = model.tokenizer.decode_stream(special=False)
    for token in result.prompt_tokens:  # the reply goes on from them: a space between the two is not at a beginning
        decoder.push(token)
    pieces = []
    started = time.perf_counter()
    while len(result.tokens) != n_predict:
        if sampler.sampling.ignore_eos:
            logits = _without(logits, model.tokenizer.eos_ids)
        token = sampler(logits, [*result.prompt_tokens[-sampler.sampling.penalty_last :], *result.tokens])
        if token in model.tokenizer.eos_ids:
            result.stopped = "end"
            break
        result.tokens.append(token)
        pieces.append(decoder.push(token))
        if on_text and pieces[-1]:
            on_text(pieces[-1])
        if len(result.tokens) == n_predict:
            break
        if cache.length == cache.n_ctx:
            result.stopped = "context"
            break
        logits = model.forward([token], cache, "last")[0]
        result.steps += 1
    result.predict_seconds = time.perf_counter() - started
    if rest := decoder.finish():
        pieces.append(rest)
        if on_text:
            on_text(rest)
    result.text = "".join(pieces)
