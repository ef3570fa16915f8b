"""The server process: listen, tell the address, serve, and stop on a signal."""

from __future__ import annotations

from collections.abc import Sequence

import structlog

from tandem.http_server.process import HttpLimits, serve
from tandem.network.listen_address import reaches_beyond_this_machine
from tandem.process.telemetry import configure_logging
from tandem_openai_gateway.app import make_app
from tandem_openai_gateway.settings import read_settings

BACKLOG = 2048
KEEP_ALIVE_S = 75
"""Seconds that a silent connection stays open: longer than the clients' pools keep theirs."""

NOT_ENCRYPTED = "other machines can reach this address, and keys and texts on it are not encrypted"

_log: structlog.stdlib.BoundLogger = structlog.get_logger()


def run(arguments: Sequence[str]) -> int:
    """
    Serve until a signal; return the exit code.

    Raises:
        AddressInUse, InvalidConfig: The gateway cannot listen, or a setting cannot work.
    """
    settings = read_settings(arguments)
    configure_logging(settings.log_level, settings.log_format)
    app = make_app(settings)
    limits = HttpLimits(
        backlog=BACKLOG, stop_s=max(1, round(settings.drain_grace_s)), keep_alive_s=KEEP_ALIVE_S
    )

    def tell(address: str) -> None:
        _log.info("listening", at=address, schedulers=",".join(settings.schedulers))
        if reaches_beyond_this_machine(address) and settings.tls_cert is None:
            _log.warning("unprotected", at=address, why=NOT_ENCRYPTED)

    return serve(app, settings, limits, on_listening=tell)
