"""Name of a call's connection, by which calls of one client are bounded together."""

from __future__ import annotations


def connection_of(peer: str, call: object) -> str:
    """
    Return the key of a call's connection.

    Args:
        peer: What gRPC calls the client's end. Those of unix sockets have no name of their own.
        call: Any object of the call that lives as long as it: over a unix socket it is the key.
    """
    return f"unix-{id(call)}" if peer.startswith("unix") else peer
