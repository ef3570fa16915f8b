"""Command line of the console."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tandem.errors import InvalidConfig
from tandem.network.address import check_server_address
from tandem_client.channel import DEFAULT_ADMIN_ADDRESS

DEFAULT_LISTEN = "127.0.0.1:8081"
SHORTEST_S, LONGEST_S = 0.2, 60.0

FILES = {
    "tls-cert": "PEM file of this server's certificate chain, for HTTPS; default: plain HTTP",
    "tls-key": "PEM file of its key",
    "scheduler-ca": "PEM file of the authorities that sign the scheduler's certificate; default: "
    "the connection to it is not encrypted",
    "scheduler-cert": "PEM file of a certificate of this client, if the scheduler asks for one",
    "scheduler-key": "PEM file of its key",
}
"""Flags that name files, and their help."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """
    Settings of one console process.

    Attributes:
        admin_address: The scheduler's address for operators.
        listen: HTTP address, HOST:PORT; port 0 takes a free one.
        tls_cert: PEM file of this server's certificate chain; None = plain HTTP.
        tls_key: PEM file of its key.
        scheduler_ca: PEM file of the authorities that sign the scheduler's certificate; None =
            the connection to it is not encrypted.
        scheduler_cert: PEM file of the certificate that the scheduler asks of clients.
        scheduler_key: PEM file of its key.
        interval_s: Seconds between two looks at the scheduler.
        ready_file: File that gets address and pid as JSON once the port listens.
        log_level: Least severe event to log, to stderr.
        log_format: "console" or "json".
    """

    admin_address: str = DEFAULT_ADMIN_ADDRESS
    listen: str = DEFAULT_LISTEN
    tls_cert: Path | None = None
    tls_key: Path | None = None
    scheduler_ca: Path | None = None
    scheduler_cert: Path | None = None
    scheduler_key: Path | None = None
    interval_s: float = 1.0
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
    if not SHORTEST_S <= given.interval_s <= LONGEST_S:
        raise InvalidConfig(f"interval_s must be in [{SHORTEST_S:g}, {LONGEST_S:g}]")
    _check_files(given)
    return Settings(
        admin_address=check_server_address(given.admin_address),
        listen=given.listen,
        tls_cert=given.tls_cert,
        tls_key=given.tls_key,
        scheduler_ca=given.scheduler_ca,
        scheduler_cert=given.scheduler_cert,
        scheduler_key=given.scheduler_key,
        interval_s=given.interval_s,
        ready_file=given.ready_file,
        log_level=given.log_level,
        log_format=given.log_format,
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
    parser.add_argument(
        "--listen",
        metavar="ADDRESS",
        default=DEFAULT_LISTEN,
        help="HTTP address, HOST:PORT; port 0 takes a free one; default: %(default)s",
    )
    for name, text in FILES.items():
        parser.add_argument(f"--{name}", metavar="FILE", type=Path, help=text)
    parser.add_argument(
        "--interval-s",
        metavar="SECONDS",
        type=float,
        default=1.0,
        help=f"seconds between two looks, {SHORTEST_S:g} to {LONGEST_S:g}; default: %(default)s",
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


def _check_files(given: argparse.Namespace) -> None:
    for cert, key in (("tls_cert", "tls_key"), ("scheduler_cert", "scheduler_key")):
        if (getattr(given, cert) is None) != (getattr(given, key) is None):
            raise InvalidConfig(f"{cert} and {key} go together: give both or neither")
    if given.scheduler_cert is not None and given.scheduler_ca is None:
        raise InvalidConfig("scheduler_cert needs scheduler_ca: without it nothing is encrypted")
    for flag in FILES:
        path = getattr(given, flag.replace("-", "_"))
        if path is not None and not path.is_file():
            raise InvalidConfig(f"--{flag}: {path} is not a file")
