"""Open connections: how long one may be idle, and which one is closed when there are too many.

uvicorn limits the time from an answer to the client's next byte, but not the time until a request's header is complete.
Without a limit, connections that send nothing, or a byte now and then, would keep all other clients out.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from starlette.types import Scope
from uvicorn.protocols.http.h11_impl import H11Protocol


class Connections:
    """The open connections of a server. `protocol` is uvicorn's HTTP protocol that reports to it.

    A connection is idle except while a request is answered, from its complete header on (`answering`). It is closed
    after it has been idle for `idle_seconds`. If `limit` are open and another one comes, an idle one is closed at once.
    """

    def __init__(self, limit: int, idle_seconds: float):
        self._limit, self._idle_seconds = limit, idle_seconds
        self._open: set[_Connection] = set()

    def protocol(self) -> type[H11Protocol]:
        """The class for `uvicorn.Config(http=…)`."""
        connections = self

        class Protocol(H11Protocol):
            def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as H11Protocol
                super().connection_made(transport)
                self._entry = connections._add(transport)

            def connection_lost(self, exc: Exception | None) -> None:
                connections._remove(self._entry)
                super().connection_lost(exc)

        return Protocol

    @contextlib.contextmanager
    def answering(self, scope: Scope) -> Iterator[None]:
        """A context in which the connection of a request is not idle."""
        addresses = (scope.get("client"), scope.get("server"))
        found = next((one for one in self._open if one.addresses == addresses), None)
        if found is None:  # the client has disconnected
            yield
            return
        found.begin_answer()
        try:
            yield
        finally:
            found.end_answer()

    def _add(self, transport: asyncio.Transport) -> _Connection:
        idle = [one for one in self._open if one.is_idle]
        if len(self._open) >= self._limit and idle:
            oldest = min(idle, key=lambda one: (one.has_answered, one.idle_since))
            oldest.abort()
            self._remove(oldest)
        added = _Connection(transport, self._idle_seconds)
        self._open.add(added)
        return added

    def _remove(self, connection: _Connection) -> None:
        connection.stop_timer()
        self._open.discard(connection)


class _Connection:
    """An open connection and the timer that closes it.

    addresses      of the client and the server, as in ASGI's scope
    is_idle        whether no request is answered
    idle_since     in seconds of the loop's clock
    has_answered   whether a request has been taken
    """

    def __init__(self, transport: asyncio.Transport, idle_seconds: float):
        self._transport, self._idle_seconds = transport, idle_seconds
        peer, own = (transport.get_extra_info(name) for name in ("peername", "sockname"))
        self.addresses = (peer and peer[:2], own and own[:2])  # those of IPv6 have four parts
        self.has_answered = False
        self._answers = 0
        self._start_timer()

    @property
    def is_idle(self) -> bool:
        return self._answers == 0

    def begin_answer(self) -> None:
        self.stop_timer()
        self.has_answered = True
        self._answers += 1

    def end_answer(self) -> None:
        self._answers -= 1  # uvicorn begins the next request of a pipeline before the last one has returned
        if self.is_idle and not self._transport.is_closing():
            self._start_timer()

    def abort(self) -> None:
        """Close the connection at once."""
        self._transport.abort()

    def stop_timer(self) -> None:
        self._timer.cancel()

    def _start_timer(self) -> None:
        loop = asyncio.get_running_loop()
        self.idle_since = loop.time()
        self._timer = loop.call_later(self._idle_seconds, self._on_timer)

    def _on_timer(self) -> None:
        """Close the connection. A client whose request was taken may still read its answer."""
        if self.has_answered:
            self._transport.close()
        else:
            self._transport.abort()
