"""
Draining of a scheduler: it admits no new request, gives live requests a grace time to finish, ends
the rest with HandedOver, so that clients resume them on its successor, and gives executors back.
"""

from __future__ import annotations

import structlog

from scheduler_svc.service.executors.members import Members
from scheduler_svc.service.service_state import ServiceState
from tandem.errors import HandedOver

_log: structlog.stdlib.BoundLogger = structlog.get_logger()


class Drain:
    """
    Drain of one scheduler. Owned by the core loop.

    A drain cannot be undone: a drained scheduler is to be stopped.

    Attributes:
        num_handed_over: Number of choices that had not ended when their grace time was up.
        is_over: True once no request is left and the executors are given back.
    """

    def __init__(self, state: ServiceState, members: Members) -> None:
        self._state = state
        self._members = members
        self._until_s: float | None = None
        self.num_handed_over = 0
        self.is_over = False

    def begin(self, grace_s: float, now: float, *, asked_by: str) -> None:
        """Admit no new request from now on; the latest call sets the grace time of the others."""
        if not self.is_over:
            requests = self._state.num_requests
            _log.info("draining", asked_by=asked_by, requests=requests, grace_s=grace_s)
        self._state.draining = True
        self._until_s = now + grace_s

    @property
    def due_s(self) -> float | None:
        """Latest time of the next call of `advance`; None when none is needed."""
        return None if self.is_over else self._until_s

    def advance(self, now: float) -> bool:
        """Do what is due; return True once the drain is over."""
        if self._until_s is None or self.is_over:
            return self.is_over
        core = self._state.core
        if core is not None and (num_left := core.num_requests):
            if now < self._until_s:
                return False
            _log.warning("requests_handed_over", requests=num_left)
            self.num_handed_over += num_left
            core.fail_all(
                HandedOver("this scheduler is stopping: resume the request on its successor"), now
            )
        self._members.release(now)
        for member in self._members:
            if member.port is not None:
                member.port.executor_lost(now)
        self.is_over = True
        return True
