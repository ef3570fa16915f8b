from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from scheduler_svc import executor_connection, executor_probe
from tests.scheduler_svc.loop.service_bench import ServiceBench


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """Whoever waits for an executor's answer waits for an hour."""
    for name in ("DESCRIBE_DEADLINE_S", "SEEK_DEADLINE_S", "OPEN_DEADLINE_S"):
        monkeypatch.setattr(executor_connection, name, 3600.0)


@pytest.fixture
def one_by_one(monkeypatch):
    """No address is asked before the one before it has answered, however slow the machine is."""
    monkeypatch.setattr(executor_probe, "HEAD_START_S", 3600.0)


@pytest.fixture
def make_bench(tmp_path: Path) -> Iterator[Callable[..., ServiceBench]]:
    benches: list[ServiceBench] = []

    def make(**settings) -> ServiceBench:
        benches.append(ServiceBench(tmp_path / str(len(benches)), **settings))
        return benches[-1]

    yield make
    for bench in benches:
        bench.close()


@pytest.fixture
def bench(make_bench) -> ServiceBench:
    """A service with an attached executor."""
    bench = make_bench()
    bench.link.boot("boot-1")
    return bench


@pytest.fixture
def deaths(monkeypatch, bench):
    """Which steps the core was told to blame."""
    told: list[int | None] = []
    lose = type(bench.loop._fate).lost

    def lost(fate, cause, died_in, may_live, now):
        told.append(died_in)
        lose(fate, cause, died_in, may_live, now)

    monkeypatch.setattr(type(bench.loop._fate), "lost", lost)
    return told
