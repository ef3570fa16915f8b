"""Signals that end a command through its clean-up."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

from tandem_client.cli.shared.failures import Terminated


@contextlib.contextmanager
def stop_signals() -> Iterator[None]:
    """Make SIGTERM and SIGHUP leave through the same clean-up as Ctrl-C; nohup is respected."""

    def leave(_number: int, _frame: object) -> None:
        raise Terminated

    numbers = [signal.SIGTERM]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    previous = {number: signal.signal(number, leave) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
