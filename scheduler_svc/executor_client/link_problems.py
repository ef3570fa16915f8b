"""Telling the operator what is wrong between here and the executors: once, not at every attempt."""

from __future__ import annotations

import structlog

from tandem.errors import TandemError

_log: structlog.stdlib.BoundLogger = structlog.get_logger()


class LinkProblems:
    """The latest problem of each kind and address since all was well. Owned by the session."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], str] = {}

    def note(self, event: str, error: TandemError, retry_in_s: float, address: str = "") -> None:
        """Log a problem as a warning, or for debugging only where it is known."""
        problem = f"{error.reason} {error.field}"
        is_known = self._known.get((event, address)) == problem
        self._known[event, address] = problem
        log = _log.debug if is_known else _log.warning
        ours = {"reason": error.reason, "message": error.message, "address": address}
        ours = {name: value for name, value in ours.items() if value}
        taken = {"event", "retry_in_s", *ours}  # A peer chose the names of its metadata.
        theirs = {name: value for name, value in error.metadata.items() if name not in taken}
        log(event, retry_in_s=round(retry_in_s, 3), **ours, **theirs)

    def clear(self) -> None:
        """A stream was attached: whatever comes now is news."""
        self._known.clear()
