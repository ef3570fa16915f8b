"""`python -m tandem_bench.fixed_step`: serve steps of a fixed time until SIGTERM."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict

from executor_svc.server.process import serve
from tandem.errors import TandemError
from tandem.network.grpc_polling import poll_where_waited
from tandem.process.process_start import refuse
from tandem.process.telemetry import configure_logging
from tandem_bench.fixed_step.accounting import IdleAccount
from tandem_bench.fixed_step.settings import FixedStepSettings, read_settings


def main(argv: Sequence[str] | None = None) -> int:
    """Run one executor process; return its exit code."""
    try:
        settings = read_settings(sys.argv[1:] if argv is None else argv)
        configure_logging(settings.log_level, "console")
        return _serve(settings)
    except TandemError as error:
        return refuse(error)


def _serve(settings: FixedStepSettings) -> int:
    """
    Serve until a signal or a fatal error.

    Raises:
        TandemError: The process cannot go on; the error says why.
    """
    poll_where_waited(os.environ)
    # These import gRPC, which reads its environment then.
    from executor_svc.server.server import ExecutorServer  # noqa: PLC0415
    from tandem_bench.fixed_step.engine import load_fixed_step  # noqa: PLC0415

    account = IdleAccount()
    return serve(
        lambda on_fatal: ExecutorServer(
            lambda boot_id: load_fixed_step(settings, boot_id, account),
            on_fatal,
            insecure_link=True,  # no prompt that means anything reaches it
        ),
        listen=settings.listen,
        ready_file=settings.ready_file,
        stop_grace_s=None,
        report=lambda: _print_report(account),
    )


def _print_report(account: IdleAccount) -> None:
    report = account.report
    line = {
        **asdict(report),
        "idle_percent": round(report.idle_percent, 3),
        "cpu_ns": time.process_time_ns(),
    }
    try:
        # Past the buffer, which Python would write once more as it ends, and fail.
        os.write(sys.stdout.fileno(), f"{json.dumps(line)}\n".encode())
    except OSError as error:
        sys.stderr.write(f"the report cannot be written: {error.strerror}\n")


if __name__ == "__main__":
    sys.exit(main())
