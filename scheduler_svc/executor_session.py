"""
The core thread's side of the executor: one session at a time, and what to do when it breaks.

    connecting ── SessionOpened ──▶ attaching ── Attached ──▶ attached
        ▲                             ▲                          │
        │                             └──── stream broken ───────┤
        └──── SESSION_LOST, StepFailed, a bad message ───────────┘

A broken stream keeps the session: it is attached again and both ends send again what the other
missed. A lost session takes all slots and blocks with it; the loop is told, and a new one is
opened.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import structlog

from scheduler_svc.executor_description import ExecutorDescription
from scheduler_svc.link_events import (
    ConnectFailed,
    LinkEvent,
    SessionOpened,
    StreamBroken,
    StreamMessage,
    backoff_s,
)
from tandem.errors import SessionLost, StreamReplaced, TandemError
from tandem.link.batch import Command, StepFailed, StepResult
from tandem.link.scheduler_end import LinkState, SchedulerEnd
from tandem.link.session import Attached, Heartbeat
from tandem.link.wire import encode_attach

LONGEST_STEP_S = 10.0
"""A step younger than this is never late."""
LATE_FACTOR = 20.0
"""A step older than this many usual ones is late."""

_log: structlog.stdlib.BoundLogger = structlog.get_logger()


class Link(Protocol):
    """What a session needs of `executor_link.ExecutorLink`."""

    def connect(self, delay_s: float = 0.0) -> None:
        """Open a session, however many attempts it takes."""

    def attach(self, raw_attach: bytes, delay_s: float = 0.0) -> int:
        """Open a step stream; gives its number."""

    def send(self, raw_step: bytes) -> None:
        """Queue a message on the newest stream."""

    def break_stream(self) -> None:
        """End the newest stream."""

    def take_events(self) -> Iterator[LinkEvent]:
        """What happened since the last call."""


class SessionOwner(Protocol):
    """Who is told what happens to slots and requests: the loop."""

    def session_opened(
        self, description: ExecutorDescription, tokenizer_dir: Path, now: float
    ) -> None:
        """A new session begins with empty slots."""

    def step_done(self, result: StepResult, step_s: float, now: float) -> None:
        """
        The next result in order; `step_s` is the time since its step was sent.

        Raises:
            SessionLost: The result is not that of the batch.
        """

    def session_lost(self, now: float) -> None:
        """All slots, blocks and steps in flight are gone."""


class ExecutorSession:
    """
    Keeps one executor attached. Owned by the core thread.

    Attributes:
        num_sessions: Sessions opened since the start.
        num_reattachments: Broken streams that were attached again.
        last_sign_s: When the executor was last heard on an attached stream; None before the first.
        detached_since_s: Since when no stream is attached; None while one is.
        refusal: Why an executor that answers is not used, where only an operator can change that;
            empty otherwise.
    """

    def __init__(self, link: Link, owner: SessionOwner, *, window: int, now: float) -> None:
        self._link = link
        self._owner = owner
        self._window = window
        self._end = SchedulerEnd(window)
        self._stream = 0
        self._num_broken = 0
        """Streams in a row that did not get attached."""
        self._num_lost = 0
        """Sessions in a row in which no step succeeded."""
        self._sent_s: dict[int, float] = {}
        self._usual_step_s = 0.0
        self._last_problem = ""
        self._was_attached = False
        """Whether this session had a stream before."""
        self.num_sessions = 0
        self.num_reattachments = 0
        self.last_sign_s: float | None = None
        self.detached_since_s: float | None = now
        self.refusal = ""

    @property
    def is_attached(self) -> bool:
        """True while steps and results flow."""
        return self._end.state is LinkState.ATTACHED

    @property
    def can_send(self) -> bool:
        """True when a step may be sent now."""
        return self._end.can_send

    def send(self, command: Command, state_hash: int, now: float) -> int:
        """Send the next step, whose id is returned; `can_send` must hold."""
        step_id, raw = self._end.send(command, state_hash)
        self._sent_s[step_id] = now
        self._link.send(raw)
        return step_id

    def is_alive(self, now: float, grace_s: float) -> bool:
        """True when the executor was heard within the grace time."""
        return self.last_sign_s is not None and now - self.last_sign_s <= grace_s

    def is_progressing(self) -> bool:
        """False while the running step takes much longer than steps usually do."""
        heartbeat = self._end.last_heartbeat
        if heartbeat is None or not self.is_attached:
            return True
        return heartbeat.elapsed_ms / 1000 <= max(LONGEST_STEP_S, LATE_FACTOR * self._usual_step_s)

    def take_events(self, now: float) -> None:
        """Handle everything the link reported."""
        for event in self._link.take_events():
            try:
                self._handle(event, now)
            except SessionLost as error:
                self._lose(error, now)

    def _handle(self, event: LinkEvent, now: float) -> None:
        match event:
            case SessionOpened():
                self._opened(event, now)
            case ConnectFailed(error=error, retry_in_s=retry_in_s):
                self.refusal = error.message if error.code == "FAILED_PRECONDITION" else ""
                self._note_problem("executor_connect_failed", error, retry_in_s)
            case StreamMessage(stream=stream, message=message) if stream == self._stream:
                self.last_sign_s = now
                self._message(message, now)
            case StreamBroken(stream=stream, error=error) if stream == self._stream:
                self._broken(error, now)
            case _:
                pass  # The rest of a stream that was given up.

    def _opened(self, event: SessionOpened, now: float) -> None:
        description = event.description
        self.refusal = ""
        self._end = SchedulerEnd(min(self._window, description.max_inflight_steps))
        self._end.open(description.boot_id, event.session_epoch)
        self._sent_s.clear()
        self._was_attached = False
        self.num_sessions += 1
        self._owner.session_opened(description, event.tokenizer_dir, now)
        self._stream = self._link.attach(encode_attach(self._end.attach()))

    def _message(self, message: Attached | StepResult | StepFailed | Heartbeat, now: float) -> None:
        match message:
            case StepResult():
                if self._end.on_result(message):
                    step_s = now - self._sent_s.pop(message.step_id, now)
                    self._usual_step_s += 0.1 * (step_s - self._usual_step_s)
                    self._num_lost = 0
                    self._owner.step_done(message, step_s, now)
            case Heartbeat():
                self._end.on_heartbeat(message, now)
            case Attached():
                self._attached(message)
            case StepFailed():
                if self._end.on_result(message):
                    raise SessionLost(
                        f"step {message.step_id} failed: {message.reason}: {message.message}"
                    )

    def _attached(self, message: Attached) -> None:
        missing = self._end.on_attached(message)
        for raw in missing:
            self._link.send(raw)
        self.detached_since_s = None
        self._last_problem = ""
        self.num_reattachments += self._was_attached
        self._was_attached = True
        _log.info(
            "executor_attached",
            boot_id=self._end.boot_id,
            session_epoch=self._end.session_epoch,
            steps_sent_again=len(missing),
        )

    def _broken(self, error: TandemError, now: float) -> None:
        if isinstance(error, SessionLost | StreamReplaced):
            self._lose(error, now)
            return
        was_attached = self.is_attached
        self._end.detach()
        self._num_broken = 0 if was_attached else self._num_broken + 1
        if was_attached:
            self.detached_since_s = now
        delay_s = backoff_s(self._num_broken)
        self._note_problem("executor_stream_broken", error, delay_s)
        self._stream = self._link.attach(encode_attach(self._end.attach()), delay_s)

    def _lose(self, error: TandemError, now: float) -> None:
        """Give the session up and open another; the wait grows until a step succeeds."""
        if self.detached_since_s is None:
            self.detached_since_s = now
        self._end.lose(error.message)
        self._stream = 0
        self._sent_s.clear()
        self._link.break_stream()
        self._owner.session_lost(now)
        delay_s = backoff_s(self._num_lost)
        self._num_lost += 1
        _log.warning(
            "executor_session_lost",
            reason=error.reason,
            message=error.message,
            new_session_in_s=delay_s,
        )
        self._link.connect(delay_s)

    def _note_problem(self, event: str, error: TandemError, retry_in_s: float) -> None:
        """Log a problem once, not at every attempt; later ones only for debugging."""
        problem = f"{event} {error.reason} {error.field}"
        log = _log.debug if problem == self._last_problem else _log.warning
        self._last_problem = problem
        log(
            event,
            reason=error.reason,
            message=error.message,
            retry_in_s=round(retry_in_s, 3),
            **error.metadata,
        )
