"""Files of TLS as settings name them; imports no part of gRPC."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tandem.errors import InvalidConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTls:
    """
    Files of a server's end of TLS, all in PEM format.

    Attributes:
        certificate: The server's certificate, followed by intermediate ones.
        key: Private key of the certificate, not encrypted.
        client_ca: Certificates that sign clients' certificates; every client must then show one.
            None = clients need none.
    """

    certificate: Path
    key: Path
    client_ca: Path | None = None

    @property
    def requires_client_certificate(self) -> bool:
        """True if a client without a certificate of `client_ca` cannot connect."""
        return self.client_ca is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientTls:
    """
    Files of a client's end of TLS, all in PEM format.

    Attributes:
        ca: Certificates that sign servers' certificates; None = the public ones gRPC comes with.
        certificate: The client's certificate, followed by intermediate ones; None = no certificate.
        key: Private key of the certificate, not encrypted; given exactly if `certificate` is.
    """

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None


def server_tls(
    certificate: Path | None, key: Path | None, client_ca: Path | None, *, prefix: str = "tls_"
) -> ServerTls | None:
    """
    Return the files of a service's settings; None if none is set.

    Args:
        certificate: Setting `tls_cert`.
        key: Setting `tls_key`.
        client_ca: Setting `tls_client_ca`.
        prefix: What the settings' names begin with, for errors.

    Raises:
        InvalidConfig: Some are set that need others.
    """
    if certificate is None and key is None and client_ca is None:
        return None
    if certificate is None or key is None:
        raise InvalidConfig(
            f"TLS needs {prefix}cert and {prefix}key together"
            + (f"; {prefix}client_ca alone encrypts nothing" if client_ca else "")
        )
    return ServerTls(certificate=certificate, key=key, client_ca=client_ca)


def client_tls(
    ca: Path | None, certificate: Path | None, key: Path | None, *, prefix: str = ""
) -> ClientTls | None:
    """
    Return the files of a client's settings; None if none is set.

    Args:
        ca: Setting `ca`.
        certificate: Setting `cert`.
        key: Setting `key`.
        prefix: What the settings' names begin with, for errors.

    Raises:
        InvalidConfig: Certificate and key are not set together.
    """
    if ca is None and certificate is None and key is None:
        return None
    if (certificate is None) is not (key is None):
        raise InvalidConfig(f"a client certificate needs {prefix}cert and {prefix}key together")
    return ClientTls(ca=ca, certificate=certificate, key=key)
