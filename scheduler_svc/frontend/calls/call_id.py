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

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")

_TRACE_HEADERS = ("traceparent", "tracestate")

_current: ContextVar[str] = ContextVar("call_id", default="")
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
        return
    _headers.set(headers)
    structlog.contextvars.bind_contextvars(trace_id=found[1])


def trace_headers() -> dict[str, str]:
    """Return `traceparent` and `tracestate` of the calling task's call, those that it has."""
    return _headers.get() or {}


def name_call(request_id: str) -> None:
    """Replace the call's id by that of the request, which its client chose."""
    _current.set(request_id)
    structlog.contextvars.bind_contextvars(request_id=request_id)


def call_id() -> str:
    """Return the id of the calling task's call; empty outside of calls."""
    return _current.get()
