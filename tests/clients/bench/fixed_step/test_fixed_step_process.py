"""The fixed-step executor as a process: reports on a signal, refusals, exit codes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest

DEADLINE_S = 180.0
REPORT_KEYS = {"steps", "rows", "busy_ns", "idle_ns", "host_ns", "idle_percent", "cpu_ns"}


@pytest.fixture
def started(tmp_path):
    """A process that listens."""
    ready = tmp_path / "ready"
    command = [sys.executable, "-m", "tandem_bench.fixed_step", f"--ready-file={ready}"]
    process = subprocess.Popen(
        [*command, "--listen=127.0.0.1:0", "--step-ms=1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = iter(range(int(DEADLINE_S * 20)))
        while not ready.exists() and process.poll() is None:
            next(deadline)
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.05)
        yield process
    finally:
        process.kill()
        process.communicate()


class TestReports:
    def test_report_on_signal_and_at_the_end(self, started):
        """
        SIGUSR1 prints one line of JSON and the process goes on; SIGTERM prints the last, exit code 0.
        """
        started.send_signal(signal.SIGUSR1)
        first = json.loads(started.stdout.readline())
        started.send_signal(signal.SIGTERM)
        output, _ = started.communicate(timeout=DEADLINE_S)
        assert REPORT_KEYS == set(first) == set(json.loads(output))
        assert 0 == started.returncode

    def test_report_that_nobody_reads_ends_nothing(self, started):
        """
        A reader of the reports that has gone costs one line in the log, and the exit code stays 0.
        """
        started.stdout.close()
        started.send_signal(signal.SIGTERM)
        log = started.stderr.read()
        assert 0 == started.wait(DEADLINE_S)
        assert "the report cannot be written: Broken pipe" in log
        assert "Traceback" not in log
