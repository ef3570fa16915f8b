"""Guard of the work that spans are made with, so that a fault of it ends no request."""

from __future__ import annotations

from types import TracebackType

import structlog

_log: structlog.stdlib.BoundLogger = structlog.get_logger()


class SpanFaults:
    """
    Guard of blocks that serve tracing alone; each may be entered again, also within another.

    An error in such a block is kept from the request, and the first one is logged as `span_broken`:
    a fault of tracing would most often come with every request.
    """

    def __init__(self) -> None:
        self._is_told = False

    def __enter__(self) -> None:
        """Enter a block."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        """Return True for an error that goes no further; one that ends tasks or processes does."""
        del kind, traceback
        if not isinstance(error, Exception):
            return False
        if not self._is_told:
            self._is_told = True
            _log.error("span_broken", exc_info=error)
        return True
