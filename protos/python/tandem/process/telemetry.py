"""Logging of a service process to stderr: one line per event, with its name and keys."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping
from typing import TextIO

import structlog
from structlog.typing import EventDict

from tandem.network.listen_address import unprotected


class LineLogger:
    """
    Logger that writes each line at once, and drops a line that cannot be written: a full disk or a
    closed pipe must not end the service. A line that was cut counts as dropped, and the next one
    begins on a line of its own. The first line that can be written again is followed by one that
    counts the dropped lines.

    Nothing waits in a buffer. It would keep lines that were counted as dropped, and fail once more
    when Python flushes it at its end, with an exit code of 120.

    One object serves all loggers of a process, from any thread.

    Args:
        file: File whose descriptor is written to; the file itself where it has none.
    """

    def __init__(self, file: TextIO) -> None:
        self._write = _writer_of(file)
        self._lock = threading.Lock()
        self._num_dropped = 0

    def msg(self, line: str) -> None:
        """Write one rendered event."""
        with self._lock:
            try:
                self._write(line + "\n")
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
    lines = LineLogger(sys.stderr)
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


def _writer_of(file: TextIO) -> Callable[[str], None]:
    """Return a function that writes text to a file at once, or raises an OSError."""
    try:
        return _Descriptor(file.fileno(), file.encoding).write
    except OSError:  # a replacement in memory

        def write(text: str) -> None:
            file.write(text)
            file.flush()

        return write


class _Descriptor:
    """Writer of whole lines to a file's descriptor, which may take a part of what it is given."""

    def __init__(self, number: int, encoding: str) -> None:
        self._number = number
        self._encoding = encoding
        self._is_cut = False
        """True while what was written last is a part of a line."""

    def write(self, text: str) -> None:
        """
        Write lines, below a line that was cut.

        Raises:
            OSError: They could not be written, or were cut.
        """
        separator = "\n" if self._is_cut else ""
        rest = (separator + text).encode(self._encoding, "backslashreplace")
        while rest:
            num_written = os.write(self._number, rest)
            self._is_cut = rest[num_written - 1] != ord("\n")
            rest = rest[num_written:]


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
