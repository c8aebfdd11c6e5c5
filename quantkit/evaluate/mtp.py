"""How good MTP (multi-token prediction) layers are as a draft: acceptance, and KL divergence from another file's.

From each scored position t of a chunk, `steps` tokens are drafted (`runtime/mtp.py`), each after the text's tokens up
to t + s. With p the trunk's probabilities at the same position and q the head's:

    agrees     argmax q == argmax p, the first in a tie
    accepted   this and all steps before agree: what greedy decoding accepts
    overlap    sum of min(p, q): the probability that sampling at temperature 1 accepts the token
    kld        sum of b (log b - log q), with b the probabilities of another file's head

A draft of n tokens adds the sum of the first n `accepted` to each pass of the trunk. In use a wrong draft ends there,
but here the text goes on: on a text that the trunk has not written, the steps beyond the first follow its tokens.
With `greedy` the trunk writes the second half of each chunk itself, and the figures are those of greedy decoding.

Errors are standard errors over positions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from quantkit.errors import DataError
from quantkit.evaluate.chunk_runs import check_context
from quantkit.evaluate.conditions import Conditions
from quantkit.evaluate.divergence import Estimate, mean_error
from quantkit.evaluate.text import DEFAULT_BATCH, Chunks
from quantkit.formats.kld.scored_tokens import scored_rows

if TYPE_CHECKING:
    from quantkit.runtime.model import Model
    from quantkit.runtime.mtp import MtpHead

_ROWS = 64  # positions whose probabilities are in memory at a time


@dataclass(frozen=True)
class Drafts:
    """What `measure` found: arrays [positions, steps], in the text's order.

    kld, same_top   of the head against the base's head; None without a base
    """

    agrees: np.ndarray  # bool
    overlap: np.ndarray  # float64
    kld: np.ndarray | None = None  # float64, nats
    same_top: np.ndarray | None = None  # bool
    greedy: bool = False
    seconds: float = 0.0
    conditions: Conditions = field(default_factory=dict)

    @property
    def steps(self) -> int:
        """The number of drafted tokens."""
        return int(self.agrees.shape[1])

    @property
    def accepted(self) -> np.ndarray:
        """bool[positions, steps]: this and all steps before agree."""
        return np.logical_and.accumulate(self.agrees, axis=1)

    def length(self, n: int) -> Estimate:
        """Tokens that greedy decoding accepts of a draft of n."""
        return _mean(self.accepted[:, :n].sum(axis=1, dtype=np.float64))

    def of_step(self, step: int) -> dict[str, Estimate]:
        """The figures of a step, from 0 on, by name."""
        found = {
            "agrees": _mean(self.agrees[:, step].astype(np.float64)),
            "accepted": _mean(self.accepted[:, step].astype(np.float64)),
            "length": self.length(step + 1),
            "overlap": _mean(self.overlap[:, step]),
        }
        if self.kld is not None and self.same_top is not None:
            found["kld"] = _mean(self.kld[:, step])
            found["same_top"] = _mean(self.same_top[:, step].astype(np.float64))
        return found

    def record(self) -> dict[str, object]:
        """The figures by name, for JSON: shares of 1, nats, errors over positions."""
        steps = [
            {"step": step + 1}
            | {key: x for name, found in self.of_step(step).items()
               for key, x in ((name, found.value), (f"{name}_error_over_positions", found.error))}
            for step in range(self.steps)
        ]  # fmt: skip
        return {"positions": len(self.agrees), "greedy": self.greedy, "steps": steps}


def _mean(x: np.ndarray) -> Estimate:
    return Estimate(float(x.mean()), mean_error(x))


@dataclass(frozen=True)
class Drafting:
    """A model and the MTP layers that draft for it."""

    model: Model
    head: MtpHead


def measure(
    drafting: Drafting,
    chunks: Chunks,
    *,
    steps: int = 3,
    base: Drafting | None = None,
    greedy: bool = False,
    n_batch: int = DEFAULT_BATCH,
    on_chunk: Callable[[Drafts, int], None] | None = None,
) -> Drafts:
    """Draft from the scored positions of chunks. `on_chunk(result so far, chunks done)` is called after each chunk.

    base     another head to compare with; its trunk may be the same open model
    greedy   the trunk writes the second half of each chunk

    DataError for chunks that are too short for `steps`, and for a base with another vocabulary.
    """
    model = drafting.model
    check_context(model, chunks.n_ctx)
    if base is not None and base.model.vocab_size != model.vocab_size:
        raise DataError(
            f"{base.model.path} has a vocabulary of {base.model.vocab_size} tokens, {model.path} of {model.vocab_size}"
        )
    starts = _starts(chunks.n_ctx, steps)
    begin = time.monotonic()
    parts: list[Drafts] = []
    for index, part in enumerate(_chunks(drafting, chunks, starts, steps, base, greedy, n_batch), 1):
        parts.append(part)
        if on_chunk is not None:
            on_chunk(_joined(parts), index)
    return replace(_joined(parts), greedy=greedy, seconds=time.monotonic() - begin)


def _starts(n_ctx: int, steps: int) -> slice:
    scored = scored_rows(n_ctx)
    found = slice(scored.start, n_ctx - steps)
    if steps < 1 or found.stop <= found.start:
        raise DataError(f"{steps} drafted tokens from the second half of chunks of {n_ctx} tokens: take longer chunks")
    return found


def _chunks(
    drafting: Drafting, chunks: Chunks, starts: slice, steps: int, base: Drafting | None, greedy: bool, n_batch: int
) -> Iterator[Drafts]:
    model, together = drafting.model, max(1, n_batch // chunks.n_ctx)
    for start in range(0, len(chunks), together):
        tokens = np.asarray(chunks.inputs[start : start + together], np.int64)
        if greedy:
            tokens = continued(model, tokens, starts.start)
        hidden = model.hidden_sequences(tokens, slice(None))
        states = drafting.head.states(tokens, hidden, steps, starts)
        other = None
        if base is not None:
            same = base.model is model
            of_base = hidden if same else base.model.hidden_sequences(tokens, slice(None))
            other = base.head.states(tokens, of_base, steps, starts)
        for i in range(len(tokens)):
            trunk = model.project(hidden[i, starts.start + 1 : starts.stop + steps])
            of_other = None if other is None else [x[i] for x in other]
            yield _chunk(drafting.head, [x[i] for x in states], trunk, None if base is None else base.head, of_other)


def _chunk(
    head: MtpHead, states: list[np.ndarray], trunk: np.ndarray, base: MtpHead | None, other: list[np.ndarray] | None
) -> Drafts:
    """The figures of a chunk: states float32[starts, n] by step, the trunk's logits from the first start + 1 on."""
    steps, count = len(states), len(states[0])
    agrees, overlap = np.empty((count, steps), np.bool_), np.empty((count, steps))
    kld, same_top = np.empty((count, steps)), np.empty((count, steps), np.bool_)
    for step in range(steps):
        for a in range(0, count, _ROWS):
            rows = slice(a, min(a + _ROWS, count))
            q = head.project(step, states[step][rows])
            p = trunk[a + step : rows.stop + step]
            agrees[rows, step] = q.argmax(axis=1) == p.argmax(axis=1)
            log_q, log_p = _log_probabilities(q), _log_probabilities(p)
            overlap[rows, step] = np.exp(np.minimum(log_q, log_p)).sum(axis=1)
            if base is not None and other is not None:
                b = base.project(step, other[step][rows])
                log_b = _log_probabilities(b)
                kld[rows, step] = (np.exp(log_b) * (log_b - log_q)).sum(axis=1)
                same_top[rows, step] = q.argmax(axis=1) == b.argmax(axis=1)
    return Drafts(agrees, overlap, None if base is None else kld, None if base is None else same_top)


def _log_probabilities(logits: np.ndarray) -> np.ndarray:
    x = logits.astype(np.float64)
    x -= x.max(axis=1, keepdims=True)
    x -= np.log(np.exp(x).sum(axis=1, keepdims=True))
    return x


def _joined(parts: list[Drafts]) -> Drafts:
    def join(name: str) -> np.ndarray | None:
        found = [getattr(part, name) for part in parts]
        return None if found[0] is None else np.concatenate(found)

    agrees, overlap = join("agrees"), join("overlap")
    assert agrees is not None
    assert overlap is not None
    return Drafts(agrees, overlap, join("kld"), join("same_top"))


def continued(model: Model, tokens: np.ndarray, prompt: int) -> np.ndarray:
    """int64[n_seq, len]: the first `prompt` tokens of each sequence, and what the model writes after them, greedily."""
    found = tokens.copy()
    caches = [model.new_cache(tokens.shape[1]) for _ in tokens]
    first = 0
    for position in range(prompt, tokens.shape[1]):
        parts = [(found[i, first:position], cache) for i, cache in enumerate(caches)]
        found[:, position] = model.forward_batch(parts).argmax(axis=1)
        first = position
    return found
