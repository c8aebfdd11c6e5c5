"""The progress bar itself, on a stream that says that it is a terminal."""

from __future__ import annotations

import io
import itertools
import re
import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from tqdm.utils import disp_len

from quantkit import progress
from quantkit.cli.common.evaluation import ChunkBar
from quantkit.cli.common.terminal import escaped_controls
from quantkit.errors import OptionError
from quantkit.evaluate.progress import ChunkProgress
from quantkit.formats.pipeline import spread


class Terminal(io.StringIO):
    """A stream that is a terminal."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True

    def texts(self) -> list[str]:
        """What was drawn or printed, without the blanks that erase."""
        return [part.rstrip() for part in re.split(r"[\r\n]", self.getvalue()) if part.strip()]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    stream = Terminal()
    monkeypatch.delenv("QUANTKIT_PROGRESS", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=stream))  # pytest sets sys.stderr again for the test
    monkeypatch.setattr(progress, "_TICK_SECONDS", 60.0)
    yield stream
    assert not progress._SCREEN.bars


def test_a_bar_shows_bytes_time_left_and_rate_and_vanishes(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_DRAW_SECONDS", 0.0)
    with progress.ProgressBar("repack", unit="B") as bar:
        bar.started, bar.rate = bar.started - 10, 1e8
        bar(10**9, 10**10, "blk.0.attn_q.weight")
        bar(10**10, 10**10, "")
    status, first, last = terminal.texts()
    assert status == "repack [00:00]"
    assert re.fullmatch(r"blk\.0\.attn_q\.weight  10%\|█+.? *\| 1\.00G/10\.0G \[00:10<01:30, 100MB/s\]", first)
    assert re.fullmatch(r"blk\.0\.attn_q\.weight 100%\|█+\| 10\.0G/10\.0G \[00:10<00:00, 100MB/s\]", last)
    assert re.search(r"\r {77}\r$", terminal.getvalue())  # erased


@pytest.mark.parametrize("label", ["", "x", "blk.10.ffn_down_exps.weight", "a" * 300, "模型" * 100, "\x1b[2Jx\r\n"])
def test_no_line_is_wider_than_the_terminal(label: str) -> None:
    for columns, total, unit in itertools.product(range(20, 160, 7), (None, 40, 9 * 10**12), ("", "B")):
        bar = progress.ProgressBar(label, total, unit=unit)
        bar.started, bar.done = time.monotonic() - 40000, 13
        bar.values = "123456 tok/s, PPL 12345.6789"
        text = bar.text(columns)
        assert disp_len(text) <= columns, text
        assert text.isprintable()


def test_at_80_columns_all_figures_are_seen() -> None:
    bar = progress.ProgressBar("a-model-with-a-long-name-IQ4_K.gguf", 4000)
    bar.started, bar.done, bar.rate = time.monotonic() - 7260, 1234, 0.17
    bar.values = "1234 tok/s, KLD 0.03215"
    text = bar.text(79)
    assert text.startswith("a-model-")
    assert text.endswith("| 1234/4000 [2:01:00<4:31:10, 1234 tok/s, KLD 0.03215]")


def test_names_of_other_lengths_do_not_move_the_bar(terminal: Terminal) -> None:
    with progress.ProgressBar(total=4, unit="B") as bar:
        starts = []
        for done, name in enumerate(("output.weight", "blk.0.ffn_down.weight", "a.bias", "output_norm.weight")):
            bar.label, bar.done = name, done
            starts.append(bar.text(100).index("%|"))
    assert starts[1] == starts[2] == starts[3]


def test_the_newest_bar_is_shown_and_the_one_below_it_again(terminal: Terminal) -> None:
    with progress.ProgressBar("outer") as outer:
        with progress.ProgressBar(total=3):  # without a label, that of the bar below
            pass
        assert terminal.texts()[-1].startswith("outer   0%|")
        outer.show(1, 2)
        outer.show(2, 2)
    assert terminal.texts()[-1].startswith("outer 100%|")


def test_other_output_is_above_the_bar(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", terminal)
    with escaped_controls(), progress.ProgressBar("work", 2) as bar:
        print("a line")
        print("half", end="")
        bar.show(2, 2)  # not drawn: a line is open
        print(" a line")
    text = re.sub(r"work +(\d+)%\|[^\r]*", r"<\1>", terminal.getvalue())
    text = re.sub(r"\r +\r", "#", text)
    assert text == "\r<0>#a line\n\r<0>#half a line\n\r<100>#"


def test_output_elsewhere_does_not_touch_the_bar(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    with escaped_controls(), progress.ProgressBar("work", 2):
        before = terminal.getvalue()
        print("to a pipe")
        assert terminal.getvalue() == before


def test_after_a_failure_the_bar_stays_and_the_cursor_is_on_a_new_line(terminal: Terminal) -> None:
    def fail() -> int:
        raise KeyboardInterrupt

    with progress.ProgressBar("outer", after=60), pytest.raises(KeyboardInterrupt):
        spread([lambda: 5, fail], 10, threads=1, progress=True)
    assert terminal.getvalue().endswith("]\n")
    assert re.match(r"outer +50%\|", terminal.texts()[-1])


def test_a_status_is_shown_after_a_while_and_its_clock_goes_on(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_TICK_SECONDS", 0.01)
    with progress.ProgressBar("plan", after=0.05):
        assert terminal.getvalue() == ""
        deadline = time.monotonic() + 20
        while "plan [00:01]" not in terminal.getvalue():
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_a_measurement_is_not_drawn_into(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_TICK_SECONDS", 0.001)
    with progress.ProgressBar("outer"), progress.ProgressBar("bench", 2, ticks=False):
        before = terminal.getvalue()
        time.sleep(0.2)
        assert terminal.getvalue() == before


def test_no_thread_is_left(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_TICK_SECONDS", 0.01)
    before = threading.active_count()
    for _ in range(20):
        with progress.ProgressBar("x"):
            pass
    deadline = time.monotonic() + 20
    while threading.active_count() > before:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_end_closes_all_bars(terminal: Terminal) -> None:
    with progress.ProgressBar("a", 2) as a, progress.ProgressBar("b", 2) as b:
        progress.end()
        before = terminal.getvalue()
        a.show(2, 2)
        b.show(2, 2)
        assert terminal.getvalue() == before
        assert before.endswith("\r")


def test_a_terminal_that_is_gone_does_not_stop_the_job(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = []

    def write(text: str) -> int:
        refused.append(text)
        raise OSError(5, "gone")

    with progress.ProgressBar("a", 2) as bar:
        monkeypatch.setattr(terminal, "write", write)
        bar.show(2, 2)
        assert bar.done == 2
    assert refused


@pytest.mark.parametrize("why", ["settings", "QUANTKIT_PROGRESS", "TERM", "a pipe"])
def test_there_is_no_bar(why: str, terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    if why == "QUANTKIT_PROGRESS":
        monkeypatch.setenv(why, "0")
    elif why == "TERM":
        monkeypatch.setenv(why, "dumb")
    elif why == "a pipe":
        monkeypatch.setattr(terminal, "isatty", lambda: False)
    with (
        progress.settings(bars=False if why == "settings" else None),
        progress.settings(),
        progress.ProgressBar("a", 2) as bar,
    ):
        bar.show(2, 2)
    assert terminal.getvalue() == ""


def test_an_option_counts_more_than_the_variable(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUANTKIT_PROGRESS", "0")
    with progress.settings(bars=True):
        assert progress.mode() == "bar"
        with progress.settings(bars=False), progress.settings(bars=True):
            assert progress.mode() == "off"  # what an outer context turned off stays off
    monkeypatch.setattr(terminal, "isatty", lambda: False)
    with progress.settings(bars=True):
        assert progress.mode() == "lines"
    assert progress.mode() == "off"


def test_settings_end_with_their_context() -> None:
    with progress.settings(messages=False):
        assert not progress.messages_shown()
    assert progress.messages_shown()


def test_without_a_terminal_lines_are_whole(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "isatty", lambda: False)
    monkeypatch.setenv("QUANTKIT_PROGRESS", "1")
    with progress.ProgressBar("perplexity", 40) as bar:
        bar.show(1, 40)
        assert terminal.getvalue() == ""  # a minute has not passed
        monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
        bar._next_line, bar.rate = 0.0, 0.5
        bar.show(10, 40, values="PPL 12.4")
        bar.show(20, 40, values="PPL 12.5")
    assert terminal.getvalue() == (
        "perplexity 25% 10/40 [00:00<01:00, PPL 12.4]\nperplexity 50% 20/40 [00:00<00:40, PPL 12.5]\n"
    )


@pytest.mark.parametrize("value", ["yes", "2", "01"])
def test_another_value_of_the_variable_is_an_error(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUANTKIT_PROGRESS", value)
    with pytest.raises(OptionError, match=rf"QUANTKIT_PROGRESS={value}: write 0 \(no progress\) or 1"):
        progress.mode()


def chunk(done: int, seconds: float, chunks: int = 40, resumed: int = 0) -> ChunkProgress[None]:
    return ChunkProgress(done, chunks, resumed, 512, 4, seconds, "text", None)


def test_the_rate_of_chunks_is_known_at_the_end_of_a_batch(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_DRAW_SECONDS", 0.0)
    with ChunkBar("perplexity", "PPL") as bar:
        bar.show(chunk(13, 8.0, resumed=12), 9.5)
        assert terminal.texts()[-1].endswith("| 13/40 [00:08<?, PPL 9.5000]")
        bar.show(chunk(16, 8.0, resumed=12), 9.25)
        assert terminal.texts()[-1].endswith("| 16/40 [00:08<00:48, 256 tok/s, PPL 9.2500]")
        bar.show(chunk(17, 8.0, resumed=12), 9.25)
        assert terminal.texts()[-1].endswith("| 17/40 [00:08<00:46, 256 tok/s, PPL 9.2500]")


def test_the_bar_of_several_runs_counts_all_of_them(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_DRAW_SECONDS", 0.0)
    with ChunkBar("compare", "KLD", 5) as bar:
        bar.show(chunk(40, 10.0), run=0, runs=3, label="ref.gguf")
        bar.show(chunk(20, 5.0), 0.0123456, run=1, runs=3, label="q4.gguf")
        text = terminal.texts()[-1]
    assert text.startswith("q4.gguf   50%|")
    assert text.endswith("| 60/120 [00:10<00:10, 2048 tok/s, KLD 0.01235]")


def test_layers_are_in_the_bar_on_a_terminal_and_messages_elsewhere(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ChunkBar("perplexity", "PPL") as bar:
        assert bar.on_layer is not None
        bar.on_layer(30, 30)
    assert re.search(r"^perplexity 100%\|█+\| 30/30 \[\d\d:\d\d<00:00, layer by layer\]$", terminal.texts()[-1])
    monkeypatch.setattr(terminal, "isatty", lambda: False)
    with ChunkBar("perplexity", "PPL") as bar:
        assert bar.on_layer is None
