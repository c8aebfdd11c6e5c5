"""What a test of wrong input counts: calls that quantkit refuses and calls that it takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quantkit.errors import QuantkitError


class Refusals:
    """Calls of functions with input of any kind. An error that is not of quantkit's own goes on to the test."""

    def __init__(self) -> None:
        self.taken = 0
        self.said: list[str] = []

    def call(self, function: Callable[..., Any], *given: Any) -> None:
        """Call a function, which returns or raises a QuantkitError."""
        try:
            function(*given)
        except QuantkitError as error:
            self.said.append(str(error))
        else:
            self.taken += 1

    def check_both(self) -> None:
        """Some input was refused, with a message each, and some was taken: neither is an answer to everything."""
        assert self.said, f"all {self.taken} calls were taken"
        assert all(self.said)
        assert self.taken, f"all {len(self.said)} calls were refused"
