"""One executor process, with any runner of steps: from listening to the exit code."""

from __future__ import annotations

import os
import queue
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import structlog

from executor_svc.server.waiting import wait_for_news
from tandem.errors import InternalError, TandemError
from tandem.process.exit_codes import EXIT_DONE, EXIT_FAILED
from tandem.process.process_start import refuse
from tandem.process.ready_file import write_ready_file

if TYPE_CHECKING:  # It imports gRPC, which reads an environment that is set up first.
    from executor_svc.server.server import ExecutorServer

FAILED_GRACE_S = 1.0
"""Seconds that a failed process waits for its runner, which may be stuck for good."""

_log = structlog.get_logger(__name__)


def serve(
    make_server: Callable[[Callable[[TandemError], None]], ExecutorServer],
    *,
    listen: str,
    ready_file: Path | None,
    stop_grace_s: float | None,
    report: Callable[[], None] | None = None,
) -> int:
    """
    Serve until SIGTERM, SIGINT or a fatal error; a second signal ends the process at once.

    Args:
        make_server: Builds the server; its argument is called with a fatal error.
        listen: Address to listen on.
        ready_file: File that gets the address once clients can connect.
        stop_grace_s: Seconds that a stop waits for the running step; None for no limit.
        report: Called at every SIGUSR1 and after the stop.

    Returns:
        The exit code; if a thread cannot be ended in order, or after an internal error, the process
        exits here instead.

    Raises:
        TandemError: The process cannot go on; the message says why.
    """
    news: queue.SimpleQueue[TandemError | signal.Signals] = queue.SimpleQueue()
    server = make_server(news.put)
    _on_signals(news, with_report=report is not None)
    server.listen(listen)
    if ready_file is not None:
        write_ready_file(ready_file, {"address": server.address})
    server.load()
    while (end := wait_for_news(news)) is signal.SIGUSR1:
        if report is not None:
            report()
    has_failed = isinstance(end, TandemError)
    is_clean = server.stop(FAILED_GRACE_S if has_failed else stop_grace_s)
    if report is not None:
        report()
    if isinstance(end, TandemError):
        if is_clean and not isinstance(end, InternalError):
            raise end
        # A device may be lost, with all on it that the interpreter would free.
        is_clean = False
        exit_code = refuse(end)
    else:
        exit_code = EXIT_FAILED if server.has_abandoned_step else EXIT_DONE
        _log.info("stopped", signal=end.name)
    if not is_clean:
        sys.stderr.flush()
        os._exit(exit_code)  # a thread is inside the loader or a step: no orderly way to end it
    return exit_code


def _on_signals(
    news: queue.SimpleQueue[TandemError | signal.Signals], *, with_report: bool
) -> None:
    has_begun_to_stop = False

    def on_stop(number: int, _frame: FrameType | None) -> None:
        nonlocal has_begun_to_stop
        if has_begun_to_stop:
            os._exit(EXIT_FAILED)
        has_begun_to_stop = True
        news.put(signal.Signals(number))

    signal.signal(signal.SIGTERM, on_stop)
    signal.signal(signal.SIGINT, on_stop)
    if with_report:
        signal.signal(signal.SIGUSR1, lambda *_: news.put(signal.SIGUSR1))
