"""Addresses to serve at where those that were meant are taken."""

from __future__ import annotations

from collections.abc import Mapping

from tandem.errors import TandemError
from tandem.listen_address import ListenAddress, busy_among

STEP = 100
"""Ports are looked for this far from the ones that are taken, so that they are alike."""


def free_instead(addresses: Mapping[str, str | None]) -> dict[str, str]:
    """
    A free address for each one that is taken, by setting.

    Args:
        addresses: By setting; None or empty where there is none.
    """
    known = {name: address for name, address in addresses.items() if address}
    taken = set(known.values())
    found = {}
    for name, _ in busy_among(known):
        found[name] = _near(known[name], taken)
        taken.add(found[name])
    return found


def _near(address: str, taken: set[str]) -> str:
    if address.startswith("unix:"):
        return f"{address}.{len(taken)}"
    host, _, port = address.rpartition(":")
    for number in range(int(port) + STEP, 1 << 16, STEP):
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
