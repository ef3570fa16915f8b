"""Settings that every HTTP server in front of a scheduler has, and their flags."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from tandem.errors import InvalidConfig
from tandem.process.process_flags import (
    add_log_format_flag,
    add_log_level_flag,
    add_ready_file_flag,
)

SERVER_FILES = {
    "tls-cert": "PEM file of this server's certificate chain, for HTTPS; default: plain HTTP",
    "tls-key": "PEM file of its key",
}
"""Flags of the files of a server's own port, and their help."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpServerSettings:
    """
    Settings of one HTTP server process.

    Attributes:
        listen: HTTP address, HOST:PORT; port 0 takes a free one.
        tls_cert: PEM file of this server's certificate chain; None = plain HTTP.
        tls_key: PEM file of its key.
        scheduler_ca: PEM file of the authorities that sign schedulers' certificates; None =
            connections to schedulers are not encrypted.
        scheduler_cert: PEM file of the certificate that schedulers ask of clients, if they do.
        scheduler_key: PEM file of its key.
        ready_file: File that gets address and pid as JSON once the port listens.
        log_level: Least severe event to log, to stderr.
        log_format: "console" or "json".
    """

    listen: str
    tls_cert: Path | None = None
    tls_key: Path | None = None
    scheduler_ca: Path | None = None
    scheduler_cert: Path | None = None
    scheduler_key: Path | None = None
    ready_file: Path | None = None
    log_level: str = "info"
    log_format: str = "console"


def add_port_flags(
    parser: argparse.ArgumentParser, default_listen: str, files: Mapping[str, str]
) -> None:
    """
    Add --listen, and the flags that name files.

    Args:
        parser: Parser of the program's command line.
        default_listen: Address where none is given.
        files: `SERVER_FILES`, and the help of scheduler-ca, scheduler-cert and scheduler-key.
    """
    parser.add_argument(
        "--listen",
        metavar="ADDRESS",
        default=default_listen,
        help="HTTP address, HOST:PORT; port 0 takes a free one; default: %(default)s",
    )
    for name, text in files.items():
        parser.add_argument(f"--{name}", metavar="FILE", type=Path, help=text)


def add_process_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the ready file and of logging."""
    add_ready_file_flag(parser)
    add_log_level_flag(parser)
    add_log_format_flag(parser)


def common_values(given: argparse.Namespace) -> dict[str, Any]:
    """Return the values of `HttpServerSettings` that a command line gave, by attribute."""
    return {one.name: getattr(given, one.name) for one in fields(HttpServerSettings)}


def check_files(given: argparse.Namespace, files: Mapping[str, str]) -> None:
    """
    Check that files which go together were given together, and that each is there.

    Args:
        given: The command line.
        files: Flags that name files, as in `add_port_flags`.

    Raises:
        InvalidConfig: One is missing.
    """
    for cert, key in (("tls_cert", "tls_key"), ("scheduler_cert", "scheduler_key")):
        if (getattr(given, cert) is None) != (getattr(given, key) is None):
            raise InvalidConfig(f"{cert} and {key} go together: give both or neither")
    if given.scheduler_cert is not None and given.scheduler_ca is None:
        raise InvalidConfig("scheduler_cert needs scheduler_ca: without it nothing is encrypted")
    for flag in files:
        path = getattr(given, flag.replace("-", "_"))
        if path is not None and not path.is_file():
            raise InvalidConfig(f"--{flag}: {path} is not a file")
