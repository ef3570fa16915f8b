"""Rank 0 and another rank over a real socket, with runners that compute nothing."""

from __future__ import annotations

import queue
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass, field

import pytest

from executor_svc.ranks.channel import Channel, ChannelClosed
from executor_svc.ranks.follower import Follower
from executor_svc.ranks.leader import FollowingRanks
from executor_svc.server.loaded import Engine
from tandem.errors import InternalError, InvalidModel, OutOfMemory, SessionLost, TandemError
from tandem.executor.v1.executor_service_pb2 import DescribeResponse
from tandem.link.batch import Batch
from tandem.link.codec.wire import encode_step
from tandem.link.commands import Command, KvMode, Step, Suspend

LIMIT_S = 60.0


class FakeRunner:
    """A runner that notes what it is told, and fails when told to."""

    def __init__(self) -> None:
        self.done: list[object] = []
        self.state_hash = 5
        self.slots = None
        self.fails_with: Exception | None = None

    def reset(self):
        self.done.append("reset")

    def suspend(self, mode):
        self.done.append(mode)

    def resume(self):
        self.done.append("resume")

    def launch(self, _batch, step_id):
        if self.fails_with is not None:
            raise self.fails_with
        self.done.append(step_id)
        return lambda: None


@dataclass
class Pair:
    """Both ends; errors that would end a process are kept instead."""

    runner: FakeRunner = field(default_factory=FakeRunner)
    checksum: int = 9
    differs: bool = False
    reported: queue.SimpleQueue[TandemError] = field(default_factory=queue.SimpleQueue)
    ends: dict[int, queue.SimpleQueue[TandemError]] = field(
        default_factory=lambda: {rank: queue.SimpleQueue() for rank in (0, 1)}
    )

    def __post_init__(self) -> None:
        here, there = socket.socketpair()
        self.channels = Channel(here, 1), Channel(there, 0)
        self.leader = FollowingRanks([self.channels[0]], self.reported.put, end=self.ends[0].put)
        self.follower = Follower(self.channels[1], end=self.ends[1].put)
        self.leader.start()
        self.follower.start()

    def follow(self, error: Exception | None = None) -> None:
        """Start the other rank's loop; its loading fails with the error."""

        def load() -> Engine:
            if error is not None:
                raise error
            return Engine(
                runner=self.runner,
                description=DescribeResponse(),
                tokenizer_files=(),
                checksum=lambda: self.checksum,
                compare_ranks=self.compare_ranks,
            )

        self.thread = threading.Thread(target=self.follower.run, args=(load,), daemon=True)
        self.thread.start()
        if error is None:
            self.leader.begin()

    def compare_ranks(self) -> None:
        if self.differs:
            raise InternalError("other hidden states")

    def step(self, step_id: int, command: Command | None = None, state_hash: int = 5) -> None:
        step = Step(
            session_epoch=1,
            step_id=step_id,
            acked_step_id=0,
            state_hash=state_hash,
            command=command or Batch(),
        )
        self.leader.pass_on(encode_step(step))


@pytest.fixture
def pair(monkeypatch):
    monkeypatch.setattr("executor_svc.ranks.follower.REPORTED_S", 0.1)
    monkeypatch.setattr("executor_svc.ranks.follower.AGREE_S", 0.5)
    pair = Pair()
    yield pair
    pair.leader.end()


class TestFollowing:
    def test_commands_are_done_in_order_and_awaited(self, pair):
        """
        Steps, resets and suspensions reach the other rank in order; `wait` returns once it has done
        the last one.
        """
        pair.follow()
        pair.leader.reset()
        for step_id in range(1, 21):
            pair.step(step_id)
        pair.step(21, Suspend(kv_mode=KvMode.OFFLOAD))
        pair.leader.wait()
        assert ["reset", *range(1, 21), KvMode.OFFLOAD, 21] == pair.runner.done

    def test_shutdown_ends_the_loop(self, pair):
        """
        The other rank returns when rank 0 ends in good order, and neither end counts as a death.
        """
        pair.follow()
        pair.leader.end()
        pair.thread.join(LIMIT_S)
        assert not pair.thread.is_alive()
        assert pair.ends[0].empty()
        assert pair.ends[1].empty()

    def test_equal_checksums_go_on_and_others_fail(self, pair):
        """
        A rank whose device state has another checksum than that of rank 0 reports it.
        """
        pair.follow()
        pair.leader.check(9)
        pair.leader.reset()
        pair.leader.wait()
        assert pair.reported.empty()
        pair.leader.check(8)
        error = pair.reported.get(timeout=LIMIT_S)
        assert error.message == (
            "rank 1 of the model: its tokens differ from those of rank 0 on the device: checksum "
            "0x9, there 0x8"
        )

    def test_other_hidden_states_fail(self, pair):
        """
        A rank with the same tokens whose stage computed different hidden states reports it.
        """
        pair.follow()
        pair.differs = True
        pair.leader.check(9)
        error = pair.reported.get(timeout=LIMIT_S)
        assert "rank 1 of the model: other hidden states" == error.message

    def test_shutdown_ends_a_rank_whose_step_does_not(self, monkeypatch):
        """
        A rank whose step waits for one that has shut down ends its process all the same.
        """
        monkeypatch.setattr("executor_svc.ranks.follower.SHUTDOWN_S", 0.2)
        pair, begun, release = Pair(), threading.Event(), threading.Event()

        def launch(*_):
            begun.set()
            release.wait(LIMIT_S)
            return lambda: None

        monkeypatch.setattr(pair.runner, "launch", launch)
        pair.follow()
        pair.step(1)
        assert begun.wait(LIMIT_S)
        pair.leader.end()
        assert "rank 0 ended" in pair.ends[1].get(timeout=LIMIT_S).message
        release.set()

    def test_shutdown_waits_for_no_rank_that_reads_nothing(self):
        """
        Rank 0 ends at once beside a rank that takes no bytes.
        """
        here, there = socket.socketpair()
        here.setblocking(False)
        with suppress(BlockingIOError):
            while True:
                here.send(bytes(1 << 16))
        ends: queue.SimpleQueue[TandemError] = queue.SimpleQueue()
        leader = FollowingRanks([Channel(here, 1)], ends.put, end=ends.put)
        ending = threading.Thread(target=leader.end, daemon=True)
        ending.start()
        ending.join(LIMIT_S)
        assert not ending.is_alive()
        there.close()


class TestLostSessions:
    def test_step_refused_by_all_is_forgotten_with_the_session(self, pair):
        """
        Where both ranks refuse a step, they go on with the next session.
        """
        pair.follow()
        pair.step(1, state_hash=6)
        pair.leader.lose()
        pair.leader.reset()
        pair.leader.wait()
        pair.step(1)
        pair.leader.reset()
        pair.leader.wait()
        assert [1, "reset", 1, "reset"] == pair.runner.done

    def test_step_refused_by_one_rank_alone_fails(self, pair):
        """
        A rank that refuses what rank 0 took, or takes what that refused, reports it.
        """
        pair.follow()
        pair.runner.fails_with = SessionLost("slot 3 is not live")
        pair.step(1)
        error = pair.reported.get(timeout=LIMIT_S)
        assert "refused a step that rank 0 took: slot 3 is not live" in error.message

    def test_step_refused_by_rank_0_alone_fails(self, pair):
        """
        A rank that took a step which rank 0 refused reports it.
        """
        pair.follow()
        pair.step(1)
        pair.leader.lose()
        error = pair.reported.get(timeout=LIMIT_S)
        assert "rank 0 refused a step that this rank took" in error.message


class TestFailures:
    def test_failed_load_is_reported_with_its_reason(self, pair):
        """
        A rank that cannot load says why to rank 0, with the class of its error.
        """
        pair.follow(InvalidModel("a shard is missing"))
        error = pair.reported.get(timeout=LIMIT_S)
        assert isinstance(error, InvalidModel)
        assert "rank 1 of the model: a shard is missing" == error.message

    def test_lack_of_memory_is_the_cause_of_a_broken_step(self, pair):
        """
        Where a rank runs out of memory, a step that broke on rank 0 counts as out of memory too.
        """
        pair.follow()
        pair.runner.fails_with = OutOfMemory("lower max_total_tokens")
        pair.step(1)
        cause = pair.leader.cause_of(RuntimeError("connection closed by peer"))
        assert isinstance(cause, OutOfMemory)

    def test_closed_connection_ends_both(self, pair):
        """
        When a connection ends, the process at its other end does.
        """
        pair.follow()
        pair.channels[1]._socket.shutdown(socket.SHUT_RDWR)
        assert "rank 1 of the model is gone" == pair.ends[0].get(timeout=LIMIT_S).message
        assert "rank 0 of the model is gone" == pair.ends[1].get(timeout=LIMIT_S).message
        with pytest.raises((InternalError, ChannelClosed)):
            pair.step(1)
