"""TLS of servers that are not gRPC's, with Python's `ssl`."""

from __future__ import annotations

import ssl

import structlog

from tandem.network.newest_files import NewestFiles
from tandem.network.tls_files import ServerTls
from tandem.network.tls_pairs import expiry, read_ca
from tandem.process.loaded_files import LOADED

_log = structlog.get_logger(__name__)


def server_context(files: ServerTls) -> ssl.SSLContext:
    """
    Return a context to listen with; each handshake uses the newest usable files.

    Raises:
        InvalidConfig: A file cannot be used, as for `tandem.network.tls.server_credentials`.
    """
    paths = [one for one in (files.certificate, files.key, files.client_ca) if one is not None]
    newest = NewestFiles(paths, lambda: _context(files))
    context = newest.value

    def use_newest(connection: ssl.SSLObject, _name: str | None, _own: ssl.SSLContext) -> None:
        # OpenSSL calls it at each ClientHello, with a server name or without one.
        connection.context = newest.newest()

    context.sni_callback = use_newest
    return context


def _context(files: ServerTls) -> ssl.SSLContext:
    until = expiry(files.certificate, files.key, ssl.Purpose.SERVER_AUTH)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.certificate, files.key)
    if files.client_ca is not None:
        read_ca(files.client_ca)
        context.load_verify_locations(files.client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    LOADED.note_certificate(files.certificate, until)
    _log.info("tls_certificate", certificate=str(files.certificate), expires=until.isoformat())
    return context
