"""
The core loop: the only owner of the scheduler core and of everything that drives it.

    poll ─▶ commands ─▶ frontends' messages ─▶ results ─▶ next steps ─▶ events ─▶ frontends

A turn is one iteration of the loop; one thread at a time makes it. The core thread waits only in
the poll, for the first event of any kind. It does not wait there for a step's result: the thread
that reads the result from the executor makes the turn itself, so the next step is sent without
waking another thread. A frontend or executor that is slow, silent or gone cannot block a turn.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Mapping

import structlog

from scheduler_svc.config.settings import LoadedSettings
from scheduler_svc.core.executor_port import ExecutorPort
from scheduler_svc.core.observe.step_lines import Load, StepLines
from scheduler_svc.core.observe.step_log import memory_line
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.executor_client.link_events import SessionOpened
from scheduler_svc.executor_client.session_events import ExecutorSeen, SessionEnded
from scheduler_svc.ipc.messages import Hello
from scheduler_svc.ipc.sockets import CoreSocket
from scheduler_svc.service.drain import Drain
from scheduler_svc.service.executors.availability import AvailabilityTeller
from scheduler_svc.service.executors.fate import ExecutorFate
from scheduler_svc.service.executors.member import Member
from scheduler_svc.service.executors.members import MakeLink, Members
from scheduler_svc.service.executors.names import ExecutorNames
from scheduler_svc.service.executors.operations import ExecutorOperations
from scheduler_svc.service.housekeeping import LOOK_INTERVAL_S, Housekeeping
from scheduler_svc.service.intake import Intake
from scheduler_svc.service.observe.metrics import CoreMetrics
from scheduler_svc.service.observe.readings import Readings
from scheduler_svc.service.observe.traced_requests import TracedRequests
from scheduler_svc.service.operate.commands import Commands
from scheduler_svc.service.operate.queries import Queries
from scheduler_svc.service.publisher import RETRY_S, Publisher
from scheduler_svc.service.queue_positions import QueuePositions
from scheduler_svc.service.service_state import ServiceState
from scheduler_svc.service.turns import LoopTurns
from scheduler_svc.service.wakeup import Wakeup
from tandem.engine_config import EngineConfig
from tandem.errors import InternalError, SessionLost
from tandem.link.results import StepResult
from tandem.process.telemetry import log_worded

TICK_S = 0.5
"""Longest wait of one poll, in seconds; the executor's silence may be noticed so much later."""
MESSAGES_PER_TURN = 512
LAST_FLUSH_S = 2.0
"""Seconds that a stopping core waits for frontends to take their last messages."""

_log: structlog.stdlib.BoundLogger = structlog.get_logger()


class CoreLoop:
    """
    Loop around a scheduler service's core; turns are made by the thread that calls `run` and by the
    thread that reads step results.

    `frontend_died`, `stop` and `wakeup.set` may be called from any thread; all else may only be
    called by the thread that makes the turn.

    Attributes:
        turns: Makes the turns, at least one per `TICK_S`; the thread that watches this loop reads
            their count and thread.
    """

    def __init__(
        self,
        loaded: LoadedSettings,
        socket: CoreSocket,
        make_link: MakeLink,
        wakeup: Wakeup,
        *,
        clock: Callable[[], float],
        on_hello: Callable[[Hello], None] = lambda _: None,
        know_hosts: Callable[[Mapping[str, str]], None] = lambda _: None,
        is_strict: bool = False,
    ) -> None:
        """
        Args:
            loaded: The settings.
            socket: Socket to which frontends connect.
            make_link: Makes the link to an executor; it is started at the start of `run`.
            wakeup: Set by links after every event that is not a step result.
            clock: Returns seconds, on the clock of Submit.arrival_s.
            on_hello: Called for each frontend that connects.
            know_hosts: Takes the host of each address that a name means, before a link is made.
            is_strict: Raise on an inconsistency found while idle, after logging it.
        """
        settings = loaded.settings
        self._socket = socket
        self._wakeup = wakeup
        self._clock = clock
        self._on_hello = on_hello
        self._is_strict = is_strict
        self._commands: queue.SimpleQueue[Callable[[float], None]] = queue.SimpleQueue()
        self.turns = LoopTurns(self._turn, sources=(socket,), wakeup=wakeup)
        self._state = ServiceState(clock(), TracedRequests(settings.traced_steps_per_s))
        self._metrics = CoreMetrics()
        self._publisher = Publisher(socket)
        self._positions = QueuePositions(self._publisher, clock)
        self._members = Members(make_link, settings, self._state.started_s)
        self._fate = ExecutorFate(loaded, self._state, self._members, self._publisher)
        self._availability = AvailabilityTeller(loaded, self._state, self._members, self._publisher)
        self._operations = ExecutorOperations(self._members, self._fate)
        self._names = ExecutorNames(settings.executor_names, self._found)
        self._know_hosts = know_hosts
        self._drain = Drain(self._state, self._members)
        self._queries = Queries(
            loaded,
            self._state,
            self._publisher,
            Readings(loaded, self._state, self._members, self._metrics, self._publisher),
            Commands(self._state, self._members, self._drain, self._operations),
        )
        self._housekeeping = Housekeeping(self._state, self._drain, self._queries, self._operations)
        self._intake = Intake(
            self._state, publisher=self._publisher, metrics=self._metrics, queries=self._queries
        )
        self._step_lines = StepLines(
            settings.logging_step_interval, lambda: time.strftime("%H:%M:%S")
        )
        self._flush_until_s: float | None = None  # last messages may be taken until then, once set
        self._is_running = True
        self._was_busy = False
        self._has_mail = False  # True if the last turn left messages, or found some at its end

    def frontend_died(self, frontend: int) -> None:
        """Have the next turn end the requests of a frontend after its process ended."""
        self._command(lambda now: self._end_frontend(frontend, now))

    def stop(self, grace_s: float) -> None:
        """
        Have the loop drain: admit no new request, give the others `grace_s` seconds to finish, end
        the rest with HandedOver, and return from `run`.
        """
        self._command(lambda now: self._begin_stop(grace_s, now))

    def _found(self, hosts: dict[str, str]) -> None:
        """Have the next turn let executors join that names mean now, on the thread of the names."""
        self._know_hosts(hosts)
        self._command(lambda now: self._operations.follow(hosts, now))

    def stop_links(self, *, release: bool) -> None:
        """
        End the links to all executors, after `run` has returned or will not be called; with
        `release` so that another scheduler can soon have them.
        """
        self._names.stop()
        self._members.stop(release=release)

    def run(self) -> None:
        """Make turns until the loop was stopped and its drain is over."""
        self._members.start(self.turns.turn_now)
        self._names.start()
        try:
            while self._is_running:
                self.turns.poll_and_turn(self.turns.polls_until_s - self._clock())
        finally:
            self.turns.end()

    def _turn(self) -> float:
        """Make one turn; return the time at which the next one is due if no event comes."""
        now = self._clock()
        has_news = False
        while not self._commands.empty():
            has_news = True
            self._commands.get()(now)
        # Messages wake the polling thread: others take only what the last turn left or found late.
        if self._has_mail or (self.turns.is_polled and self._socket.has_messages):
            has_news = True
            self._take_messages(now)
        has_news |= self._take_link_events(now)
        keeps_house = self._housekeeping.is_due(now, has_news=has_news)
        if keeps_house and not self._drain.is_over:
            self._operations.advance(now)
            self._fate.advance(now)
        if self._state.core is not None:
            self._plan(self._state.core, now)
            self._publish()
            self._check_when_idle(self._state.core)
        if keeps_house:
            self._keep_house(now)
        self._flush(now)
        return self._next_due_s(now)

    def _keep_house(self, now: float) -> None:
        """Do what depends on the time, on messages, and on executors that come and go."""
        if self._state.core is not None:
            self._positions.tell(self._state.core, self._intake.num_accepted, now)
        self._advance_stop(now)
        self._queries.settle(now)
        self._state.look_at_frontends(now)
        self._availability.tell()
        self._housekeeping.note_done(now)

    def _take_messages(self, now: float) -> None:
        messages = self._socket.receive(MESSAGES_PER_TURN)
        while (hello := self._intake.take(messages, now)) is not None:
            self._end_frontend(hello.frontend_index, now)
            self._intake.welcome(hello, now)
            self._on_hello(hello)

    def _end_frontend(self, frontend: int, now: float) -> None:
        self._intake.end_frontend(frontend, now)
        self._publish()

    def _take_link_events(self, now: float) -> bool:
        """Take what links have; return True if that was more than results of steps."""
        has_news = False
        for member in self._members:
            link, session = member.link, member.session
            is_due = now >= member.look_at_s
            if not (is_due or link.has_events):
                continue
            has_others = False
            for event in link.take_events():
                session.take(event, now)
                # An event that leaves nothing to do here, as a heartbeat, is news of the executor.
                has_others |= not session.events or self._follow_session(member, now)
            if is_due or has_others or not session.is_progressing():
                has_others |= self._look(member, now)
            has_news |= has_others
        return has_news

    def _look(self, member: Member, now: float) -> bool:
        """Judge an executor's silence; return True if that has a consequence."""
        member.look_at_s = now + LOOK_INTERVAL_S
        self._members.look(member, now)
        return self._follow_session(member, now)

    def _follow_session(self, member: Member, now: float) -> bool:
        """
        Act on a session's events in order; what is done for one may add another. Return True if
        there were others than results of steps.
        """
        events, has_others = member.session.events, False
        while events:
            event = events.popleft()
            match event:
                case StepResult():
                    self._apply(member, event, now)
                    continue
                case SessionOpened():
                    if self._fate.opened(member, event, now):
                        member.session.attach()
                case SessionEnded():
                    self._state.activity.note_loss(member.address, event, now)
                    self._fate.lost(member, event, now)
                case ExecutorSeen():
                    self._fate.seen(event, now)
            has_others = True
        return has_others

    def _apply(self, member: Member, result: StepResult, now: float) -> None:
        """Apply the result of the oldest step in flight at an executor."""
        port, limits, session = member.port, member.limits, member.session
        assert port is not None
        assert limits is not None
        traced = self._state.traced.find(port, now)
        try:
            port.apply(result, now)
        except SessionLost as error:
            session.lose(error, now)
            return
        command = session.step_applied(result.step_id)
        if result.step_id == member.command_step:
            member.command_step = None
        member.note_result(result)
        step_s = session.last_step_s
        num_tokens = self._metrics.count_step(command, result, step_s)
        self._state.activity.note_step(
            member.address, command, result, num_tokens=num_tokens, total_s=step_s, now=now
        )
        if traced is not None:
            span = traced.message(member, result, sent_s=now - step_s, applied_s=now)
            self._publisher.offer(traced.frontend, span)
            self._state.traced.note_told()
        line = self._step_lines.line(command, result, lambda: self._load(port, limits))
        if line is not None:
            stats, ids = self._load(port, limits).stats, {"step_id": result.step_id}
            memory = memory_line(stats.used_blocks, stats.total_blocks)
            log_worded(_log, line.event, line.values, line.text)
            log_worded(_log, memory.event, {**ids, **memory.values}, memory.text)

    def _load(self, port: ExecutorPort, limits: EngineConfig) -> Load:
        core = self._state.core
        assert core is not None
        return Load(
            stats=core.stats(),
            max_requests=limits.max_batch_size,
            paused_blocks=port.num_paused_blocks,
            paused_budget_blocks=port.paused_budget_blocks,
        )

    def _plan(self, core: Scheduler, now: float) -> None:
        core.expire(now)
        for member in self._members:
            port = member.port
            if port is not None and port.num_inflight < port.most_in_flight:
                self._plan_steps(member, port, now)

    def _plan_steps(self, member: Member, port: ExecutorPort, now: float) -> None:
        """Send an executor as many steps as may be in flight."""
        session = member.session
        while session.can_send and port.num_inflight < port.lookahead(session.usual_step_s):
            command = port.take_command()
            if command is not None:
                member.command_step = session.send(command, port.state_hash, now)
                continue
            began_s = self._clock()
            batch = port.schedule(now)
            if batch is None:
                return
            self._metrics.count_schedule(self._clock() - began_s)
            port.name_step(session.send(batch, port.state_hash, now))

    def _publish(self) -> None:
        events = self._state.core.take_events() if self._state.core is not None else None
        if not events:
            return
        self._metrics.count_events(events)
        if events.progress:
            self._state.traced.note_progress(events.progress)
        if events.failed:
            self._state.activity.note_failures(events.failed, self._clock())
        for line in events.log_lines:
            log_worded(_log, line.event, line.values, line.text, is_warning=line.is_warning)
        for end in events.ended:
            self._state.forget(end.handle)
        for failure in events.failed:
            self._state.forget(failure.handle)
        self._publisher.add(events)

    def _flush(self, now: float) -> None:
        """Send what pipes take; the next turn ends the requests of frontends found gone."""
        for frontend in self._publisher.flush(now):
            self.frontend_died(frontend)

    def _check_when_idle(self, core: Scheduler) -> None:
        is_busy = core.has_pending_work()
        was_busy, self._was_busy = self._was_busy, is_busy
        if is_busy or not was_busy:
            return
        try:
            core.check_integrity()
        except InternalError as error:
            self._metrics.integrity_failures += 1
            self._state.activity.note_bookkeeping(error.message, self._clock())
            _log.error("integrity_check_failed", message=error.message)
            if self._is_strict:
                raise

    def _command(self, command: Callable[[float], None]) -> None:
        self._commands.put(command)
        self._wakeup.set()

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
        self._flush(now)
        if not self._publisher.has_unsent or now >= self._flush_until_s:
            self._is_running = False

    def _next_due_s(self, now: float) -> float:
        """Return the time at which the next turn is due if no event comes; at the end of a turn."""
        self._has_mail = self._socket.has_messages
        if self._has_mail or not self._is_running:
            return now  # more messages came than one turn takes, or some came while sending
        longest_s = RETRY_S if self._publisher.has_unsent else TICK_S
        due_s = min(now + longest_s, self._housekeeping.due_s)
        core = self._state.core
        if core is not None and (deadline_s := core.next_deadline_s) is not None:
            due_s = min(due_s, deadline_s)
        return due_s
