"""What a client is told when its request cannot be served."""

from __future__ import annotations

from typing import Any


class ApiError(Exception):
    """An HTTP status and its JSON body.

    Messages name what the client sent, never a path, a key or anything else of the server.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        type: str = 'invalid_request_error',
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ):
        super().__init__(message)
        self.message, self.status, self.type = message, status, type
        self.param, self.code, self.retry_after_s = param, code, retry_after_s

    @property
    def body(self) -> dict[str, Any]:
        """As clients of OpenAI's interface read it."""
        error = {'message': self.message, 'type': self.type, 'param': self.param, 'code': self.code}
        return {'error': error}


def overloaded(message: str, retry_after_s: int = 1) -> ApiError:
    """Too much at once: 429."""
    return ApiError(
        message,
        status=429,
        type='rate_limit_reached_error',
        code='rate_limit_exceeded',
        retry_after_s=retry_after_s,
    )


def internal_error() -> ApiError:
    """Our own fault: 500, without saying more."""
    return ApiError(
        'The server failed to answer this request.',
        status=500,
        type='server_error',
        code='internal',
    )
