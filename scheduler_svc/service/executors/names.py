"""
Names of executors that mean several addresses, such as that of a headless Service in Kubernetes:
looked up again and again, as executors come and go.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence

import structlog

LOOK_UP_INTERVAL_S = 2.0
"""Seconds between two lookups of a name; a resolver answers from its cache in between."""
_SCHEME = "dns:"

_log: structlog.stdlib.BoundLogger = structlog.get_logger()


def host_of(name: str) -> str:
    """Return the host of dns:///NAME:PORT."""
    return _split(name)[0]


def look_up(name: str) -> list[str]:
    """
    Return the addresses that a name means now: those of IPv4 if it has any, else those of IPv6.

    An executor that has both is then named once.

    Raises:
        OSError: The name cannot be looked up.
    """
    host, port = _split(name)
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    numbers = {str(place[0]) for family, *_, place in found if family == socket.AF_INET}
    if numbers:
        return sorted(f"{number}:{port}" for number in numbers)
    numbers = {str(place[0]) for family, *_, place in found if family == socket.AF_INET6}
    return sorted(f"[{number}]:{port}" for number in numbers)


class ExecutorNames:
    """Thread that looks names up and tells what they mean."""

    def __init__(
        self,
        names: Sequence[str],
        tell: Callable[[dict[str, str]], None],
        *,
        look_up: Callable[[str], list[str]] = look_up,
        interval_s: float = LOOK_UP_INTERVAL_S,
    ) -> None:
        """
        Args:
            names: Names to look up.
            tell: Takes the host under which each address was found, by address, at the first lookup
                and when it has changed; called on this object's thread.
            look_up: Looks one name up.
            interval_s: Seconds between two lookups.
        """
        self._names = names
        self._tell = tell
        self._look_up = look_up
        self._interval_s = interval_s
        self._known: dict[str, list[str]] = {}
        """Addresses of each name when it was last looked up with success."""
        self._failed: set[str] = set()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="executor-names", daemon=True)

    def start(self) -> None:
        """Begin to look names up; without names there is no thread."""
        if self._names:
            self._thread.start()

    def stop(self) -> None:
        """Look nothing up any more; a lookup under way is not waited for."""
        self._stopping.set()

    def _run(self) -> None:
        told: dict[str, str] | None = None
        while not self._stopping.is_set():
            found = self._found()
            if found != told:
                told = found
                self._tell(found)
            self._stopping.wait(self._interval_s)

    def _found(self) -> dict[str, str]:
        """Look every name up; one that cannot be looked up means what it meant before."""
        for name in self._names:
            try:
                self._known[name] = self._look_up(name)
                self._failed.discard(name)
            except OSError as error:
                if name not in self._failed:  # a warning for the first failure of several in a row
                    self._failed.add(name)
                    _log.warning("executor_name_not_found", name=name, message=str(error))
        return {place: host_of(name) for name in self._names for place in self._known.get(name, ())}


def _split(name: str) -> tuple[str, int]:
    host, _, port = name.removeprefix(_SCHEME).lstrip("/").rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)
