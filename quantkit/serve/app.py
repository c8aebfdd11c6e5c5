"""The ASGI application: /v1/models, /v1/completions and /v1/chat/completions.

401   without the API key, where there is one
403   a Host header that is no name of the loopback interface, where there is no API key: a web page can make a
      browser send requests to a name of its own that resolves to 127.0.0.1 (DNS rebinding)
404   another path or model         405   another method        408   a body that takes over READ_SECONDS
413   a body over MAX_BODY          415   a body that is not declared as JSON: browsers send other types unasked
429   the queue is full
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import json
import re
import time
from collections.abc import AsyncIterator, Callable

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from quantkit.serve import requests
from quantkit.serve.answers import Answer, Record
from quantkit.serve.api_error import ApiError
from quantkit.serve.connections import Connections
from quantkit.serve.requests import Request
from quantkit.serve.worker import Event, Job, PieceOf, Started, Worker

MAX_BODY = 1 << 20  # bytes
READ_SECONDS = 30.0  # for a body


def is_loopback(host: str) -> bool:
    """Whether a name or address is one of the loopback interface."""
    try:
        return host.lower() == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def application(worker: Worker, model: str, api_key: str | None, connections: Connections) -> Starlette:
    """The application. `model` is the name of the worker's model."""
    listed = {"id": model, "object": "model", "created": int(time.time()), "owned_by": "quantkit"}

    async def models(_: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [listed]})

    async def one_model(request: HttpRequest) -> Response:
        if (asked := request.path_params["name"]) != model:
            raise ApiError(404, f"there is no model {asked[:80]!r}; this server has {model!r}", "model_not_found")
        return JSONResponse(listed)

    def endpoint(parse: Callable[[bytes, str], Request]) -> Callable[[HttpRequest], object]:
        async def answer(request: HttpRequest) -> Response:
            return _Answering(worker, model, parse(await _body(request), model))

        return answer

    routes = [
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", one_model),
        Route("/v1/completions", endpoint(requests.completion), methods=["POST"]),
        Route("/v1/chat/completions", endpoint(requests.chat), methods=["POST"]),
    ]
    handlers = {ApiError: _on_api_error, HTTPException: _on_http_error, Exception: _on_bug}
    guard = Middleware(_Guard, api_key=api_key, connections=connections)
    return Starlette(routes=routes, middleware=[guard], exception_handlers=handlers)


class _Guard:
    """Middleware that refuses requests without the API key or, where there is none, for a foreign host.

    The connection of a refused request stays idle, so that such requests do not keep it open.
    """

    def __init__(self, app: ASGIApp, api_key: str | None, connections: Connections):
        self._app, self._connections = app, connections
        self._key = None if api_key is None else api_key.strip().encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (error := self._refusal(Headers(scope=scope))) is not None:
            await _error_response(error)(scope, receive, send)
            return
        with self._connections.answering(scope):
            await self._app(scope, receive, send)

    def _refusal(self, headers: Headers) -> ApiError | None:
        if self._key is None:
            host = headers.get("host", "")
            if is_loopback(re.sub(r":\d*$", "", host)):
                return None
            return ApiError(403, f"the host {host[:80]!r} is not this machine's loopback interface", "forbidden_host")
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and hmac.compare_digest(key.strip().encode("latin-1"), self._key):
            return None
        return ApiError(401, "the API key is missing or wrong", "invalid_api_key", {"WWW-Authenticate": "Bearer"})


async def _body(request: HttpRequest) -> bytes:
    """The body of a request."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, f"the content type is {kind[:80]!r}; it must be application/json")
    if (declared := int(request.headers.get("content-length", "0"))) > MAX_BODY:  # digits: h11 has checked them
        raise _too_large(str(declared))
    try:
        return await asyncio.wait_for(_read(request), READ_SECONDS)
    except ClientDisconnect:
        raise ApiError(400, "the client disconnected") from None
    except asyncio.TimeoutError:
        raise ApiError(408, f"the body did not arrive within {READ_SECONDS:g} s") from None


async def _read(request: HttpRequest) -> bytes:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY:
            raise _too_large(f"{len(body)} or more")
    return bytes(body)


def _too_large(size: str) -> ApiError:
    """The answer to a large body. It is sent at once; uvicorn discards the rest, so that the client can read it."""
    return ApiError(413, f"the body has {size} bytes; at most {MAX_BODY} are taken", "body_too_large")


def _error_response(error: ApiError) -> JSONResponse:
    return JSONResponse(error.record, error.status, error.headers)


async def _on_api_error(_: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _error_response(error)


async def _on_http_error(_: HttpRequest, error: Exception) -> Response:
    """404 and 405 of the router."""
    assert isinstance(error, HTTPException)
    return _error_response(ApiError(error.status_code, error.detail, headers=dict(error.headers or {})))


async def _on_bug(_: HttpRequest, error: Exception) -> Response:
    """Whatever else is raised. starlette raises it again, and its traceback is printed."""
    return _error_response(ApiError(500, f"the server failed: {type(error).__name__}; its output has the traceback"))


class _Answering(Response):
    """The response to a request: puts it into the queue, and sends what the worker makes of it.

    A client that disconnects cancels its job.
    """

    def __init__(self, worker: Worker, model: str, request: Request):
        super().__init__()
        self._model, self._request = model, request
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def emit(event: Event) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._events.put_nowait, event)

        self._worker, self._job = worker, Job(request, emit)
        worker.put(self._job)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watching = asyncio.create_task(self._cancel_on_disconnect(receive))
        try:
            first = await self._events.get()
            if isinstance(first, ApiError):
                raise first
            assert isinstance(first, Started)
            answer = Answer(self._request, self._model, first.prompt_tokens)
            if self._request.stream:
                await self._stream(answer, send)
            else:
                async for part in self._pieces():
                    answer.add(part.index, part.piece)
                await JSONResponse(answer.record())(scope, receive, send)
        finally:
            watching.cancel()
            self._worker.cancel(self._job)

    async def _cancel_on_disconnect(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._worker.cancel(self._job)

    async def _pieces(self) -> AsyncIterator[PieceOf]:
        """The pieces of the answer until it is complete."""
        while isinstance(event := await self._events.get(), PieceOf):
            yield event
        if isinstance(event, ApiError):
            raise event

    async def _stream(self, answer: Answer, send: Send) -> None:
        """Send server-sent events. An error after the first one is an event too."""
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            async for part in self._pieces():
                for record in answer.chunks(part.index, part.piece):
                    await _send_event(send, record)
            if self._request.include_usage:
                await _send_event(send, answer.usage_chunk())
            await _send_event(send, None)
        except ApiError as error:
            await _send_event(send, error.record)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send_event(send: Send, record: Record | None) -> None:
    """Send a record as an event; None: the mark of the end."""
    text = "[DONE]" if record is None else json.dumps(record, ensure_ascii=False, allow_nan=False)
    await send({"type": "http.response.body", "body": f"data: {text}\n\n".encode(), "more_body": True})
