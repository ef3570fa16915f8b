"""The app: the page and its files, login, and snapshots as JSON and as server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from tandem.error_codes import PermissionDenied, TandemError, Unauthenticated
from tandem.http_server.encryption import newest_credentials
from tandem.network.listen_address import reaches_beyond_this_machine
from tandem.process.telemetry import warn_where_unprotected
from tandem_client.channel import ChannelOptions
from tandem_console.headers import Guard
from tandem_console.logins import LoginRefused, check_site, token_of
from tandem_console.sessions import Sessions
from tandem_console.settings import Settings
from tandem_console.watch import WatchState

COOKIE = "tandem_console"
MAX_STREAMS = 128
HEARTBEAT_S = 15.0
"""Longest silence of a stream in seconds; then a comment tells whether the browser is there."""
TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}


class Console:
    """State that the paths share; made when the server starts, in its event loop."""

    def __init__(self, settings: Settings) -> None:
        """
        Raises:
            InvalidConfig: A file of the settings cannot be used.
        """
        self._settings = settings
        self._credentials = newest_credentials(settings)
        self._sessions: Sessions | None = None
        self._num_streams = 0
        self._has_warned = False

    @contextlib.asynccontextmanager
    async def lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        """Hold the sessions while the server runs."""
        settings = self._settings
        self._sessions = Sessions(
            settings.admin_address,
            lambda: ChannelOptions(credentials=self._credentials()),
            settings.interval_s,
            asks_login=settings.scheduler_cert is not None,
        )
        sweeping = asyncio.create_task(self._sessions.sweep_on())
        try:
            yield
        finally:
            sweeping.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await sweeping
            await self.end_streams()

    async def end_streams(self) -> None:
        """End all sessions, and with them the streams of snapshots, as the server is to stop."""
        if self._sessions is not None:
            await self._sessions.close()

    async def snapshot(self, request: Request) -> Response:
        """Return the newest snapshot, or why there is none."""
        cookie = request.cookies.get(COOKIE)
        try:
            state = await self._in_use.watch_of(cookie).first()
        except Unauthenticated as error:
            return _failure(401, error.reason, error.message)
        has_session = self._in_use.has(cookie)
        if not has_session and state.error is None:
            self._warn_of_open()
        told = self._told(state) | {"logged_in": has_session}
        return JSONResponse(told, 200 if state.error is None else _status(state.error))

    async def events(self, request: Request) -> Response:
        """Stream every snapshot as an event, until the browser leaves or the scheduler refuses."""
        if self._num_streams >= MAX_STREAMS:
            return _failure(503, "TOO_MANY_STREAMS", "too many pages are open: close one")
        try:
            snapshots = self._in_use.watch_of(request.cookies.get(COOKIE)).stream()
        except Unauthenticated as error:
            return _failure(401, error.reason, error.message)
        return StreamingResponse(self._streamed(snapshots), media_type="text/event-stream")

    async def log_in(self, request: Request) -> Response:
        """Open a session for a token; the cookie holds no part of it."""
        try:
            cookie = await self._in_use.log_in(await token_of(request))
        except LoginRefused as error:
            return _failure(error.status, error.reason, error.message)
        except TandemError as error:
            return _failure(_status(error), error.reason, error.message)
        await self._in_use.log_out(request.cookies.get(COOKIE))
        answer = Response(status_code=204)
        answer.set_cookie(
            COOKIE,
            cookie,
            httponly=True,
            samesite="strict",
            secure=self._settings.tls_cert is not None,
        )
        return answer

    async def log_out(self, request: Request) -> Response:
        """End the session."""
        try:
            check_site(request)
        except LoginRefused as error:
            return _failure(error.status, error.reason, error.message)
        await self._in_use.log_out(request.cookies.get(COOKIE))
        answer = Response(status_code=204)
        answer.delete_cookie(COOKIE, httponly=True, samesite="strict")
        return answer

    @property
    def is_local(self) -> bool:
        """True if only this machine reaches the console."""
        return not reaches_beyond_this_machine(self._settings.listen)

    @property
    def _in_use(self) -> Sessions:
        assert self._sessions is not None
        return self._sessions

    def _warn_of_open(self) -> None:
        """Warn once where other machines see what the scheduler shows without a token."""
        if not self._has_warned:
            settings = self._settings
            warn_where_unprotected(
                {"listen": settings.listen}, is_encrypted=settings.tls_cert is not None
            )
        self._has_warned = True

    def _told(self, state: WatchState) -> dict[str, Any]:
        """Return what a page gets of a state."""
        error = state.error
        return {
            "address": self._settings.admin_address,
            "interval_s": self._settings.interval_s,
            "number": state.number,
            "at_s": state.at_s,
            "view": state.view,
            "error": None
            if error is None
            else {"reason": error.reason, "message": error.message, "final": state.is_refused},
        }

    async def _streamed(self, snapshots: AsyncGenerator[WatchState, None]) -> AsyncIterator[str]:
        self._num_streams += 1
        following = asyncio.ensure_future(anext(snapshots, None))
        try:
            while True:
                done, _ = await asyncio.wait({following}, timeout=HEARTBEAT_S)
                if not done:
                    yield ": still here\n\n"
                    continue
                state = following.result()
                if state is None:
                    return
                # JSON has no line break outside of texts, and there it is escaped.
                yield f"event: snapshot\ndata: {json.dumps(self._told(state))}\n\n"
                following = asyncio.ensure_future(anext(snapshots, None))
        finally:
            self._num_streams -= 1
            following.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await following
            await snapshots.aclose()


def make_app(console: Console) -> ASGIApp:
    """Return the app of a console."""
    pages = files("tandem_console") / "pages"
    static = [
        Route(
            "/" if page.name == "index.html" else f"/{page.name}",
            _serving(page.read_bytes(), TYPES[page.name.rpartition(".")[2]]),
        )
        for page in pages.iterdir()
    ]
    app = Starlette(
        routes=[
            *static,
            Route("/snapshot", console.snapshot),
            Route("/events", console.events),
            Route("/login", console.log_in, methods=["POST"]),
            Route("/logout", console.log_out, methods=["POST"]),
            Route("/health", _health),
        ],
        lifespan=console.lifespan,
    )
    return Guard(app, local_only=console.is_local)


def _serving(content: bytes, media_type: str) -> Any:
    async def serve(_request: Request) -> Response:
        return Response(content, media_type=media_type)

    return serve


async def _health(_request: Request) -> Response:
    return JSONResponse({"status": "ok"})


def _status(error: TandemError) -> int:
    if isinstance(error, Unauthenticated):
        return 401
    return 403 if isinstance(error, PermissionDenied) else 503


def _failure(status: int, reason: str, message: str) -> JSONResponse:
    return JSONResponse({"error": {"reason": reason, "message": message, "final": True}}, status)
