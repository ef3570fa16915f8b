"""Failures of commands: one readable line on stderr and an exit code that scripts can match."""

from __future__ import annotations

import errno
import functools
import signal
import sys
from collections.abc import Callable
from typing import Any, ParamSpec

import typer

from tandem.error_codes import DeadlineExceeded
from tandem.errors import InvalidConfig, InvalidModel, ModelChanged, OutOfMemory, TandemError
from tandem.process.printing_commands import forget_output
from tandem.status import PeerUnavailable
from tandem_client.channel import ChannelOptions
from tandem_client.cli.shared.exit_codes import EXIT_CODES_HELP, ExitCode
from tandem_client.cli.shared.screen import remark
from tandem_client.cli.shared.tls_probe import wants_tls

__all__ = [
    "EXIT_CODES_HELP",
    "ExitCode",
    "Terminated",
    "describe",
    "exit_code_of",
    "fail",
    "readable_errors",
    "signal_name",
]

Arguments = ParamSpec("Arguments")

_BY_GRPC_CODE = {
    "INVALID_ARGUMENT": ExitCode.REFUSED,
    "NOT_FOUND": ExitCode.REFUSED,
    "ALREADY_EXISTS": ExitCode.REFUSED,
    "RESOURCE_EXHAUSTED": ExitCode.OVERLOADED,
    "UNAVAILABLE": ExitCode.UNAVAILABLE,
    "FAILED_PRECONDITION": ExitCode.REFUSED,
    "UNIMPLEMENTED": ExitCode.REFUSED,
    "OUT_OF_RANGE": ExitCode.REFUSED,
    "UNAUTHENTICATED": ExitCode.REFUSED,
    "PERMISSION_DENIED": ExitCode.REFUSED,
    "CANCELLED": ExitCode.CANCELLED,
    "DEADLINE_EXCEEDED": ExitCode.CANCELLED,
}
_BY_REASON = {
    # The user has nothing to change: the same command works next time.
    ModelChanged.reason: ExitCode.UNAVAILABLE,
    InvalidConfig.reason: ExitCode.USAGE,
    InvalidModel.reason: ExitCode.USAGE,
    OutOfMemory.reason: ExitCode.USAGE,
}
"""Exit codes of reasons for which the gRPC code alone would mislead a script."""

_CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


class Terminated(SystemExit):
    """Exit after SIGTERM or SIGHUP, which runs the clean-up on its way."""

    def __init__(self) -> None:
        super().__init__(int(ExitCode.TERMINATED))


def exit_code_of(error: TandemError) -> ExitCode:
    """Return the exit code of an error."""
    if isinstance(error, OutOfMemory) and "tokens_emitted" in error.metadata:
        return ExitCode.REFUSED  # a server refused one request; our configuration is not at fault
    return _BY_REASON.get(error.reason, _BY_GRPC_CODE.get(error.code, ExitCode.FAILED))


def describe(error: TandemError, address: str | None = None, *, is_encrypted: bool = True) -> str:
    """
    Return one line for the user: the error, and advice if the error itself cannot give it.

    Args:
        error: The error.
        address: Address of the server that was called.
        is_encrypted: False if it was called without TLS, which may be why it was not reached.
    """
    line = " ".join(error.message.split())
    if wants_tls(error, address, is_encrypted=is_encrypted):
        return f"{address} does not answer in plain text, as it speaks TLS: give --ca FILE"
    if isinstance(error, PeerUnavailable):
        where = "the server" if address is None else address
        why = line.rsplit(": ", 1)[-1]
        if not any(map(str.isalpha, why)):  # "... Debug Text: )" of a peer that gave no reason
            why = line
        if "[" not in why:
            why = why.removesuffix("]")
        return f"cannot reach {where}: {why}. Is it running? Start one with: tandem up"
    if isinstance(error, DeadlineExceeded):
        return "the deadline passed before the answer was complete"
    return f"{error.reason}: {line}"


def fail(line: str, code: ExitCode = ExitCode.FAILED) -> typer.Exit:
    """Print a line to stderr, and return the exception for the caller to raise."""
    try:
        sys.stdout.flush()
    except OSError:  # of what was printed before; the line tells more
        forget_output()
    remark(f"tandem: {line}", is_dim=False)
    return typer.Exit(int(code))


def cannot_write(error: OSError) -> bool:
    """Tell whether an error is that of output that its device does not take."""
    return error.filename is None and error.errno in _CANNOT_WRITE


def unwritten(error: OSError) -> typer.Exit:
    """Tell that the output cannot be written, and return the exception for the caller to raise."""
    return fail(f"cannot write the output: {error.strerror or error}", ExitCode.FAILED)


def signal_name(number: int) -> str:
    """Return the name of the signal that killed a process of ours, for display."""
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    # SIGKILL comes as a rule from the kernel, which writes nothing to the process's own log.
    return f"{name} (out of memory?)" if number == signal.SIGKILL else name


def readable_errors(command: Callable[Arguments, None]) -> Callable[Arguments, None]:
    """Turn the exceptions of a command into a line and an exit code."""

    @functools.wraps(command)
    def wrapped(*args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
        try:
            command(*args, **kwargs)
            sys.stdout.flush()
        except TandemError as error:
            address = kwargs.get("address")
            where = address if isinstance(address, str) else None
            files: Any = {name: kwargs.get(name) or None for name in ("ca", "cert", "key")}
            line = describe(error, where, is_encrypted=ChannelOptions(**files).is_encrypted)
            raise fail(line, exit_code_of(error)) from None
        except KeyboardInterrupt:
            raise typer.Exit(int(ExitCode.INTERRUPTED)) from None
        except BrokenPipeError:
            forget_output()
            raise typer.Exit(int(ExitCode.FAILED)) from None
        except OSError as error:
            if cannot_write(error):
                raise unwritten(error) from None
            what = f"{error.filename}: " if error.filename else ""
            raise fail(f"{what}{error.strerror or error}", ExitCode.USAGE) from None

    return wrapped
