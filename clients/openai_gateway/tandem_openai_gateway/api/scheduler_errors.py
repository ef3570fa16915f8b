"""Errors of the schedulers and of the client library, as OpenAI's clients read them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from tandem.errors import TandemError
from tandem_openai_gateway.api.field_names import Naming, typed_message, typed_name, unchanged
from tandem_openai_gateway.errors import RETRY_AFTER_S, ApiError, retry_headers

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

CODE_OF_REASON: Mapping[str, str] = {
    "PROMPT_TOO_LONG": "context_length_exceeded",
    "TOTAL_TOO_LONG": "context_length_exceeded",
    "QUEUE_FULL": "rate_limit_exceeded",
    "UNAUTHENTICATED": "invalid_api_key",
}
"""OpenAI's codes, which clients know; any other code is our reason in small letters."""

RETRY_STATUSES = frozenset({429, 503})


def api_error(error: TandemError, naming: Naming = unchanged) -> ApiError:
    """
    Return the answer for an error of the scheduler or of the client library.

    Args:
        error: The error.
        naming: Tells how the request that failed names fields.
    """
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
    param = None if error.field is None else typed_name(error.field, naming)
    message = error.message if param is None else typed_message(error, param)
    return ApiError(status, message, param=param, code=code, headers=headers)


@contextmanager
def answered(naming: Naming) -> Iterator[None]:
    """
    Have errors of the scheduler in this block name fields as the request does.

    Raises:
        ApiError: The block raised a TandemError.
    """
    try:
        yield
    except TandemError as error:
        raise api_error(error, naming) from error
