"""Failures of calls, and of items of a batch, as clients get them: typed, logged, and bounded."""

from __future__ import annotations

import structlog

from scheduler_svc.frontend.calls.call_id import call_id
from tandem.errors import InternalError, TandemError

_log: structlog.stdlib.BoundLogger = structlog.get_logger()

MAX_MESSAGE_BYTES = 600
"""Limit of an error's text, which may quote a client; trailers must stay under 8 KiB."""


def typed_failure(error: Exception, method: str) -> TandemError:
    """Log what a call failed with and return it; an exception that is no TandemError is a bug."""
    if not isinstance(error, TandemError):
        _log.error("call_broken", method=method, call_id=call_id(), exc_info=error)
        return InternalError(
            "the scheduler failed on this call because of a bug; "
            "its log has the traceback, as event call_broken"
        )
    _log.info(
        "call_failed", method=method, call_id=call_id(), reason=error.reason, field=error.field
    )
    encoded = error.message.encode()
    if len(encoded) > MAX_MESSAGE_BYTES:
        error.message = encoded[:MAX_MESSAGE_BYTES].decode(errors="ignore") + "…"
    return error
