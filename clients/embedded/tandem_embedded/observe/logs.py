"""
Logging of the library: warnings, and what the caller asked for, go to stderr unless the application
configured structlog, whose processors and level count then.
"""

from __future__ import annotations

import logging
import sys

import structlog

from scheduler_svc.core.request.events import LogLine

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


def log_line(line: LogLine, *, is_asked: bool = False) -> None:
    """
    Log a line: its event with its keys, which an application's own processors get, or its text
    where the application leaves logging to the library.

    Args:
        line: The line.
        is_asked: The caller has asked for it: it is shown although information is not, unless the
            application has set the level.
    """
    level = logging.WARNING if line.is_warning else logging.INFO
    if isinstance(structlog.get_config()["logger_factory"], _ToStderr):
        (_asked if is_asked else _log).log(level, line.text)
    else:
        _log.log(level, line.event, **line.values)
