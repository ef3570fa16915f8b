"""
The core's session with an executor: one at a time, and its recovery when it breaks.

    connecting ── SessionOpened ──▶ attaching ── Attached ──▶ attached
        ▲                             ▲   │                      │
        │                             └───┴─ broken, or silent ──┤
        └── SESSION_LOST, StepFailed, too long silent or stuck ──┘

A broken stream keeps the session: a new stream is attached, at another address of the same executor
if need be, and both ends send again what the other missed. With a lost session all slots and blocks
are lost, and a new session is opened, with this executor or another.

    link ── events ─▶ loop ── take ─▶ session ── events ─▶ loop ─▶ core

The session calls the link below it and nothing above it: it queues what the loop must act on.
"""

from __future__ import annotations

from collections import deque
from math import inf

import structlog

from scheduler_svc.executor_client.link import ExecutorLink
from scheduler_svc.executor_client.link_events import (
    ConnectFailed,
    LinkEvent,
    PathFound,
    SessionOpened,
    StreamBroken,
    StreamMessage,
    backoff_s,
)
from scheduler_svc.executor_client.link_problems import LinkProblems, failed_step, refusal_of
from scheduler_svc.executor_client.refusals import Refusals
from scheduler_svc.executor_client.session_events import (
    SessionCounts,
    SessionEnded,
    SessionEvent,
    SilentExecutors,
)
from scheduler_svc.executor_client.watch import ExecutorWatch
from tandem.errors import Draining, SessionLost, StreamReplaced, TandemError
from tandem.link.codec.wire import encode_attach
from tandem.link.commands import Command
from tandem.link.results import StepFailed, StepResult
from tandem.link.scheduler_end import LinkState, SchedulerEnd
from tandem.link.session import Attached, Heartbeat, LossCause
from tandem.status import PeerUnavailable

LONGEST_STREAM_SILENCE_S = 5.0
"""
Longest silence of a stream, in seconds; then a new one is opened over another connection, as the
old one may be dead unnoticed.
"""
STREAMS_PER_LOSS = 4.0
"""Number of streams that are tried at least, while an executor is silent, before it is given up."""
SEEK_AFTER_BROKEN = 3
"""Number of streams in a row that were not attached after which other addresses are asked too."""
STREAMS_IN_VAIN = 10
"""
Number of streams in a row that may fail to deliver a step or its result; after one more the session
is given up.
"""
LOSSES_IN_VAIN = 4
"""
Number of sessions in a row lost without a successful step, after which the running step is blamed
even if no sign shows that it killed a process: one step could else end every session for ever.
"""

_log: structlog.stdlib.BoundLogger = structlog.get_logger()


class ExecutorSession:
    """
    Session with one executor, which it keeps attached. Owned by the core loop.

    Attributes:
        events: Events on which the loop must act and has not yet, oldest first; the loop takes
            them out.
        counts: Counts of sessions, losses and the like since the start.
        refusals: Reasons why executors that answer are not used.
        address: Address at which the newest session's executor was last reached; empty before the
            first session.
        detached_since_s: Time since which no stream is attached; None while one is.
        last_step_s: Seconds from sending the latest step that has a result to that result.
    """

    def __init__(self, link: ExecutorLink, *, lost_after_s: float, now: float) -> None:
        """
        Args:
            link: The link that talks to executors.
            lost_after_s: Seconds that the executor may be silent or stuck before it is given up.
            now: Seconds, on the clock of all calls.
        """
        self._link = link
        self._lost_after_s = lost_after_s
        self._end = SchedulerEnd()
        self._watch = ExecutorWatch(now)
        self._stream = self._num_broken = 0
        """Number of the newest stream, and count of streams in a row that were not attached."""
        self._num_lost = 0
        """Number of sessions in a row in which no step succeeded."""
        self._num_in_vain = 0
        """Number of streams in a row that did not deliver the oldest step or its result."""
        self._sent_s: dict[int, float] = {}
        self._in_flight: dict[int, Command] = {}
        self._problems = LinkProblems()
        self._silent = SilentExecutors()
        self._was_attached = False
        """True once a stream of this session was attached."""
        self._was_lost_stuck = False
        self._is_released = False
        self.events: deque[SessionEvent] = deque()
        self.counts = SessionCounts()
        self.refusals = Refusals()
        self.address = ""
        self.detached_since_s: float | None = now
        self.last_step_s = 0.0

    @property
    def is_attached(self) -> bool:
        """True while steps and results flow."""
        return self._end.state is LinkState.ATTACHED

    @property
    def epoch(self) -> int:
        """Number of the newest session, issued by its executor; 0 before the first."""
        return self._end.session_epoch

    @property
    def can_send(self) -> bool:
        """True while a stream is attached and the executor can take one more step."""
        return self._end.can_send

    @property
    def usual_step_s(self) -> float:
        """Seconds that a step usually computes; 0 before the first."""
        return self._watch.usual_step_s

    def send(self, command: Command, state_hash: int, now: float) -> int:
        """Send the next step and return its id; `can_send` must hold."""
        step_id, raw = self._end.send(command, state_hash)
        self._sent_s[step_id] = now
        self._in_flight[step_id] = command
        self._link.send(raw)
        return step_id

    def is_alive(self, grace_s: float) -> bool:
        """Return True if the executor was heard within the last `grace_s` seconds."""
        return self._watch.was_heard and self._watch.silent_s <= grace_s

    def is_progressing(self) -> bool:
        """
        Return False while a step takes much longer than predicted, or after a session was lost
        during such a step, until a stream is attached.
        """
        return not (self._watch.stuck_s or self._was_lost_stuck)

    def release(self, now: float) -> None:
        """Give the executor back for good: no session follows; another scheduler may have it."""
        self._is_released = True
        self.detached_since_s = now
        self._end.lose("the scheduler gives its executor back")
        self._sent_s.clear()
        self._in_flight.clear()
        self._link.release()

    def take(self, event: LinkEvent, now: float) -> None:
        """Handle an event of the link; the loop then acts on all `events`."""
        if self._is_released:
            return
        try:
            match event:
                case StreamMessage(stream=stream, message=message) if stream == self._stream:
                    self._watch.heard()
                    self._message(message, now)
                case StreamBroken(stream=stream, error=error) if stream == self._stream:
                    self._broken(error, now)
                case SessionOpened():
                    self._opened(event, now)
                case PathFound():
                    self._path_found(event)
                case ConnectFailed(error=error, retry_in_s=retry_in_s):
                    self.refusals.note(event)
                    self._problems.note("executor_connect_failed", error, retry_in_s, event.address)
                case _:
                    pass  # The event is of a stream that was given up.
        except SessionLost as error:
            self.lose(error, now)

    def attach(self, delay_s: float = 0.0) -> None:
        """Open a stream; the loop opens the first one of a session."""
        self._watch.begin_stream()
        self._stream = self._link.attach(encode_attach(self._end.attach()), delay_s)

    def step_applied(self, step_id: int) -> Command:
        """Take a step out of flight, as its result was applied; return its command."""
        self._num_lost = self._num_in_vain = 0
        return self._in_flight.pop(step_id)

    def lose(self, error: SessionLost, now: float) -> None:
        """Give the session up for an error that names its cause, such as a result of no use."""
        self._lose(error, LossCause.of(error.metadata), now)

    def look(self, now: float, *, silent_s: float = inf) -> None:
        """
        Give the session up if the executor was silent or stuck for too long; before that, replace a
        stream that is silent or stalled. To be called after all events of the link were taken.

        Where requests can move to another executor, it may be silent for `silent_s` only.
        """
        if self._is_released:
            return
        watch, state = self._watch, self._end.state
        watch.look(self._in_flight, now)
        if state in (LinkState.CLOSED, LinkState.LOST):
            return
        allowed_s = min(silent_s, self._lost_after_s)
        if watch.session_silent_s > allowed_s:
            silent = SessionLost(f"the executor was silent for {watch.session_silent_s:.1f} s")
            self._lose(silent, LossCause.SILENT, now)
        elif self.is_attached and watch.stuck_s > self._lost_after_s:
            step_id = watch.running_step_id
            stuck = SessionLost(f"step {step_id} has been late for {watch.stuck_s:.1f} s")
            self._lose(stuck, LossCause.STUCK, now)
        elif state is not LinkState.DETACHED and watch.stream_silent_s > min(
            LONGEST_STREAM_SILENCE_S, allowed_s / STREAMS_PER_LOSS
        ):
            self._link.seek(may_move=False)
            self._open_anew(f"nothing came for {watch.stream_silent_s:.1f} s", now)
        elif self.is_attached and watch.is_stalled(
            self._in_flight, self._end.num_inflight_bytes, self._end.last_applied_step_id, now
        ):
            self._open_anew("the executor is idle and results are missing", now)

    def _opened(self, event: SessionOpened, now: float) -> None:
        if self._end.state not in (LinkState.CLOSED, LinkState.LOST):
            moved = SessionLost(f"the work moves to the executor at {event.address}")
            self._give_up(moved, LossCause.MOVED, now)
        self.events.extend(self._silent.seen(event.description.boot_id, event.address))
        description = event.description
        steps = description.max_inflight_steps
        self._end.open(description.boot_id, event.session_epoch, steps)
        self._watch.begin_session()
        self._was_attached = False
        self._num_broken = self._num_in_vain = 0
        self.counts.executor_sessions += 1
        self.address = event.address
        self.events.append(event)

    def _path_found(self, event: PathFound) -> None:
        """Note the session's new address; the stream that was asked for last uses it already."""
        if event.boot_id == self._end.boot_id:
            _log.warning("executor_path_changed", address=event.address, previous=self.address)
            self.address = event.address

    def _message(self, message: Attached | StepResult | StepFailed | Heartbeat, now: float) -> None:
        match message:
            case StepResult():
                if self._end.on_result(message):
                    self._result(message, now)
            case Heartbeat():
                self._end.on_heartbeat(message)
                self._watch.beat(message, now)
            case Attached():
                self._attached(message)
            case StepFailed() if self._end.on_result(message):
                error = failed_step(message)
                self._lose(error, LossCause.of(error.metadata), now, failed=message)

    def _result(self, result: StepResult, now: float) -> None:
        step_id, timings = result.step_id, result.timings
        self.last_step_s = now - self._sent_s.pop(step_id, now)
        computed_s = timings.compute_ns / 1e9
        self._watch.step_done(step_id, self._in_flight[step_id], computed_s or self.last_step_s)
        self.events.append(result)

    def _attached(self, message: Attached) -> None:
        missing = self._end.on_attached(message)
        self._check_getting_through(message)
        for raw in missing:
            self._link.send(raw)
        self.detached_since_s = None
        self._was_lost_stuck = False
        self.refusals.clear()
        self._problems.clear()
        self._num_broken = 0
        self.counts.executor_reattachments += self._was_attached
        self.counts.steps_sent_again += len(missing)
        self._was_attached = True
        _log.info(
            "executor_attached",
            boot_id=self._end.boot_id,
            session_epoch=self._end.session_epoch,
            steps_sent_again=len(missing),
        )

    def _check_getting_through(self, message: Attached) -> None:
        """
        Count streams in a row that find the oldest step or its result still undelivered.

        Raises:
            SessionLost: There were more than `STREAMS_IN_VAIN`.
        """
        oldest = next(iter(self._in_flight), 0)
        is_computed = oldest <= message.last_completed_step_id
        is_on_its_way = oldest > 0 and (oldest > message.last_received_step_id or is_computed)
        self._num_in_vain = (self._num_in_vain + 1) * is_on_its_way
        if self._num_in_vain > STREAMS_IN_VAIN:
            raise SessionLost(f"step {oldest} or its result is lost on stream after stream")

    def _broken(self, error: TandemError, now: float) -> None:
        match error:
            case SessionLost():
                self.lose(error, now)
            case StreamReplaced():
                self._lose(error, LossCause.PROTOCOL, now)
            case Draining():
                self._lose(error, LossCause.DRAINING, now)
            case _:
                self._detach(error, now, num_broken=0 if self.is_attached else self._num_broken + 1)

    def _open_anew(self, why: str, now: float) -> None:
        """Replace a stream that may be dead without its end being reported."""
        # This counts as no broken stream: a stopped process accepts streams and answers none.
        self._detach(PeerUnavailable(f"{why}; a new stream is opened"), now, num_broken=0)

    def _detach(self, error: TandemError, now: float, *, num_broken: int) -> None:
        """Open the next stream after the last one ended; the session goes on."""
        if self.is_attached:
            self.detached_since_s = now
        self._end.detach()
        self._num_broken = num_broken
        delay_s = backoff_s(max(num_broken, self._num_in_vain - 1))
        self._problems.note("executor_stream_broken", error, delay_s)
        if num_broken >= SEEK_AFTER_BROKEN:
            self._link.seek(may_move=True)
        self.attach(delay_s)

    def _lose(
        self, error: TandemError, cause: LossCause, now: float, *, failed: StepFailed | None = None
    ) -> None:
        """Give the session up and open another; the wait grows until a step succeeds."""
        self._give_up(error, cause, now, failed=failed)
        delay_s = backoff_s(self._num_lost)
        self._num_lost += 1
        if cause is LossCause.FENCED:
            self.refusals.fenced_by(error.metadata.get("holder", "another scheduler"))
        is_elsewhere = cause in (LossCause.DRAINING, LossCause.SILENT, LossCause.STUCK)
        self._link.connect(delay_s, elsewhere=is_elsewhere)

    def _give_up(
        self, error: TandemError, cause: LossCause, now: float, *, failed: StepFailed | None = None
    ) -> None:
        """End the session, and tell which step may be to blame for the loss."""
        is_in_vain = self._num_lost >= LOSSES_IN_VAIN
        is_blaming = cause.blames_step or (cause.may_repeat and is_in_vain)
        step_id = self._running() if is_blaming else None
        died_in = None if step_id is None else step_id - next(iter(self._in_flight))
        refusal = refusal_of(error, cause, self._in_flight, is_repeated=is_in_vain)
        self._was_lost_stuck = self._was_lost_stuck or self._watch.stuck_s > 0
        if self.detached_since_s is None:
            self.detached_since_s = now
        self._end.lose(error.message)
        self._stream = 0
        self._sent_s.clear()
        self._in_flight.clear()
        self._link.break_stream()
        self.counts.note_loss(cause)
        _log.warning(
            "executor_session_lost",
            cause=cause.value,
            reason=error.reason,
            message=error.message,
            died_in=died_in,
            step_id=step_id,
        )
        may_live = self._end.boot_id if cause.may_live and not is_in_vain else ""
        ended = SessionEnded(
            cause=cause,
            died_in=died_in,
            may_live=may_live,
            refusal=refusal,
            failed=failed,
            message=error.message,
        )
        self.events.append(ended)
        # Streams may have moved to the address of another boot that fell silent.
        self.events.extend(self._silent.seen(self._end.boot_id, self.address))
        if may_live:
            self._silent.note(may_live, self.address)

    def _running(self) -> int | None:
        """Return the id of the step in flight that ran at the last heartbeat; None without any."""
        if not self._in_flight:
            return None
        oldest, newest = next(iter(self._in_flight)), next(reversed(self._in_flight))
        return min(max(self._watch.running_step_id, oldest), newest)
