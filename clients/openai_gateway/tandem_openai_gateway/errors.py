"""Failures as OpenAI's clients read them: a status and {"error": {message, type, param, code}}."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from tandem.errors import TandemError

STATUS_OF_CODE: Mapping[str, int] = {
    "INVALID_ARGUMENT": 400,
    "OUT_OF_RANGE": 400,
    "UNIMPLEMENTED": 400,
    "UNAUTHENTICATED": 401,
    "PERMISSION_DENIED": 403,
    "NOT_FOUND": 404,
    "ALREADY_EXISTS": 409,
    "RESOURCE_EXHAUSTED": 429,
    "CANCELLED": 499,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
}
"""HTTP status of each gRPC code; all others are 500."""

TYPE_OF_STATUS: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
"""OpenAI's type of an error; other statuses below 500 are the request's fault, the rest ours."""

CODE_OF_REASON: Mapping[str, str] = {
    "PROMPT_TOO_LONG": "context_length_exceeded",
    "TOTAL_TOO_LONG": "context_length_exceeded",
    "QUEUE_FULL": "rate_limit_exceeded",
    "UNAUTHENTICATED": "invalid_api_key",
}
"""OpenAI's codes, which clients know; any other code is our reason in small letters."""

RETRY_STATUSES = frozenset({429, 503})
RETRY_AFTER_S = 1.0
"""Advice to a client where the scheduler gave none."""

_OUTER_FIELDS = ("sampling.", "stopping.", "response.", "response_options.", "chat.", "prompt.")
"""Fields of Tandem's request around those that have OpenAI's names."""


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


def api_error(error: TandemError) -> ApiError:
    """Return the answer for an error of the scheduler or of the client library."""
    status = STATUS_OF_CODE.get(error.code, 500)
    if error.metadata.get("grpc_code") == "DEADLINE_EXCEEDED":
        status = 504
    headers = {}
    if status in RETRY_STATUSES:
        wait_s = RETRY_AFTER_S if error.retry_after_s is None else error.retry_after_s
        headers = retry_headers(wait_s)
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    code = CODE_OF_REASON.get(error.reason, error.reason.lower())
    return ApiError(status, error.message, param=_param(error.field), code=code, headers=headers)


def retry_headers(wait_s: float) -> dict[str, str]:
    """Return the headers that tell a client to come again after so many seconds."""
    # OpenAI's clients read the second, which is exact, where it is there.
    return {
        "Retry-After": str(max(1, math.ceil(wait_s))),
        "Retry-After-Ms": str(max(1, math.ceil(wait_s * 1000))),
    }


def _param(field: str | None) -> str | None:
    if field is None:
        return None
    for outer in _OUTER_FIELDS:
        field = field.removeprefix(outer)
    return "prompt" if field in {"text", "token_ids"} else field
