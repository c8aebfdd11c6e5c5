"""Chat templates, which are programs inside of model files: rendered in a process of their own, within limits.

jinja2's sandbox keeps a template away from Python's internals, but not from `10 ** (10 ** 9)`, nested loops, a text
doubled forty times or `|center(10 ** 10)`, and a thread cannot be stopped while it runs one. A process can: it is
killed after MAX_SECONDS, and the system refuses it more memory than chat_worker.MAX_MEMORY (not on Windows).

The process is started with the first template and serves the later ones. That costs a tenth of a second once.
"""

from __future__ import annotations

import atexit
import json
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Mapping

from quantkit.errors import DataError, FormatError, QuantkitError, UnsupportedError, printable

MAX_SECONDS = 10.0  # for a template and its messages; real ones take milliseconds
MAX_TEMPLATE = 1 << 20  # characters; the longest published ones have some ten thousand


class _Renderer:
    """The process, started for the first rendering, and again after it had to be killed."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0  # the process that started it: after a fork the other one starts its own
        self._lock = threading.Lock()

    def render(self, request: bytes) -> dict[str, str]:
        """The reply to a request, an error where the process did not end in time."""
        with self._lock:
            process = self._started()
            timer = threading.Timer(MAX_SECONDS, process.kill)
            timer.daemon = True
            timer.start()
            try:
                reply = _exchange(process, request)
            except BaseException:  # an interrupt; what is left of the reply would be taken for the next one's
                self._end(process)
                raise
            finally:
                in_time = timer.is_alive()
                timer.cancel()
            if reply is not None:
                return reply
            status = self._end(process)
            return {"error": f"it ended its process with status {status}" if in_time
                    else f"it takes more than {MAX_SECONDS:g} seconds"}  # fmt: skip

    def _started(self) -> subprocess.Popen[bytes]:
        process = self._process
        if process is None or process.poll() is not None or self._owner != os.getpid():
            process = self._process = _start()
            self._owner = os.getpid()
        return process

    def _end(self, process: subprocess.Popen[bytes]) -> int:
        """Kill the process if it still runs; returns its exit status."""
        process.kill()
        self._process = None
        return process.wait()

    def close(self) -> None:
        """End the process, if there is one of this process's own."""
        if self._process is not None and self._owner == os.getpid():
            self._end(self._process)


def _start() -> subprocess.Popen[bytes]:
    if not sys.executable:
        raise UnsupportedError("chat templates are rendered by a second Python process, and sys.executable names none")
    # With -m Python would look for modules in the working directory first, where a model's files may lie.
    paths = [path for path in sys.path if path]
    code = f"import sys; sys.path[:] = {paths!r}; from quantkit.tokenizers.chat_worker import main; main()"
    return subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip


def _exchange(process: subprocess.Popen[bytes], request: bytes) -> dict[str, str] | None:
    """Send a request and wait for the reply; None where the process ended before."""
    from quantkit.tokenizers.chat_worker import receive, send

    assert process.stdin is not None
    assert process.stdout is not None
    try:
        send(process.stdin, request)  # type: ignore[arg-type]
        reply = receive(process.stdout)  # type: ignore[arg-type]
    except OSError:  # its end of the pipe is closed
        return None
    return None if reply is None else json.loads(reply)


_renderer = _Renderer()
atexit.register(_renderer.close)


def render(template: object, values: Mapping[str, object]) -> str:
    """Render a template. QuantkitError if it refuses its input, fails, or exceeds the limits."""
    if not isinstance(template, str):
        raise FormatError(f"the model's chat template is {type(template).__name__}, not text")
    if len(template) > MAX_TEMPLATE:
        raise FormatError(
            f"the model's chat template has {len(template)} characters, up to {MAX_TEMPLATE} are rendered; set "
            "another one with `quantkit metadata set FILE tokenizer.chat_template=…`"
        )
    try:
        request = pickle.dumps((template, dict(values)))
    except Exception as error:  # of whatever kind the objects' own methods raise
        raise DataError(
            f"a variable of the chat template cannot be sent to the process that renders: {error}"
        ) from None
    reply = _renderer.render(request)
    if "syntax" in reply:
        raise FormatError(
            f"the model's chat template cannot be read: {printable(reply['syntax'])}; set another one with "
            "`quantkit metadata set FILE tokenizer.chat_template=…`"
        )
    if "text" not in reply:
        raise QuantkitError(f"the model's chat template refuses these messages: {printable(reply['error'])}")
    return reply["text"]
