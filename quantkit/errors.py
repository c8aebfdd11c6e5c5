"""Exceptions, and what is shown of names. Libraries raise these, the command line prints them and exits with status 1.

A message is complete by itself: it names the file, the tensor, the numbers that disagree and the remedy.
"""

from __future__ import annotations

from collections.abc import Iterable


class QuantkitError(Exception):
    """Base of every error that quantkit raises on purpose."""


class FormatError(QuantkitError):
    """A file is truncated, corrupt, hostile or of a kind that is not read."""


class DataError(QuantkitError):
    """Numbers that cannot be worked with: NaN, Inf, shapes that do not fit a type."""


class UnsupportedError(QuantkitError):
    """Valid input that quantkit knows of but does not handle."""


class KernelError(QuantkitError):
    """Compiled code raised an exception, so that what it computes is incomplete; or threads to run it are missing."""


class UnknownNameError(QuantkitError):
    """A name that is not registered; the message lists the nearest ones."""

    def __init__(self, kind: str, name: object, known: Iterable[str]):
        import difflib

        name, names = str(name), sorted(known)
        of_lower = {known_name.lower(): known_name for known_name in names}
        near = [of_lower[n] for n in difflib.get_close_matches(name.lower(), of_lower, n=3, cutoff=0.4)]
        hint = f"did you mean {', '.join(near)}?" if near else f"known: {', '.join(names)}"
        super().__init__(f"unknown {kind} '{name}'; {hint}")
        self.name = name
        self.near = near


def printable(text: str) -> str:
    """`text` with its control characters escaped: names of files and tensors must not steer a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
