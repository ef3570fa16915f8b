"""A server with other ranks, which are played by the tests."""

from __future__ import annotations

from dataclasses import replace

import pytest

from executor_svc.engine import load_engine
from executor_svc.server.loaded import Followers
from tandem.errors import InternalError, OutOfMemory
from tandem.link.codec.wire import decode_request
from tandem.link.commands import KvMode, Resume, Suspend
from tandem.link.results import StepFailed
from tests.executor_svc.server import harness
from tests.executor_svc.server.harness import StepClient, wait_until


class PlayedRanks(Followers):
    """Ranks that note what they get, and fail when told to."""

    exist = True

    def __init__(self) -> None:
        self.got: list[object] = []
        self.report = None

    def pass_on(self, raw):
        self.got.append(decode_request(raw).step_id)

    def reset(self):
        self.got.append("reset")

    def lose(self):
        self.got.append("lost")

    def check(self, checksum):
        self.got.append(("check", checksum))

    def wait(self):
        self.got.append("waited")

    def on_failure(self, report):
        self.report = report


@pytest.fixture
def ranks(monkeypatch):
    """Return the ranks that the next servers have."""
    ranks = PlayedRanks()

    def load(*arguments):
        return replace(
            load_engine(*arguments),
            followers=ranks,
            checksum=lambda: 42,
            compare_ranks=lambda: ranks.got.append("compared"),
        )

    monkeypatch.setattr(harness, "load_engine", load)
    return ranks


class TestPassingOn:
    def test_every_command_is_passed_on_in_order(self, ranks, start):
        """
        A session's reset and each step go to the other ranks; resets, suspensions and resumptions
        are waited for.
        """
        client = StepClient(start())
        stream = client.attach()
        client.step(stream)
        for command in (Suspend(kv_mode=KvMode.PERSIST), Resume()):
            stream.send(client.plan(command))
        wait_until(lambda: client.apply(stream) == 3)
        assert ["reset", "waited", 1, 2, "waited", 3, "waited"] == ranks.got

    def test_device_state_is_compared_at_times(self, ranks, start, monkeypatch):
        """
        After a fixed number of steps the ranks get the checksum of this one's tokens, and those of
        the stage compare what they computed.
        """
        monkeypatch.setattr("executor_svc.server.runner_thread.CHECK_STEPS", 8)
        client = StepClient(start())
        stream = client.attach()
        for _ in client.steps(stream, 7):
            continue
        assert ("check", 42) not in ranks.got
        client.step(stream)
        wait_until(lambda: ranks.got[-2:] == [("check", 42), "compared"])

    def test_refused_step_is_told(self, ranks, start):
        """
        A step with another state hash ends the session, and the other ranks are told.
        """
        client = StepClient(start())
        stream = client.attach()
        stream.send(client.end.send(client.next_batch(), 1)[1])
        stream.ended_with()
        assert ["reset", "waited", 1, "lost"] == ranks.got


class TestFailing:
    def test_rank_out_of_memory_fails_the_running_step_and_the_process(self, ranks, start):
        """
        A rank that runs out of memory while this one waits for it makes the step fail with
        OUT_OF_MEMORY, not sticky, so that smaller steps are planned; then the process ends.
        """
        running = start()
        client = StepClient(running)
        stream = client.attach()
        running.runner.gate.clear()
        stream.send(client.plan())
        wait_until(lambda: running.runner.is_waiting)
        ranks.report(OutOfMemory("rank 1 of the model: lower max_total_tokens"))
        wait_until(lambda: bool(stream.of(StepFailed)))
        failed = stream.of(StepFailed)[0]
        assert ("OUT_OF_MEMORY", False) == (failed.reason, failed.sticky)
        assert [InternalError] == [type(error) for error in running.fatal]

    def test_any_failed_step_ends_the_process(self, ranks, start):
        """
        Where there are other ranks, a step that raises is reported, and the process ends.
        """
        running = start()
        client = StepClient(running)
        stream = client.attach()
        running.runner.fails_with = RuntimeError("a kernel failed")
        stream.send(client.plan())
        wait_until(lambda: bool(running.fatal))
        assert "a kernel failed" in stream.of(StepFailed)[0].message
        assert isinstance(running.fatal[0], InternalError)
