"""
Logging of the library: warnings, and what the caller asked for, go to stderr unless the application
configured structlog, whose processors and level count then.
"""

from __future__ import annotations

import logging
import sys

import structlog

_INFORMATION = structlog.make_filtering_bound_logger(logging.INFO)
_asked: structlog.stdlib.BoundLogger = structlog.wrap_logger(None, wrapper_class=_INFORMATION)
_log: structlog.stdlib.BoundLogger = structlog.get_logger()


class _ToStderr(structlog.PrintLoggerFactory):
    """Factory of loggers by which the library's own configuration is known."""


def quiet_unless_configured() -> None:
    """Keep structlog's default from printing every event on stdout."""
    if structlog.is_configured():
        return
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        logger_factory=_ToStderr(sys.stderr),
    )


def log_asked(event: str) -> None:
    """
    Log what the caller has asked to be logged: as information, which is shown although other
    information is not where the application leaves logging to the library.
    """
    is_ours = isinstance(structlog.get_config()["logger_factory"], _ToStderr)
    (_asked if is_ours else _log).info(event)
