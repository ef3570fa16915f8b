"""Ports for services that come and go while other tests run beside them."""

from __future__ import annotations

import socket

_held: list[socket.socket] = []


def free_port() -> int:
    """
    Return a port of 127.0.0.1 where no server listens, and only servers that are told of it
    will, until the tests end.

    A socket stays bound to it without listening: the system then gives it to no process that asks
    for any port, also while the service that belongs there is down, and connections are refused as
    if it were free. Servers that set SO_REUSEADDR or SO_REUSEPORT, as ours do, can listen there.
    """
    holder = socket.socket()
    for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
        holder.setsockopt(socket.SOL_SOCKET, option, 1)
    holder.bind(("127.0.0.1", 0))
    _held.append(holder)
    return int(holder.getsockname()[1])
