"""Settings of encryption and identity that the core process gives a frontend."""

from __future__ import annotations

from pathlib import Path

import msgspec

from tandem.network.tls_files import ServerTls, server_tls


class FrontendSecurity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """
    Files of the ports that a service listens on; msgspec knows paths as text only.

    Attributes:
        tls_cert: Certificate of the public port; None for plain text.
        tls_key: Its private key.
        tls_client_ca: CAs of clients' certificates; None where clients need none.
        admin_tls_cert: Certificate of the admin port.
        admin_tls_key: Its private key.
        admin_tls_client_ca: CAs of operators' certificates.
        metrics_tls_cert: Certificate of the port of /metrics; None for plain HTTP.
        metrics_tls_key: Its private key.
        metrics_tls_client_ca: CAs of the certificates of readers of /metrics.
        metrics_token_file: File of tokens of which a reader of /metrics must send one.
        tokens_file: File of the credentials that callers must have; None where they need none.
    """

    tls_cert: str | None = None
    tls_key: str | None = None
    tls_client_ca: str | None = None
    admin_tls_cert: str | None = None
    admin_tls_key: str | None = None
    admin_tls_client_ca: str | None = None
    metrics_tls_cert: str | None = None
    metrics_tls_key: str | None = None
    metrics_tls_client_ca: str | None = None
    metrics_token_file: str | None = None
    tokens_file: str | None = None

    def public_tls(self) -> ServerTls | None:
        """
        Return the files of the public port; None for plain text.

        Raises:
            InvalidConfig: Some are set that need others.
        """
        paths = (self.tls_cert, self.tls_key, self.tls_client_ca)
        return server_tls(*(_path(path) for path in paths))

    def admin_tls(self) -> ServerTls | None:
        """Return the files of the admin port, as `public_tls` does."""
        paths = (self.admin_tls_cert, self.admin_tls_key, self.admin_tls_client_ca)
        return server_tls(*(_path(path) for path in paths), prefix="admin_tls_")

    def metrics_tls(self) -> ServerTls | None:
        """Return the files of the port of /metrics, as `public_tls` does."""
        paths = (self.metrics_tls_cert, self.metrics_tls_key, self.metrics_tls_client_ca)
        return server_tls(*(_path(path) for path in paths), prefix="metrics_tls_")


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)
