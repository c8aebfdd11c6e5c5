"""Ctrl-C while numba compiles, where LLVM would lose it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from numba.core import event

from quantkit.codegen import jit


class Signals(event.Listener):
    """Sends SIGINT a number of times when something starts in numba; `returned` if that raised nothing there."""

    def __init__(self, signals: int):
        self.left, self.returned = signals, False

    def on_start(self, event: Any) -> None:
        while self.left:
            self.left -= 1
            signal.raise_signal(signal.SIGINT)
            self.returned = not self.left

    def on_end(self, event: Any) -> None: ...


@pytest.fixture
def new_kernel() -> Iterator[Callable[[], Any]]:
    """Makes kernels that are not in the cache."""
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def make() -> Any:
        return jit.Kernel(lambda x: x + 1, {}, is_cached=False)

    make()(1)  # LLVM is initialized: the signals of tests come while a kernel is compiled
    yield make
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_waits_for_llvm(new_kernel: Callable[[], Any]) -> None:
    """It comes between two passes, not where LLVM calls Python."""
    kernel, signals = new_kernel(), Signals(1)
    with event.install_listener("numba:llvm_lock", signals), pytest.raises(KeyboardInterrupt):
        kernel(1)
    assert signals.returned
    assert kernel(1) == 2


def test_an_interrupt_in_the_last_pass(new_kernel: Callable[[], Any]) -> None:
    """It comes when the kernel is compiled."""
    kernel = new_kernel()

    class AtEnd(Signals):
        def on_start(self, event: Any) -> None: ...

        def on_end(self, event: Any) -> None:
            super().on_start(event)

    last = AtEnd(1)
    with event.install_listener("numba:compile", last), pytest.raises(KeyboardInterrupt):
        kernel(1)
    assert last.returned
    assert len(kernel.dispatcher.signatures) == 1


def test_a_second_interrupt_does_not_wait(new_kernel: Callable[[], Any]) -> None:
    kernel, signals = new_kernel(), Signals(2)
    with event.install_listener("numba:run_pass", signals), pytest.raises(KeyboardInterrupt):
        kernel(1)
    assert not signals.returned
    assert kernel(1) == 2


def test_other_handlers_are_called_once(new_kernel: Callable[[], Any]) -> None:
    calls: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: calls.append(number))
    try:
        with event.install_listener("numba:llvm_lock", Signals(1)):
            assert new_kernel()(1) == 2
        assert calls == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
