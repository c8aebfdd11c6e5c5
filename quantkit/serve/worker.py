"""The queue of requests, and the thread that alone runs the model and its tokenizer."""

from __future__ import annotations

import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from quantkit.errors import QuantkitError
from quantkit.runtime.generate import TextModel
from quantkit.serve import generation
from quantkit.serve.api_error import ApiError
from quantkit.serve.generation import Cancelled, Piece
from quantkit.serve.requests import Request


@dataclass(frozen=True)
class Started:
    """The request is valid, and its prompts have so many tokens."""

    prompt_tokens: int


@dataclass(frozen=True)
class PieceOf:
    """A piece of the answer to the prompt number `index`."""

    index: int
    piece: Piece


class Done:
    """The answer is complete."""


Event = Started | PieceOf | Done | ApiError
"""What becomes of a job: an ApiError; or Started, pieces, and Done or an ApiError."""


class Job:
    """A request in the queue. `emit` is called with its events, from any thread, and does not wait."""

    def __init__(self, request: Request, emit: Callable[[Event], None]):
        self.request, self.emit = request, emit
        self._cancelled = threading.Event()

    @property
    def is_cancelled(self) -> bool:
        """Whether nobody waits for the answer any more."""
        return self._cancelled.is_set()

    def cancel(self) -> None:
        """Mark the job; see `Worker.cancel`."""
        self._cancelled.set()


class Worker:
    """Runs jobs one after another, in a thread of its own.

    `waiting` jobs at most wait. One cache of the model's context serves all of them, so memory does not grow.
    """

    def __init__(self, model: TextModel, waiting: int):
        self.model, self.waiting = model, waiting
        self._kv_cache = model.new_cache(model.n_ctx)
        self._queue: deque[Job] = deque()
        self._running: Job | None = None
        self._changed = threading.Condition()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="quantkit-serve", daemon=True)
        self._thread.start()

    def put(self, job: Job) -> None:
        """Add a job. ApiError where the queue is full (429) or the server stops (503)."""
        with self._changed:
            if self._stopped:
                raise _stopping()
            self._drop_cancelled()
            if len(self._queue) >= self.waiting:
                raise ApiError(
                    429, f"{self.waiting} requests wait already; send this one again later", "queue_full",
                    {"Retry-After": "1"},
                )  # fmt: skip
            self._queue.append(job)
            self._changed.notify()

    def cancel(self, job: Job) -> None:
        """Drop a job: at once if it waits, after its current forward pass if it runs."""
        with self._changed:
            job.cancel()
            self._drop_cancelled()

    def stop(self) -> None:
        """Refuse further jobs and end those that wait or run, the latter after its current forward pass."""
        with self._changed:
            self._stopped = True
            for job in [*self._queue, *([self._running] if self._running else [])]:
                job.cancel()
            self._drop_cancelled()
            self._changed.notify()

    def join(self) -> None:
        """Wait until the thread has ended; after `stop`."""
        self._thread.join()

    def _drop_cancelled(self) -> None:
        for job in [job for job in self._queue if job.is_cancelled]:
            self._queue.remove(job)
            job.emit(_stopping())

    def _run(self) -> None:
        while True:
            with self._changed:
                self._running = None
                while not self._queue and not self._stopped:
                    self._changed.wait()
                if self._stopped:
                    return
                self._running = job = self._queue.popleft()
            job.emit(self._end_of(job))

    def _end_of(self, job: Job) -> Event:
        """Run a job. Returns its last event."""
        try:
            self._answer(job)
        except ApiError as error:
            return error
        except Cancelled:
            return _stopping()
        except QuantkitError as error:
            return ApiError(500, str(error))
        except Exception as error:  # a bug, which must not end the server
            traceback.print_exc(file=sys.stderr)
            return ApiError(500, f"the server failed: {type(error).__name__}; its output has the traceback")
        return Done()

    def _answer(self, job: Job) -> None:
        if job.is_cancelled:
            raise Cancelled
        try:
            prompts = generation.prepare(self.model, job.request)
        except QuantkitError as error:  # of the tokenizer or the chat template: the request's text is its cause
            raise ApiError(400, str(error)) from None
        job.emit(Started(sum(len(prompt.tokens) for prompt in prompts)))
        for i, prompt in enumerate(prompts):
            for piece in generation.complete(self.model, self._kv_cache, prompt, job.request, lambda: job.is_cancelled):
                job.emit(PieceOf(i, piece))


def _stopping() -> ApiError:
    """The answer to a request that is dropped."""
    return ApiError(503, "the server stops", "server_stopping")
