"""Headers of requests that go on to the scheduler as metadata."""

from __future__ import annotations

import hashlib

from starlette.requests import Request

from tandem_openai_gateway.errors import ApiError
from tandem_openai_gateway.scheduler_calls.batch_call import Metadata

PASSED_ON = ("authorization", "traceparent", "tracestate")
MAX_METADATA_BYTES = 7 << 10
"""
Most bytes of these headers: a scheduler takes 8 KiB of metadata with gRPC's own, and refuses more
as RESOURCE_EXHAUSTED, which would read as if the request could come again.
"""
ENTRY_BYTES = 32
"""Bytes that HTTP/2 counts for an entry beside its name and its value."""


def metadata_of(request: Request) -> Metadata:
    """
    Return the headers of a request that go on to the scheduler.

    Raises:
        ApiError: One has characters that no key or trace has, or they are too large.
    """
    found = [(name, request.headers[name]) for name in PASSED_ON if name in request.headers]
    for name, text in found:
        if not (text.isascii() and text.isprintable()):
            raise ApiError(400, f"the header {name} must be printable ASCII", param=name)
    if sum(len(name) + len(text) + ENTRY_BYTES for name, text in found) > MAX_METADATA_BYTES:
        longest = max(found, key=lambda header: len(header[1]))[0]
        raise ApiError(
            431,
            f"{' and '.join(name for name, _ in found)} may have {MAX_METADATA_BYTES} bytes "
            f"together, and {longest} has the most",
            param=longest,
            code="header_too_large",
        )
    return tuple(found)


def key_of(metadata: Metadata) -> bytes:
    """Return a hash of the key in these headers; those without one have the same."""
    return hashlib.sha256(dict(metadata).get("authorization", "").encode()).digest()
