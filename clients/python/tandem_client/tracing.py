"""Trace that a call is part of (W3C Trace Context), of OpenTelemetry where the program uses it."""

from __future__ import annotations

import re
import sys

from tandem.errors import InvalidParameter

TRACEPARENT = "traceparent"
_FORM = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_API = "opentelemetry.trace"


def checked_traceparent(value: str) -> str:
    """
    Return a value of the header `traceparent` unchanged.

    Raises:
        InvalidParameter: It is none: a server would take no notice of it.
    """
    if not _FORM.fullmatch(value):
        raise InvalidParameter(
            "traceparent must be VERSION-TRACE-PARENT-FLAGS in hexadecimal digits (2, 32, 16 and 2 "
            f"of them), got {value[:100]!r}.",
            field=TRACEPARENT,
        )
    return value


def with_trace(metadata: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """
    Return the metadata of a call with `traceparent` and `tracestate` of the current span of
    OpenTelemetry, where there is one and the metadata have no `traceparent`.
    """
    # A program that has not loaded it has no current span, and need not wait for it to load.
    if _API not in sys.modules or any(name.lower() == TRACEPARENT for name, _ in metadata):
        return metadata
    from opentelemetry.trace.propagation.tracecontext import (  # noqa: PLC0415  # may be missing
        TraceContextTextMapPropagator,
    )

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return [*metadata, *carrier.items()]
