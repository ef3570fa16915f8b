"""Addresses that frontends will listen on, checked and held before any frontend starts."""

from __future__ import annotations

import contextlib
import errno
import socket
from types import TracebackType
from typing import Any, Self

from tandem.errors import AddressInUse, InvalidConfig


class ListenAddress:
    """
    A TCP address that was free when this was made.

    Several frontends share one with SO_REUSEPORT, which would also let a second scheduler of the
    same user in unnoticed. So the address is first bound exclusively, which says whether it is
    free, and a shared one is then held by a socket that shares it and never listens: its port is
    known before the first frontend starts, and nobody takes it meanwhile.

    Attributes:
        address: Where frontends are to listen. Port 0 of a shared address is resolved.
    """

    def __init__(self, setting: str, address: str, *, is_shared: bool = False) -> None:
        """
        Args:
            setting: Name of the setting the address comes from, for errors.
            address: HOST:PORT; port 0 takes a free one. unix:PATH is passed on as it is.
            is_shared: Several frontends will listen there.

        Raises:
            AddressInUse: Another process listens there.
            InvalidConfig: The host cannot be resolved or is not one of this machine's.
        """
        self._holder: socket.socket | None = None
        self.address = address
        if address.startswith("unix:"):
            return
        host, _, port = address.rpartition(":")
        bare_host = host.removeprefix("[").removesuffix("]")
        try:
            family, *_, where = socket.getaddrinfo(
                bare_host, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
        except socket.gaierror as error:
            raise InvalidConfig(f"{setting}: cannot resolve {host}: {error.strerror}") from error
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            _bind(probe, where, setting, address)
            # Listening is what fails where another socket shares the address already.
            _listen(probe, setting, address)
            where = probe.getsockname()
        if not is_shared:
            return
        self._holder = socket.socket(family, socket.SOCK_STREAM)
        self._holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        _bind(self._holder, where, setting, address)
        self.address = f"{host}:{where[1]}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    def release(self) -> None:
        """Let others have the address."""
        if self._holder is not None:
            with contextlib.suppress(OSError):
                self._holder.close()


def _bind(one: socket.socket, where: Any, setting: str, text: str) -> None:
    try:
        one.bind(where)
    except OSError as error:
        raise _refusal(error, setting, text) from error


def _listen(one: socket.socket, setting: str, text: str) -> None:
    try:
        one.listen(1)
    except OSError as error:
        raise _refusal(error, setting, text) from error


def _refusal(error: OSError, setting: str, text: str) -> AddressInUse | InvalidConfig:
    flag = "--" + setting.replace("_", "-")
    if error.errno == errno.EADDRINUSE:
        return AddressInUse(
            f"{setting} {text} is in use by another process: stop it or choose another {flag}"
        )
    return InvalidConfig(f"{setting}: cannot listen on {text}: {error.strerror}")
