from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from scheduler_svc.executor_client import channel, connection, probe, watch
from tests.scheduler_svc.service.service_bench import ServiceBench

HOUR_S = 3600.0
PATIENT_OPTIONS = {
    "grpc.min_reconnect_backoff_ms",
    "grpc.keepalive_time_ms",
    "grpc.keepalive_timeout_ms",
    "grpc.http2.ping_timeout_ms",
}


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """Let every wait for an executor's answer, or for a connection, last for up to an hour."""
    for name in ("DESCRIBE_DEADLINE_S", "SEEK_DEADLINE_S", "OPEN_DEADLINE_S"):
        monkeypatch.setattr(connection, name, HOUR_S)
    options = [
        (name, int(HOUR_S * 1000) if name in PATIENT_OPTIONS else value)
        for name, value in channel.CHANNEL_OPTIONS
    ]
    monkeypatch.setattr(channel, "CHANNEL_OPTIONS", options)


@pytest.fixture
def one_by_one(monkeypatch):
    """Ask no address before the one before it has answered, however slow the machine is."""
    monkeypatch.setattr(probe, "HEAD_START_S", 3600.0)


@pytest.fixture
def make_bench(tmp_path: Path, monkeypatch) -> Iterator[Callable[..., ServiceBench]]:
    """
    Yield a function that makes a service; with a real link, time limits against executors are an
    hour.
    """
    benches: list[ServiceBench] = []

    def make(**settings) -> ServiceBench:
        if settings.get("has_real_link"):
            monkeypatch.setattr(watch, "STALLED_AFTER_S", HOUR_S)
            settings = {"lost_after_s": HOUR_S, "recovery_timeout_s": HOUR_S} | settings
        benches.append(ServiceBench(tmp_path / str(len(benches)), **settings))
        return benches[-1]

    yield make
    for bench in benches:
        bench.close()


@pytest.fixture
def bench(make_bench) -> ServiceBench:
    """Return a service with an attached executor."""
    bench = make_bench()
    bench.link.boot("boot-1")
    return bench


@pytest.fixture
def deaths(monkeypatch, bench):
    """Return the list of steps that the core is told to blame."""
    told: list[int | None] = []
    lose = type(bench.loop._fate).lost

    def lost(fate, member, event, now):
        told.append(event.died_in)
        lose(fate, member, event, now)

    monkeypatch.setattr(type(bench.loop._fate), "lost", lost)
    return told
