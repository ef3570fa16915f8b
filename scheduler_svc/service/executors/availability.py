"""Availability of the service, as every frontend is told."""

from __future__ import annotations

import logging

import structlog

from scheduler_svc.config.settings import LoadedSettings
from scheduler_svc.ipc.messages import Availability
from scheduler_svc.service.executors.members import Members
from scheduler_svc.service.publisher import Publisher
from scheduler_svc.service.service_state import ServiceState
from tandem.readiness import why_unready

_log: structlog.stdlib.BoundLogger = structlog.get_logger()


class AvailabilityTeller:
    """Tells frontends of the availability. Owned by the core loop."""

    def __init__(
        self, loaded: LoadedSettings, state: ServiceState, members: Members, publisher: Publisher
    ) -> None:
        self._state = state
        self._members = members
        self._publisher = publisher
        self._ready_grace_s = loaded.settings.ready_grace_s

    def tell(self) -> None:
        """Tell every frontend the availability if it has changed, and log why it changed."""
        state, members = self._state, self._members
        is_computing = not state.executor_given_up and any(
            member.is_computing(self._ready_grace_s) for member in members
        )
        availability = Availability(
            executor_attached=members.is_attached,
            ready=is_computing and not state.draining,
            draining=state.draining,
            progressing=members.is_progressing(),
            refusal="" if is_computing and len(members) > 1 else members.refusal,
            frontends_alive=state.frontends_alive,
            blocked_by="" if is_computing or not members.num_sessions else self._blocked_by(),
        )
        if availability == state.availability:
            return
        state.availability = availability
        self._publisher.answer_all(availability)
        is_suspended = members.is_suspended
        is_expected = availability.ready or availability.draining or is_suspended
        _log.log(
            logging.INFO if is_expected else logging.WARNING,
            "availability_changed",
            why=_why(availability, is_suspended=is_suspended),
            ready=availability.ready,
            executor_attached=availability.executor_attached,
            draining=availability.draining,
            progressing=availability.progressing,
        )

    def _blocked_by(self) -> str:
        """Say what accepted requests wait for; draining does not count, as they go on meanwhile."""
        members = self._members
        if all(member.is_drained for member in members):
            return "no executor is left to serve: add one with tandem executors add"
        return why_unready(
            is_draining=False,
            is_suspended=members.is_suspended,
            refusal=members.refusal,
            is_attached=members.is_attached,
            num_sessions=members.num_sessions,
        )


def _why(availability: Availability, *, is_suspended: bool) -> str:
    """Say for the log what made the service ready or unready."""
    is_attached, is_ready = availability.executor_attached, availability.ready
    causes = (
        (availability.draining, "the service is stopping or was drained"),
        (is_suspended, "an operator suspended the service"),
        (is_ready and not is_attached, "the executor's stream broke; it has a moment to come back"),
        (is_ready, "the executor is attached and alive"),
        (not is_attached, availability.refusal or "no executor is attached"),
        (not availability.progressing, "the executor's step takes far longer than steps do"),
    )
    return next((why for holds, why in causes if holds), "the executor is attached but silent")
