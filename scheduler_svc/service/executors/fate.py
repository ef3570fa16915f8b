"""
Decisions about live requests when an executor is attached, lost or replaced: they go on here or on
another executor, wait, or fail.
"""

from __future__ import annotations

import structlog

from scheduler_svc.config.scheduling import without_effect
from scheduler_svc.config.settings import LoadedSettings
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.executor_client.connection import ModelInUse
from scheduler_svc.executor_client.description import ExecutorDescription
from scheduler_svc.executor_client.link_events import SessionOpened
from scheduler_svc.executor_client.session_events import ExecutorSeen, SessionEnded
from scheduler_svc.service.executors.member import Member
from scheduler_svc.service.executors.members import Members
from scheduler_svc.service.publisher import Publisher
from scheduler_svc.service.service_state import ServiceState
from tandem.engine_config import EngineConfig
from tandem.errors import (
    ERROR_BY_REASON,
    ExecutorLost,
    InternalError,
    ModelChanged,
    SessionLost,
    TandemError,
)
from tandem.link.results import StepFailed
from tandem.link.session import LossCause

_log: structlog.stdlib.BoundLogger = structlog.get_logger()


class ExecutorFate:
    """Decisions about live requests when an executor is attached or lost. Owned by the loop."""

    def __init__(
        self, loaded: LoadedSettings, state: ServiceState, members: Members, publisher: Publisher
    ) -> None:
        self._loaded = loaded
        self._settings = loaded.settings
        self._state = state
        self._members = members
        self._publisher = publisher
        self._told: tuple[object, ...] = ()
        """Facts from which links were last told what model they need."""

    def opened(self, member: Member, event: SessionOpened, now: float) -> bool:
        """
        Go on with this executor's model and geometry; requests of another model fail. Returns False
        if it cannot serve beside the others, so that its session was given up.
        """
        state, description = self._state, event.description
        limits = self._loaded.limits_on(description.geometry)
        options = self._settings.core_options(description.kv_bytes_per_block)
        if wrong := self._why_alone(member, description):
            member.session.lose(SessionLost(wrong, metadata=LossCause.MISFIT.as_metadata()), now)
            return False
        if state.core is None:
            core = Scheduler(limits, description.geometry, options)
            state.core = member.port = core
            for warning in without_effect(options, limits, description.geometry.num_host_blocks):
                _log.warning("unusual_setting", message=warning)
        else:
            self._fail_other_model(state.core, description, now)
            self._use(member, state.core, description, limits, now)
        member.description, member.limits, member.is_serving = description, limits, True
        self._members.newest = member
        state.description = description
        self._tell_model(event)
        _log.info(
            "executor_session_opened",
            address=event.address,
            model=description.model_name,
            fingerprint=description.fingerprint[:16],
            device=description.device,
            dtype=description.dtype,
            requests_waiting=state.num_requests,
            **limits.as_dict(),
        )
        return True

    def lost(self, member: Member, event: SessionEnded, now: float) -> None:
        """
        Move running requests back to the waiting queue, from which another executor may take them.

        A suspension is asked for again, unless its own command has failed, as where the host has no
        room: it would fail again and again, so it is given up and no request is to blame.
        """
        failed = event.failed
        is_command = failed is not None and failed.step_id == member.command_step
        member.command_step = None
        port, was_serving = member.port, member.is_serving
        member.is_serving = False
        if port is None or not was_serving:
            return
        if event.cause is LossCause.STATE_HASH:
            _log.error("state_hash_mismatch", **port.slot_columns())
        if event.refusal is not None:
            port.batch_refused(event.refusal, now)
            return
        if failed is not None and is_command:
            port.executor_lost(now)
            self._give_up_suspension(member, failed)
            return
        is_memory = event.cause is LossCause.OUT_OF_MEMORY
        port.executor_lost(now, event.died_in, out_of_memory=is_memory, may_live=event.may_live)

    def seen(self, event: ExecutorSeen, now: float) -> None:
        """Settle the fate of an executor that was silent when it was lost."""
        port = next((one.port for one in self._members if one.port is not None), None)
        if port is not None:
            port.executor_seen(event.boot_id, now, died=event.died)

    def advance(self, now: float) -> None:
        """
        Fail all requests once every executor was away for longer than `recovery_timeout_s`, and
        those that only one which was away so long could compute; tell links which model is needed.
        """
        since_s, state = self._members.detached_since_s, self._state
        if since_s is None:
            state.executor_given_up = False
            self._part_with_absent(now)
        elif now - since_s > self._settings.recovery_timeout_s and not state.executor_given_up:
            state.executor_given_up = True
            if state.core is not None:
                error = self._why_given_up(state.description)
                _log.error(
                    "executor_given_up", reason=error.reason, requests_failed=state.num_requests
                )
                state.core.fail_all(error, now)
        self._require_model()

    def part(self, member: Member, now: float) -> None:
        """
        Take a member out of the core, if it is not the last one there: what ran on it goes on
        elsewhere, and requests that no other executor can hold fail.
        """
        core, port = self._state.core, member.port
        has_others = any(one.port is not None for one in self._members if one is not member)
        if core is None or port is None or not has_others:
            return
        core.detach(port.number, now)
        member.port = None
        member.is_serving = False

    def _part_with_absent(self, now: float) -> None:
        """Take members out of the core that were away for longer than requests wait."""
        if len(self._members) == 1:
            return
        for member in self._members:
            since_s = member.session.detached_since_s
            if member.port is None or member.is_serving or since_s is None:
                continue
            if now - since_s > self._settings.recovery_timeout_s:
                _log.warning("executor_gone", address=member.address)
                self.part(member, now)

    def _give_up_suspension(self, member: Member, failed: StepFailed) -> None:
        """Give a suspension up for all executors, as one of them could not obey."""
        address, why = member.session.address, failed.message
        _log.warning("suspension_given_up", address=address, reason=failed.reason, message=why)
        kind = ERROR_BY_REASON.get(failed.reason, InternalError)
        self._members.give_up_suspension(
            kind(f"the executor at {address} was not suspended, so none is: {why}")
        )

    def _use(
        self,
        member: Member,
        core: Scheduler,
        description: ExecutorDescription,
        limits: EngineConfig,
        now: float,
    ) -> None:
        """Let the core plan for an executor that is empty, in the place of one that was lost."""
        geometry, port = description.geometry, member.port
        for other in self._members:
            blocks = None if other.description is None else other.description.geometry.block_size
            if other is member or other.port is None or blocks == geometry.block_size:
                continue
            # It is away, and comes back with these blocks or not at all. The core keeps one port.
            if port is None:
                port, other.port = other.port, None
            else:
                self.part(other, now)
        spare = self._members.spare
        if port is None and spare is not None:
            port, self._members.spare = spare, None
        if port is None:
            member.port = core.attach(limits, geometry)
            if self._members.suspension is not None:
                member.port.suspend(self._members.suspension.mode, now)
            return
        port.use_geometry(limits, geometry, now)
        member.port = port

    def _why_alone(self, member: Member, description: ExecutorDescription) -> str:
        """Say why an executor cannot serve beside those that do; empty if it can."""
        for other in self._members.others_serving(member):
            theirs = other.description
            assert theirs is not None
            if theirs.fingerprint != description.fingerprint:
                return f"it serves {_shown(description)} and the others serve {_shown(theirs)}"
            if _kind(theirs) != _kind(description):
                return f"it has {_kind(description)} and the others have {_kind(theirs)}"
        return ""

    def _tell_model(self, event: SessionOpened) -> None:
        """Tell frontends of the model, with the limits of the executor that takes most."""
        state = self._state
        served = [
            (one.limits, one.description)
            for one in self._members
            if one.is_serving and one.limits is not None and one.description is not None
        ]
        state.limits, description = max(
            served, key=lambda one: (one[0].max_model_len, one[0].max_num_blocks)
        )
        options = self._settings.core_options(description.kv_bytes_per_block)
        model = description.model(str(event.tokenizer_dir), state.limits, options)
        if model != state.model:
            state.model = model
            self._publisher.answer_all(model)

    def _require_model(self) -> None:
        """
        Let links accept only the served model while requests are live or other executors serve,
        else any model.
        """
        served = self._state.description
        serving = tuple(member.is_serving for member in self._members)
        told = (served, serving, self._state.num_requests > 0)
        if told == self._told:
            return
        self._told = told
        for member in self._members:
            others = self._members.others_serving(member)
            is_needed = served is not None and (self._state.num_requests > 0 or bool(others))
            member.link.require(_in_use(served, bool(others)) if is_needed else None)

    def _why_given_up(self, served: ExecutorDescription | None) -> TandemError:
        waited = f"within {self._settings.recovery_timeout_s:g} s"
        found = (member.session.refusals.other_model for member in self._members)
        other = next((one for one in found if one is not None), None)
        if served is None or other is None:
            why = self._members.refusal or "try again later"
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


def _in_use(served: ExecutorDescription | None, has_others: bool) -> ModelInUse | None:
    if served is None:
        return None
    return ModelInUse(
        fingerprint=served.fingerprint,
        name=served.model_name,
        dtype=served.dtype if has_others else None,
        block_size=served.geometry.block_size if has_others else None,
    )


def _kind(description: ExecutorDescription) -> str:
    """Return in words what executors that serve together must have in common beside the model."""
    return f"dtype {description.dtype} and block_size {description.geometry.block_size}"


def _shown(description: ExecutorDescription) -> str:
    return f"{description.model_name} ({description.fingerprint[:16]})"
