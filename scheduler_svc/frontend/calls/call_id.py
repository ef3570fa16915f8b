"""
Id of the call that is being served: it stands in every line of the log and in every error, so that
one finds the other.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable
from contextvars import ContextVar

import structlog

_TRACEPARENT = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}"
)
"""Header of W3C Trace Context, in which version 255 and ids of zeros are invalid."""

_TRACE_HEADERS = ("traceparent", "tracestate")

_current: ContextVar[str] = ContextVar("call_id", default="")
_trace: ContextVar[tuple[str, str]] = ContextVar("trace", default=("", ""))
_headers: ContextVar[dict[str, str] | None] = ContextVar("trace_headers", default=None)


def start_call(metadata: Iterable[tuple[str, str | bytes]] | None) -> None:
    """
    Give the calling task's call a new id, and note the id of the trace that it is part of.

    Args:
        metadata: Metadata of the call; `traceparent` is read, and `tracestate` with it (W3C Trace
            Context).
    """
    _current.set(secrets.token_hex(12))
    # The last of several counts: it is of the innermost span of the client's libraries.
    headers = {
        key: value
        for key, value in metadata or ()
        if key in _TRACE_HEADERS and isinstance(value, str)
    }
    found = _TRACEPARENT.fullmatch(headers.get("traceparent", ""))
    if found is None:
        _headers.set(None)
        _trace.set(("", ""))
        return
    _headers.set(headers)
    name_trace(found[1])


def trace_headers() -> dict[str, str]:
    """Return `traceparent` and `tracestate` of the calling task's call, those that it has."""
    return _headers.get() or {}


def name_trace(trace_id: str, span_id: str = "") -> None:
    """
    Note the trace that the calling task's call is part of.

    Args:
        trace_id: Id of the trace, 32 hexadecimal digits.
        span_id: Id of the span of the request in it, 16 digits; empty if none is recorded.
    """
    _trace.set((trace_id, span_id))
    structlog.contextvars.bind_contextvars(trace_id=trace_id)


def call_trace() -> tuple[str, str]:
    """Return what `name_trace` was told for the calling task's call; empty for no trace."""
    return _trace.get()


def name_call(request_id: str) -> None:
    """Replace the call's id by that of the request, which its client chose."""
    _current.set(request_id)
    structlog.contextvars.bind_contextvars(request_id=request_id)


def call_id() -> str:
    """Return the id of the calling task's call; empty outside of calls."""
    return _current.get()
