"""Lines of the log about calls that any peer can have refused: few, however many there are."""

from __future__ import annotations

import asyncio
import contextvars
from collections import Counter

import structlog

from tandem.error_codes import PermissionDenied, Unauthenticated
from tandem.errors import TandemError

INTERVAL_S = 1.0
"""Seconds from one line about refusals of one kind to the next."""
_OF_ACCESS = frozenset({Unauthenticated.reason, PermissionDenied.reason})
_HEALTH = "/grpc.health.v1.Health/"
"""Methods that need no credential: nothing they fail with is more than a stranger's word."""

_log: structlog.stdlib.BoundLogger = structlog.get_logger()


class RefusalLines:
    """
    Refused calls that have no line yet, by reason and credential. Owned by the event loop.

    A stranger may make thousands of calls a second, and a line for each would fill the disk. So the
    first refusal of a kind has a line at once, and those of each second after it are one line with
    their number.

    Attributes:
        num_failed: Calls and items of calls that failed, by reason, with a line or without one.
    """

    def __init__(self) -> None:
        self.num_failed: Counter[str] = Counter()
        self._untold: Counter[tuple[str, str | None]] = Counter()
        """Refusals since the last line of their kind; a kind without a line for a second is not
        here."""

    def has_own_line(self, error: TandemError, method: str) -> bool:
        """Return whether a failed call is to be logged now; count it for a later line if not."""
        if error.reason not in _OF_ACCESS and not method.startswith(_HEALTH):
            return True
        credential = structlog.contextvars.get_contextvars().get("credential")
        kind = (error.reason, credential)
        if kind in self._untold:
            self._untold[kind] += 1
            return False
        self._untold[kind] = 0
        self._tell_later(kind)
        return True

    def _tell_later(self, kind: tuple[str, str | None]) -> None:
        # The line is about many calls: it has the id and the trace of none.
        asyncio.get_running_loop().call_later(
            INTERVAL_S, self._tell, kind, context=contextvars.Context()
        )

    def _tell(self, kind: tuple[str, str | None]) -> None:
        num_calls = self._untold[kind]
        if not num_calls:
            del self._untold[kind]
            return
        reason, credential = kind
        named = {} if credential is None else {"credential": credential}
        _log.info("calls_refused", num_calls=num_calls, reason=reason, **named)
        self._untold[kind] = 0
        self._tell_later(kind)
