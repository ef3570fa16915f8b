"""
TLS credentials of services and clients from PEM files, checked at the start and read again.

A file may be replaced while its service runs: the next handshake uses the new files, and streams
that are open go on. A pair that cannot be used is logged, and the one before it is kept. Files are
checked by Python's `ssl`, because gRPC takes any bytes and fails only in handshakes, without a
reason that an operator could read.
"""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Generic, TypeVar

import grpc
import structlog

from tandem.errors import InvalidConfig

T = TypeVar("T")

_log = structlog.get_logger(__name__)


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


def server_credentials(files: ServerTls) -> grpc.ServerCredentials:
    """
    Return credentials for `add_secure_port`, of grpc and grpc.aio; each handshake uses the newest
    usable files.

    Raises:
        InvalidConfig: A file is missing or unreadable, certificate and key do not belong together,
            or the certificate has expired or is not valid yet.
    """
    paths = [one for one in (files.certificate, files.key, files.client_ca) if one is not None]
    newest = _Newest(paths, lambda: _server_configuration(files))
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
        self._newest = _Newest(paths, lambda: _channel_credentials(files))

    def get(self) -> grpc.ChannelCredentials:
        """Return the credentials of the newest usable files."""
        self._newest.changed()
        return self._newest.value


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
    _read(certificate)
    _read(key)
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


class _Newest(Generic[T]):
    """
    Value that is made from files, and made again once one of them has changed. If that fails, the
    failure is logged once and the value stays. Any thread may call it.
    """

    def __init__(self, paths: Sequence[Path], make: Callable[[], T]) -> None:
        self._paths = paths
        self._make = make
        self._lock = threading.Lock()
        self._stamp = self._stamp_now()
        self.value = make()

    def changed(self) -> T | None:
        """Return the new value if a file has changed; None if none has, or the change is broken."""
        with self._lock:
            stamp = self._stamp_now()
            if stamp == self._stamp:
                return None
            self._stamp = stamp
            try:
                self.value = self._make()
            except InvalidConfig as error:
                _log.error("tls_files_refused", message=error.message, kept="those before them")
                return None
            _log.info("tls_files_reloaded", files=[str(path) for path in self._paths])
            return self.value

    def _stamp_now(self) -> list[tuple[int, int, int] | None]:
        return [_stamp(path) for path in self._paths]


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()  # of the file itself: Kubernetes swaps links that lead to it
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def _server_configuration(files: ServerTls) -> grpc.ServerCertificateConfiguration:
    until = expiry(files.certificate, files.key, ssl.Purpose.SERVER_AUTH)
    _log.info("tls_certificate", certificate=str(files.certificate), expires=until.isoformat())
    return grpc.ssl_server_certificate_configuration(
        [(_read(files.key), _read(files.certificate))],
        root_certificates=None if files.client_ca is None else _read_ca(files.client_ca),
    )


def _channel_credentials(files: ClientTls) -> grpc.ChannelCredentials:
    if files.certificate is not None and files.key is not None:
        expiry(files.certificate, files.key, ssl.Purpose.CLIENT_AUTH)
    return grpc.ssl_channel_credentials(
        root_certificates=None if files.ca is None else _read_ca(files.ca),
        private_key=None if files.key is None else _read(files.key),
        certificate_chain=None if files.certificate is None else _read(files.certificate),
    )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidConfig(f"cannot read the TLS file {path}: {error.strerror}") from error


def _read_ca(path: Path) -> bytes:
    content = _read(path)
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
