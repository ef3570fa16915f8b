"""Command line of the gateway."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from tandem.errors import InvalidConfig
from tandem.http_server.settings import (
    SERVER_FILES,
    HttpServerSettings,
    add_port_flags,
    add_process_flags,
    check_files,
    common_values,
)
from tandem.network.address import check_server_address
from tandem_client.channel import DEFAULT_ADDRESS
from tandem_openai_gateway.delta_interval import (
    LOADED_INTERVAL_S,
    LONGEST_S,
    NUM_PROMPT,
)

DEFAULT_LISTEN = "127.0.0.1:8000"
MAX_BODY_MIB = 4
"""Size that a scheduler's `max_message_bytes` lets through by default."""
DRAIN_GRACE_S = 30.0

FILES = SERVER_FILES | {
    "scheduler-ca": "PEM file of the authorities that sign the schedulers' certificates; default: "
    "connections to schedulers are not encrypted",
    "scheduler-cert": "PEM file of a certificate of this client, if the schedulers ask for one",
    "scheduler-key": "PEM file of its key",
}
"""Flags that name files, and their help."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(HttpServerSettings):
    """
    Settings of one gateway process.

    Attributes:
        schedulers: Addresses of the schedulers, which serve the same model.
        cors_origins: Origins whose pages may call the gateway; "*" = all.
        max_body_bytes: Size of the largest request body; larger ones are refused unread.
        min_delta_interval_s: Least seconds between two chunks of a stream; None = by the number of
            streams that run.
        drain_grace_s: Seconds that running requests may go on after a stop signal.
    """

    schedulers: tuple[str, ...] = (DEFAULT_ADDRESS,)
    listen: str = DEFAULT_LISTEN
    cors_origins: tuple[str, ...] = ()
    max_body_bytes: int = MAX_BODY_MIB << 20
    min_delta_interval_s: float | None = None
    drain_grace_s: float = DRAIN_GRACE_S


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
    interval_s = given.min_delta_interval_s
    if interval_s is not None and not 0 <= interval_s <= LONGEST_S:
        raise InvalidConfig(f"min_delta_interval_s must be in [0, {LONGEST_S:g}]")
    check_files(given, FILES)
    return Settings(
        schedulers=tuple(check_server_address(address) for address in schedulers),
        cors_origins=tuple(_listed(given.cors_origins)),
        max_body_bytes=given.max_body_mib << 20,
        min_delta_interval_s=interval_s,
        drain_grace_s=given.drain_grace_s,
        **common_values(given),
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
    add_port_flags(parser, DEFAULT_LISTEN, FILES)
    parser.add_argument(
        "--cors-origins",
        metavar="ORIGINS",
        default="",
        help="origins, with commas between them, whose web pages may call the gateway; * = all; "
        "default: none",
    )
    _add_limits(parser)
    add_process_flags(parser)
    return parser


def _add_limits(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--max-body-mib",
        type=int,
        default=MAX_BODY_MIB,
        help="size of the largest request body in MiB; schedulers take messages up to their "
        "max_message_bytes; default: %(default)s",
    )
    parser.add_argument(
        "--min-delta-interval-s",
        metavar="SECONDS",
        type=float,
        help="least seconds between two chunks of a stream, 0 to 10; output in between is joined, "
        "the first chunk and the last one never wait. 0 = a chunk for each delta of the scheduler; "
        f"default: by the number of streams when one begins, 0 up to {NUM_PROMPT} and "
        f"{LOADED_INTERVAL_S:g} beyond",
    )
    parser.add_argument(
        "--drain-grace-s",
        type=float,
        default=DRAIN_GRACE_S,
        help="seconds that running requests may go on after SIGTERM; default: %(default)s",
    )


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]
