"""An adapter for EleutherAI's lm-evaluation-harness: `--model quantkit --model_args path=model.gguf`.

lm_eval finds the models of other packages only if something imports them and registers their class: version 0.4.13 has
no entry points for models. So `quantkit lm-eval …` calls `register` and then lm_eval's own command line. In Python:

    from quantkit.evaluate import harness
    harness.register()
    lm_eval.simple_evaluate(model="quantkit", model_args={"path": "model.gguf"}, tasks=["arc_easy"])

`HarnessModel` computes what lm_eval asks for; it needs nothing of lm_eval. The class that `register` gives adds
lm_eval's `TemplateLM`, which cuts a context and its continuation into tokens.

    loglikelihood           sum of log p over a continuation's tokens, and whether each of them is the most probable
    loglikelihood_rolling   sum of log p over a text's tokens, in windows of the context
    generate_until          text up to a stop string, the end of the reply or a number of tokens

Requests run in batches, longest first. Requests with the same input, such as the choices of one token of a question,
run once. A batch of scores is one pass over sequences that are filled to the same length; a batch of replies takes a
token each in one `forward_batch`.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from quantkit.errors import DataError, OptionError, UnsupportedError
from quantkit.evaluate.nll import negative_log_likelihood
from quantkit.progress import ProgressBar
from quantkit.runtime.generate import Sampler, Sampling

if TYPE_CHECKING:
    from quantkit.runtime.kv.cache import Cache
    from quantkit.runtime.model import Model

NAME = "quantkit"
BATCH_TOKENS = 2048  # of a batch where batch_size does not say more
LOGITS_BYTES = 64 << 20  # of scored tokens, computed at a time
MAX_GEN_TOKS = 256  # of a reply whose task does not say, as for lm_eval's hf model

_LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # names of one option; first wins
_SAMPLING = {"temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
             "repetition_penalty": "penalty", "seed": "seed"}  # fmt: skip
_WHOLE_TEXT = 1 << 31  # tokens; transformers' repetition_penalty concerns all of the prompt and the reply

TokenPair = tuple[Any, list[int], list[int]]  # (a key of lm_eval's cache, tokens of the context, of the continuation)


class Request(Protocol):
    """What is used of lm_eval's Instance."""

    @property
    def args(self) -> tuple[Any, ...]:
        """(context, continuation), (text,) or (context, options)."""


@dataclass
class _Reply:
    """A reply that is generated."""

    sampler: Sampler
    cache: Cache
    tokens: list[int]
    prompt: int
    decoder: Any
    text: str = ""
    stops: list[str] = field(default_factory=list)

    def stopped(self) -> bool:
        return any(stop in self.text for stop in self.stops)


class HarnessModel:
    """Answers lm_eval's requests with a model.

    path             the GGUF file
    numerics         "exact" (the default) judges the file; "fast" computes as `generate` does
    max_length       tokens of the longest sequence; default: the model's training context. Longer ones lose their
                     beginning, as with lm_eval's hf model
    batch_size       sequences that run together; "auto": as many as have 2048 tokens together
    max_batch_size   at most this many, for "auto"
    device           no effect, since lm_eval's default is cuda:0 whatever the machine has; for GPUs pass `devices`
    add_bos_token    whether BOS begins a text; default: what the file says
    placement        further keywords of `quantkit.load`: threads, devices, gpu_layers, cache_type, …

    Raises OptionError for an unknown keyword.
    """

    def __init__(
        self,
        path: str,
        *,
        numerics: str = "exact",
        max_length: int | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        add_bos_token: bool | None = None,
        **placement: Any,
    ):
        super().__init__()
        from quantkit.runtime.loading import load

        known = set(inspect.signature(load).parameters) - {"path", "n_ctx", "numerics", "tokenizer", "offload"}
        for name in placement:
            if name not in known:
                raise OptionError(f"--model_args: unknown '{name}'; known are {', '.join(sorted(known))}")
        if device not in (None, "cpu") and not placement.get("devices"):
            logging.getLogger(__name__).info(
                "device %s, lm_eval's default, has no effect: the model runs on the CPU; for GPUs pass devices=… in "
                "--model_args", device,
            )  # fmt: skip
        self.model: Model = load(path, numerics=numerics, n_ctx=max_length, **placement)
        self.max_length = max_length or self.model.n_ctx_train
        self.batch_size = _batch_size(batch_size)
        self._most = None if self.batch_size else max_batch_size
        bos = self.model.tokenizer.adds_bos if add_bos_token is None else bool(add_bos_token)
        self._bos = self.model.tokenizer.bos_id if bos else None

    # ----------------------------------------------------------------------------------------------------------- tokens

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text; QuantkitError if the file names none."""
        found = self.model.tokenizer.eos_id
        if found is None:
            raise UnsupportedError(f"{self.model.path}: no token ends a text (tokenizer.ggml.eos_token_id)")
        return int(found)

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without a context: BOS, else the token that ends a text."""
        bos = self.model.tokenizer.bos_id
        return self.eot_token_id if bos is None else int(bos)

    @property
    def tokenizer_name(self) -> str:
        """The name under which lm_eval caches requests (--cache_requests): of the file and of its chat template.

        Requests hold formatted prompts, and another file of this name may have another template.
        """
        tokenizer = self.model.tokenizer
        ends = [tokenizer.token_bytes(i) for i in (tokenizer.bos_id, tokenizer.eos_id) if i is not None]
        digest = hashlib.sha256(repr((tokenizer.chat_template, ends)).encode(errors="backslashreplace"))
        return f"{self.model.path.name}-{digest.hexdigest()[:16]}"

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: object) -> list[int]:
        """The tokens of a text. Control tokens that are written out in it are found; BOS is not doubled."""
        ids = self.model.tokenizer.encode(string, bos=False, special=True)
        if self._bos is not None and add_special_tokens is not False and ids[:1] != [self._bos]:
            ids = [self._bos, *ids]
        return ids

    def apply_chat_template(self, chat_history: list[dict[str, Any]], add_generation_prompt: bool = True) -> str:
        """The prompt of messages. Without the generation prompt it ends where the last message's text ends."""
        text = self.model.tokenizer.apply_chat_template(chat_history, add_generation_prompt=add_generation_prompt)
        if add_generation_prompt:
            return text
        last = str(chat_history[-1]["content"]).strip()
        at = text.rfind(last)
        if at < 0:
            raise DataError(f"{self.model.path}: the chat template changes the last message; it cannot be continued")
        return text[: at + len(last)]

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The model's chat template, which lm_eval records; None if none is asked for."""
        return self.model.tokenizer.chat_template if chat_template else None

    # ----------------------------------------------------------------------------------------------------------- scores

    def _loglikelihood_tokens(
        self, requests: Sequence[TokenPair], disable_tqdm: bool = False, **_: object
    ) -> list[tuple[float, bool]]:
        """(sum of log p, is each token the most probable) of each continuation after its context."""
        inputs: dict[tuple[int, ...], list[int]] = {}
        for number, (_, context, continuation) in enumerate(requests):
            if not context or not 0 < len(continuation) <= self.max_length:
                raise DataError(
                    f"request {number}: {len(context)} tokens of context and {len(continuation)} to score; at least "
                    f"one of each is needed, and at most {self.max_length} to score (max_length)"
                )
            sequence = (*context, *continuation)[-(self.max_length + 1) :]
            inputs.setdefault(sequence[:-1], []).append(number)
        found: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        done = 0
        with ProgressBar("loglikelihood") as bar:
            for batch in self._batches(sorted(inputs, key=len, reverse=True)):
                for number, result in self._scores(batch, inputs, requests):
                    found[number] = result
                    done += 1
                    if requests[number][0] is not None:
                        self._remember("loglikelihood", requests[number][0], result)
                bar.show(done, len(requests))
        return found

    def _batches(self, sequences: Sequence[Sequence[int]]) -> Iterator[list[Sequence[int]]]:
        """Sequences that run together, of sequences in descending length."""
        start = 0
        while start < len(sequences):
            size = self.batch_size or max(1, BATCH_TOKENS // len(sequences[start]))
            size = min(size, self._most or size)
            yield list(sequences[start : start + size])
            start += size

    def _scores(
        self, batch: Sequence[Sequence[int]], inputs: Mapping[Any, list[int]], requests: Sequence[TokenPair]
    ) -> Iterator[tuple[int, tuple[float, bool]]]:
        """The requests of a batch of inputs, with their results."""
        longest = max(map(len, batch))
        tokens = np.array([[*sequence, *[sequence[-1]] * (longest - len(sequence))] for sequence in batch])
        scored = [max(len(requests[number][2]) for number in inputs[sequence]) for sequence in batch]
        first = min(len(sequence) - n for sequence, n in zip(batch, scored))
        hidden = self.model.hidden_sequences(tokens, slice(first, longest))
        for sequence, states, n in zip(batch, hidden, scored):
            states = states[len(sequence) - n - first : len(sequence) - first]
            for number in inputs[sequence]:
                targets = requests[number][2]
                yield number, self._score(states[n - len(targets) :], targets)

    def _score(self, states: np.ndarray, targets: Sequence[int]) -> tuple[float, bool]:
        total, greedy = 0.0, True
        step = max(1, LOGITS_BYTES // (4 * self.model.vocab_size))
        for start in range(0, len(targets), step):
            logits = self.model.project(states[start : start + step])
            part = np.array(targets[start : start + step])
            total -= float(negative_log_likelihood(logits, part).sum())
            greedy = greedy and bool((logits.argmax(axis=1) == part).all())
        return total, greedy

    def loglikelihood_rolling(self, requests: Sequence[Request], disable_tqdm: bool = False) -> list[float]:
        """Sum of log p of each text's tokens.

        A text longer than the context is cut into windows. Each token is scored once; each window is as long as the
        context, so that the last one repeats tokens that are not scored again.
        """
        pairs: list[TokenPair] = []
        counts = []
        for request in requests:
            tokens = self.tok_encode(request.args[0])
            known = [self.prefix_token_id, *tokens]
            before = len(pairs)
            for start in range(0, len(tokens), self.max_length):
                end = min(start + self.max_length, len(tokens))
                pairs.append((None, known[max(0, end - self.max_length) : start + 1], tokens[start:end]))
            counts.append(len(pairs) - before)
        scores = iter(self._loglikelihood_tokens(pairs))
        found = []
        for request, count in zip(requests, counts):
            found.append(sum(next(scores)[0] for _ in range(count)))
            self._remember("loglikelihood_rolling", request.args, found[-1])
        return found

    # ---------------------------------------------------------------------------------------------------------- replies

    def generate_until(self, requests: Sequence[Request], disable_tqdm: bool = False) -> list[str]:
        """The reply to each context, up to its first stop string.

        Options of a request: until, max_gen_toks (and its other names), do_sample, temperature, top_k, top_p, min_p,
        repetition_penalty, seed. Without do_sample or a temperature the most probable token is taken. OptionError for
        another option.
        """
        prompts = []
        for number, request in enumerate(requests):
            context, options = request.args
            stops, limit, sampling = _generation_options(options)
            room = self.max_length - limit
            if room < 1:
                raise DataError(
                    f"request {number}: {limit} tokens to generate, the context holds {self.max_length}; lower "
                    "max_gen_toks, or raise max_length"
                )
            prompts.append((self.tok_encode(context)[-room:] or [self.prefix_token_id], stops, limit, sampling))
        found = [""] * len(requests)
        order = sorted(range(len(requests)), key=lambda i: -len(prompts[i][0]))
        size = self.batch_size or self._most or 8
        done = 0
        with ProgressBar("generate") as bar:
            for start in range(0, len(order), size):
                batch = order[start : start + size]
                for number, text in zip(batch, self._replies([prompts[i] for i in batch])):
                    found[number] = text
                    done += 1
                    self._remember("generate_until", requests[number].args, text)
                bar.show(done, len(requests))
        return found

    def _replies(self, prompts: Sequence[tuple[list[int], list[str], int, Sampling]]) -> list[str]:
        replies = [
            _Reply(
                Sampler(sampling), self.model.new_cache(len(tokens) + limit), list(tokens), len(tokens),
                self.model.tokenizer.decode_stream(special=False), stops=stops,
            )
            for tokens, stops, limit, sampling in prompts
        ]  # fmt: skip
        limits = [limit for _, _, limit, _ in prompts]
        active = [(reply, limit) for reply, limit in zip(replies, limits) if limit > 0]
        following = [reply.tokens for reply, _ in active]
        while active:
            logits = self.model.forward_batch([(t, reply.cache) for t, (reply, _) in zip(following, active)])
            remaining = []
            for row, (reply, limit) in zip(logits, active):
                token = reply.sampler(row, reply.tokens)
                if token in self.model.tokenizer.eos_ids:
                    continue
                reply.tokens.append(token)
                reply.text += reply.decoder.push(token)
                if not reply.stopped() and len(reply.tokens) - reply.prompt < limit:
                    remaining.append((reply, limit))
            active, following = remaining, [[reply.tokens[-1]] for reply, _ in remaining]
        texts = []
        for reply in replies:
            text = reply.text + reply.decoder.finish()
            ends = [at for stop in reply.stops if (at := text.find(stop)) >= 0]
            texts.append(text[: min(ends, default=len(text))])
        return texts

    def _remember(self, kind: str, request: Any, result: Any) -> None:
        """Store a result in lm_eval's cache, if there is one (--use_cache)."""
        hook = getattr(self, "cache_hook", None)
        if hook is not None:
            hook.add_partial(kind, request, result)


def _batch_size(given: int | str | None) -> int:
    """The number of sequences that run together; 0 for "auto"."""
    if given is None or str(given).partition(":")[0] == "auto":
        return 0
    if not str(given).isdecimal() or int(given) < 1:
        raise OptionError(f"--batch_size {given}: a number of sequences from 1, or auto")
    return int(given)


def _generation_options(options: Mapping[str, Any]) -> tuple[list[str], int, Sampling]:
    """Stop strings, number of tokens and sampling of a request's options."""
    given = dict(options)
    until = given.pop("until", None) or []
    stops = [until] if isinstance(until, str) else list(until)
    limits = [given.pop(name) for name in _LIMITS if given.get(name) is not None]
    limit = int(limits[0]) if limits else MAX_GEN_TOKS
    do_sample = given.pop("do_sample", None)
    values = {_SAMPLING[name]: given.pop(name) for name in _SAMPLING if given.get(name) is not None}
    if unknown := [name for name, value in given.items() if value is not None and name not in _LIMITS]:
        raise OptionError(
            f"generation option '{unknown[0]}' is not supported; known are until, do_sample, {', '.join(_LIMITS)}, "
            f"{', '.join(_SAMPLING)}"
        )
    temperature = float(values.pop("temperature", 1.0 if do_sample else 0.0))
    if do_sample is False:
        temperature = 0.0
    found = {"top_k": 0, "top_p": 1.0, "min_p": 0.0} | values
    sampling = Sampling(temperature=temperature, penalty_last=_WHOLE_TEXT, **found)
    return [stop for stop in stops if stop], limit, sampling


def register() -> type:
    """Register the adapter with lm_eval as the model "quantkit"; returns its class.

    Raises UnsupportedError if lm_eval is not installed.
    """
    try:
        import lm_eval.models  # noqa: F401  # lm_eval registers its own models only into an empty registry
        from lm_eval.api.model import TemplateLM
        from lm_eval.api.registry import model_registry, register_model
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "lm_eval":
            raise
        raise UnsupportedError("lm-eval needs lm_eval: pip install 'quantkit[lm-eval]'") from None
    if NAME in model_registry:
        found: type = model_registry.get(NAME)
        return found

    class QuantkitLM(HarnessModel, TemplateLM):  # type: ignore[misc]  # lm_eval is not installed where this is checked
        """quantkit's models for lm_eval."""

    registered: type = register_model(NAME)(QuantkitLM)
    return registered


def run(arguments: Iterable[str]) -> None:
    """Register the adapter and run lm_eval's own command line with these arguments. SystemExit as it raises it."""
    import sys

    register()
    from lm_eval.__main__ import cli_evaluate

    before = sys.argv
    sys.argv = ["lm_eval", *arguments]
    try:
        cli_evaluate()
    finally:
        sys.argv = before
