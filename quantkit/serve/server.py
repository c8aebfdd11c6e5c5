"""The server: an open socket, uvicorn's event loop, and a clean end."""

from __future__ import annotations

import contextlib
import errno
import os
import socket

import uvicorn

from quantkit.errors import OptionError, QuantkitError
from quantkit.runtime.generate import TextModel
from quantkit.serve.app import application, is_loopback
from quantkit.serve.connections import Connections
from quantkit.serve.worker import Worker

IDLE_SECONDS = 10.0  # of a connection, also until a request's header is complete
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


class Listener:
    """A socket that listens at an address; port 0 is any free one. Requests wait until an `ApiServer` answers them.

    url   of the API, for `base_url` of clients
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 8080, api_key: str | None = None):
        require_key(host, api_key)
        plain = host.strip("[]")
        family = socket.AF_INET6 if ":" in plain else socket.AF_INET
        try:
            self.socket = socket.create_server((plain, port), family=family)
        except (OSError, UnicodeError) as error:  # UnicodeError: a label of a host name is empty or too long
            raise QuantkitError(f"--host {host} --port {port}: {_why_not(error)}") from None
        shown = f"[{plain}]" if family == socket.AF_INET6 else plain
        self.url = f"http://{shown}:{self.socket.getsockname()[1]}/v1"
        self.api_key = api_key

    def close(self) -> None:
        """Stop listening."""
        self.socket.close()


def _why_not(error: OSError | UnicodeError) -> str:
    """Why an address cannot be listened on, and the remedy."""
    number = error.errno if isinstance(error, OSError) and not isinstance(error, socket.gaierror) else None
    reason = os.strerror(number) if number else getattr(error, "strerror", None) or str(error)
    if number == errno.EADDRINUSE:
        return f"{reason}; end the program that listens there, or give another --port (0: any free one)"
    if number == errno.EACCES:
        return f"{reason}; ports below 1024 are the system's, give a --port above them"
    return f"{reason}; --host must be an address of this machine"


class ApiServer:
    """A model at the address of `listener`, which it closes. It answers while `run` runs.

    waiting        requests that may wait
    idle_seconds   after which a connection without a request is closed

    url            of the API, for `base_url` of clients
    """

    def __init__(
        self, model: TextModel, name: str, listener: Listener, *, waiting: int = 64, idle_seconds: float = IDLE_SECONDS
    ):
        self._listener, self.url = listener, listener.url
        self.worker = Worker(model, waiting)
        most = waiting + 1 + _IDLE_CONNECTIONS
        connections = Connections(most, idle_seconds)
        config = uvicorn.Config(
            application(self.worker, name, listener.api_key, connections),
            http=connections.protocol(), ws="none", loop="asyncio", lifespan="off", log_level="warning",
            access_log=False, server_header=False, proxy_headers=False,
            limit_concurrency=most + 1,  # uvicorn refuses from this number on
            timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
        )  # fmt: skip
        self._server = _Server(config, self.worker)

    def run(self) -> None:
        """Answer requests until Ctrl-C or `stop`."""
        try:
            with contextlib.suppress(KeyboardInterrupt):  # uvicorn has ended and raises what ended it
                self._server.run(sockets=[self._listener.socket])
        finally:
            self.worker.stop()
            self.worker.join()
            self._listener.close()

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
