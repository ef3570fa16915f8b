"""
The core loop: the one owner of the scheduler core and of everything it is driven by.

    poll ─▶ commands ─▶ frontends' messages ─▶ results ─▶ next steps ─▶ events ─▶ frontends

It turns on one thread at a time. The core thread waits in one place, the poll, and there for
whatever comes first. A step's result is not waited for there: the thread that reads it from the
executor makes the turn that it is for, and so the next step is sent without any other thread being
woken. Nothing a frontend or the executor does or leaves undone can hold a turn up.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import structlog

from scheduler_svc.config.settings import LoadedSettings
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.executor_client.description import ExecutorDescription
from scheduler_svc.executor_client.session import ExecutorSession
from scheduler_svc.executor_client.session_neighbours import Link
from scheduler_svc.ipc.messages import Hello
from scheduler_svc.ipc.sockets import CoreSocket
from scheduler_svc.service.drain import Drain
from scheduler_svc.service.executor_fate import ExecutorFate
from scheduler_svc.service.intake import Intake
from scheduler_svc.service.metrics import CoreMetrics
from scheduler_svc.service.publisher import RETRY_S, Publisher
from scheduler_svc.service.queries import Queries
from scheduler_svc.service.queue_positions import QueuePositions
from scheduler_svc.service.service_state import ServiceState
from scheduler_svc.service.step_lines import StepLines
from scheduler_svc.service.turns import Turns
from scheduler_svc.service.wakeup import Wakeup
from tandem.errors import InternalError
from tandem.link.batch import Command, StepResult
from tandem.link.session import LossCause
from tandem.telemetry import log_worded

TICK_S = 0.5
"""Longest wait of one poll: how late the silence of the executor may be noticed."""
MESSAGES_PER_TURN = 512
LAST_FLUSH_S = 2.0
"""How long a stopping core waits for frontends to take their last messages."""

_log: structlog.stdlib.BoundLogger = structlog.get_logger()


class TurningLink(Link, Protocol):
    """What the loop needs of `executor_link.ExecutorLink` besides what the session does."""

    def turn_with(self, turn: Callable[[], None]) -> None:
        """Call `turn` for every result, on the thread that read it."""


class CoreLoop:
    """
    Runs a scheduler service's core, on the thread that calls `run` and on those with results.

    `frontend_died`, `stop` and `wakeup.set` may be called from any thread; all else belongs to
    whoever turns.

    Attributes:
        turns: Makes the turns, at least one in `TICK_S`; whoever watches this loop reads of them.
    """

    def __init__(
        self,
        loaded: LoadedSettings,
        socket: CoreSocket,
        link: TurningLink,
        wakeup: Wakeup,
        *,
        clock: Callable[[], float],
        on_hello: Callable[[Hello], None] = lambda _: None,
        is_strict: bool = False,
    ) -> None:
        """
        Args:
            loaded: The settings.
            socket: Where frontends connect.
            link: The executor; its `turn_with` and `connect` are called at the start of `run`.
            wakeup: Set by the link after every event.
            clock: Seconds, the clock of Submit.arrival_s.
            on_hello: Called for each frontend that connects.
            is_strict: Raise on an inconsistency found while idle instead of logging it.
        """
        settings = loaded.settings
        self._socket = socket
        self._link = link
        self._wakeup = wakeup
        self._clock = clock
        self._is_strict = is_strict
        self._commands: queue.SimpleQueue[Callable[[float], None]] = queue.SimpleQueue()
        self.turns = Turns(self._turn, sources=(socket,), wakeup=wakeup)
        self._state = ServiceState(started_s=clock())
        self._metrics = CoreMetrics()
        self._publisher = Publisher(socket, self._frontend_gone)
        self._positions = QueuePositions(self._publisher, clock)
        self._session = ExecutorSession(
            link, self, lost_after_s=settings.lost_after_s, now=self._state.started_s
        )
        self._fate = ExecutorFate(loaded, self._state, link, self._session, self._publisher)
        self._drain = Drain(self._state, self._session)
        self._queries = Queries(
            loaded,
            self._state,
            self._session,
            metrics=self._metrics,
            publisher=self._publisher,
            drain=self._drain,
        )
        self._intake = Intake(
            self._state,
            publisher=self._publisher,
            metrics=self._metrics,
            queries=self._queries,
            on_hello=on_hello,
            publish=self._publish,
        )
        self._step_lines = StepLines(settings.logging_step_interval)
        self._flush_until_s: float | None = None
        """Set once it is stopping: how long frontends may take for their last messages."""
        self._is_running = True
        self._was_busy = False

    def frontend_died(self, frontend: int) -> None:
        """Tell that a frontend's process ended."""
        self._command(lambda now: self._intake.end_frontend(frontend, now))

    def stop(self, grace_s: float) -> None:
        """Drain: take no new request, let the others finish for a while, end the rest, return."""
        self._command(lambda now: self._begin_stop(grace_s, now))

    def run(self) -> None:
        """Serve until stopped."""
        self._link.turn_with(self.turns.turn_now)
        self._link.connect()
        try:
            while self._is_running:
                self.turn(self.turns.polls_until_s - self._clock())
        finally:
            self.turns.end()

    def turn(self, wait_s: float) -> None:
        """Wait for something to do, at most `wait_s`, and do all there is."""
        self.turns.poll_and_turn(wait_s)

    def _turn(self) -> float:
        """Do all there is; gives when the next turn must come."""
        now = self._clock()
        while not self._commands.empty():
            self._commands.get()(now)
        if self._socket.has_messages:
            self._intake.take(self._socket.receive(MESSAGES_PER_TURN), now)
        self._session.take_events(now)
        if not self._drain.is_over:
            self._fate.advance(now)
        if self._state.core is not None:
            self._plan(self._state.core, now)
            self._publish()
            self._positions.tell(self._state.core, self._intake.num_accepted, now)
            self._check_when_idle(self._state.core)
        self._advance_stop(now)
        self._queries.settle(now)
        self._state.look_at_frontends(now)
        self._fate.tell_availability()
        self._publisher.flush(now)
        return self._next_due_s(now)

    # SessionOwner

    def session_opened(
        self, description: ExecutorDescription, tokenizer_dir: Path, now: float
    ) -> None:
        """Go on with what this executor has."""
        self._fate.opened(description, tokenizer_dir, now)

    def step_done(self, command: Command, result: StepResult, step_s: float, now: float) -> None:
        """Apply a result."""
        core, limits = self._state.core, self._state.limits
        assert core is not None
        assert limits is not None
        core.apply(result, now)
        if result.step_id == self._state.command_step:
            self._state.command_step = None
        self._metrics.count_step(result, step_s)
        line = self._step_lines.line(command, result, core.stats, limits.max_batch_size)
        if line is not None:
            log_worded(_log, line.event, line.values, line.text)

    def session_lost(
        self, cause: LossCause, died_in: int | None, may_live: str, now: float
    ) -> None:
        """Who ran waits again."""
        self._fate.lost(cause, died_in, may_live, now)

    def executor_seen(self, boot_id: str, *, died: bool, now: float) -> None:
        """An executor that fell silent lives, or has died."""
        self._fate.seen(boot_id, died=died, now=now)

    # Parts of a turn

    def _plan(self, core: Scheduler, now: float) -> None:
        core.expire(now)
        session = self._session
        while session.can_send and core.num_inflight < core.depth(session.usual_step_s):
            command = core.take_command()
            if command is not None:
                state_hash = core.state_hash
                self._state.command_step = session.send(command, state_hash, now)
                continue
            began_s = self._clock()
            batch = core.schedule(now)
            if batch is None:
                return
            self._metrics.count_schedule(self._clock() - began_s)
            session.send(batch, core.state_hash, now)

    def _publish(self) -> None:
        events = self._state.core.take_events() if self._state.core is not None else None
        if not events:
            return
        self._metrics.count_events(events)
        for line in events.log_lines:
            log_worded(_log, line.event, line.values, line.text, is_warning=line.is_warning)
        for end in events.ended:
            self._state.forget(end.handle)
        for failure in events.failed:
            self._state.forget(failure.handle)
        self._publisher.add(events)

    def _check_when_idle(self, core: Scheduler) -> None:
        is_busy = core.has_pending_work()
        was_busy, self._was_busy = self._was_busy, is_busy
        if is_busy or not was_busy:
            return
        try:
            core.check_integrity()
        except InternalError as error:
            self._metrics.integrity_failures += 1
            _log.error("integrity_check_failed", message=error.message)
            if self._is_strict:
                raise

    # Stopping and waiting

    def _command(self, command: Callable[[float], None]) -> None:
        self._commands.put(command)
        self._wakeup.set()

    def _frontend_gone(self, frontend: int) -> None:
        """A send found nobody there; what its requests held is released in the next turn."""
        self.frontend_died(frontend)

    def _begin_stop(self, grace_s: float, now: float) -> None:
        self._drain.begin(grace_s, now, asked_by="signal")
        self._flush_until_s = now + grace_s + LAST_FLUSH_S

    def _advance_stop(self, now: float) -> None:
        if not self._drain.advance(now):
            return
        self._publish()
        if self._flush_until_s is None:
            return
        self._queries.settle(now)
        self._publisher.flush(now)
        if not self._publisher.has_unsent or now >= self._flush_until_s:
            self._is_running = False

    def _next_due_s(self, now: float) -> float:
        """When the next turn must come if nothing does; at the end of one."""
        if self._socket.has_messages or not self._is_running:
            return now  # more came than one turn takes, or while sending
        due = [now + TICK_S]
        if self._publisher.has_unsent:
            due.append(now + RETRY_S)
        if (drained_s := self._drain.due_s) is not None:
            due.append(max(drained_s, now + RETRY_S))
        if (answer_s := self._queries.next_answer_s) is not None:
            due.append(answer_s)
        core = self._state.core
        if core is not None and (deadline_s := core.next_deadline_s) is not None:
            due.append(deadline_s)
        return min(due)
