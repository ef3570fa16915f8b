"""Finds out if a port that does not answer in plain text speaks TLS."""

from __future__ import annotations

import socket
import ssl

from tandem.errors import InvalidConfig, TandemError
from tandem.network.address import host_and_port, without_brackets
from tandem.status import PeerUnavailable

TIMEOUT_S = 2.0
"""Longest wait for each part of the handshake."""


def wants_tls(error: TandemError, address: str | None, *, is_encrypted: bool) -> bool:
    """
    Return whether a call failed because it was in plain text and the port speaks TLS.

    Args:
        error: What it failed with.
        address: Address that was called; None = not known.
        is_encrypted: True if the call was encrypted.
    """
    was_plain = isinstance(error, PeerUnavailable) and not is_encrypted
    return was_plain and address is not None and speaks_tls(address)


def speaks_tls(address: str) -> bool:
    """
    Return whether a TLS handshake with HOST:PORT gets an answer of TLS; False for other addresses.

    Nothing is sent after the handshake, and nothing that is read is used: the certificate is not
    verified.
    """
    try:
        host, port = host_and_port(address)
    except InvalidConfig:
        return False
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    name = without_brackets(host)
    try:
        with (
            socket.create_connection((name, port), TIMEOUT_S) as plain,
            context.wrap_socket(plain, server_hostname=name),
        ):
            return True
    except ssl.SSLError as error:
        return "ALERT" in (error.reason or "")  # it refuses us, in words of TLS
    except (OSError, ValueError):
        return False
