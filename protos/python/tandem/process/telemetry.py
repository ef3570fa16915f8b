"""Logging of a service process to stderr: one line per event, with its name and keys."""

from __future__ import annotations

import io
import logging
import sys
import threading
from collections.abc import Mapping
from typing import Any, TextIO

import structlog
from structlog.typing import EventDict

from tandem.network.listen_address import unprotected


class LineLogger:
    """
    Logger that writes each line at once, and drops a line that cannot be written: a full disk or a
    closed pipe must not end the service. The first line that can be written again is followed by
    one that counts the dropped lines.

    One object serves all loggers of a process, from any thread.
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._num_dropped = 0

    def msg(self, line: str) -> None:
        """Write one rendered event."""
        with self._lock:
            try:
                self._file.write(line + "\n")
                self._file.flush()
            except OSError:
                self._num_dropped += 1
                return
            num_dropped, self._num_dropped = self._num_dropped, 0
        if num_dropped:
            structlog.get_logger().warning("log_lines_dropped", lines=num_dropped)

    debug = info = warning = error = critical = msg


def configure_logging(level: str, log_format: str) -> None:
    """
    Set up structlog for this process.

    Args:
        level: "debug", "info", "warning" or "error".
        log_format: "json" for one object per line, "console" for human readers.
    """
    renderer: structlog.typing.Processor
    if log_format == "json":
        renderer = structlog.processors.JSONRenderer()
    else:
        renderer = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    lines = LineLogger(_unbuffered(sys.stderr))
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            _values_alone if log_format == "json" else _sentence_alone,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=lambda *_: lines,
        cache_logger_on_first_use=True,
    )


def _unbuffered(file: TextIO) -> TextIO:
    """
    Return a writer to a file's descriptor that keeps nothing that it could not write; the file
    itself where it has no descriptor.

    A buffer would keep lines that were counted as dropped, and fail once more when Python flushes
    it at its end, with an exit code of 120.
    """
    try:
        raw: Any = io.FileIO(file.fileno(), "w", closefd=False)
    except OSError:  # a replacement in memory
        return file
    return io.TextIOWrapper(raw, encoding=file.encoding, errors=file.errors, write_through=True)


def log_worded(
    log: structlog.stdlib.BoundLogger,
    event: str,
    values: Mapping[str, object],
    sentence: str,
    *,
    is_warning: bool = False,
) -> None:
    """
    Log an event that has a well-known wording: in text logs as that sentence, in JSON as the event
    and its keys.
    """
    level = logging.WARNING if is_warning else logging.INFO
    log.log(level, event, values=values, sentence=sentence)


def _values_alone(_log: object, _method: str, event: EventDict) -> EventDict:
    if event.pop("sentence", None) is not None:
        event.update(event.pop("values"))
    return event


def _sentence_alone(_log: object, _method: str, event: EventDict) -> EventDict:
    sentence = event.pop("sentence", None)
    if sentence is not None:
        event["event"] = sentence
        del event["values"]
    return event


def warn_where_unprotected(
    addresses: Mapping[str, str], *, is_encrypted: bool = False, is_authenticated: bool = False
) -> None:
    """
    Log a warning for each address, by setting, that other machines can reach, unless its calls are
    encrypted and only callers with a credential are served.
    """
    for setting, address in addresses.items():
        why = unprotected(address, is_encrypted=is_encrypted, is_authenticated=is_authenticated)
        if why is not None:
            structlog.get_logger().warning(
                "listening_unprotected", setting=setting, address=address, message=why
            )
