"""Failures as OpenAI's clients read them: a status and {"error": {message, type, param, code}}."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

TYPE_OF_STATUS: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
"""OpenAI's type of an error; other statuses below 500 are the request's fault, the rest ours."""

RETRY_AFTER_S = 1.0
"""Advice to a client where no scheduler gave another one."""


class ErrorBody(msgspec.Struct, kw_only=True):
    """Description of a failure; `param` names the field of the request."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorAnswer(msgspec.Struct, kw_only=True):
    """Body of every response that failed."""

    error: ErrorBody


class ApiError(Exception):
    """
    A failure that is answered with its status.

    Attributes:
        status: HTTP status.
        body: Body of the answer.
        headers: Headers of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        fault = "invalid_request_error" if status < 500 else "server_error"
        kind = TYPE_OF_STATUS.get(status, fault)
        self.body = ErrorAnswer(error=ErrorBody(message=message, type=kind, param=param, code=code))
        self.headers = dict(headers or {})


def retry_headers(wait_s: float) -> dict[str, str]:
    """Return the headers that tell a client to come again after so many seconds."""
    # OpenAI's clients read the second, which is exact, where it is there.
    return {
        "Retry-After": str(max(1, math.ceil(wait_s))),
        "Retry-After-Ms": str(max(1, math.ceil(wait_s * 1000))),
    }
