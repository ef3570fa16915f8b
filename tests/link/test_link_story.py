"""Both ends joined by hand: a broken stream, a diverged state and a new boot."""

from __future__ import annotations

import pytest

from tandem.errors import SessionLost
from tandem.link.batch import Batch
from tandem.link.codec.wire import decode_request, decode_response, encode_attach, encode_response
from tandem.link.executor_end import ExecutorEnd
from tandem.link.scheduler_end import LinkState, SchedulerEnd
from tandem.link.slots.slot_state import SlotState
from tests.link.values import admission, ints, result, rows, scheduler_id

FIRST = Batch(admits=(admission(0, 1, 5, [1, 2]),), **rows((0, 0, 5, 1)))
SECOND = Batch(**rows((0, 5, 1, 1)))
THIRD = Batch(append_slot=ints(0), append_block=ints(3), **rows((0, 6, 1, 1)))


class Pair:
    """A scheduler's end and an executor's, each with its own mirror of two slots of eight blocks."""

    def __init__(self) -> None:
        self.scheduler = SchedulerEnd()
        self.mine = SlotState(2, 4, 4, 8)
        self.boot("first")

    def boot(self, boot_id: str) -> None:
        self.executor = ExecutorEnd(boot_id, 4)
        self.theirs = SlotState(2, 4, 4, 8)

    def open(self) -> None:
        epoch = self.executor.open_session(scheduler_id("a"), False, 10.0, 0.0)
        self.theirs.reset()
        self.mine.reset()
        self.scheduler.open(self.executor.boot_id, epoch, 4)

    def attach(self) -> tuple[list[bytes], list[bytes]]:
        """Begin a stream; return the results and the steps that are sent again."""
        attach = decode_request(encode_attach(self.scheduler.attach()))
        attached, replayed = self.executor.attach(attach, 0.0)
        return replayed, self.scheduler.on_attached(decode_response(encode_response(attached)))

    def plan(self, batch: Batch) -> bytes:
        self.mine.apply(batch)
        return self.scheduler.send(batch, self.mine.state_hash)[1]

    def execute(self, raw: bytes) -> bytes:
        """Receive and run a step as an executor does, and compare the state hash at its end."""
        step = decode_request(raw)
        assert self.executor.receive(step, raw, self.executor.attach_id, 0.0)
        self.executor.start(step.step_id, 0.0)
        self.theirs.apply(step.command)
        if self.theirs.state_hash != step.state_hash:
            self.executor.lose(f"state hashes differ after step {step.step_id}")
            raise SessionLost("state hashes differ")
        encoded = encode_response(result(step.step_id, self.executor.boot_id))
        self.executor.complete(step.session_epoch, step.step_id, encoded)
        return encoded


@pytest.fixture
def pair():
    """Return two ends in their first session, attached."""
    pair = Pair()
    pair.open()
    pair.attach()
    return pair


class TestStory:
    def test_broken_stream_recomputes_nothing(self, pair):
        """
        A cut stream recomputes nothing: lost results are replayed, lost steps are resent, and each
        step runs once.
        """
        first, second, third = pair.plan(FIRST), pair.plan(SECOND), pair.plan(THIRD)
        pair.execute(first)
        lost_result = pair.execute(second)
        pair.executor.detach(1, 1)
        pair.scheduler.detach()
        replayed, resent = pair.attach()
        assert [1, 2] == [decode_response(raw).step_id for raw in replayed]
        assert lost_result == replayed[1]
        assert [third] == resent
        replayed.append(pair.execute(third))
        taken = [pair.scheduler.on_result(decode_response(raw)) for raw in replayed]
        assert ([True, True, True], 0) == (taken, pair.scheduler.num_inflight)
        assert pair.mine.state_hash == pair.theirs.state_hash

    def test_diverged_state_ends_the_session(self, pair):
        """
        Slot state that differs between the ends ends the session at the step that shows it, and a
        new session starts clean.
        """
        pair.mine.apply(Batch(admits=(admission(1, 1, 3, [8]),)))
        with pytest.raises(SessionLost, match="hashes differ"):
            pair.execute(pair.plan(FIRST))
        assert not pair.executor.can_execute
        pair.scheduler.detach()
        with pytest.raises(SessionLost, match="hashes differ after step 1"):
            pair.attach()
        pair.scheduler.lose("the executor said so")
        pair.open()
        pair.attach()
        encoded = pair.execute(pair.plan(FIRST))
        assert pair.scheduler.on_result(decode_response(encoded))

    def test_new_boot_starts_over(self, pair):
        """
        A new boot refuses the old session, and a session opened with it counts epochs and steps from 1.
        """
        pair.execute(pair.plan(FIRST))
        pair.boot("second")
        with pytest.raises(SessionLost, match="boot 'first' is gone"):
            pair.attach()
        pair.scheduler.lose("a new boot")
        pair.open()
        pair.attach()
        step = decode_request(pair.plan(FIRST))
        assert (1, 1) == (step.session_epoch, step.step_id)
        assert LinkState.ATTACHED is pair.scheduler.state
