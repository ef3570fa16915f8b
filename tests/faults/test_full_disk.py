"""Services that cannot write a single line of their logs."""

from __future__ import annotations

import signal

import pytest

from tandem_client import NO_RETRY, Client
from tests.e2e.step_gate import StepGate
from tests.faults.processes.rig import Rig, RigSettings
from tests.waiting import wait_until

NUM_TOKENS = 200


@pytest.mark.slow
class TestFullDisk:
    def test_services_live_without_their_logs(self, tiny_model, zygote, tmp_path):
        """
        Services with stderr on a full device start, serve, recover and stop as usual.
        """
        for name in ("executor-a", "scheduler-1"):
            (tmp_path / f"{name}.log").symlink_to("/dev/full")
        gate = StepGate(tmp_path / "gate")
        rig = Rig(tmp_path, RigSettings(model=tiny_model), zygote)
        try:
            rig.start()
            with Client(rig.address, retry=NO_RETRY) as client:
                asked = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0.0}
                expected = client.complete("a full disk", **asked)
                gate.allow(100)
                stream = client.generate("a full disk", **asked)
                next(stream)
                wait_until(lambda: rig.stats().output_tokens > NUM_TOKENS, "more tokens")
                rig.executors[0].signal(signal.SIGKILL)
                gate.open()
                assert expected.text == "".join(stream.text)
            rig.wait_idle()
            scheduler = rig.scheduler.process
            scheduler.terminate()
            wait_until(lambda: scheduler.poll() is not None, "an orderly end")
            assert 0 == scheduler.returncode
            assert [-signal.SIGKILL] == rig.executors[0].deaths
        finally:
            rig.close()
