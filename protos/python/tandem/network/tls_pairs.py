"""
Checks of TLS files in PEM format, and a channel's credentials from them; for clients too.

gRPC takes any bytes and fails only in handshakes, without a reason that an operator could read. So
a certificate and its key are tried first in a handshake in memory, by Python's `ssl`.
"""

from __future__ import annotations

import ssl
from datetime import UTC, datetime
from pathlib import Path

import grpc

from tandem.errors import InvalidConfig
from tandem.network.tls_files import ClientTls
from tandem.process.loaded_files import LOADED


def channel_credentials(files: ClientTls) -> grpc.ChannelCredentials:
    """
    Return the credentials of a channel.

    Raises:
        InvalidConfig: A file is missing or unreadable, certificate and key do not belong together,
            or the certificate has expired or is not valid yet.
    """
    if files.certificate is not None and files.key is not None:
        until = expiry(files.certificate, files.key, ssl.Purpose.CLIENT_AUTH)
        LOADED.note_certificate(files.certificate, until)
    return grpc.ssl_channel_credentials(
        root_certificates=None if files.ca is None else read_ca(files.ca),
        private_key=None if files.key is None else read_pem(files.key),
        certificate_chain=None if files.certificate is None else read_pem(files.certificate),
    )


def expiry(certificate: Path, key: Path, purpose: ssl.Purpose) -> datetime:
    """
    Return the time until which a certificate is valid, once it and its key have been checked.

    Args:
        certificate: File with the certificate.
        key: File with its key.
        purpose: `SERVER_AUTH` for the certificate of a server, `CLIENT_AUTH` for a client's.

    Raises:
        InvalidConfig: The pair cannot be used for this purpose; the text says why.
    """
    read_pem(certificate)
    read_pem(key)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_mode = ssl.CERT_NONE
    checker = client if purpose is ssl.Purpose.SERVER_AUTH else server
    try:
        for end in (server, client):
            end.load_cert_chain(certificate, key, password=lambda: _refuse_encrypted(key))
        checker.load_verify_locations(certificate)
    except ssl.SSLError as error:
        raise InvalidConfig(_why_not_loaded(certificate, key, error)) from error
    checker.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    checker.verify_mode = ssl.CERT_REQUIRED
    try:
        last_valid = _last_valid(server, client, purpose)
    except ssl.SSLCertVerificationError as error:
        raise InvalidConfig(
            f"the TLS certificate {certificate} cannot be used: {error.verify_message}"
        ) from error
    except ssl.SSLError as error:
        raise InvalidConfig(
            f"no TLS handshake succeeds with {certificate} and {key}: {error.reason}"
        ) from error
    return datetime.fromtimestamp(ssl.cert_time_to_seconds(last_valid), UTC)


def read_pem(path: Path) -> bytes:
    """
    Return what a file holds.

    Raises:
        InvalidConfig: It cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidConfig(f"cannot read the TLS file {path}: {error.strerror}") from error


def read_ca(path: Path) -> bytes:
    """
    Return the certificates of a file of CAs.

    Raises:
        InvalidConfig: It cannot be read, or holds no certificate.
    """
    content = read_pem(path)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except ssl.SSLError as error:
        raise InvalidConfig(f"{path} holds no certificate in PEM format to trust") from error
    return content


def _refuse_encrypted(key: Path) -> str:
    raise InvalidConfig(f"the TLS key {key} is encrypted: store it without a password")


def _why_not_loaded(certificate: Path, key: Path, error: ssl.SSLError) -> str:
    if error.reason == "KEY_VALUES_MISMATCH":
        return f"the TLS key {key} does not belong to the certificate {certificate}"
    return (
        f"{certificate} and {key} are no TLS certificate and key in PEM format: "
        f"{error.reason or error}"
    )


def _last_valid(server: ssl.SSLContext, client: ssl.SSLContext, purpose: ssl.Purpose) -> str:
    """Make a handshake in memory; return the `notAfter` of the certificate that was checked."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    serving = server.wrap_bio(to_server, to_client, server_side=True)
    calling = client.wrap_bio(to_client, to_server)
    due = [calling, serving]
    while due:
        for end in list(due):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            due.remove(end)
    found = (calling if purpose is ssl.Purpose.SERVER_AUTH else serving).getpeercert()
    if found is None:
        raise AssertionError("a checked certificate was not shown")
    return str(found["notAfter"])
