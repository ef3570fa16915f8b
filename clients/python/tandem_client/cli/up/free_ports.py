"""Free addresses to suggest if the configured ones are in use."""

from __future__ import annotations

from collections.abc import Mapping

from tandem.errors import TandemError
from tandem.network.address import MAX_PORT, host_and_port, is_unix
from tandem.network.listen_address import ListenAddress, busy_among

STEP = 100
"""Distance between a port in use and the next ones tried, so that the numbers look alike."""


def free_instead(addresses: Mapping[str, str | None]) -> dict[str, str]:
    """
    Return a free address for each one that is in use, by setting.

    Args:
        addresses: Addresses by setting; None or empty for a setting without one.
    """
    known = {name: address for name, address in addresses.items() if address}
    taken = set(known.values())
    found = {}
    for name, _ in busy_among(known):
        found[name] = _near(known[name], taken)
        taken.add(found[name])
    return found


def _near(address: str, taken: set[str]) -> str:
    if is_unix(address):
        return f"{address}.{len(taken)}"
    host, port = host_and_port(address)
    for number in range(port + STEP, MAX_PORT + 1, STEP):
        near = f"{host}:{number}"
        if near not in taken and _is_free(near):
            return near
    return f"{host}:0"


def _is_free(address: str) -> bool:
    try:
        ListenAddress("listen", address).release()
    except TandemError:
        return False
    return True
