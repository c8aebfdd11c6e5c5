"""The server: an open socket, uvicorn's event loop, and a clean end."""

from __future__ import annotations

import contextlib
import socket

import uvicorn

from quantkit.errors import OptionError
from quantkit.runtime.generate import TextModel
from quantkit.serve.app import application, is_loopback
from quantkit.serve.worker import Worker

_IDLE_CONNECTIONS = 64  # besides the ones of waiting requests
_SHUTDOWN_SECONDS = 5  # for clients to read the end of their answers


def require_key(host: str, api_key: str | None) -> None:
    """OptionError for an address that others can reach without an API key, and for an empty key."""
    if api_key is not None and not api_key.strip():
        raise OptionError("the API key is empty; give --api-key KEY or set QUANTKIT_API_KEY, or leave both out")
    if api_key is None and not is_loopback(host):
        raise OptionError(
            f"--host {host} can be reached from other machines: give --api-key KEY or set QUANTKIT_API_KEY"
        )


class ApiServer:
    """A model at an address; port 0 is any free one. It listens from here on, and answers while `run` runs.

    url   of the API, for `base_url` of clients
    """

    def __init__(
        self, model: TextModel, name: str, *, host: str = "127.0.0.1", port: int = 8080, api_key: str | None = None,
        waiting: int = 64,
    ):  # fmt: skip
        require_key(host, api_key)
        plain = host.strip("[]")
        family = socket.AF_INET6 if ":" in plain else socket.AF_INET
        self._socket = socket.create_server((plain, port), family=family)
        shown = f"[{plain}]" if family == socket.AF_INET6 else plain
        self.url = f"http://{shown}:{self._socket.getsockname()[1]}/v1"
        self.worker = Worker(model, waiting)
        config = uvicorn.Config(
            application(self.worker, name, api_key),
            http="h11", ws="none", loop="asyncio", lifespan="off", log_level="warning", access_log=False,
            server_header=False, proxy_headers=False, limit_concurrency=waiting + 1 + _IDLE_CONNECTIONS,
            timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
        )  # fmt: skip
        self._server = _Server(config, self.worker)

    def run(self) -> None:
        """Answer requests until Ctrl-C or `stop`."""
        try:
            with contextlib.suppress(KeyboardInterrupt):  # uvicorn has ended and raises what ended it
                self._server.run(sockets=[self._socket])
        finally:
            self.worker.stop()
            self.worker.join()
            self._socket.close()

    def stop(self) -> None:
        """End `run`, from another thread."""
        self._server.should_exit = True


class _Server(uvicorn.Server):
    """uvicorn's server, which ends the jobs before it waits for their answers."""

    def __init__(self, config: uvicorn.Config, worker: Worker):
        super().__init__(config)
        self._worker = worker

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop the worker and close the connections."""
        self._worker.stop()
        await super().shutdown(sockets)
