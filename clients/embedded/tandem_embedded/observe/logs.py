"""Logging of the library: warnings go to stderr unless the application configured structlog."""

from __future__ import annotations

import logging
import sys

import structlog


def quiet_unless_configured() -> None:
    """Keep structlog's default from printing every event on stdout."""
    if structlog.is_configured():
        return
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
