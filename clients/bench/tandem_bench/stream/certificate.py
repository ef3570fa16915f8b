"""Certificate that a benchmark makes for itself, to measure what encryption costs."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from tandem.errors import InternalError, InvalidConfig

_HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class SelfMadeCertificate:
    """
    Certificate for this machine that signs itself, with an elliptic key as public authorities use.

    Attributes:
        file: The certificate; for clients it is the authority, too.
        key: Its private key.
    """

    file: Path
    key: Path

    @classmethod
    def make(cls, directory: Path) -> Self:
        """
        Write a certificate that is valid for a day.

        Raises:
            InvalidConfig: This machine has no `openssl` command.
            InternalError: The command failed.
        """
        made = cls(directory / "server.pem", directory / "server-key.pem")
        command = [
            *("openssl", "req", "-x509", "-nodes", "-days", "1"),
            *("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"),
            *("-subj", f"/CN={_HOST}", "-addext", f"subjectAltName=IP:{_HOST}"),
            *("-keyout", str(made.key), "-out", str(made.file)),
        ]
        try:
            done = subprocess.run(  # noqa: S603  # no part of it comes from outside
                command, capture_output=True, text=True, check=False
            )
        except FileNotFoundError:
            raise InvalidConfig("--tls needs the command openssl, which is not here") from None
        if done.returncode:
            raise InternalError(f"openssl made no certificate: {done.stderr.strip()}")
        return made

    @property
    def options(self) -> Sequence[str]:
        """Arguments of a scheduler service that listens with this certificate."""
        return (f"--tls-cert={self.file}", f"--tls-key={self.key}")
