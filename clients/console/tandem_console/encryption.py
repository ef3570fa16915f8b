"""Encryption of the console's port, and of its connections to the scheduler."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from dataclasses import replace

from tandem.network.tls import ClientCredentials
from tandem.network.tls_contexts import server_context
from tandem.network.tls_files import client_tls, server_tls
from tandem_client.channel import ChannelOptions
from tandem_console.settings import Settings


def https_context(settings: Settings) -> ssl.SSLContext | None:
    """
    Return the context of the console's port, whose handshakes use the newest files; None for plain
    HTTP.

    Raises:
        InvalidConfig: A file cannot be used.
    """
    files = server_tls(settings.tls_cert, settings.tls_key, None)
    return None if files is None else server_context(files)


def newest_options(settings: Settings) -> Callable[[], ChannelOptions]:
    """
    Return a function that tells the options of new connections to the scheduler, with the newest
    files.

    Raises:
        InvalidConfig: A file cannot be used.
    """
    files = client_tls(settings.scheduler_ca, settings.scheduler_cert, settings.scheduler_key)
    if files is None:
        return ChannelOptions
    credentials = ClientCredentials(files)
    return lambda: ChannelOptions(credentials=credentials.get())


def with_token(options: ChannelOptions, token: str) -> ChannelOptions:
    """Return these options with a bearer token; empty = calls have none."""
    return replace(options, api_key=token)
