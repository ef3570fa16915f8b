"""One HTTP server process: listen, tell the address, serve, and stop on a signal."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

import structlog
import uvicorn

from tandem.http_server.encryption import https_context
from tandem.http_server.listening import listen
from tandem.http_server.settings import HttpServerSettings
from tandem.process.exit_codes import EXIT_DONE
from tandem.process.ready_file import write_ready_file

_log: structlog.stdlib.BoundLogger = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """
    Limits of an HTTP server.

    Attributes:
        backlog: Most connections that wait to be accepted.
        stop_s: Whole seconds that open requests may go on after a stop signal.
        keep_alive_s: Whole seconds that a silent connection stays open.
    """

    backlog: int
    stop_s: int
    keep_alive_s: int = 5


class _Server(uvicorn.Server):
    """A server that tells its address when it listens."""

    def __init__(
        self,
        config: uvicorn.Config,
        on_listening: Callable[[], None],
        end_streams: Callable[[], Awaitable[None]] | None,
    ) -> None:
        """
        Args:
            config: Settings that are loaded, with the app.
            on_listening: Called once the server listens.
            end_streams: As in `serve`.
        """
        super().__init__(config)
        self._app = config.loaded_app
        config.loaded_app = self._answer
        self._on_listening = on_listening
        self._end_streams = end_streams

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and tell so."""
        await super().startup(sockets)
        self._on_listening()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the streams that would else be waited for, and then all else."""
        if self._end_streams is not None:
            await self._end_streams()
        await super().shutdown(sockets)

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        """Have the app answer; at a stop one that takes too long is cut off, which is no fault."""
        try:
            await self._app(scope, receive, send)
        except asyncio.CancelledError:
            if not self.should_exit:
                raise


def serve(
    app: Any,
    settings: HttpServerSettings,
    limits: HttpLimits,
    *,
    on_listening: Callable[[str], None],
    end_streams: Callable[[], Awaitable[None]] | None = None,
) -> int:
    """
    Serve an ASGI app until a signal; return the exit code.

    Args:
        app: The app; it sees the lifespan of the server.
        settings: Where to listen, with which files, and what to write once it listens.
        limits: Limits of connections and times.
        on_listening: Called with the address, once the ready file is there.
        end_streams: Called as the server stops, to end the streams that are open; None = they may
            go on for `limits.stop_s`.

    Raises:
        AddressInUse, InvalidConfig: The server cannot listen, or a file cannot be used.
    """
    tls = https_context(settings)
    listener, address = listen(settings.listen, limits.backlog)
    config = uvicorn.Config(
        app,
        log_config=None,
        log_level="warning",
        access_log=False,
        lifespan="on",
        backlog=limits.backlog,
        timeout_keep_alive=limits.keep_alive_s,
        timeout_graceful_shutdown=limits.stop_s,
        server_header=False,
        ws="none",
    )
    config.load()
    config.ssl = tls  # uvicorn's own context would read the files once

    def tell() -> None:
        if settings.ready_file is not None:
            write_ready_file(settings.ready_file, {"address": address})
        on_listening(address)

    # uvicorn raises the signal again when it has stopped, so that handlers from before it end the
    # process as they like: this one lets it end well.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _ignore)
    _Server(config, tell, end_streams).run(sockets=[listener])
    _log.info("stopped")
    return EXIT_DONE


def _ignore(_number: int, _frame: FrameType | None) -> None:
    """Do nothing about a signal that was obeyed."""
