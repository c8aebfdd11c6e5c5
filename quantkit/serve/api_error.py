"""Errors as OpenAI's API states them: an HTTP status, and {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

from typing import Any


class ApiError(Exception):
    """An answer that is an error.

    status     of HTTP
    code       a word for programs, such as "context_length_exceeded"
    headers    further headers of the response
    """

    def __init__(self, status: int, message: str, code: str | None = None, headers: dict[str, str] | None = None):
        super().__init__(message)
        self.status, self.message, self.code, self.headers = status, message, code, headers or {}

    @property
    def record(self) -> dict[str, Any]:
        """The JSON of the answer."""
        kind = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}.get(
            self.status, "invalid_request_error" if self.status < 500 else "server_error"
        )
        return {"error": {"message": self.message, "type": kind, "param": None, "code": self.code}}
