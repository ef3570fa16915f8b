"""`python -m executor_svc`: read settings, serve, stop on SIGTERM."""

from __future__ import annotations

import os
import queue
import signal
import sys
from collections.abc import Sequence
from types import FrameType

import structlog

from executor_svc.config import LoadedSettings, load_settings
from executor_svc.idle_threads import let_idle_threads_sleep
from executor_svc.waiting import wait_for_news
from tandem.errors import InvalidConfig, InvalidModel, OutOfMemory, TandemError
from tandem.grpc_polling import poll_where_waited
from tandem.telemetry import configure_logging

EXIT_STOPPED = 0
EXIT_FAILED = 1
EXIT_REFUSED = 2
"""The configuration or the model cannot work; starting again will not help."""
FAILED_GRACE_S = 1.0
"""How long a process that has failed waits for its own runner: what is stuck stays stuck."""

_log = structlog.get_logger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one executor process; gives its exit code."""
    try:
        loaded = load_settings(sys.argv[1:] if argv is None else argv, os.environ)
        configure_logging(loaded.settings.log_level, loaded.settings.log_format)
        return _forecast(loaded) if loaded.settings.dry_run else _serve(loaded)
    except TandemError as error:
        sys.stderr.write(f"{error.reason}: {error.message}\n")
        refused = isinstance(error, InvalidConfig | InvalidModel | OutOfMemory)
        return EXIT_REFUSED if refused else EXIT_FAILED


def _forecast(loaded: LoadedSettings) -> int:
    """
    Print the memory plan; a line of JSON where logs are JSON.

    Raises:
        TandemError: Why the executor could not start.
    """
    from executor_svc.memory_plan import as_json, as_text, forecast  # noqa: PLC0415

    show = as_json if loaded.settings.log_format == "json" else as_text
    sys.stdout.write(show(forecast(loaded)))
    return EXIT_STOPPED


def _serve(loaded: LoadedSettings) -> int:
    """
    Serve until a signal or a fatal error.

    Raises:
        TandemError: Why the process cannot go on.
    """
    let_idle_threads_sleep(os.environ)
    poll_where_waited(os.environ)
    # These import gRPC, which reads its environment then, and PyTorch: seconds that --help or a
    # mistyped flag need not wait for.
    from executor_svc.engine import load_engine  # noqa: PLC0415
    from executor_svc.server import ExecutorServer  # noqa: PLC0415

    ends: queue.SimpleQueue[TandemError | signal.Signals] = queue.SimpleQueue()
    server = ExecutorServer(lambda boot_id: load_engine(loaded, boot_id), ends.put)
    _on_signals(ends)
    server.listen(loaded.settings.listen)
    if loaded.settings.ready_file is not None:
        server.write_ready_file(loaded.settings.ready_file)
    server.load()
    end = wait_for_news(ends)
    has_failed = isinstance(end, TandemError)
    is_clean = server.stop(FAILED_GRACE_S if has_failed else loaded.settings.stop_grace_s)
    if isinstance(end, TandemError) and is_clean:
        raise end
    exit_code = EXIT_FAILED if server.has_abandoned_step else EXIT_STOPPED
    if isinstance(end, TandemError):
        _log.error("failed", reason=end.reason, message=end.message)
        exit_code = EXIT_FAILED
    else:
        _log.info("stopped", signal=end.name)
    if not is_clean:
        sys.stderr.flush()
        os._exit(exit_code)  # a thread is inside the loader or a step: no orderly way to end it
    return exit_code


def _on_signals(ends: queue.SimpleQueue[TandemError | signal.Signals]) -> None:
    """The first SIGTERM or SIGINT asks for an orderly end, the second ends at once."""
    num_signals = 0

    def on_signal(number: int, _frame: FrameType | None) -> None:
        nonlocal num_signals
        num_signals += 1
        if num_signals > 1:
            os._exit(EXIT_FAILED)
        ends.put(signal.Signals(number))

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)


if __name__ == "__main__":
    sys.exit(main())
