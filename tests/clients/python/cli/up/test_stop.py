"""End of the services that `tandem up` has started."""

from __future__ import annotations

from tandem_client.cli.local_server.service import Service
from tandem_client.cli.local_server.services import STOP_S, RunningServer
from tests.waiting import wait_until

TOGETHER = """
import json, pathlib, signal, sys, time
ready = pathlib.Path(sys.argv[-1])
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
temporary = ready.with_suffix(".tmp")
temporary.write_text(json.dumps({"address": "a:1"}))
temporary.rename(ready)
while not asked:
    time.sleep(0.01)
ready.with_suffix(".asked").touch()
while len(list(ready.parent.glob("*.asked"))) < 2:
    time.sleep(0.01)
"""
"""A service that ends once two of them were asked to."""


class Deaf:
    """A service that hears nothing and has to be killed; a clock passes while it is waited for."""

    def __init__(self, program, number, heard, clock):
        self.program, self._name = program, f"{program}-{number}"
        self._heard, self._clock = heard, clock

    def ask_to_end(self):
        self._heard.append(f"ask {self._name}")

    def wait_or_kill(self, limit_s):
        self._heard.append(f"wait {limit_s:g} s for {self._name}")
        self._clock[0] += limit_s

    def kill(self):
        """Has nothing to kill: the process is one in name only."""


class TestStop:
    def test_executors_end_at_the_same_time(self, tmp_path, monkeypatch):
        """
        All executors are asked to end before one of them is waited for.
        """
        (tmp_path / "together.py").write_text(TOGETHER)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        executors = [Service("executor", "together", [], tmp_path, number) for number in (1, 2)]
        try:
            for executor in executors:
                wait_until(executor.addresses, "a ready file")
            RunningServer(tmp_path, list(executors)).stop(0.0)
            assert [0, 0] == [executor.process.returncode for executor in executors]
        finally:
            for executor in executors:
                executor.kill()

    def test_each_service_is_asked_once_and_deaf_ones_share_a_limit(self, tmp_path, monkeypatch):
        """
        A service is asked to end once, as a second request would break it off; the scheduler comes
        before the executors, and executors that hang are waited for together, not one by one.
        """
        heard, clock = [], [100.0]
        monkeypatch.setattr(
            "tandem_client.cli.local_server.services.time.monotonic", lambda: clock[0]
        )
        services = [Deaf("executor", 1, heard, clock), Deaf("executor", 2, heard, clock)]
        services.append(Deaf("scheduler", 1, heard, clock))
        RunningServer(tmp_path, services).stop(5.0)

        assert [
            "ask scheduler-1",
            f"wait {5 + STOP_S:g} s for scheduler-1",
            "ask executor-1",
            "ask executor-2",
            f"wait {5 + STOP_S:g} s for executor-1",
            "wait 0 s for executor-2",
        ] == heard
