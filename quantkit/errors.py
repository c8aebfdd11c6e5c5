"""The exceptions that quantkit raises, and `printable` for names in messages.

The command line prints them and exits with status 1 (`OptionError`: 2). A message is complete: it names the file, the
tensor, the numbers that disagree and the remedy.
"""

from __future__ import annotations

from collections.abc import Iterable


class QuantkitError(Exception):
    """Base of every error that quantkit raises on purpose."""


class FormatError(QuantkitError):
    """A file is truncated, corrupt, malicious or in a format that quantkit does not read."""


class DataError(QuantkitError):
    """Values that quantkit cannot use: NaN, Inf, a shape that does not fit a type, an argument out of range."""


class OptionError(DataError):
    """An option with a value that it does not take, options that contradict each other or that need another one. The
    command line exits with status 2."""


class UnsupportedError(QuantkitError):
    """Valid input that quantkit recognizes but does not support."""


class KernelError(QuantkitError):
    """Compiled code failed, so its output is incomplete, or its worker threads could not be started."""


class UnknownNameError(QuantkitError):
    """A name that is not registered. `name` is that name, `near` the registered names that resemble it most."""

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
    """Escape the control characters of `text`: a file or tensor name must not send escape codes to a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
