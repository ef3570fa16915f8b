"""Encryption of an HTTP server's port, and of its connections to schedulers."""

from __future__ import annotations

import ssl
from collections.abc import Callable

import grpc

from tandem.http_server.settings import HttpServerSettings
from tandem.network.tls import ClientCredentials
from tandem.network.tls_contexts import server_context
from tandem.network.tls_files import client_tls, server_tls


def https_context(settings: HttpServerSettings) -> ssl.SSLContext | None:
    """
    Return the context of the server's port, whose handshakes use the newest files; None for plain
    HTTP.

    Raises:
        InvalidConfig: A file cannot be used.
    """
    files = server_tls(settings.tls_cert, settings.tls_key, None)
    return None if files is None else server_context(files)


def newest_credentials(
    settings: HttpServerSettings,
) -> Callable[[], grpc.ChannelCredentials | None]:
    """
    Return a function that tells the credentials of new connections to schedulers: others than
    before once the files have changed, and those before if the change cannot be used. They are
    None where these connections are not encrypted.

    Raises:
        InvalidConfig: A file cannot be used.
    """
    files = client_tls(settings.scheduler_ca, settings.scheduler_cert, settings.scheduler_key)
    return (lambda: None) if files is None else ClientCredentials(files).get
