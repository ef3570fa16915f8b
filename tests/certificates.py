"""Certificates for tests of TLS, signed by a CA of the test's own."""

from __future__ import annotations

import socket
import ssl
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import trustme

from tandem.network.address import host_and_port

HOSTS = ("127.0.0.1", "localhost")


@dataclass(frozen=True, slots=True)
class Pair:
    """Files of a certificate and its key."""

    certificate: Path
    key: Path


class Authority:
    """A CA whose files lie in one folder."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._ca = trustme.CA(organization_name=name)
        self._folder = folder
        self.file = folder / f"{name}.pem"
        self._ca.cert_pem.write_to_path(self.file)

    def issue(self, name: str, *hosts: str, not_after: datetime | None = None) -> Pair:
        """Write NAME.pem and NAME-key.pem, over files of an earlier call; hosts default to HOSTS."""
        leaf = self._ca.issue_cert(
            *(hosts or HOSTS),
            common_name=name,
            not_before=datetime(2020, 1, 1, tzinfo=UTC) if not_after else None,
            not_after=not_after,
        )
        pair = Pair(self._folder / f"{name}.pem", self._folder / f"{name}-key.pem")
        leaf.private_key_pem.write_to_path(pair.key)
        pair.certificate.write_bytes(b"".join(blob.bytes() for blob in leaf.cert_chain_pems))
        return pair

    def issue_expired(self, name: str) -> Pair:
        """Write a pair that was valid until yesterday."""
        return self.issue(name, not_after=datetime.now(UTC) - timedelta(days=1))


def shown_certificate(address: str, context: ssl.SSLContext) -> bytes:
    """Return the certificate, in DER, that a server shows to a new connection."""
    host, port = host_and_port(address)
    with (
        socket.create_connection((host, port)) as plain,
        context.wrap_socket(plain, server_hostname=host) as encrypted,
    ):
        found = encrypted.getpeercert(binary_form=True)
        assert found is not None
        return found


def first_certificate(file: Path) -> bytes:
    """Return the first certificate of a file, in DER."""
    end = "-----END CERTIFICATE-----"
    return ssl.PEM_cert_to_DER_cert(file.read_text().split(end)[0] + end)
