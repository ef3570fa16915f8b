"""Settings, tiny models and servers on one of them, shared by the executor's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.executor_svc.server.harness import DEADLINE_S, RunningServer, start_server
from tests.model_zoo import FAMILIES
from tests.threads import NUM_THREADS

Start = Callable[..., RunningServer]

torch.set_num_threads(NUM_THREADS)  # also where torch was imported before the variable was set


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Directory of a tiny model by its builder's name, built once per session."""
    built: dict[str, Path] = {}

    def directory(name: str) -> Path:
        if name not in built:
            built[name] = FAMILIES[name](tmp_path_factory.mktemp(name))
        return built[name]

    return directory


@pytest.fixture(scope="session")
def model_dir(zoo: Callable[[str], Path]) -> Path:
    return zoo("llama_mqa")


@pytest.fixture(autouse=True)
def patient_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let calls end with their own errors, however slow the threads are that tell of them."""
    monkeypatch.setattr("executor_svc.server.server._STREAM_END_GRACE_S", DEADLINE_S)


@pytest.fixture
def start(model_dir: Path) -> Iterator[Start]:
    """Start a server with flags; all are stopped at the end, with their gates open."""
    started: list[RunningServer] = []

    def begin(*flags: str, directory: Path = model_dir, **options: object) -> RunningServer:
        started.append(start_server(directory, *flags, **options))
        return started[-1]

    yield begin
    for running in started:
        for runner in running.runners:
            runner.gate.set()
        running.server.stop()
        running.channel.close()


@pytest.fixture
def executor(start: Start) -> RunningServer:
    return start()
