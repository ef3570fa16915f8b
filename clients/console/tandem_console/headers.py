"""Headers of every answer, and the check of the host that a request names."""

from __future__ import annotations

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
LOCAL_HOSTS = frozenset({"localhost", "127.0.0.1", "[::1]"})
MISDIRECTED = 421


class Guard:
    """
    ASGI app around another one, which adds the headers. With `local_only` it answers only requests
    for this machine's own names: the page of a stranger, whose name was made to mean this machine,
    would else read a console that asks for no token.
    """

    def __init__(self, app: ASGIApp, *, local_only: bool) -> None:
        self._app = app
        self._local_only = local_only

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
            await send(message)

        app = self._app
        if self._local_only and _host(Headers(scope=scope)) not in LOCAL_HOSTS:
            text = "this console listens on loopback: call it by localhost or 127.0.0.1\n"
            app = PlainTextResponse(text, status_code=MISDIRECTED)
        await app(scope, receive, send_with_headers)


def _host(headers: Headers) -> str:
    """Return the host that a request names, without its port."""
    named = headers.get("host", "")
    return named[: named.rfind("]") + 1] if named.startswith("[") else named.partition(":")[0]
