"""
Forms of addresses: HOST:PORT with an IPv6 host in brackets, unix:PATH, and what gRPC resolves.

Services and clients check and take apart addresses here and nowhere else. This module does no I/O;
`listen_address` finds out if a service can listen on an address.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
from pathlib import Path

from tandem.errors import InvalidConfig

MAX_PORT = 65_535
UNIX = "unix:"

_RESOLVED_BY_GRPC = (UNIX, "unix-abstract:", "dns:", "ipv4:", "ipv6:", "vsock:")
"""Prefixes of gRPC's resolvers; gRPC itself parses the text after one."""
_LISTEN_HOST = re.compile(r"[^\s:/\[\]]+|\[[0-9A-Fa-f:.]+(%\w+)?\]")
_PORT = re.compile(r"0*([0-9]{1,5})")
_WANTED = "give HOST:PORT, for example"


def is_unix(address: str) -> bool:
    """Return True if the address is that of a unix socket."""
    return address.startswith(UNIX)


def unix_path(address: str) -> Path:
    """Return the path of unix:PATH or unix:///PATH."""
    path = address.removeprefix(UNIX)
    return Path(path.removeprefix("//") if path.startswith("///") else path)


def host_and_port(address: str) -> tuple[str, int]:
    """
    Return the host of HOST:PORT as it is written, and the port.

    Raises:
        InvalidConfig: The address has another form.
    """
    parts = _parts(address)
    if parts is None:
        raise InvalidConfig(f"{address!r} is not an address of the form host:port")
    return parts


def without_brackets(host: str) -> str:
    """Return a host as sockets take it: an IPv6 address without its brackets."""
    return host.removeprefix("[").removesuffix("]")


def is_loopback(host: str) -> bool:
    """
    Return True if a host is a loopback address, in a short form such as 127.1 too; a name is none,
    as it is not looked up.
    """
    plain = without_brackets(host).partition("%")[0]
    try:
        return ipaddress.ip_address(plain).is_loopback
    except ValueError:
        with contextlib.suppress(OSError):
            return ipaddress.ip_address(socket.inet_aton(plain)).is_loopback
        return False


def names_this_machine(address: str) -> bool:
    """Return True if an address is one of this machine's own: a socket, loopback or localhost."""
    parts = _parts(address)
    return is_unix(address) or (
        parts is not None and (parts[0] == "localhost" or is_loopback(parts[0]))
    )


def check_target(text: str) -> str:
    """
    Return the address of a service unchanged if the other service can connect to it.

    Raises:
        ValueError: It is neither HOST:PORT nor unix:PATH.
    """
    if _parts(text) is None and not _names_a_socket(text):
        raise ValueError("must be HOST:PORT or unix:PATH")
    return text


def check_targets(text: str) -> str:
    """
    Return addresses that commas separate without the spaces around them.

    Raises:
        ValueError: `check_target` refuses one of them, or two are the same.
    """
    parts = [check_target(part.strip()) for part in text.split(",")]
    if len(set(parts)) != len(parts):
        raise ValueError("must not name an address twice")
    return ",".join(parts)


def check_listen_address(text: str) -> str:
    """
    Return an address unchanged if a service can listen on addresses of its form.

    Raises:
        ValueError: It is neither HOST:PORT, with an IPv6 host in brackets, nor unix:PATH.
    """
    if _names_a_socket(text):
        return text
    return _with_listen_host(text, "must be HOST:PORT or unix:PATH")


def check_tcp_address(text: str) -> str:
    """
    Return an address unchanged if it is HOST:PORT, with an IPv6 host in brackets.

    Raises:
        ValueError: It has another form.
    """
    return _with_listen_host(text, "must be HOST:PORT")


def check_unix_address(text: str) -> str:
    """
    Return an address unchanged if it is unix:PATH.

    Raises:
        ValueError: It has another form.
    """
    if not _names_a_socket(text):
        raise ValueError("must be unix:PATH")
    return text


def check_server_address(address: str) -> str:
    """
    Return the address of a server unchanged if a client can try to connect to it.

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


def _parts(address: str) -> tuple[str, int] | None:
    host, _, text = address.rpartition(":")
    port = _port(text)
    return None if not host or port is None else (host, port)


def _port(text: str) -> int | None:
    digits = _PORT.fullmatch(text)
    return None if digits is None or int(digits[1]) > MAX_PORT else int(digits[1])


def _names_a_socket(text: str) -> bool:
    return is_unix(text) and bool(text.removeprefix(UNIX).strip("/"))


def _with_listen_host(text: str, rule: str) -> str:
    host = check_target(text).rpartition(":")[0]
    if _names_a_socket(text) or not _LISTEN_HOST.fullmatch(host):
        raise ValueError(f"{rule}, an IPv6 host in brackets")
    return text


def _what_is_wrong(address: str) -> str | None:
    if address.startswith(_RESOLVED_BY_GRPC):
        return None if address.partition(":")[2].strip("/") else "names nothing to connect to"
    scheme, is_url, rest = address.partition("://")
    if is_url:
        where = rest.split("/")[0]
        is_whole = bool(where.rpartition(":")[0]) and _is_port_of_server(where.rpartition(":")[2])
        example = where if is_whole else f"{where.split(':')[0] or 'host'}:50051"
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
            not _is_port_of_server(port),
            f"has no port from 1 to 65535 after the colon: {_WANTED} {host}:50051",
        ),
        (
            any(character.isspace() or character in "/,@" for character in host),
            f"has no valid host before the port: {_WANTED} 127.0.0.1:{port}",
        ),
    )
    return next((why for holds, why in mistakes if holds), None)


def _is_port_of_server(text: str) -> bool:
    return bool(_port(text))
