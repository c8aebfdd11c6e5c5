"""One thread at a time in a model, and caches that keep their length when a call fails."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Concatenate, ParamSpec, TypeVar

from quantkit.runtime.kv.cache import Cache

P = ParamSpec("P")
R = TypeVar("R")
L = TypeVar("L", bound="Locked")


class Locked:
    """An object whose methods under `one_at_a_time` exclude each other, in every thread and also after a fork."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        _instances.add(self)


def one_at_a_time(method: Callable[Concatenate[L, P], R]) -> Callable[Concatenate[L, P], R]:
    """Decorator: while a thread runs one of these methods of an object, other threads wait to run any of them."""

    @functools.wraps(method)
    def run(self: L, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._lock:
            return method(self, *args, **kwargs)

    return run  # type: ignore[return-value]  # mypy names the first parameter of what `wraps` gives


_instances: weakref.WeakSet[Locked] = weakref.WeakSet()


def _after_fork() -> None:
    """New locks: a forked child does not have the threads that may hold the old ones."""
    for instance in list(_instances):
        instance._lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@contextlib.contextmanager
def restore_lengths(caches: Sequence[Cache]) -> Iterator[None]:
    """Context: after an exception or an interrupt the caches have the lengths that they had before."""
    before = [cache.length for cache in caches]
    try:
        yield
    except BaseException:
        for cache, length in zip(caches, before):
            cache.length = length
        raise
