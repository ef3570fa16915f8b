"""Main program of a scheduler process: reads settings, serves, stops on SIGTERM."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import structlog

from scheduler_svc.config.dry_run import as_json, as_text, forecast
from scheduler_svc.config.settings import load_settings
from tandem.network.grpc_polling import poll_where_waited
from tandem.process.exit_codes import EXIT_DONE
from tandem.process.process_start import check_limits
from tandem.process.telemetry import configure_logging

MIN_ADDRESS_SPACE_BYTES = 1 << 29
"""Bytes of address space below which gRPC would wait forever for threads it cannot start."""


def run(argv: Sequence[str]) -> int:
    """
    Run one scheduler; returns its exit code.

    Raises:
        TandemError: The process cannot start or go on; the error says why.
        OSError, MemoryError, ImportError, RuntimeError: A resource or library is missing.
    """
    loaded = load_settings(argv, os.environ)
    settings = loaded.settings
    if settings.dry_run:
        # These import gRPC.
        from scheduler_svc.executor_client.channel import ExecutorAccess  # noqa: PLC0415
        from scheduler_svc.service.port_security import check_files  # noqa: PLC0415

        check_files(settings.frontend_security())
        access = ExecutorAccess(settings.executor_tls, settings.link_token_file)
        access.check(settings.link_addresses, insecure_link=settings.insecure_link)
        show = as_json if settings.log_format == "json" else as_text
        sys.stdout.write(show(forecast(loaded)))
        return EXIT_DONE
    configure_logging(settings.log_level, settings.log_format)
    check_limits(MIN_ADDRESS_SPACE_BYTES)
    log: structlog.stdlib.BoundLogger = structlog.get_logger()
    log.info("starting", executor=settings.executor, set_by_user=loaded.sources)
    for warning in settings.engine_config().warnings():
        log.warning("unusual_setting", message=warning)
    poll_where_waited(os.environ)
    # This imports gRPC, which reads its environment at import.
    from scheduler_svc.service.service import Service  # noqa: PLC0415

    return Service(loaded).run()
