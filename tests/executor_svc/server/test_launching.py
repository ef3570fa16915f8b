"""
Runners on a device that works by itself: steps are launched before earlier results are known.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import grpc
import numpy as np
import pytest

from executor_svc.server.loaded import DEPTH, Engine
from executor_svc.server.server import ExecutorServer
from tandem.errors import InternalError, SessionLost, TandemError
from tandem.link.batch import Batch
from tandem.link.results import StepFailed, StepResult
from tandem_bench.fixed_step.accounting import IdleAccount
from tandem_bench.fixed_step.engine import load_fixed_step
from tandem_bench.fixed_step.settings import read_settings
from tests.executor_svc.server.harness import (
    DEADLINE_S,
    RunningServer,
    StepClient,
    is_loaded,
    refusal,
    wait_until,
)


class GatedDevice:
    """A launching runner that leaves its results in the device while `gate` is closed."""

    def __init__(self, runner: object) -> None:
        self._runner = runner
        self.gate = threading.Event()
        self.gate.set()
        self.launched: list[int] = []
        self.collected: list[int] = []
        self.fails_with: Exception | None = None
        self.holds_after_first: threading.Event | None = None
        self.before_launch: Callable[[int], None] = lambda _: None
        self.spoils: Callable[[StepResult], StepResult] = lambda result: result
        self.num_resets = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._runner, name)

    def reset(self) -> None:
        assert len(self.launched) == len(self.collected)
        self.num_resets += 1
        self._runner.reset()

    def launch(self, delta: Batch, step_id: int) -> Callable[[], StepResult]:
        self.before_launch(step_id)
        self.launched.append(step_id)
        collect = self._runner.launch(delta, step_id)

        def wait() -> StepResult:
            assert self.gate.wait(DEADLINE_S)
            if self.collected and self.holds_after_first is not None:
                assert self.holds_after_first.wait(DEADLINE_S)
            self.collected.append(step_id)
            if self.fails_with is not None:
                raise self.fails_with
            return self.spoils(collect())

        return wait


@pytest.fixture
def executor() -> Iterator[RunningServer]:
    settings = read_settings(["--step-ms", "0", "--rows", "4"])
    devices: list[GatedDevice] = []

    def load(boot_id: str) -> Engine:
        engine = load_fixed_step(settings, boot_id, IdleAccount())
        devices.append(GatedDevice(engine.runner))
        return replace(
            engine,
            runner=devices[0],
            is_sticky=lambda error: "gone" in str(error),
        )

    fatal: list[TandemError] = []
    server = ExecutorServer(load, fatal.append)
    server.listen("127.0.0.1:0")
    server.load()
    running = RunningServer(server, grpc.insecure_channel(server.address), fatal, devices)
    wait_until(lambda: bool(fatal) or is_loaded(running))
    yield running
    devices[0].gate.set()
    running.server.stop()
    running.channel.close()


def device_of(executor: RunningServer) -> GatedDevice:
    return executor.runners[0]


class TestLaunching:
    def test_next_step_is_launched_before_a_result_is_known(self, executor):
        """
        The device is given a step while another runs, and no more than that.
        """
        device, client = device_of(executor), StepClient(executor)
        stream = client.attach()
        device.gate.clear()
        for _ in range(DEPTH + 2):
            stream.send(client.plan())
        wait_until(lambda: len(device.launched) == DEPTH)
        assert [] == device.collected
        device.gate.set()
        wait_until(lambda: client.apply(stream) == DEPTH + 2)
        assert [1, 2, 3, 4] == device.launched == device.collected
        assert [1, 2, 3, 4] == [result.step_id for result in client.results]

    def test_oldest_launched_step_is_the_running_one(self, executor):
        """
        Heartbeats tell of the oldest step that is not completed.
        """
        device, client = device_of(executor), StepClient(executor)
        stream = client.attach()
        device.gate.clear()
        for _ in range(2):
            stream.send(client.plan())
        wait_until(lambda: len(device.launched) == 2)
        assert 1 == executor.server._link.beat().running_step_id
        device.gate.set()
        wait_until(lambda: client.apply(stream) == 2)
        assert 0 == executor.server._link.beat().running_step_id

    def test_failure_found_late_ends_the_session_at_its_step(self, executor):
        """
        A device that fails a step after the next was launched reports that step; no later one runs.
        """
        device, client = device_of(executor), StepClient(executor)
        stream = client.attach()
        device.gate.clear()
        device.fails_with = RuntimeError("bad sectors")
        for _ in range(4):
            stream.send(client.plan())
        wait_until(lambda: len(device.launched) == DEPTH)
        device.gate.set()
        wait_until(lambda: bool(stream.of(StepFailed)))
        assert [1] == [failure.step_id for failure in stream.of(StepFailed)]
        assert "bad sectors" in stream.of(StepFailed)[0].message
        assert [1] == device.collected
        device.fails_with, device.collected = None, list(device.launched)

        fresh = StepClient(executor)
        assert 1 == fresh.step(fresh.attach()).step_id

    @pytest.mark.parametrize("error", [RuntimeError("worse"), SessionLost("other slots")])
    def test_launch_that_fails_after_its_predecessor_has_failed_changes_nothing(
        self, executor, error
    ):
        """
        A step is never reported when its predecessor fails during its launch, however that launch
        ends, and the process lives on.
        """
        device, client = device_of(executor), StepClient(executor)
        stream = client.attach()
        device.gate.clear()
        device.fails_with = RuntimeError("bad sectors")

        def fail_second(step_id: int) -> None:
            if step_id == 2:
                device.gate.set()
                wait_until(lambda: bool(stream.of(StepFailed)))
                raise error

        device.before_launch = fail_second
        for _ in range(2):
            stream.send(client.plan())
        wait_until(lambda: bool(stream.of(StepFailed)))
        device.fails_with, device.before_launch = None, lambda _: None

        fresh = StepClient(executor)
        assert 1 == fresh.step(fresh.attach()).step_id
        assert [1] == [failure.step_id for failure in stream.of(StepFailed)]
        assert [] == executor.fatal

    def test_device_that_is_gone_ends_the_process(self, executor):
        """
        A sticky failure found late is as fatal as one found at once.
        """
        device, client = device_of(executor), StepClient(executor)
        device.fails_with = RuntimeError("the device is gone")
        client.attach().send(client.plan())
        wait_until(lambda: bool(executor.fatal))
        device.collected = list(device.launched)

    def test_process_that_has_failed_does_not_say_that_it_drains(self, executor):
        """
        A result that cannot be sent ends the process, and the stream by that error, as a stop in good order would
        clear the step of blame; no session begins any more.
        """
        device, client = device_of(executor), StepClient(executor)
        stream = client.attach()
        device.spoils = lambda result: replace(result, token=result.token.astype(np.float64))
        stream.send(client.plan())
        wait_until(lambda: bool(executor.fatal))
        refused = refusal(lambda: executor.open_session("one"))
        executor.server.stop()
        ended = stream.ended_with()
        assert {InternalError} == {type(error) for error in (*executor.fatal, refused, ended)}
        assert {executor.fatal[0].message} == {refused.message, ended.message}
        assert [] == stream.of(StepResult)

    def test_new_session_waits_for_what_was_launched(self, executor):
        """
        Slots are reset only when the device has done all it was given.
        """
        device, client = device_of(executor), StepClient(executor)
        stream = client.attach()
        device.gate.clear()
        for _ in range(2):
            stream.send(client.plan())
        wait_until(lambda: len(device.launched) == 2)
        num_resets = device.num_resets
        opened = threading.Thread(target=lambda: executor.open_session("two", take_over=True))
        opened.start()
        assert isinstance(stream.ended_with(), SessionLost)
        assert num_resets == device.num_resets
        device.gate.set()
        opened.join(DEADLINE_S)
        assert num_resets + 1 == device.num_resets

    def test_every_step_that_a_new_session_waits_for_is_watched(self, executor, monkeypatch):
        """
        The second of two launched steps may hang like the first, and then ends the process that a new session waits
        for.
        """
        device, client = device_of(executor), StepClient(executor)
        stream = client.attach()
        device.gate.clear()
        for _ in range(2):
            stream.send(client.plan())
        wait_until(lambda: len(device.launched) == 2)
        second = threading.Event()
        refused: list[TandemError] = []
        opened = threading.Thread(
            target=lambda: refused.append(
                refusal(lambda: executor.open_session("two", take_over=True))
            )
        )
        opened.start()
        assert isinstance(stream.ended_with(), SessionLost)
        device.holds_after_first = second
        device.gate.set()
        wait_until(lambda: device.collected == [1])
        monkeypatch.setattr("tandem.link.step_cost.ALWAYS_ALLOWED_S", 0.0)
        wait_until(lambda: bool(executor.fatal))
        opened.join(DEADLINE_S)
        second.set()
        assert "stuck" in executor.fatal[0].message
        assert [executor.fatal[0].message] == [error.message for error in refused]
