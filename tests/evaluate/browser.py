"""A headless Chromium, spoken to over its debugging pipe: what a page says, asks for and looks like.

    with Browser(find()) as browser:
        seen = browser.open(path, width=420)     # Seen
        png = browser.screenshot()

Messages are JSON, each ended by a zero byte, over the file descriptors 3 (to the browser) and 4 (from it).
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_SECONDS = 30.0


def find() -> str | None:
    """The program of a browser that is installed, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


@dataclass(frozen=True)
class Seen:
    """What happened while a page was opened."""

    requests: list[str]  # addresses, the page's own first
    messages: list[str]  # of the console, of exceptions and of the browser's log
    width: int  # pixels that the page takes across


class Browser:
    """Used with `with`. One page at a time."""

    def __init__(self, program: str):
        self._program = program

    def __enter__(self) -> Browser:
        self._folder = tempfile.TemporaryDirectory(prefix="quantkit-browser-", ignore_cleanup_errors=True)
        theirs_in, self._to = os.pipe()
        self._from, theirs_out = os.pipe()
        arguments = [self._program, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                     "--remote-debugging-pipe", f"--user-data-dir={self._folder.name}", "about:blank"]  # fmt: skip
        ends = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (theirs_in, theirs_out)]
        # A shell puts the pipes where the browser looks for them.
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{ends[0]} 4>&{ends[1]}', "-", *arguments], pass_fds=ends,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        for end in (theirs_in, theirs_out, *ends):
            os.close(end)
        self._count, self._buffer, self._session = 0, b"", ""
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._to)
        os.close(self._from)
        self._folder.cleanup()

    def open(self, path: Path, width: int, height: int = 900, dark: bool = False) -> Seen:
        """Load a file into a window so wide."""
        self.events.clear()
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        loader = self.call("Page.navigate", url=path.resolve().as_uri())["loaderId"]
        while not self._loaded(loader):
            self._next()
        across = self.value("document.documentElement.scrollWidth")
        requests = [e["params"]["request"]["url"] for e in self.events if e["method"] == "Network.requestWillBeSent"]
        loud = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        return Seen(requests, [json.dumps(e["params"]) for e in self.events if e["method"] in loud], across)

    def value(self, expression: str) -> Any:
        """Of an expression in the page's language."""
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"]["value"]

    def screenshot(self) -> bytes:
        """The whole page as PNG."""
        found = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        return base64.b64decode(found["data"])

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of a command."""
        self._count += 1
        number = self._count
        message = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result

    def _loaded(self, loader: str) -> bool:
        """Whether the page of a loader is there; pages before it have events of their own."""
        seen = [e["params"]["frame"]["loaderId"] if e["method"] == "Page.frameNavigated" else e["method"]
                for e in self.events]  # fmt: skip
        return loader in seen and "Page.loadEventFired" in seen[seen.index(loader) :]

    def _next(self) -> dict[str, Any]:
        """The next message; events are also kept."""
        deadline = time.monotonic() + _SECONDS
        while b"\0" not in self._buffer:
            part = os.read(self._from, 1 << 16)
            assert part, f"{self._program} ended"
            assert time.monotonic() < deadline, f"{self._program} does not answer"
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        if "method" in message:
            self.events.append(message)
        return message
