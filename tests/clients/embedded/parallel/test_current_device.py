"""The device on which kernels of a runner are launched, whichever thread lets it compute."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch

from tandem.link.batch import Batch
from tandem.link.results import StepResult
from tandem_embedded import (
    ExecutionBatch,
    GenerationParams,
    InferenceEngine,
    ModelExecutor,
    SimpleTokenizer,
)
from tandem_embedded.backend import geometry_of
from tests.clients.embedded.fake_backend import FakeRunner
from tests.clients.embedded.parallel.fleet import CONFIG, backend_of, check_all, submit_all

DEVICE = "cuda:1"


class CurrentDevice(threading.local):
    """The current device of each thread; a thread begins on the first."""

    name = "cuda:0"


class NotingRunner(FakeRunner):
    """A runner that notes the device on which its kernels would be launched."""

    def __init__(self, current: CurrentDevice) -> None:
        super().__init__(geometry_of(CONFIG))
        self._current = current
        self.devices: list[str] = []

    def execute(self, batch: Batch, step_id: int) -> StepResult:
        self.devices.append(self._current.name)
        return super().execute(batch, step_id)

    def launch(self, batch: Batch, step_id: int) -> Callable[[], StepResult]:
        result = self.execute(batch, step_id)
        return lambda: result

    def reset(self) -> None:
        self.devices.append(self._current.name)
        super().reset()


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> CurrentDevice:
    """The current devices of two GPUs that torch seems to have."""
    found = CurrentDevice()

    @contextmanager
    def on(device: str) -> Iterator[None]:
        before, found.name = found.name, device
        yield
        found.name = before

    monkeypatch.setattr(torch.cuda, "device", on)
    return found


@pytest.mark.parametrize("num_stages", [1, 2])
def test_lone_runner_computes_on_its_device_on_any_thread(current: CurrentDevice, num_stages: int):
    """
    The thread that made an engine and another one that drives it both launch on the runner's device, and have their own current device afterwards.
    """
    runner = NotingRunner(current)
    engine = InferenceEngine(
        CONFIG, backend=backend_of(runner, num_stages, DEVICE), tokenizer=SimpleTokenizer()
    )
    assert "cuda:0" == current.name
    params = GenerationParams(max_tokens=3)
    with ThreadPoolExecutor(1) as other:
        engine.submit_request("one", params)
        other.submit(engine.run).result()
        in_thread = len(runner.devices)
        assert "cuda:0" == other.submit(lambda: current.name).result()
    engine.submit_request("two", params)
    engine.run()
    assert 0 < in_thread < len(runner.devices)
    assert {DEVICE} == set(runner.devices)
    assert "cuda:0" == current.name


def test_each_of_several_runners_computes_on_its_device(current: CurrentDevice):
    """
    Runners on threads of their own launch on their devices, each on its own.
    """
    runners = [NotingRunner(current) for _ in range(2)]
    backends = [
        backend_of(runner, device=f"cuda:{number}") for number, runner in enumerate(runners)
    ]
    with InferenceEngine(CONFIG, backend=backends, tokenizer=SimpleTokenizer()) as engine:
        submit_all(engine)
        check_all(engine)
    assert [{"cuda:0"}, {"cuda:1"}] == [set(runner.devices) for runner in runners]


def test_executor_driven_by_hand_computes_on_its_device(current: CurrentDevice):
    """
    A `ModelExecutor` launches on the device of its backend, not on the caller's.
    """
    runner = NotingRunner(current)
    executor = ModelExecutor(CONFIG, backend_of(runner, device=DEVICE))
    executor.execute(ExecutionBatch())
    executor.reset()
    assert [DEVICE, DEVICE] == runner.devices
    assert "cuda:0" == current.name
