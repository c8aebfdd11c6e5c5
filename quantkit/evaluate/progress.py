"""Progress of a run over chunks, as `imatrix`, `perplexity` and `divergence` report it to their callers."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

Result = TypeVar("Result")
Covariant = TypeVar("Covariant", covariant=True)


@dataclass(frozen=True)
class ChunkProgress(Generic[Covariant]):
    """The state of a run after a chunk.

    done        chunks that are done, of `chunks`
    resumed     those of them that an earlier run did
    n_ctx       tokens per chunk
    per_batch   chunks that run together: `done` grows in steps, so a rate is known only at the end of a batch
    seconds     since the first chunk of this run began
    text        the text or base file
    so_far      the result over the chunks that are done
    """

    done: int
    chunks: int
    resumed: int
    n_ctx: int
    per_batch: int
    seconds: float
    text: str
    so_far: Covariant

    @property
    def seconds_per_chunk(self) -> float:
        """Mean time of a chunk of this run."""
        return self.seconds / max(1, self.done - self.resumed)

    @property
    def tokens_per_second(self) -> float:
        """Mean speed of this run."""
        return self.n_ctx / max(1e-9, self.seconds_per_chunk)

    @property
    def ends_batch(self) -> bool:
        """Whether the chunk is the last one of its batch, so that rates are known."""
        return self.done == self.chunks or (self.done - self.resumed) % self.per_batch == 0

    @property
    def seconds_left(self) -> float:
        """Estimated time until the last chunk is done."""
        return self.seconds_per_chunk * (self.chunks - self.done)


class ChunkClock:
    """Times a run and calls a progress callback after its chunks."""

    def __init__(self, chunks: int, resumed: int, n_batch: int, n_ctx: int, text: str):
        self._chunks, self._resumed, self._n_ctx, self._text = chunks, resumed, n_ctx, text
        self._per_batch = max(1, n_batch // n_ctx)
        self._started = time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds since the clock was made."""
        return time.monotonic() - self._started

    def report(self, progress: Callable[[ChunkProgress[Result]], None] | None, done: int, so_far: Result) -> None:
        """Call `progress`, if there is one, after `done` chunks."""
        if progress is not None:
            progress(
                ChunkProgress(
                    done, self._chunks, self._resumed, self._n_ctx, self._per_batch, self.seconds, self._text, so_far
                )
            )
