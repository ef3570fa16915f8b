"""
HTTP server of one page for Prometheus: GET /metrics.

prometheus_client's own server is not used: it is http.server's, with a thread for each scrape that
would have to ask the event loop for the core's numbers, and its page, which any path shows, has no
answer for a core that is gone.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Iterator
from http import HTTPStatus
from typing import Protocol

import structlog
from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from scheduler_svc.frontend.core_client import CoreClient
from scheduler_svc.frontend.operators.metrics import SnapshotMetrics
from scheduler_svc.ipc.snapshot import decode_metrics
from tandem.errors import TandemError
from tandem.network.token_file import TokenFile

_log: structlog.stdlib.BoundLogger = structlog.get_logger()

MAX_REQUEST_BYTES = 16 * 1024
READ_TIMEOUT_S = 10.0
PLAIN = "text/plain; charset=utf-8"
CHALLENGE = "WWW-Authenticate: Bearer\r\n"

METRICS_TOKENS = "the token file of /metrics"
"""Name of that file in errors."""

Page = tuple[HTTPStatus, str, bytes]
"""Status, content type and body of a response."""


class SpanCounts(Protocol):
    """Counts of spans since the start."""

    @property
    def exported(self) -> int:
        """Spans that a collector took."""

    @property
    def lost(self) -> int:
        """Spans that none took."""


class _SpanMetrics:
    """Metrics of the spans of the process that has the page."""

    def __init__(self, spans: SpanCounts) -> None:
        self._spans = spans

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(
            "tandem_trace_spans",
            "Spans of this frontend process, by outcome: exported to the collector, or lost.",
            labels=["outcome"],
        )
        family.add_metric(["exported"], self._spans.exported)
        family.add_metric(["lost"], self._spans.lost)
        yield family


async def serve_metrics(
    core: CoreClient,
    host: str,
    port: int,
    *,
    tls: ssl.SSLContext | None = None,
    tokens: TokenFile | None = None,
    spans: SpanCounts | None = None,
) -> asyncio.Server:
    """
    Listen and return the server, which the caller closes.

    Args:
        core: Core that has the numbers.
        host: Host to listen on.
        port: Port to listen on; 0 takes a free one.
        tls: Context of HTTPS; None for HTTP.
        tokens: Tokens of which a request must send one; None where it needs none.
        spans: Counts of spans to show too; None where none are recorded.

    Raises:
        OSError: The address cannot be used.
    """

    async def page() -> Page:
        try:
            snapshot = decode_metrics(await core.query("metrics"))
        except TandemError as error:
            return HTTPStatus.SERVICE_UNAVAILABLE, PLAIN, f"{error.message}\n".encode()
        # generate_latest needs only `collect` of a registry.
        body = generate_latest(SnapshotMetrics(snapshot))
        if spans is not None:
            body += generate_latest(_SpanMetrics(spans))
        return HTTPStatus.OK, CONTENT_TYPE_PLAIN_0_0_4, body

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                status, content_type, body = await _answer(reader, page, tokens)
                if writer.is_closing():  # the client has reset it, and uvloop's write would raise
                    return
                head = (
                    f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {content_type}\r\n"
                    f"Content-Length: {len(body)}\r\nConnection: close\r\n"
                    f"{CHALLENGE if status is HTTPStatus.UNAUTHORIZED else ''}\r\n"
                )
                writer.write(head.encode() + body)
                await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError) as error:
            _log.debug("metrics_connection_dropped", error=repr(error))
        finally:
            writer.close()

    limits = {} if tls is None else {"ssl_handshake_timeout": READ_TIMEOUT_S}
    return await asyncio.start_server(
        connected, host, port, limit=MAX_REQUEST_BYTES, ssl=tls, **limits
    )


async def _answer(
    reader: asyncio.StreamReader, page: Callable[[], Awaitable[Page]], tokens: TokenFile | None
) -> Page:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError:
        return HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, PLAIN, b"request too large\n"
    words = head.split(b"\r\n", 1)[0].split(b" ")
    if len(words) != 3:
        return HTTPStatus.BAD_REQUEST, PLAIN, b"not an HTTP request\n"
    if tokens is not None and not tokens.accepts(_authorizations(head)):
        return HTTPStatus.UNAUTHORIZED, PLAIN, b"send a token of the service's metrics_token_file\n"
    if words[0] != b"GET":
        return HTTPStatus.METHOD_NOT_ALLOWED, PLAIN, b"only GET is served\n"
    if words[1].split(b"?", 1)[0] != b"/metrics":
        return HTTPStatus.NOT_FOUND, PLAIN, b"the page is /metrics\n"
    return await page()


def _authorizations(head: bytes) -> list[str]:
    """Return the values of the header Authorization in the head of a request."""
    lines = (line.partition(b":") for line in head.split(b"\r\n")[1:])
    return [
        value.strip().decode("latin-1")
        for name, _, value in lines
        if name.lower() == b"authorization"
    ]
