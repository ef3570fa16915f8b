"""
The world of the link's model: three schedulers, the third a later incarnation of the first, one
executor that can be replaced, and streams that break.

Every method is one event. The world keeps its own account of boots, epochs, streams and leases, and
an end must raise the error that follows from it; any other error is a failure.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tandem.errors import SessionHeld, SessionLost, StreamReplaced, TandemError
from tandem.link.codec.wire import decode_request, decode_response, encode_attach
from tandem.link.commands import Command, KvMode
from tandem.link.executor_end import ExecutorEnd
from tandem.link.results import StepFailed, StepResult
from tandem.link.scheduler_end import LinkState, SchedulerEnd
from tandem.link.session import Attach, Attached, Heartbeat
from tandem.link.slots.slot_state import SlotState
from tests.link.model.fake_executor import FakeExecutor
from tests.link.model.model_requests import ModelRequest, Place, identity_of, next_token
from tests.link.model.model_scheduler import Geometry, ModelScheduler
from tests.link.model.network import Stream
from tests.link.values import scheduler_id

Response = Attached | Heartbeat | StepResult | StepFailed
LEASE_S = 10.0
MAX_SETTLE_ROUNDS = 400
IDENTITIES = {"a": scheduler_id("a"), "b": scheduler_id("b"), "heir": scheduler_id("a", "2")}
"""Identity that each scheduler of the model gives."""


@dataclass(frozen=True)
class Parts:
    """The classes the world is built from; a planted bug replaces one of them."""

    scheduler_end: type[SchedulerEnd] = SchedulerEnd
    executor_end: type[ExecutorEnd] = ExecutorEnd
    slots: type[SlotState] = SlotState
    scheduler: type[ModelScheduler] = ModelScheduler
    executor: type[FakeExecutor] = FakeExecutor


class World:
    """State of the model and its events."""

    def __init__(self, window: int, parts: Parts | None = None) -> None:
        self.window = window
        self.parts = parts or Parts()
        self.geometry = Geometry()
        self.now = 0.0
        self.num_boots = 0
        self.schedulers = [
            self.parts.scheduler(name, self.parts.scheduler_end(), self.geometry)
            for name in IDENTITIES
        ]
        self.streams: dict[str, Stream | None] = dict.fromkeys(IDENTITIES)
        self.old_streams: list[Stream] = []
        self.expected_state: dict[tuple[str, int, int], tuple[str, object]] = {}
        self.failed_steps: set[tuple[str, int, int]] = set()
        self.boot()

    def boot(self) -> None:
        """Start an executor process; the process before it, if any, is gone with its streams."""
        for stream in [*self.streams.values(), *self.old_streams]:
            if stream is not None:
                stream.cut()
        self.old_streams.clear()
        self.num_boots += 1
        geometry = self.geometry
        end = self.parts.executor_end(f"boot{self.num_boots}", self.window)
        slots = self.parts.slots(
            geometry.num_slots,
            geometry.max_blocks_per_slot,
            geometry.block_size,
            geometry.num_blocks,
            geometry.num_host_blocks,
        )
        self.executor = self.parts.executor(end, slots, geometry)
        self.epoch = 0
        self.holder: str | None = None
        self.replaced: set[str] = set()
        self.attached: tuple[int, int] | None = None
        self.sign_of_life_s = 0.0
        self.newest_attach_id = 0
        self.num_executed = 0
        self.failed_step_id: int | None = None

    def open(self, who: int, *, take_over: bool, answer_arrives: bool) -> None:
        """Ask for a session on behalf of a scheduler."""
        scheduler = self.schedulers[who]
        identity = IDENTITIES[scheduler.name]
        if self.must_refuse(scheduler.name, take_over=take_over):
            with pytest.raises(SessionHeld) as refusal:
                self.executor.open_session(identity, take_over, LEASE_S, self.now)
            age_ms = int((self.now - self.sign_of_life_s) * 1000)
            assert refusal.value.metadata["holder"] == IDENTITIES[str(self.holder)].name
            assert refusal.value.metadata["age_ms"] == str(age_ms)
            return
        epoch = self.executor.open_session(identity, take_over, LEASE_S, self.now)
        assert epoch == self.epoch + 1
        if self.holder not in (None, scheduler.name):
            self.replaced.add(str(self.holder))
        self.replaced.discard(scheduler.name)
        if self.attached is not None and not self.attached_stream.is_cut:
            told = self.attached_stream.up[-1] if self.attached_stream.up else None
            assert isinstance(told, SessionLost), "a fenced stream was not ended"
        self.attached = None
        assert self.executor.running is None
        self.epoch = epoch
        self.holder = scheduler.name
        self.sign_of_life_s = self.now
        self.newest_attach_id = 0
        self.num_executed = 0
        self.failed_step_id = None
        if answer_arrives:
            self.recover(scheduler, "it opens a new session")
            scheduler.end.open(self.executor.end.boot_id, epoch, self.window)

    def must_refuse(self, name: str, *, take_over: bool) -> bool:
        """
        Return if another scheduler holds the session; an heir may have it while no stream is
        attached.
        """
        if self.holder in (None, name) or take_over:
            return False
        namesake = IDENTITIES[name].name == IDENTITIES[str(self.holder)].name
        if namesake and self.attached is None and name not in self.replaced:
            return False
        return self.now - self.sign_of_life_s < LEASE_S

    def recover(self, scheduler: ModelScheduler, why: str) -> None:
        """Let the scheduler give up its session and forget its state on the executor."""
        scheduler.end.lose(why)
        scheduler.forget_executor()
        self.give_up_stream(scheduler)

    def give_up_stream(self, scheduler: ModelScheduler) -> None:
        """
        Let the scheduler stop reading its stream; the executor may read on until `late_detach`.
        """
        stream = self.streams[scheduler.name]
        self.streams[scheduler.name] = None
        if stream is not None:
            self.old_streams.append(stream)

    def connect(self, who: int) -> None:
        """Open a stream for a scheduler with a session; an earlier stream may still deliver."""
        scheduler = self.schedulers[who]
        if scheduler.end.state in (LinkState.CLOSED, LinkState.LOST):
            return
        self.give_up_stream(scheduler)
        attach = scheduler.end.attach()
        stream = Stream(scheduler.name, self.executor.end.boot_id, attach)
        stream.first_message = encode_attach(attach)
        stream.send_down(stream.first_message)
        self.streams[scheduler.name] = stream

    def plan(self, who: int, chunk: int, max_admits: int) -> None:
        """Let a scheduler with credit plan a batch and send it."""
        scheduler = self.schedulers[who]
        if scheduler.end.can_send:
            self.send(scheduler, scheduler.plan(chunk, max_admits))

    def suspend(self, who: int, mode: KvMode) -> None:
        scheduler = self.schedulers[who]
        if scheduler.end.can_send:
            self.send(scheduler, scheduler.plan_suspension(mode))

    def resume(self, who: int) -> None:
        scheduler = self.schedulers[who]
        if scheduler.end.can_send and scheduler.suspended:
            self.send(scheduler, scheduler.plan_resumption())

    def send(self, scheduler: ModelScheduler, planned: tuple[Command, int] | None) -> None:
        if planned is None:
            return
        step_id, raw = scheduler.end.send(*planned)
        key = (scheduler.end.boot_id, scheduler.end.session_epoch, step_id)
        assert key not in self.expected_state, "a step id was planned twice"
        self.expected_state[key] = (scheduler.name, scheduler.snapshot())
        stream = self.streams[scheduler.name]
        assert stream is not None
        stream.send_down(raw)

    def all_streams(self) -> list[Stream]:
        return [s for s in [*self.streams.values(), *self.old_streams] if s is not None]

    def deliver_down(self, stream: Stream) -> None:
        """Let the executor read one message of a stream."""
        if not stream.down:
            return
        raw = stream.down.popleft()
        expected = self.expected_refusal(stream, raw)
        if expected is not None:
            with pytest.raises(expected) as refusal:
                self.executor.receive(stream, raw, self.now)
            stream.down.clear()
            stream.send_up(refusal.value)
            return
        self.executor.receive(stream, raw, self.now)
        self.sign_of_life_s = self.now
        if raw is stream.first_message:
            self.newest_attach_id = stream.attach.attach_id
            self.attached = (stream.attach.session_epoch, stream.attach.attach_id)
            self.attached_stream = stream
            stream.was_accepted = True

    def expected_refusal(self, stream: Stream, raw: bytes) -> type[TandemError] | None:
        message = decode_request(raw)
        if isinstance(message, Attach) and message.boot_id != self.executor.end.boot_id:
            return SessionLost
        if message.session_epoch != self.epoch:
            return SessionLost
        if isinstance(message, Attach):
            return StreamReplaced if message.attach_id <= self.newest_attach_id else None
        return StreamReplaced if stream.attach.attach_id != self.newest_attach_id else None

    def deliver_up(self, stream: Stream) -> None:
        """Let a scheduler read one message; messages of a stream it gave up are dropped."""
        if not stream.up:
            return
        item = stream.up.popleft()
        scheduler = next(s for s in self.schedulers if s.name == stream.owner)
        if self.streams[scheduler.name] is not stream:
            return
        if isinstance(item, TandemError):
            assert isinstance(item, SessionLost), f"the newest stream was refused: {item}"
            self.recover(scheduler, str(item))
            return
        self.take(scheduler, stream, decode_response(item))

    def take(self, scheduler: ModelScheduler, stream: Stream, message: Response) -> None:
        """Let a scheduler handle a message of its newest stream."""
        match message:
            case Attached():
                for raw in scheduler.end.on_attached(message):
                    stream.send_down(raw)
            case Heartbeat():
                scheduler.end.on_heartbeat(message)
            case StepResult():
                if scheduler.end.on_result(message):
                    scheduler.apply(message)
            case StepFailed():
                if scheduler.end.on_result(message):
                    key = (message.boot_id, scheduler.end.session_epoch, message.step_id)
                    assert key in self.failed_steps
                    self.recover(scheduler, message.message)

    def cut(self, who: int, *, executor_notices: bool, scheduler_notices: bool) -> None:
        """
        Break a connection; a side that does not notice learns of it only when it tries something.
        """
        scheduler = self.schedulers[who]
        stream = self.streams[scheduler.name]
        if stream is None:
            return
        stream.cut()
        if executor_notices:
            self.detach(stream)
        if scheduler_notices:
            scheduler.end.detach()
            self.give_up_stream(scheduler)

    def late_detach(self, which: int) -> None:
        """End the executor's handler of a stream that was given up long ago."""
        if self.old_streams:
            stream = self.old_streams.pop(which % len(self.old_streams))
            stream.cut()
            self.detach(stream)

    def detach(self, stream: Stream) -> None:
        """
        End the handler of a stream that was accepted, in the process that the stream was opened to.
        """
        if stream.was_accepted and stream.boot_id == self.executor.end.boot_id:
            number = (stream.attach.session_epoch, stream.attach.attach_id)
            self.executor.end.detach(*number)
            if number == self.attached:
                self.attached = None

    def start(self) -> None:
        self.executor.start(self.now)

    def finish(self) -> None:
        """Finish the running step; slot state must be what its sender holds for that step."""
        step = self.executor.running
        if step is None:
            return
        assert step.session_epoch == self.epoch, "a step of a fenced session ran"
        assert self.failed_step_id is None, "a step ran after one that failed"
        assert step.step_id == self.num_executed + 1, "steps ran twice or out of order"
        self.executor.finish()
        self.num_executed = step.step_id
        key = (self.executor.end.boot_id, step.session_epoch, step.step_id)
        assert (self.holder, self.slot_snapshot()) == self.expected_state[key]

    def fail(self) -> None:
        """Fail the running step, and with it the session."""
        step = self.executor.running
        if step is not None:
            self.executor.fail()
            self.num_executed = self.failed_step_id = step.step_id
            key = (self.executor.end.boot_id, step.session_epoch, step.step_id)
            self.failed_steps.add(key)

    def fail_among_others(self, who: int) -> None:
        """Fail a step while as many as the window allows wait behind it."""
        for _ in range(self.window):
            self.plan(who, 2, 1)
        stream = self.streams[self.schedulers[who].name]
        while stream is not None and stream.down:
            self.deliver_down(stream)
        self.start()
        self.fail()

    def slot_snapshot(self) -> dict[int, tuple[int, int, tuple[int, ...]]]:
        slots = self.executor.slots
        return {
            slot: (
                int(slots.generation[slot]),
                int(slots.planned[slot]),
                tuple(slots.blocks_of(slot).tolist()),
            )
            for slot in range(slots.num_slots)
            if slots.live[slot]
        }

    def heartbeat(self) -> None:
        if self.executor.end.attach_id:
            self.sign_of_life_s = self.now
        self.executor.heartbeat(self.now)

    def pump(self, who: int, chunk: int, max_admits: int) -> None:
        """Run a round without faults: plan, deliver, compute, deliver."""
        stream = self.streams[self.schedulers[who].name]
        if stream is None:
            return
        self.plan(who, chunk, max_admits)
        while stream.down:
            self.deliver_down(stream)
        while self.executor.queue or self.executor.running:
            self.start()
            self.finish()
        while stream.up:
            self.deliver_up(stream)

    def check(self) -> None:
        """Check the invariants that hold after every event."""
        end = self.executor.end
        assert end.last_received_step_id - end.acked_step_id <= self.window
        assert end.last_completed_step_id == self.num_executed
        assert (end.attach_id > 0) == (self.attached is not None)
        for scheduler in self.schedulers:
            scheduler.check()
            assert scheduler.end.num_inflight <= self.window
            assert scheduler.end.num_inflight == len(scheduler.in_flight)

    def mend(self, who: int, *, take_over: bool) -> None:
        """
        Take one of the steps by which a scheduler gets its executor back: open a session or
        connect.
        """
        scheduler = self.schedulers[who]
        stream = self.streams[scheduler.name]
        if scheduler.end.state in (LinkState.CLOSED, LinkState.LOST):
            self.open(who, take_over=take_over, answer_arrives=True)
        elif stream is None or stream.is_cut:
            self.connect(who)

    def settle(self, who: int) -> None:
        """Let every request end without faults, with exactly its tokens and all blocks free."""
        scheduler = self.schedulers[who]
        for _ in range(MAX_SETTLE_ROUNDS):
            if not scheduler.has_work():
                break
            self.mend(who, take_over=True)
            self.resume(who)
            self.late_detach(0)
            self.pump(who, 3, 2)
            self.check()
        assert not scheduler.has_work(), "requests are stuck although nothing fails any more"
        for request in scheduler.requests:
            check_tokens(request)


def check_tokens(request: ModelRequest) -> None:
    """Check that outputs are the deterministic function of the prompt, complete unless aborted."""
    assert request.place is Place.ENDED
    assert request.aborted or request.is_complete
    tokens = list(request.prompt)
    for token in request.outputs:
        assert token == next_token(identity_of(tokens))
        tokens.append(token)
