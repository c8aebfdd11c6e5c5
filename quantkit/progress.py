"""Progress on a terminal: one line on stderr, drawn with tqdm, for every job that may take seconds.

    quantize       12%|███▎                  | 1.23G/10.2G [00:12<01:28, 102MB/s]
    perplexity     25%|██████▌               | 10/40 [00:12<00:36, 1706 tok/s, PPL 12.4071]
    perplexity [00:03]                                             the total is not known yet

Jobs report to callbacks and know nothing of terminals. A `ProgressBar` is such a callback. Bars nest: the newest one is
shown, and the one below it again when it is closed. A bar vanishes when its job is done, because the results that
follow say more. After an error or an interrupt it stays, and the cursor is on a new line. Everything else that is
printed has to go `above` the bar; the command line's streams do so.

    stderr is a terminal       a bar, unless TERM is dumb
    stderr is something else   nothing: no carriage return, the same bytes in every run
    QUANTKIT_PROGRESS=0        nothing
    QUANTKIT_PROGRESS=1        where stderr is no terminal, a whole line a minute
    `settings`                 decides instead: --progress, --no-progress and --quiet
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

from quantkit.errors import OptionError, printable

VARIABLE = "QUANTKIT_PROGRESS"
LINE_SECONDS = 60.0  # between the lines of QUANTKIT_PROGRESS=1
_DRAW_SECONDS = 0.1  # between two drawings
_TICK_SECONDS = 0.5  # between drawings of a bar that nobody updates: its clock goes on
_SPARE = 3  # columns that stay free: a terminal may wrap after the last one, and shows ^C behind the bar
_MIN_BAR = 8  # columns of the bar itself
_MIN_LABEL = 6  # columns; with less space for it, the label is left out

Mode = Literal["bar", "lines", "off"]


class _Settings:
    """What `settings` decided; `bars` is None where the variable decides."""

    bars: bool | None = None
    messages = True


_SETTINGS = _Settings()


@contextlib.contextmanager
def settings(*, bars: bool | None = None, messages: bool = True) -> Iterator[None]:
    """A context with or without bars, or without messages. What an outer context turned off stays off."""
    before = _SETTINGS.bars, _SETTINGS.messages
    if before[0] is not False and bars is not None:
        _SETTINGS.bars = bars
    _SETTINGS.messages = before[1] and messages
    try:
        yield
    finally:
        _SETTINGS.bars, _SETTINGS.messages = before


def messages_shown() -> bool:
    """Whether messages about the course of a job are printed (not with --quiet)."""
    return _SETTINGS.messages


def mode() -> Mode:
    """How a bar that is opened now shows itself. Raises OptionError for a value of QUANTKIT_PROGRESS but 0 and 1."""
    value = os.environ.get(VARIABLE, "")
    if value not in ("", "0", "1"):
        raise OptionError(wrong_value())
    shown = _SETTINGS.bars if _SETTINGS.bars is not None else {"0": False, "1": True}.get(value)
    if shown is False:
        return "off"
    if is_terminal(sys.stderr) and os.environ.get("TERM") != "dumb":
        return "bar"
    return "lines" if shown else "off"


def wrong_value() -> str:
    """The message about a value of QUANTKIT_PROGRESS that is neither 0 nor 1."""
    return f"{VARIABLE}={printable(os.environ.get(VARIABLE, ''))}: write 0 (no progress) or 1 (progress)"


def is_terminal(stream: Any) -> bool:
    """Whether a stream is a terminal; False for None and for a closed one."""
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):
        return False


class ProgressBar:
    """A bar over `total` units of work, or a line with the time spent while the total is not known.

    label    what is done; without one, that of the bar below
    unit     "B" prints bytes and their rate, another one only counts
    after    seconds until it is shown
    spent    seconds that the work has taken already
    ticks    draw it while nothing is reported too; False for a measurement of time

    It is shown within `with`. It is itself a callback of the pipelines: `bar(done, total, label)`.
    """

    def __init__(
        self,
        label: str = "",
        total: int | None = None,
        *,
        unit: str = "",
        after: float = 0.0,
        spent: float = 0.0,
        ticks: bool = True,
    ):
        self.label, self.total, self.unit, self.ticks = label, total, unit, ticks
        self.done = self.initial = 0
        self.values = ""  # further figures, after the time left
        self.rate: float | None = None  # units a second; None: the mean since `started`
        self.mode: Mode = "off"
        self._after, self._spent, self._label_columns = after, spent, 0
        self.started = self._next_line = 0.0

    def __enter__(self) -> ProgressBar:
        self.mode = mode()
        self.started = time.monotonic() - self._spent
        self._next_line = time.monotonic() + LINE_SECONDS
        if self.mode == "bar":
            _SCREEN.push(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self.close(failed=kind is not None)

    def close(self, failed: bool = False) -> None:
        """Erase the bar; after a failure, leave it and begin a new line."""
        if self.mode == "bar":
            _SCREEN.remove(self, leave=failed and self.total is not None)
        self.mode = "off"

    def __call__(self, done: int, total: int, label: str) -> None:
        """Show that `done` of `total` are done, the last of it in the tensor `label`."""
        self.show(done, total, label=label)

    def show(self, done: int, total: int | None, *, label: str = "", values: str = "") -> None:
        """Show that `done` of `total` are done. Without a label the last one stays."""
        with _SCREEN.lock:
            self.done, self.total, self.values = done, total, values
            self.label = label or self.label
            if self.mode == "bar":
                _SCREEN.draw(at_once=done == total)
            elif self.mode == "lines" and time.monotonic() >= self._next_line:
                self._next_line = time.monotonic() + LINE_SECONDS
                print(self.text(None), file=sys.stderr, flush=True)

    @property
    def is_due(self) -> bool:
        """Whether it is shown yet."""
        return time.monotonic() >= self.started + self._after

    def text(self, columns: int | None, ascii: bool = False, label: str = "") -> str:
        """The line in at most `columns` columns; None: without the bar itself. `label` is used if it has none."""
        from tqdm import tqdm
        from tqdm.utils import disp_len

        counts = "{n_fmt}/{total_fmt} [{elapsed}<{remaining}{values}]"
        if self.unit == "B":
            counts = "{n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{values}]"
        form = "{desc} [{elapsed}{values}]"
        if self.total is not None:
            form = "{desc} {percentage:3.0f}%|{bar}| " + counts if columns else "{desc} {percentage:.0f}% " + counts
        now = time.monotonic()

        def filled(form: str, label: str, columns: int | None) -> str:
            rate = self.rate if self.rate is not None else (self.done - self.initial) / max(1e-9, now - self.started)
            values = f", {self.values}" if self.values else ""
            text = tqdm.format_meter(
                self.done, self.total or 0, now - self.started, ncols=columns, prefix=label, ascii=ascii,
                unit=self.unit, unit_scale=self.unit == "B", rate=rate, bar_format=form, values=values,
            )  # fmt: skip
            return str(text)

        name = printable(self.label or label)
        if columns is None:
            return filled(form, name, None).strip()
        free = columns - disp_len(filled(form.replace("{bar}", " " * _MIN_BAR), "", None))
        name = _shortened(name, free, ascii) if free >= _MIN_LABEL else ""
        if self.total is not None:  # names of tensors differ in length; the bar stays where it is
            self._label_columns = max(0, min(max(self._label_columns, disp_len(name)), free))
            name += " " * (self._label_columns - disp_len(name))
        return filled(form, name, columns)


def _shortened(text: str, columns: int, ascii: bool) -> str:
    from tqdm.utils import disp_len, disp_trim

    if disp_len(text) <= columns:
        return text
    return f"{disp_trim(text, columns - 1)}{'~' if ascii else '…'}"


class _Screen:
    """The line on the terminal on which the newest bar is drawn."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.bars: list[ProgressBar] = []
        self._print: Callable[[str], None] | None = None  # replaces the text of the line
        self._is_drawn = False
        self._has_open_line = False  # other output has not ended its line: nothing can be drawn
        self._last_drawn = 0.0
        self._stop_ticks = threading.Event()

    def push(self, bar: ProgressBar) -> None:
        """Show a bar from now on."""
        with self.lock:
            self.bars.append(bar)
            if len(self.bars) == 1:
                self._print = None
                self._has_open_line = False
                self._stop_ticks = threading.Event()
                threading.Thread(target=self._tick, args=(self._stop_ticks,), daemon=True).start()
            self.draw(at_once=True)

    def remove(self, bar: ProgressBar, leave: bool) -> None:
        """Show a bar no longer: erase it, or leave its last state and begin a new line."""
        with self.lock:
            if bar not in self.bars:
                return
            if leave and bar is self._shown():
                self.draw(at_once=True)
                if self._is_drawn:
                    self._write("\n")
                    self._is_drawn, self._print = False, None
            else:
                self.erase()
            self.bars.remove(bar)
            if not self.bars:
                self._stop_ticks.set()

    def draw(self, at_once: bool = False) -> None:
        """Draw the newest bar that is due, if the last drawing was a while ago."""
        with self.lock:
            bar, now = self._shown(), time.monotonic()
            if bar is None or self._has_open_line or not (at_once or now >= self._last_drawn + _DRAW_SECONDS):
                return
            self._last_drawn, self._is_drawn = now, True
            below = next((b.label for b in reversed(self.bars) if b is not bar and b.label), "")
            self._replace(bar.text(_columns() - _SPARE, _is_ascii(), below))

    def erase(self) -> None:
        """Erase the line."""
        with self.lock:
            if self._is_drawn:
                self._is_drawn = False
                self._replace("")
                self._write("\r")

    @contextlib.contextmanager
    def above(self, text: str) -> Iterator[None]:
        """A context in which `text` is written to the terminal: the bar is erased before and drawn after it."""
        with self.lock:
            self.erase()
            yield
            self._has_open_line = not text.endswith("\n")
            self.draw(at_once=True)

    def _shown(self) -> ProgressBar | None:
        return next((bar for bar in reversed(self.bars) if bar.is_due), None)

    def _tick(self, stop: threading.Event) -> None:
        while not stop.wait(_TICK_SECONDS):
            with self.lock:
                if not stop.is_set() and self.bars and self.bars[-1].ticks:
                    self.draw()

    def _replace(self, text: str) -> None:
        from tqdm import tqdm

        with contextlib.suppress(OSError, ValueError):  # the terminal is gone, or stderr is closed: the job goes on
            if self._print is None:
                self._print = tqdm.status_printer(_unwrapped(sys.stderr))
            self._print(text)

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            stream = _unwrapped(sys.stderr)
            stream.write(text)
            stream.flush()


_SCREEN = _Screen()


@contextlib.contextmanager
def above(stream: Any, text: str) -> Iterator[None]:
    """A context in which `text` is written to a stream. If that is a terminal, a bar moves out of its way."""
    if not _SCREEN.bars or not text or not is_terminal(stream):
        yield
        return
    with _SCREEN.above(text):
        yield


def end() -> None:
    """Close all bars that are shown, before a command writes to the terminal as it likes."""
    for bar in list(_SCREEN.bars):
        bar.close()


def _unwrapped(stream: Any) -> Any:
    """The stream below those of the command line (`wrapped`), which escape control characters."""
    while hasattr(stream, "wrapped"):
        stream = stream.wrapped
    return stream


def _columns() -> int:
    """Columns of the terminal on stderr, now."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if columns := os.get_terminal_size(sys.stderr.fileno()).columns:
            return columns
    return 80


def _is_ascii() -> bool:
    return not str(getattr(sys.stderr, "encoding", None) or "").lower().startswith("utf")
