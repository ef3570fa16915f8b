"""Parts around every request: its id, its metrics, and an answer for every failure."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Mapping
from http import HTTPStatus

import msgspec
import structlog
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tandem.errors import TandemError
from tandem_openai_gateway.api.scheduler_errors import api_error
from tandem_openai_gateway.errors import ApiError
from tandem_openai_gateway.metrics import Metrics

ID_HEADER = b"x-request-id"
_OF_A_CLIENT = re.compile(r"[\x21-\x7e]{1,64}")
_OTHER = "other"
"""Path of requests for what is not there, in metrics: clients make up paths without end."""
_CLOSED = "the handler is closed"
"""End of uvloop's message for a write to a connection that is closed already."""

_log: structlog.stdlib.BoundLogger = structlog.get_logger()
_encode = msgspec.json.Encoder().encode


class JsonResponse(Response):
    """A response whose body is a Struct as JSON."""

    media_type = "application/json"

    def render(self, content: object) -> bytes:
        """Return the body."""
        return _encode(content)


class Envelope:
    """
    Outermost part of the app. It names the request: by an id of its own, after the client's if it
    sent one, since ids of requests that run at the same time must differ.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, paths: frozenset[str]) -> None:
        """
        Args:
            app: The app inside.
            metrics: Metrics to count requests in.
            paths: Paths that are served.
        """
        self._app = app
        self._metrics = metrics
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope)
        scope["tandem.request_id"] = request_id
        path = scope["path"] if scope["path"] in self._paths else _OTHER
        status = 499  # that of a client that left before the answer began
        started_s = time.monotonic()

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (ID_HEADER, request_id.encode())]
            try:
                await send(message)
            except RuntimeError as error:
                # The client has reset the connection and uvicorn is about to learn of it. From then
                # on it drops what is sent, and `receive` says that the client is gone.
                if _CLOSED not in str(error):
                    raise

        self._metrics.running.inc()
        try:
            await self._app(scope, receive, send_named)
        finally:
            took_s = time.monotonic() - started_s
            self._metrics.running.dec()
            self._metrics.requests.labels(path, status).inc()
            self._metrics.seconds.labels(path).observe(took_s)
            _log.debug("request", id=request_id, path=path, status=status, took_s=round(took_s, 4))


def _request_id(scope: Scope) -> str:
    given = dict(scope["headers"]).get(ID_HEADER, b"").decode("latin-1")
    if not _OF_A_CLIENT.fullmatch(given):
        return secrets.token_hex(16)
    return f"{given}-{secrets.token_hex(4)}"


def error_response(error: ApiError) -> Response:
    """Return the response for a failure."""
    return JsonResponse(error.body, error.status, error.headers)


async def on_api_error(_request: Request, error: Exception) -> Response:
    """Answer a request that cannot be served."""
    assert isinstance(error, ApiError)
    return error_response(error)


async def on_tandem_error(_request: Request, error: Exception) -> Response:
    """Answer a request that the scheduler refused or that failed there."""
    assert isinstance(error, TandemError)
    return error_response(api_error(error))


async def on_http_error(request: Request, error: Exception) -> Response:
    """Answer a request for a path or with a method that is not served."""
    assert isinstance(error, HTTPException)
    said = HTTPStatus(error.status_code).phrase.lower()
    message = f"{request.method} {request.url.path}: {said}"
    code = said.replace(" ", "_")
    return error_response(
        ApiError(error.status_code, message, code=code, headers=_headers(error.headers))
    )


async def on_bug(_request: Request, _error: Exception) -> Response:
    """Answer a request that met a bug; the server logs its traceback."""
    return error_response(
        ApiError(500, "the gateway has a bug; its log says more", code="internal")
    )


def _headers(headers: Mapping[str, str] | None) -> Mapping[str, str]:
    return {} if headers is None else headers
