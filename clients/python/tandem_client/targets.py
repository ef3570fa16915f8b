"""Addresses of one or several servers, and the targets that gRPC connects to for them."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Sequence

from tandem.errors import InvalidConfig
from tandem.network.address import (
    check_server_address,
    host_and_port,
    names_this_machine,
    without_brackets,
)

ROUND_ROBIN = ("grpc.lb_policy_name", "round_robin")
"""Channel argument that has calls take turns among all servers of a target."""
_SEPARATOR = ","
_ONE_TARGET = ("unix", "dns:", "ipv4:", "ipv6:", "vsock:")
"""Prefixes of gRPC's own targets, in which a comma is not ours."""


def address_of(given: str | Sequence[str] | None, variable: str, default: str) -> str:
    """
    Return the address to use: the one given, that of an environment variable, or the default;
    several are joined by commas.

    Raises:
        InvalidConfig: It is not the address of a server, or one of several is none by number.
    """
    chosen = (os.environ.get(variable) or default) if given is None else given
    is_many = isinstance(chosen, Sequence) and not isinstance(chosen, str)
    text = _SEPARATOR.join(chosen) if is_many else str(chosen)
    target_of(text)
    return text


def target_of(address: str) -> str:
    """
    Return gRPC's target for an address, or for several that commas separate.

    Raises:
        InvalidConfig: As for `address_of`.
    """
    if not has_several(address):
        return check_server_address(address)
    places = [check_server_address(one.strip()) for one in address.split(_SEPARATOR)]
    versions = {_version(place) for place in places}
    if len(versions) != 1:
        raise InvalidConfig(f"the addresses {address} are of IPv4 and IPv6: give those of one kind")
    return f"ipv{versions.pop()}:{_SEPARATOR.join(places)}"


def has_several(address: str) -> bool:
    """Return True if commas separate several addresses; gRPC's own `ipv4:` targets are one."""
    return _SEPARATOR in address and not address.startswith(_ONE_TARGET)


def has_this_machine(address: str) -> bool:
    """Return True if an address, or one of several, is of this machine."""
    places = address.split(_SEPARATOR) if has_several(address) else [address]
    return any(names_this_machine(one.strip()) for one in places)


def takes_turns(address: str) -> bool:
    """Return True if calls take turns among servers: several addresses, or a name as `dns:`."""
    return has_several(address) or address.startswith(("dns:", "ipv4:", "ipv6:"))


def _version(place: str) -> int:
    try:
        return ipaddress.ip_address(without_brackets(host_and_port(place)[0])).version
    except ValueError as error:
        raise InvalidConfig(
            f"{place} is one of several addresses and has no IP address: give numbers, or one name "
            "for all servers as dns:///NAME:PORT"
        ) from error
