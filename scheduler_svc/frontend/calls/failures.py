"""Failures of calls, and of items of a batch, as clients get them: typed, logged, and bounded."""

from __future__ import annotations

import structlog

from scheduler_svc.frontend.calls.call_id import call_id
from scheduler_svc.frontend.calls.refusal_lines import RefusalLines
from tandem.errors import InternalError, TandemError

_log: structlog.stdlib.BoundLogger = structlog.get_logger()

MAX_MESSAGE_BYTES = 600
"""Limit of an error's text, which may quote a client; trailers must stay under 8 KiB."""


def typed_failure(
    error: Exception, method: str, refusals: RefusalLines | None = None
) -> TandemError:
    """
    Log what a call failed with and return it; an exception that is no TandemError is a bug.

    Args:
        error: What it failed with.
        method: Name of its method.
        refusals: Counts failures, and sums up refusals that a stranger can cause; None = each has
            a line, and none is counted.
    """
    if refusals is not None:
        refusals.num_failed[getattr(error, "reason", InternalError.reason)] += 1
    if not isinstance(error, TandemError):
        _log.error("call_broken", method=method, call_id=call_id(), exc_info=error)
        return InternalError(
            "the scheduler failed on this call because of a bug; "
            "its log has the traceback, as event call_broken"
        )
    if refusals is None or refusals.has_own_line(error, method):
        _log.info(
            "call_failed", method=method, call_id=call_id(), reason=error.reason, field=error.field
        )
    encoded = error.message.encode()
    if len(encoded) > MAX_MESSAGE_BYTES:
        error.message = encoded[:MAX_MESSAGE_BYTES].decode(errors="ignore") + "…"
    return error
