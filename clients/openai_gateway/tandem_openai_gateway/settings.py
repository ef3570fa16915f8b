"""Command line of the gateway."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tandem.errors import InvalidConfig
from tandem.network.address import check_server_address
from tandem_client.channel import DEFAULT_ADDRESS

DEFAULT_LISTEN = "127.0.0.1:8000"
MAX_BODY_MIB = 32
DRAIN_GRACE_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """
    Settings of one gateway process.

    Attributes:
        schedulers: Addresses of the schedulers, which serve the same model.
        listen: HTTP address, HOST:PORT; port 0 takes a free one.
        cors_origins: Origins whose pages may call the gateway; "*" = all.
        max_body_bytes: Size of the largest request body.
        drain_grace_s: Seconds that running requests may go on after a stop signal.
        ready_file: File that gets address and pid as JSON once the port listens.
        log_level: Least severe event to log, to stderr.
        log_format: "console" or "json".
    """

    schedulers: tuple[str, ...] = (DEFAULT_ADDRESS,)
    listen: str = DEFAULT_LISTEN
    cors_origins: tuple[str, ...] = ()
    max_body_bytes: int = MAX_BODY_MIB << 20
    drain_grace_s: float = DRAIN_GRACE_S
    ready_file: Path | None = None
    log_level: str = "info"
    log_format: str = "console"


def read_settings(arguments: Sequence[str]) -> Settings:
    """
    Read the command line.

    Raises:
        SystemExit: After --help, or for a flag that cannot be read (exit code 2).
        InvalidConfig: A value cannot work.
    """
    given = _parser().parse_args(arguments)
    schedulers = tuple(_listed(given.scheduler))
    if not schedulers:
        raise InvalidConfig("scheduler: give HOST:PORT, or several with commas between them")
    if given.max_body_mib <= 0 or given.drain_grace_s < 0:
        raise InvalidConfig("max_body_mib must be above 0, and drain_grace_s must not be below 0")
    return Settings(
        schedulers=tuple(check_server_address(address) for address in schedulers),
        listen=given.listen,
        cors_origins=tuple(_listed(given.cors_origins)),
        max_body_bytes=given.max_body_mib << 20,
        drain_grace_s=given.drain_grace_s,
        ready_file=given.ready_file,
        log_level=given.log_level,
        log_format=given.log_format,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tandem gateway",
        description="Serve OpenAI's HTTP API in front of Tandem schedulers.",
        epilog="The header Authorization of a request is passed on to the scheduler.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--scheduler",
        metavar="ADDRESSES",
        default=DEFAULT_ADDRESS,
        help="HOST:PORT of a scheduler, or of several with commas between them: requests go to "
        "them in turn, and a stream whose scheduler dies goes on at another; default: %(default)s",
    )
    parser.add_argument(
        "--listen",
        metavar="ADDRESS",
        default=DEFAULT_LISTEN,
        help="HTTP address, HOST:PORT; port 0 takes a free one; default: %(default)s",
    )
    parser.add_argument(
        "--cors-origins",
        metavar="ORIGINS",
        default="",
        help="origins, with commas between them, whose web pages may call the gateway; * = all; "
        "default: none",
    )
    parser.add_argument(
        "--max-body-mib",
        type=int,
        default=MAX_BODY_MIB,
        help="size of the largest request body in MiB; default: %(default)s",
    )
    parser.add_argument(
        "--drain-grace-s",
        type=float,
        default=DRAIN_GRACE_S,
        help="seconds that running requests may go on after SIGTERM; default: %(default)s",
    )
    parser.add_argument("--ready-file", type=Path, help="file that gets address and pid as JSON")
    parser.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="least severe event to log to stderr; default: %(default)s",
    )
    parser.add_argument(
        "--log-format",
        choices=("console", "json"),
        default="console",
        help="form of log lines; default: %(default)s",
    )
    return parser


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]
