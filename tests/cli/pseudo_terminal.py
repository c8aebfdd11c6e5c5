"""Run commands with a pseudo-terminal, and what a terminal shows of their output."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

QUANTKIT = (sys.executable, "-m", "quantkit")
_ESCAPE = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])")


@dataclass(frozen=True)
class Session:
    """What a command wrote: to the terminal, and to a pipe if stdout was one."""

    status: int
    raw: str
    piped: bytes
    columns: int

    @property
    def screen(self) -> list[str]:
        """The lines that the terminal shows at the end."""
        return self._lines()[0]

    @property
    def cursor(self) -> int:
        """The column of the cursor at the end."""
        return self._lines()[1]

    @property
    def drawn(self) -> list[str]:
        """Every text that a carriage return began or ended: the states of the bar."""
        parts = re.split(r"[\r\n]", _ESCAPE.sub("", self.raw))
        return [part.rstrip() for part in parts if part.strip()]

    def _lines(self) -> tuple[list[str], int]:
        lines, row, column = [[]], 0, 0  # type: list[list[str]], int, int
        for piece in re.split(r"(\x1b\[[0-9;?]*[A-Za-z])", self.raw):
            if _ESCAPE.fullmatch(piece):
                assert piece[-1] in "mhl", f"{piece!r} moves the cursor"
                continue
            for character in piece:
                if character == "\r":
                    column = 0
                elif character == "\n":  # the terminal's driver has put \r before it
                    row += 1
                else:
                    if column == self.columns:
                        row, column = row + 1, 0
                    while len(lines) <= row:
                        lines.append([])
                    lines[row] += " " * (column + 1 - len(lines[row]))
                    lines[row][column] = character
                    column += 1
        return ["".join(line).rstrip() for line in lines], column


def _take_terminal() -> None:
    """Make Ctrl-C on the terminal reach this process, also if the tests run in the background, where it is ignored."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def run(
    argv: list[object],
    *,
    columns: int = 80,
    environment: dict[str, str] | None = None,
    pipe_stdout: bool = False,
    interrupt: Callable[[str], bool] | None = None,
    program: tuple[str, ...] = QUANTKIT,
    cwd: Path | None = None,
    timeout: float = 300,
) -> Session:
    """Run a command on a new terminal. It gets Ctrl-C when `interrupt` is true for the text so far."""
    primary, secondary = pty.openpty()
    fcntl.ioctl(secondary, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    around = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "QUANTKIT_PROGRESS")}
    child = subprocess.Popen(
        [*program, *map(str, argv)], stdin=secondary, stderr=secondary, cwd=cwd, close_fds=True,
        stdout=subprocess.PIPE if pipe_stdout else secondary,
        env=around | {"TERM": "xterm-256color"} | (environment or {}), start_new_session=True,
        preexec_fn=_take_terminal,
    )  # fmt: skip
    os.close(secondary)
    raw, piped, interrupted, deadline = b"", b"", False, time.monotonic() + timeout
    sources = [primary] + ([child.stdout.fileno()] if child.stdout else [])
    while sources:
        ready = select.select(sources, [], [], 0.1)[0]
        for source in ready:
            try:
                data = os.read(source, 65536)
            except OSError:  # Linux: the other end of the terminal is closed
                data = b""
            if not data:
                sources.remove(source)
            elif source == primary:
                raw += data
            else:
                piped += data
        if interrupt and not interrupted and interrupt(raw.decode(errors="replace")):
            interrupted = True
            os.write(primary, b"\x03")
        if time.monotonic() > deadline:
            child.kill()
            raise TimeoutError(f"{argv}: no end after {timeout} s: {raw!r}")
        if child.poll() is not None and not ready:
            break
    os.close(primary)
    if child.stdout:
        child.stdout.close()
    return Session(child.wait(), raw.decode(errors="replace"), piped, columns)
