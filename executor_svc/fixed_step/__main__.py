"""`python -m executor_svc.fixed_step`: serve steps that take a fixed time, until SIGTERM."""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from types import FrameType

import structlog

from executor_svc.fixed_step.accounting import IdleAccount
from executor_svc.fixed_step.settings import FixedStepSettings, read_settings
from executor_svc.waiting import wait_for_news
from tandem.errors import InvalidConfig, InvalidModel, TandemError
from tandem.grpc_polling import poll_where_waited
from tandem.telemetry import configure_logging

EXIT_STOPPED = 0
EXIT_FAILED = 1
EXIT_REFUSED = 2
FAILED_GRACE_S = 1.0
"""How long a process that has failed waits for its own runner: what is stuck stays stuck."""

_log = structlog.get_logger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one executor process; gives its exit code."""
    try:
        settings = read_settings(sys.argv[1:] if argv is None else argv)
        configure_logging(settings.log_level, "console")
        return _serve(settings)
    except TandemError as error:
        sys.stderr.write(f"{error.reason}: {error.message}\n")
        return EXIT_REFUSED if isinstance(error, InvalidConfig | InvalidModel) else EXIT_FAILED


def _serve(settings: FixedStepSettings) -> int:
    """
    Serve until a signal or a fatal error.

    Raises:
        TandemError: Why the process cannot go on.
    """
    poll_where_waited(os.environ)
    # These import gRPC, which reads its environment then.
    from executor_svc.fixed_step.engine import load_fixed_step  # noqa: PLC0415
    from executor_svc.server import ExecutorServer  # noqa: PLC0415

    account = IdleAccount()
    news: queue.SimpleQueue[TandemError | signal.Signals] = queue.SimpleQueue()
    server = ExecutorServer(
        lambda boot_id: load_fixed_step(settings, boot_id, account),
        news.put,
        max_inflight_steps=settings.max_inflight_steps,
    )

    def on_signal(number: int, _frame: FrameType | None) -> None:
        news.put(signal.Signals(number))

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, on_signal)
    server.listen(settings.listen)
    if settings.ready_file is not None:
        server.write_ready_file(settings.ready_file)
    server.load()
    while (end := wait_for_news(news)) is signal.SIGUSR1:
        _print_report(account)
    has_failed = isinstance(end, TandemError)
    is_clean = server.stop(FAILED_GRACE_S if has_failed else None)
    _print_report(account)
    if isinstance(end, TandemError) and is_clean:
        raise end
    exit_code = EXIT_STOPPED
    if isinstance(end, TandemError):
        _log.error("failed", reason=end.reason, message=end.message)
        exit_code = EXIT_FAILED
    else:
        _log.info("stopped", signal=end.name)
    if not is_clean:
        sys.stderr.flush()
        os._exit(exit_code)  # a thread is inside the loader or a step: no orderly way to end it
    return exit_code


def _print_report(account: IdleAccount) -> None:
    report = account.report
    line = {
        **asdict(report),
        "idle_percent": round(report.idle_percent, 3),
        "cpu_ns": time.process_time_ns(),
    }
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
