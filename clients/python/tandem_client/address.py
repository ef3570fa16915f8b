"""Checks of server addresses, so that a mistake is reported before anything connects."""

from __future__ import annotations

from tandem.errors import InvalidConfig

_RESOLVED_BY_GRPC = ("unix:", "unix-abstract:", "dns:", "ipv4:", "ipv6:", "vsock:")
"""Prefixes of gRPC's resolvers; gRPC itself parses the text after one."""
_WANTED = "give HOST:PORT, for example"


def check_address(address: str) -> str:
    """
    Return the address of a server unchanged if a connection to it can be tried.

    Args:
        address: HOST:PORT, [IPv6]:PORT, unix:PATH, or another name that gRPC resolves.

    Raises:
        InvalidConfig: The address has none of these forms; the message says what to write instead.
    """
    if not isinstance(address, str):
        raise InvalidConfig(f"the address must be a string HOST:PORT, not {address!r}")
    why = _what_is_wrong(address)
    if why is not None:
        raise InvalidConfig(f"the address {address!r} {why}")
    return address


def _what_is_wrong(address: str) -> str | None:
    if address.startswith(_RESOLVED_BY_GRPC):
        return None if address.partition(":")[2].strip("/") else "names nothing to connect to"
    scheme, is_url, rest = address.partition("://")
    if is_url:
        where = rest.split("/")[0]
        example = where if _is_host_and_port(where) else f"{where.split(':')[0] or 'host'}:50051"
        return f"is a URL: {_WANTED} {example}, without {scheme}://"
    host, colon, port = address.rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    has_port = bool(colon) and not (address.startswith("[") and address.endswith("]"))
    mistakes = (
        (not address.strip(), f"is empty: {_WANTED} 127.0.0.1:50051"),
        (not has_port, f"has no port: {_WANTED} {address}:50051"),
        (not host, f"has no host: {_WANTED} 127.0.0.1:{port}"),
        (
            ":" in host and not is_bracketed,
            f"is no HOST:PORT: {_WANTED} 127.0.0.1:50051 or, with IPv6, [::1]:50051",
        ),
        (
            not _is_port(port),
            f"has no port from 1 to 65535 after the colon: {_WANTED} {host}:50051",
        ),
        (
            any(character.isspace() or character in "/,@" for character in host),
            f"has no valid host before the port: {_WANTED} 127.0.0.1:{port}",
        ),
    )
    return next((why for holds, why in mistakes if holds), None)


def _is_host_and_port(text: str) -> bool:
    host, _, port = text.rpartition(":")
    return bool(host) and _is_port(port)


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdecimal() and 0 < int(text) < 1 << 16
