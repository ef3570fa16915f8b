"""Command line of the console."""

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
from tandem_client.channel import DEFAULT_ADMIN_ADDRESS

DEFAULT_LISTEN = "127.0.0.1:8081"
SHORTEST_S, LONGEST_S = 0.2, 60.0

FILES = SERVER_FILES | {
    "scheduler-ca": "PEM file of the authorities that sign the scheduler's certificate; default: "
    "the connection to it is not encrypted",
    "scheduler-cert": "PEM file of a certificate of this client, if the scheduler asks for one",
    "scheduler-key": "PEM file of its key",
}
"""Flags that name files, and their help."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(HttpServerSettings):
    """
    Settings of one console process.

    Attributes:
        admin_address: The scheduler's address for operators.
        interval_s: Seconds between two looks at the scheduler.
    """

    admin_address: str = DEFAULT_ADMIN_ADDRESS
    listen: str = DEFAULT_LISTEN
    interval_s: float = 1.0


def read_settings(arguments: Sequence[str]) -> Settings:
    """
    Read the command line.

    Raises:
        SystemExit: After --help, or for a flag that cannot be read (exit code 2).
        InvalidConfig: A value cannot work.
    """
    given = _parser().parse_args(arguments)
    if not SHORTEST_S <= given.interval_s <= LONGEST_S:
        raise InvalidConfig(f"interval_s must be in [{SHORTEST_S:g}, {LONGEST_S:g}]")
    check_files(given, FILES)
    return Settings(
        admin_address=check_server_address(given.admin_address),
        interval_s=given.interval_s,
        **common_values(given),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tandem console",
        description="Serve a web page that shows what a scheduler does, for operators.",
        epilog="The page shows numbers, ids and tenants, and no text of a request. It asks for a "
        "token with the role operate where the scheduler asks for one.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--admin-address",
        metavar="ADDRESS",
        default=DEFAULT_ADMIN_ADDRESS,
        help="the scheduler's port for operators, HOST:PORT; default: %(default)s",
    )
    add_port_flags(parser, DEFAULT_LISTEN, FILES)
    parser.add_argument(
        "--interval-s",
        metavar="SECONDS",
        type=float,
        default=1.0,
        help=f"seconds between two looks, {SHORTEST_S:g} to {LONGEST_S:g}; default: %(default)s",
    )
    add_process_flags(parser)
    return parser
