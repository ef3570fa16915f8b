"""The server process: listen, tell the address, serve, and stop on a signal."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import structlog
import uvicorn

from tandem.errors import AddressInUse, InvalidConfig
from tandem.network.address import host_and_port, without_brackets
from tandem.network.listen_address import ListenAddress
from tandem.process.exit_codes import EXIT_DONE
from tandem.process.telemetry import configure_logging, warn_where_unprotected
from tandem_console.app import make_app
from tandem_console.encryption import https_context
from tandem_console.headers import Guard
from tandem_console.settings import Settings, read_settings

BACKLOG = 256
STOP_S = 1
"""Seconds that open streams may take to end; a browser connects again by itself."""

_log: structlog.stdlib.BoundLogger = structlog.get_logger()


class Server(uvicorn.Server):
    """A server that tells its address when it listens."""

    def __init__(
        self, config: uvicorn.Config, settings: Settings, address: str, app: Guard
    ) -> None:
        super().__init__(config)
        self._app = app
        self._settings = settings
        self._address = address

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, write the ready file, and warn where others can read along."""
        await super().startup(sockets)
        settings = self._settings
        if settings.ready_file is not None:
            ready = {"address": self._address, "pid": os.getpid()}
            _write_whole(settings.ready_file, json.dumps(ready))
        _log.info("listening", at=self._address, scheduler=settings.admin_address)
        # The scheduler decides who is served; where it serves everyone, the first look warns.
        warn_where_unprotected(
            {"listen": self._address},
            is_encrypted=settings.tls_cert is not None,
            is_authenticated=True,
        )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End open streams, which would else be waited for, and then all else."""
        await self._app.stop()
        await super().shutdown(sockets)


def run(arguments: Sequence[str]) -> int:
    """
    Serve until a signal; return the exit code.

    Raises:
        AddressInUse, InvalidConfig: The console cannot listen, or a setting cannot work.
    """
    settings = read_settings(arguments)
    configure_logging(settings.log_level, settings.log_format)
    app, tls = make_app(settings), https_context(settings)
    listener, address = listen(settings.listen)
    config = uvicorn.Config(
        app,
        log_config=None,
        log_level="warning",
        access_log=False,
        lifespan="on",
        backlog=BACKLOG,
        timeout_graceful_shutdown=STOP_S,
        server_header=False,
        ws="none",
    )
    config.load()
    config.ssl = tls  # uvicorn's own context would read the files once
    # uvicorn raises the signal again when it has stopped, so that handlers from before it end the
    # process as they like: this one lets it end well.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _ignore)
    Server(config, settings, address, app).run(sockets=[listener])
    _log.info("stopped")
    return EXIT_DONE


def listen(address: str) -> tuple[socket.socket, str]:
    """Return a bound socket and its address, with the port that it got."""
    host, port = host_and_port(address)
    ListenAddress("listen", address).release()  # reports what is wrong with the address
    family, _, _, _, where = socket.getaddrinfo(
        without_brackets(host), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(where)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise AddressInUse(f"listen: {address}: {error.strerror}") from error
    return listener, f"{host}:{listener.getsockname()[1]}"


def _ignore(_number: int, _frame: FrameType | None) -> None:
    """Do nothing about a signal that was obeyed."""


def _write_whole(path: Path, text: str) -> None:
    """Write a file so that readers find all of it or none."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)
    except OSError as error:
        raise InvalidConfig(f"ready_file: {path}: {error.strerror}") from error
