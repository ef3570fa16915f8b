"""
TLS credentials of services and clients from PEM files, checked at the start and read again.

A file may be replaced while its service runs: the next handshake uses the new files, and streams
that are open go on. A pair that cannot be used is logged, and the one before it is kept.
"""

from __future__ import annotations

import ssl

import grpc
import structlog

from tandem.network.newest_files import NewestFiles
from tandem.network.tls_files import ClientTls, ServerTls
from tandem.network.tls_pairs import channel_credentials, expiry, read_ca, read_pem
from tandem.process.loaded_files import LOADED

_log = structlog.get_logger(__name__)


def server_credentials(files: ServerTls) -> grpc.ServerCredentials:
    """
    Return credentials for `add_secure_port`, of grpc and grpc.aio; each handshake uses the newest
    usable files.

    Raises:
        InvalidConfig: A file is missing or unreadable, certificate and key do not belong together,
            or the certificate has expired or is not valid yet.
    """
    paths = [one for one in (files.certificate, files.key, files.client_ca) if one is not None]
    newest = NewestFiles(paths, lambda: _server_configuration(files))
    return grpc.dynamic_ssl_server_credentials(
        newest.value,
        newest.changed,  # type: ignore[arg-type]  # the stubs lack None, for "as before"
        require_client_authentication=files.requires_client_certificate,
    )


class ClientCredentials:
    """Credentials of a client that opens channels again and again; each gets the newest files."""

    def __init__(self, files: ClientTls) -> None:
        """
        Raises:
            InvalidConfig: A file cannot be used, as for `server_credentials`.
        """
        paths = [one for one in (files.ca, files.certificate, files.key) if one is not None]
        self._newest = NewestFiles(paths, lambda: channel_credentials(files))

    def get(self) -> grpc.ChannelCredentials:
        """Return the credentials of the newest usable files."""
        return self._newest.newest()


def _server_configuration(files: ServerTls) -> grpc.ServerCertificateConfiguration:
    until = expiry(files.certificate, files.key, ssl.Purpose.SERVER_AUTH)
    LOADED.note_certificate(files.certificate, until)
    _log.info("tls_certificate", certificate=str(files.certificate), expires=until.isoformat())
    return grpc.ssl_server_certificate_configuration(
        [(read_pem(files.key), read_pem(files.certificate))],
        root_certificates=None if files.client_ca is None else read_ca(files.client_ca),
    )
