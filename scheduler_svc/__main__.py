"""The scheduler service: `python -m scheduler_svc --help`."""

from __future__ import annotations

import os
import sys

import structlog

from scheduler_svc.config import load_settings
from scheduler_svc.dry_run import as_json, as_text, forecast
from tandem.errors import InvalidConfig, TandemError
from tandem.grpc_polling import poll_where_waited
from tandem.telemetry import configure_logging


def main() -> int:
    """Read the settings, serve, give the exit code."""
    try:
        loaded = load_settings(sys.argv[1:], os.environ)
        settings = loaded.settings
        if settings.dry_run:
            show = as_json if settings.log_format == "json" else as_text
            sys.stdout.write(show(forecast(loaded)))
            return 0
        configure_logging(settings.log_level, settings.log_format)
        log: structlog.stdlib.BoundLogger = structlog.get_logger()
        log.info("starting", executor=settings.executor, set_by_user=loaded.sources)
        for warning in settings.engine_config().warnings():
            log.warning("unusual_setting", message=warning)
        poll_where_waited(os.environ)
        # This imports gRPC, which reads its environment then.
        from scheduler_svc.service import Service  # noqa: PLC0415

        return Service(loaded).run()
    except TandemError as error:
        sys.stderr.write(f"{error.reason}: {error.message}\n")
        return 2 if isinstance(error, InvalidConfig) else 1


if __name__ == "__main__":
    sys.exit(main())
