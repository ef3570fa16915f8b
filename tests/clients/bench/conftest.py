"""Benchmarks that wait for their processes on machines that are busy with other tests."""

import pytest

from tests.clients.python.fake_server import fake_server

NEVER_S = 3600.0


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Let processes of a benchmark take as long to start and to get somewhere as a test may last.
    """
    for limit in ("link.processes.START_DEADLINE_S", "stream.command._LIMIT_S"):
        monkeypatch.setattr(f"tandem_bench.{limit}", NEVER_S)


@pytest.fixture
def server():
    """A fake server that answers well unless told otherwise."""
    with fake_server() as running:
        yield running
