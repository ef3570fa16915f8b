"""The socket that an HTTP server listens on."""

from __future__ import annotations

import socket

from tandem.errors import AddressInUse
from tandem.network.address import host_and_port, without_brackets
from tandem.network.listen_address import ListenAddress


def listen(address: str, backlog: int = socket.SOMAXCONN) -> tuple[socket.socket, str]:
    """
    Return a socket that listens, and its address, with the port that it got.

    Args:
        address: HOST:PORT; port 0 takes a free one.
        backlog: Most connections that wait to be accepted.

    Raises:
        AddressInUse, InvalidConfig: The address cannot be had, or is none.
    """
    host, port = host_and_port(address)
    ListenAddress("listen", address).release()  # reports what is wrong with the address
    family, _, _, _, where = socket.getaddrinfo(
        without_brackets(host), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(where)
        listener.listen(backlog)
    except OSError as error:
        listener.close()
        raise AddressInUse(f"listen: {address}: {error.strerror}") from error
    return listener, f"{host}:{listener.getsockname()[1]}"
