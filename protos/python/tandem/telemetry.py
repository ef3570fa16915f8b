"""Logging of a service process: one event name and its keys per line, to stderr."""

from __future__ import annotations

import logging
import sys

import structlog


def configure_logging(level: str, log_format: str) -> None:
    """
    Set up structlog for this process.

    Args:
        level: "debug", "info", "warning" or "error".
        log_format: "json" for one object per line, "console" for people.
    """
    renderer: structlog.typing.Processor
    if log_format == "json":
        renderer = structlog.processors.JSONRenderer()
    else:
        renderer = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.PrintLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )
