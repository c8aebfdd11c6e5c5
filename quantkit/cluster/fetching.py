"""`fetched`: get the result of a task that has ended, and look after the cluster while that takes.

A result waits on its worker. If that one dies first, dask runs the task again, but a task that is meant for workers of
which none is left waits until one of them comes back: getting its result would never end.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TypeVar

R = TypeVar("R")

_SECONDS = 0.5  # between two looks


def fetched(get: Callable[[], R], meanwhile: Callable[[], object]) -> R:
    """The result of `get`, or its exception; `meanwhile` is called every half a second until it ends.

    An exception of `meanwhile` ends the wait. `get`, which runs in a thread, is then left to itself.
    """
    ended: queue.SimpleQueue[tuple[list[R], BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            ended.put(([get()], None))
        except BaseException as error:  # raised below, where it is waited for
            ended.put(([], error))

    threading.Thread(target=run, name="quantkit-fetch", daemon=True).start()
    while True:
        try:
            found, error = ended.get(timeout=_SECONDS)
        except queue.Empty:
            meanwhile()
            continue
        if error is not None:
            raise error
        return found[0]
