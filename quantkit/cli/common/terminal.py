"""Output to a terminal: escape control characters in names and contents of files.

Names of tensors, metadata and files can hold escape sequences that move the cursor, change the title or type for the
user, and bidirectional controls that show text in another order. `escaped_controls` replaces the standard streams by
ones that write such characters as `\\x1b`. This protects all commands. Code that prints a name in a line or a table
also escapes the line breaks in it (`errors.printable`); `message` does so for warnings and errors.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from quantkit import progress
from quantkit.errors import printable

# C0 but for tab and line ends, DEL, C1; separators of lines; embeddings, overrides and isolates of direction. Joiners
# and marks stay: words of many scripts need them.
CONTROLS = "\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069"
_COLOUR = re.compile("\x1b\\[[0-9;]*m")
_CONTROL = re.compile(f"[{CONTROLS}]")


def visible(text: str) -> str:
    """`text` with control characters escaped, except for line breaks and tabs."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def message(text: str) -> str:
    """The lines of a warning or an error, each with its control characters escaped.

    A continuation line of quantkit's messages begins with two blanks. Any other line break comes from a file's name or
    contents and is escaped too, so that it cannot begin a line that looks like a message.
    """
    return "\n".join(map(printable, re.split(r"\n(?=  )", text)))


class EscapingStream:
    """A text stream that escapes control characters and moves a progress bar out of the way of what is written.

    Everything else is passed to the wrapped stream.
    """

    def __init__(self, stream: Any):
        self.wrapped = stream
        self.has_ended = False

    def write(self, text: str) -> int:
        # colorama, which numba loads where it is installed, resets the colours of the stream that it found, at exit
        self.write_styled(visible(_COLOUR.sub("", text) if self.has_ended else text))
        return len(text)

    def write_styled(self, text: str) -> None:
        """Write text with escape sequences of our own, such as bold headers; names in it are escaped already."""
        with progress.above(self.wrapped, text):
            self.wrapped.write(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.wrapped, name)


@contextlib.contextmanager
def escaped_controls() -> Iterator[None]:
    """A context in which stdout and stderr escape control characters."""
    before = sys.stdout, sys.stderr
    streams = [EscapingStream(stream) for stream in before]
    sys.stdout, sys.stderr = streams
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        for stream in streams:
            stream.has_ended = True
