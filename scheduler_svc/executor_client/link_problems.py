"""Warnings about problems with executors, logged once and not at every attempt."""

from __future__ import annotations

import structlog

from tandem.errors import TandemError

_log: structlog.stdlib.BoundLogger = structlog.get_logger()


class LinkProblems:
    """Latest problem by event and address since a stream was attached. Owned by the session."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], str] = {}

    def note(self, event: str, error: TandemError, retry_in_s: float, address: str = "") -> None:
        """Log a problem as a warning, or at debug level if it is known already."""
        problem = f"{error.reason} {error.field}"
        is_known = self._known.get((event, address)) == problem
        self._known[event, address] = problem
        log = _log.debug if is_known else _log.warning
        ours = {"reason": error.reason, "message": error.message, "address": address}
        ours = {name: value for name, value in ours.items() if value}
        taken = {"event", "retry_in_s", *ours}  # The peer's metadata may use these names too.
        theirs = {name: value for name, value in error.metadata.items() if name not in taken}
        log(event, retry_in_s=round(retry_in_s, 3), **ours, **theirs)

    def clear(self) -> None:
        """Forget all problems when a stream is attached: the next ones are warnings again."""
        self._known.clear()
