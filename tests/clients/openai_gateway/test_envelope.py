"""The envelope of each request bears a connection that ends at any moment."""

from __future__ import annotations

import pytest
from starlette.responses import Response

from tandem_openai_gateway.envelope import Envelope
from tandem_openai_gateway.metrics import Metrics

SCOPE = {"type": "http", "method": "GET", "path": "/health", "headers": []}
RESET = "unable to perform operation on <TCPTransport closed=True>; the handler is closed"
"""Text of uvloop for a write where the client has reset the connection."""


async def answer(text):
    """Have a request answered whose every write fails with a text."""

    async def send(_):
        raise RuntimeError(text)

    async def receive():
        return {"type": "http.disconnect"}

    envelope = Envelope(Response("healthy"), Metrics(lambda: 1), frozenset({"/health"}))
    await envelope(dict(SCOPE), receive, send)


async def test_write_to_a_connection_that_was_just_reset_is_no_error():
    """A client that is gone is no bug of the gateway, which has no traceback for it."""
    await answer(RESET)


async def test_other_failures_of_a_write_are_raised():
    """A write that breaks the protocol of the server is a bug, and is seen."""
    with pytest.raises(RuntimeError, match="Expected ASGI message"):
        await answer("Expected ASGI message 'http.response.start'")
