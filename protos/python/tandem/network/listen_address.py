"""
Addresses that a service will listen on, checked and held before any process is started.

Both services and `tandem up` use it, so that the same mistake is the same error everywhere.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tandem.errors import AddressInUse, InvalidConfig
from tandem.network.address import (
    host_and_port,
    is_loopback,
    is_unix,
    unix_path,
    without_brackets,
)

UNPROTECTED = (
    "other machines can reach this address, and nothing on it is authenticated or encrypted: "
    "whoever connects may use the service and read what it sends"
)
UNENCRYPTED = (
    "other machines can reach this address, and nothing on it is encrypted: whoever sees the "
    "network's traffic can read it, with the tokens in it"
)
UNAUTHENTICATED = (
    "other machines can reach this address, and nothing on it is authenticated: whoever connects "
    "may use the service"
)
MAX_UNIX_PATH_BYTES = 107
"""Longest path of a unix socket: `sun_path` holds 108 bytes with its terminator."""


class ListenAddress:
    """
    Address that was free when this object was made; a shared or unix one is held until `release`.

    Several frontends share a TCP address with SO_REUSEPORT, which would also let in a second
    scheduler of the same user unnoticed. So the address is first bound exclusively, which fails if
    it is in use. A shared one is then held by a socket that shares it and never listens: its port
    is known before the first frontend starts, and no other process takes it meanwhile.

    Unix sockets have no such protection: a process that binds one replaces the file of another. So
    a locked file beside the socket shows that it is taken. The system drops the lock when the
    process ends in any way, and the socket of a dead process is replaced.

    Attributes:
        address: The address to listen on; port 0 of a shared address is resolved.
    """

    def __init__(self, setting: str, address: str, *, is_shared: bool = False) -> None:
        """
        Args:
            setting: Name of the setting that the address comes from, for errors.
            address: HOST:PORT, of which port 0 takes a free one, or unix:PATH.
            is_shared: True if several processes will listen on it.

        Raises:
            AddressInUse: Another process listens on it.
            InvalidConfig: No process can listen on it: the host cannot be resolved or is not one of
                this machine's, or the path is too long, not in a directory, or that of another
                file.
        """
        self._holder: socket.socket | None = None
        self._lock: _LockFile | None = None
        self.address = address
        if not is_unix(address):
            self._take_tcp(setting, is_shared=is_shared)
        elif is_shared:
            raise InvalidConfig(
                f"{setting}: several frontends cannot share the unix socket {address}: listen on "
                "HOST:PORT or have one frontend"
            )
        else:
            self._take_unix(setting)

    def _take_tcp(self, setting: str, *, is_shared: bool) -> None:
        host, port = host_and_port(self.address)
        free, refusals = [], []
        for family, where in _resolve(setting, host, port):
            try:
                free.append((family, where, _try_tcp(family, where)))
            except OSError as error:  # in use, or of a kind that this machine lacks
                refusals.append(error)
        in_use = next((one for one in refusals if one.errno == errno.EADDRINUSE), None)
        if in_use is not None or not free:
            raise _refusal(in_use or refusals[0], setting, self.address)
        if not is_shared:
            return
        family, where, number = free[0]
        self._holder = socket.socket(family, socket.SOCK_STREAM)
        self._holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            self._holder.bind((where[0], number, *where[2:]))
        except OSError as error:
            raise _refusal(error, setting, self.address) from error
        self.address = f"{host}:{number}"

    def _take_unix(self, setting: str) -> None:
        path = unix_path(self.address)
        if len(os.fsencode(path)) > MAX_UNIX_PATH_BYTES:
            raise InvalidConfig(
                f"{setting}: {path} is longer than the {MAX_UNIX_PATH_BYTES} bytes that a unix "
                "socket's path may have: choose a shorter one"
            )
        try:
            self._lock = _LockFile(path.with_name(f"{path.name}.lock"))
            _check_unix(path)
        except OSError as error:
            self.release()
            raise _refusal(error, setting, self.address) from error

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
        """Give up the address, so that other processes can have it."""
        if self._holder is not None:
            with contextlib.suppress(OSError):
                self._holder.close()
        if self._lock is not None:
            self._lock.release()
            self._lock = None


class _LockFile:
    """File with an exclusive lock of this process; it is removed with the lock."""

    def __init__(self, path: Path) -> None:
        """
        Raises:
            OSError: EADDRINUSE if another process has locked the file, or another errno if the file
                cannot be made.
        """
        self._path = path
        while True:
            self._file = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                with contextlib.suppress(FileNotFoundError):
                    if os.path.samestat(os.fstat(self._file), path.lstat()):
                        return
            except BlockingIOError as error:
                os.close(self._file)
                raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE)) from error
            os.close(self._file)  # its holder removed it meanwhile: this file is not the lock

    def release(self) -> None:
        """Remove the file, then drop the lock."""
        self._path.unlink(missing_ok=True)
        os.close(self._file)


def check_all_free(addresses: Mapping[str, str]) -> None:
    """
    Check that a service can listen on all of these addresses, given by setting.

    Raises:
        AddressInUse: Other processes listen on some; all of them are named.
        InvalidConfig: No process can listen on one of them, or two are the same.
    """
    settings: dict[str, str] = {}
    for setting, address in addresses.items():
        if address in settings and not address.endswith(":0"):
            raise InvalidConfig(f"{settings[address]} and {setting} are both {address}")
        settings[address] = setting
    busy = busy_among(addresses)
    if len(busy) == 1:
        raise busy[0][1]
    if busy:
        raise AddressInUse(
            f"{_joined(f'{setting} {addresses[setting]}' for setting, _ in busy)} are in use by "
            f"other processes: stop them or choose others with "
            f"{_joined(_flag(setting) for setting, _ in busy)}"
        )


def busy_among(addresses: Mapping[str, str]) -> list[tuple[str, AddressInUse]]:
    """
    Return the settings with an address on which another process listens, each with its error.

    Raises:
        InvalidConfig: No process can listen on one of the addresses.
    """
    busy = []
    for setting, address in addresses.items():
        try:
            ListenAddress(setting, address).release()
        except AddressInUse as error:
            busy.append((setting, error))
    return busy


def reaches_beyond_this_machine(address: str) -> bool:
    """Return True if other machines may connect to a service that listens on this address."""
    if is_unix(address):
        return False
    try:
        places = _resolve("", *host_and_port(address))
    except InvalidConfig:
        return False
    return not all(is_loopback(where[0]) for _, where in places)


def unprotected(address: str, *, is_encrypted: bool, is_authenticated: bool) -> str | None:
    """
    Return a sentence on what a service that listens on an address lacks; None if it lacks nothing,
    or if no other machine can reach it.

    Args:
        address: HOST:PORT or unix:PATH.
        is_encrypted: True if it listens with TLS.
        is_authenticated: True if it serves only callers with a certificate or a token.
    """
    if (is_encrypted and is_authenticated) or not reaches_beyond_this_machine(address):
        return None
    if is_encrypted:
        return UNAUTHENTICATED
    return UNENCRYPTED if is_authenticated else UNPROTECTED


def _resolve(setting: str, host: str, port: int) -> list[tuple[socket.AddressFamily, Any]]:
    try:
        found = socket.getaddrinfo(
            without_brackets(host), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (socket.gaierror, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not a host name"
        raise InvalidConfig(f"{setting}: cannot resolve {host}: {why}") from error
    return [(family, where) for family, _, _, _, where in found]


def _try_tcp(family: socket.AddressFamily, where: Any) -> int:
    """Bind and listen for a moment; return the port."""
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(where)
        # Where another socket shares the address already, listening fails and not binding.
        probe.listen(1)
        return int(probe.getsockname()[1])


def _check_unix(path: Path) -> None:
    """Raise an OSError if a process without a lock file listens there, or the file is no socket."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise OSError(errno.EEXIST, "a file that is not a socket is there")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return
        except BlockingIOError:
            pass  # a process that is too busy to answer
    raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))


def _refusal(error: OSError, setting: str, text: str) -> AddressInUse | InvalidConfig:
    if error.errno == errno.EADDRINUSE:
        return AddressInUse(
            f"{setting} {text} is in use by another process: stop it or choose another "
            f"{_flag(setting)}"
        )
    return InvalidConfig(f"{setting}: cannot listen on {text}: {error.strerror}")


def _flag(setting: str) -> str:
    return "--" + setting.replace("_", "-")


def _joined(words: Iterable[str]) -> str:
    *others, last = words
    return f"{', '.join(others)} and {last}" if others else last
