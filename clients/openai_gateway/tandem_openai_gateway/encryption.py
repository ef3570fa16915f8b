"""Encryption of the gateway's port, and of the connections to schedulers."""

from __future__ import annotations

import ssl
from collections.abc import Callable

from tandem.network.tls import ClientCredentials
from tandem.network.tls_contexts import server_context
from tandem.network.tls_files import client_tls, server_tls
from tandem_client.channel import ChannelOptions
from tandem_openai_gateway.settings import Settings


def https_context(settings: Settings) -> ssl.SSLContext | None:
    """
    Return the context of the gateway's port, whose handshakes use the newest files; None for plain
    HTTP.

    Raises:
        InvalidConfig: A file cannot be used.
    """
    files = server_tls(settings.tls_cert, settings.tls_key, None)
    return None if files is None else server_context(files)


def newest_options(settings: Settings) -> Callable[[], ChannelOptions]:
    """
    Return a function that tells the options of connections to schedulers: others than before once
    the files have changed, and those before if the change cannot be used.

    Raises:
        InvalidConfig: A file cannot be used.
    """
    files = client_tls(settings.scheduler_ca, settings.scheduler_cert, settings.scheduler_key)
    if files is None:
        plain = ChannelOptions()
        return lambda: plain
    credentials = ClientCredentials(files)
    return lambda: ChannelOptions(credentials=credentials.get())
