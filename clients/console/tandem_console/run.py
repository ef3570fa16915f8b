"""The server process: listen, tell the address, serve, and stop on a signal."""

from __future__ import annotations

from collections.abc import Sequence

import structlog

from tandem.http_server.process import HttpLimits, serve
from tandem.process.telemetry import configure_logging, warn_where_unprotected
from tandem_console.app import Console, make_app
from tandem_console.settings import read_settings

LIMITS = HttpLimits(backlog=256, stop_s=1)
"""Streams end at once, as a browser connects again by itself."""

_log: structlog.stdlib.BoundLogger = structlog.get_logger()


def run(arguments: Sequence[str]) -> int:
    """
    Serve until a signal; return the exit code.

    Raises:
        AddressInUse, InvalidConfig: The console cannot listen, or a setting cannot work.
    """
    settings = read_settings(arguments)
    configure_logging(settings.log_level, settings.log_format)
    console = Console(settings)

    def tell(address: str) -> None:
        _log.info("listening", at=address, scheduler=settings.admin_address)
        # The scheduler decides who is served; where it serves everyone, the first snapshot warns.
        warn_where_unprotected(
            {"listen": address},
            is_encrypted=settings.tls_cert is not None,
            is_authenticated=True,
        )

    return serve(
        make_app(console), settings, LIMITS, on_listening=tell, end_streams=console.end_streams
    )
