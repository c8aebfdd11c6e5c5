"""Requests of OpenAI's API, checked: `completion` and `chat` turn a body into a `Request`, or raise an ApiError (400).

    completion   model, prompt, max_tokens (16), echo, logprobs
    chat         model, messages, max_tokens or max_completion_tokens (the rest of the context), logprobs, top_logprobs
    both         temperature (1), top_p (1), seed (random), stop, stream, stream_options
                 top_k (0), min_p (0), repeat_penalty (1), repeat_last_n (64), as llama.cpp's server names them

A field of the API that would change the answer and is not supported is refused, and so is a field that is not known.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

from quantkit.errors import DataError, FormatError, printable
from quantkit.inputs import json_input
from quantkit.runtime.generate import Sampling
from quantkit.serve.api_error import ApiError

MAX_PROMPTS = 128  # of a request
MAX_STOPS = 16
MAX_STOP = 256  # characters of a stop string
MAX_TOP = 20  # log-probabilities of other tokens
_MAX_TOKENS = 1 << 31
_MAX_SEED = (1 << 64) - 1
_IGNORED = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")  # change no answer
# Fields that are taken with these values only, or null.
_ONLY: dict[str, tuple[object, ...]] = {
    "n": (1,), "best_of": (1,), "frequency_penalty": (0,), "presence_penalty": (0,), "logit_bias": ({},),
    "suffix": ("",), "tools": ([],), "tool_choice": ("none",), "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}  # fmt: skip


@dataclass(frozen=True)
class Request:
    """What is asked of the model.

    prompts      texts or lists of tokens; of a chat, one empty text
    messages     of a chat; None for a completion
    max_tokens   to generate for each prompt; None: until the context is full
    top          number of most likely tokens with each log-probability; None: no log-probabilities
    """

    prompts: tuple[str | list[int], ...]
    messages: list[dict[str, str]] | None
    max_tokens: int | None
    sampling: Sampling
    stop: tuple[str, ...]
    top: int | None
    echo: bool
    stream: bool
    include_usage: bool

    @property
    def is_chat(self) -> bool:
        """Whether the answer is a message."""
        return self.messages is not None


def completion(body: bytes, model: str) -> Request:
    """The request of /v1/completions. `model` is the name of the model that is served."""
    fields = _Fields(body, model)
    prompts = _prompts(fields.take("prompt"))
    max_tokens = fields.integer("max_tokens", 16, 0, _MAX_TOKENS)
    echo = fields.boolean("echo")
    top = fields.integer("logprobs", None, 0, MAX_TOP)
    return _request(fields, prompts=prompts, messages=None, max_tokens=max_tokens, echo=echo, top=top)


def chat(body: bytes, model: str) -> Request:
    """The request of /v1/chat/completions. `model` is the name of the model that is served."""
    fields = _Fields(body, model)
    messages = _messages(fields.take("messages"))
    limits = [fields.integer(name, None, 1, _MAX_TOKENS) for name in ("max_tokens", "max_completion_tokens")]
    if None not in limits and limits[0] != limits[1]:
        raise ApiError(400, f"max_tokens is {limits[0]} and max_completion_tokens {limits[1]}; give one of them")
    logprobs = fields.boolean("logprobs")
    top = fields.integer("top_logprobs", None, 0, MAX_TOP)
    if top is not None and not logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true")
    return _request(
        fields, prompts=("",), messages=messages, max_tokens=limits[0] if limits[1] is None else limits[1], echo=False,
        top=(top or 0) if logprobs else None,
    )  # fmt: skip


def _request(fields: _Fields, **own: Any) -> Request:
    """A Request of the fields that both kinds have, and of their `own`."""
    try:
        sampling = Sampling(
            temperature=fields.real("temperature", 1.0, 0, 1e6),
            top_k=fields.integer("top_k", 0, 0, _MAX_TOKENS) or 0,
            top_p=fields.real("top_p", 1.0, 0, 1),
            min_p=fields.real("min_p", 0.0, 0, 1),
            penalty=fields.real("repeat_penalty", 1.0, 0, 1e6),
            penalty_last=fields.integer("repeat_last_n", 64, 0, _MAX_TOKENS) or 0,
            seed=fields.integer("seed", secrets.randbits(32), 0, _MAX_SEED) or 0,
        )
    except DataError as error:
        raise ApiError(400, str(error)) from None
    stream = fields.boolean("stream")
    usage = _includes_usage(fields.take("stream_options"))
    found = Request(sampling=sampling, stop=_stops(fields.take("stop")), stream=stream, include_usage=usage, **own)
    fields.require_none_left()
    return found


class _Fields:
    """The fields of a body. A field that is null counts as absent."""

    def __init__(self, body: bytes, model: str):
        try:
            found = json_input.parse(body, "the body")
        except FormatError as error:
            raise ApiError(400, str(error), "invalid_json") from None
        if not isinstance(found, dict):
            raise ApiError(400, f"the body is a JSON {type(found).__name__}; it must be an object")
        self._left = {name: value for name, value in found.items() if value is not None and name not in _IGNORED}
        asked = self.take("model")
        if asked is not None and asked != model:
            raise ApiError(404, f"there is no model {_shown(asked)}; this server has {model!r}", "model_not_found")

    def take(self, name: str) -> Any:
        """The value of a field; None if it is absent."""
        return self._left.pop(name, None)

    def integer(self, name: str, default: int | None, low: int, high: int) -> int | None:
        """A whole number from `low` to `high`."""
        value = self.take(name)
        if value is None:
            return default
        if type(value) is not int or not low <= value <= high:
            raise ApiError(400, f"{name} is {_shown(value)}; it must be a whole number from {low} to {high}")
        return value

    def real(self, name: str, default: float, low: float, high: float) -> float:
        """A number from `low` to `high`."""
        value = self.take(name)
        if value is None:
            return default
        if type(value) not in (int, float) or not low <= value <= high:
            raise ApiError(400, f"{name} is {_shown(value)}; it must be a number from {low:g} to {high:g}")
        return float(value)

    def boolean(self, name: str) -> bool:
        """True or false; false if it is absent."""
        value = self.take(name)
        if value is not None and type(value) is not bool:
            raise ApiError(400, f"{name} is {_shown(value)}; it must be true or false")
        return bool(value)

    def require_none_left(self) -> None:
        """ApiError for a field that nothing has taken, unless its value changes nothing."""
        for name, value in self._left.items():
            if name not in _ONLY:
                raise ApiError(400, f"the field {_shown(name)} is not known; leave it out", "unknown_parameter")
            if isinstance(value, bool) or value not in _ONLY[name]:
                raise ApiError(
                    400, f"{name} is {_shown(value)}; only {_ONLY[name][0]!r} is supported", "unsupported_value"
                )


def _shown(value: object) -> str:
    """A value of a request, in a message."""
    try:
        text = value if isinstance(value, str) else repr(value)
    except ValueError:  # an integer of thousands of digits
        text = "a number of thousands of digits"
    return repr(text[:80]) if isinstance(value, str) else printable(text[:80])


def _prompts(value: object) -> tuple[str | list[int], ...]:
    """The prompts: a text, a list of texts, a list of tokens, or a list of such lists."""
    if isinstance(value, str) or _are_tokens(value):
        value = [value]
    if not isinstance(value, list) or not value:
        raise ApiError(400, "prompt is missing: give a text, a list of texts, a list of tokens or a list of such lists")
    if len(value) > MAX_PROMPTS:
        raise ApiError(
            400, f"the request has {len(value)} prompts; at most {MAX_PROMPTS} are taken, send more requests"
        )
    if not all(isinstance(prompt, str) or _are_tokens(prompt) for prompt in value):
        raise ApiError(400, "a prompt is a text or a list of tokens, which are whole numbers, at least one")
    return tuple(value)


def _are_tokens(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)


def _messages(value: object) -> list[dict[str, str]]:
    """The messages, with text as their content."""
    if not isinstance(value, list) or not value:
        raise ApiError(400, "messages is missing: give a list of objects with role and content, at least one")
    found = []
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ApiError(400, "a message is an object with role, a text, and content")
        content = _content(message.get("content"))
        unknown = [name for name, given in message.items() if given is not None and name not in _OF_MESSAGE]
        if unknown or not isinstance(message.get("name"), (str, type(None))):
            raise ApiError(
                400, f"a message has role, content and name, which are texts, not {_shown(unknown or 'name')}"
            )
        name = {"name": message["name"]} if message.get("name") is not None else {}
        found.append({"role": message["role"], "content": content} | name)
    return found


_OF_MESSAGE = ("role", "content", "name")


def _content(value: object) -> str:
    """The text of a message: a text, or a list of texts, one a line as in llama.cpp's server and vLLM."""
    if isinstance(value, str):
        return value
    parts = value if isinstance(value, list) else [None]
    texts = [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
    if len(texts) < len(parts):
        raise ApiError(400, 'the content of a message is a text, or a list of {"type": "text", "text": …}')
    return "\n".join(texts)


def _includes_usage(options: object) -> bool:
    """The value of stream_options."""
    if options is None:
        return False
    usage = options.get("include_usage", False) if isinstance(options, dict) else None
    if not isinstance(usage, bool):
        raise ApiError(400, "stream_options is an object with include_usage, true or false")
    return usage


def _stops(value: object) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) and 0 < len(stop) <= MAX_STOP for stop in stops):
        raise ApiError(400, f"stop is a text of 1 to {MAX_STOP} characters, or a list of such texts")
    if len(stops) > MAX_STOPS:
        raise ApiError(400, f"the request has {len(stops)} stop strings; at most {MAX_STOPS} are taken")
    return tuple(stops)
