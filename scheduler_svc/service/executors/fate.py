"""
Decisions about live requests when an executor is attached, lost or replaced: requests go on, wait,
or fail, and every frontend is told whether the service is available.
"""

from __future__ import annotations

import logging

import structlog

from scheduler_svc.config.scheduling import without_effect
from scheduler_svc.config.settings import LoadedSettings
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.executor_client.connection import ModelInUse
from scheduler_svc.executor_client.description import ExecutorDescription
from scheduler_svc.executor_client.link import ExecutorLink
from scheduler_svc.executor_client.link_events import SessionOpened
from scheduler_svc.executor_client.session import ExecutorSession
from scheduler_svc.executor_client.session_events import SessionEnded
from scheduler_svc.ipc.messages import Availability
from scheduler_svc.service.publisher import Publisher
from scheduler_svc.service.service_state import ServiceState
from tandem.errors import ExecutorLost, ModelChanged, TandemError
from tandem.link.session import LossCause
from tandem.readiness import why_unready

_log: structlog.stdlib.BoundLogger = structlog.get_logger()


class ExecutorFate:
    """Decisions about live requests when an executor is attached or lost. Owned by the loop."""

    def __init__(
        self,
        loaded: LoadedSettings,
        state: ServiceState,
        link: ExecutorLink,
        session: ExecutorSession,
        publisher: Publisher,
    ) -> None:
        self._loaded = loaded
        self._settings = loaded.settings
        self._state = state
        self._link = link
        self._session = session
        self._publisher = publisher
        self._required: ModelInUse | None = None

    def opened(self, event: SessionOpened, now: float) -> None:
        """Go on with this executor's model and geometry; requests of another model fail."""
        state, description = self._state, event.description
        geometry = description.geometry
        limits = self._loaded.limits_on(geometry)
        options = self._settings.core_options(description.kv_bytes_per_block)
        if state.core is None:
            state.core = Scheduler(limits, geometry, options)
            for warning in without_effect(options, limits, geometry.num_host_blocks):
                _log.warning("unusual_setting", message=warning)
        else:
            self._fail_other_model(state.core, description, now)
            state.core.use_geometry(limits, geometry, now)
        state.description, state.limits = description, limits
        model = description.model(str(event.tokenizer_dir), limits, options)
        if model != state.model:
            state.model = model
            self._publisher.answer_all(model)
        _log.info(
            "executor_session_opened",
            model=description.model_name,
            fingerprint=description.fingerprint[:16],
            device=description.device,
            dtype=description.dtype,
            requests_waiting=state.num_requests,
            **limits.as_dict(),
        )

    def lost(self, event: SessionEnded, now: float) -> None:
        """Move running requests back to the waiting queue; a suspension is asked for again."""
        self._state.command_step = None
        core = self._state.core
        if core is None:
            return
        if event.cause is LossCause.STATE_HASH:
            _log.error("state_hash_mismatch", **core.slot_columns())
        if event.refusal is not None:
            core.batch_refused(event.refusal, now)
            return
        is_memory = event.cause is LossCause.OUT_OF_MEMORY
        core.executor_lost(now, event.died_in, out_of_memory=is_memory, may_live=event.may_live)

    def advance(self, now: float) -> None:
        """
        Fail all requests once the executor was away for longer than `recovery_timeout_s`, and tell
        the link which model the live requests need.
        """
        since_s, state = self._session.detached_since_s, self._state
        if since_s is None:
            state.executor_given_up = False
        elif now - since_s > self._settings.recovery_timeout_s and not state.executor_given_up:
            state.executor_given_up = True
            if state.core is not None:
                error = self._why_given_up(state.description)
                _log.error(
                    "executor_given_up", reason=error.reason, requests_failed=state.num_requests
                )
                state.core.fail_all(error, now)
        self._require_model()

    def tell_availability(self) -> None:
        """Tell every frontend the availability if it has changed, and log why it changed."""
        state, session = self._state, self._session
        is_progressing = session.is_progressing()
        is_computing = (
            session.is_alive(self._settings.ready_grace_s)
            and is_progressing
            and not state.is_suspended
            and not state.executor_given_up
            and not session.refusals.is_fenced
        )
        availability = Availability(
            executor_attached=session.is_attached,
            ready=is_computing and not state.draining,
            draining=state.draining,
            progressing=is_progressing,
            refusal=session.refusals.text,
            frontends_alive=state.frontends_alive,
            blocked_by=""
            if is_computing or not session.counts.executor_sessions
            else self._blocked_by(),
        )
        if availability == state.availability:
            return
        state.availability = availability
        self._publisher.answer_all(availability)
        is_expected = availability.ready or availability.draining or state.is_suspended
        _log.log(
            logging.INFO if is_expected else logging.WARNING,
            "availability_changed",
            why=_why(availability, is_suspended=state.is_suspended),
            ready=availability.ready,
            executor_attached=availability.executor_attached,
            draining=availability.draining,
            progressing=availability.progressing,
        )

    def _blocked_by(self) -> str:
        """Say what accepted requests wait for; draining does not count, as they go on meanwhile."""
        return why_unready(
            is_draining=False,
            is_suspended=self._state.is_suspended,
            refusal=self._session.refusals.text,
            is_attached=self._session.is_attached,
            num_sessions=self._session.counts.executor_sessions,
        )

    def _require_model(self) -> None:
        """Let the link accept only the served model while requests are live, else any model."""
        served = self._state.description
        has_requests = served is not None and self._state.num_requests > 0
        if has_requests is (self._required is not None) and (
            served is None
            or self._required is None
            or self._required.fingerprint == served.fingerprint
        ):
            return
        self._required = (
            ModelInUse(fingerprint=served.fingerprint, name=served.model_name)
            if served is not None and has_requests
            else None
        )
        self._link.require(self._required)

    def _why_given_up(self, served: ExecutorDescription | None) -> TandemError:
        waited = f"within {self._settings.recovery_timeout_s:g} s"
        other = self._session.refusals.other_model
        if served is None or other is None:
            why = self._session.refusals.text or "try again later"
            return ExecutorLost(f"the executor was lost and did not come back {waited}: {why}")
        return ModelChanged(
            f"the executor was lost and none came {waited} that serves {_shown(served)}: "
            f"{_shown(other)} is served next, send the request again"
        )

    def _fail_other_model(
        self, core: Scheduler, description: ExecutorDescription, now: float
    ) -> None:
        previous = self._state.description
        if previous is None or previous.fingerprint == description.fingerprint:
            return
        _log.warning(
            "model_changed",
            model=_shown(description),  # often of the same name: a new checkpoint, say
            previous=_shown(previous),
            requests_failed=core.num_requests,
        )
        core.fail_all(
            ModelChanged(
                f"the executor now serves {_shown(description)} instead of {_shown(previous)}: "
                "send the request again"
            ),
            now,
        )


def _shown(description: ExecutorDescription) -> str:
    return f"{description.model_name} ({description.fingerprint[:16]})"


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
