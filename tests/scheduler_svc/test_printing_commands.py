"""Commands that print results and are stopped, or cannot print them."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

SIMULATE = [sys.executable, "-m", "scheduler_svc.simulator", "--requests=3", "--json"]
MEASURE = [sys.executable, "-m", "scheduler_svc.bench", "--turns=1000000", "--running=1"]


class TestEndings:
    def test_full_disk_is_one_line(self):
        """
        Where the output cannot be written a command says so in one line and exits with 1.
        """
        with Path("/dev/full").open("w") as full:
            ran = subprocess.run(
                SIMULATE, stdout=full, stderr=subprocess.PIPE, text=True, check=False
            )
        assert 1 == ran.returncode
        said = "simulate: cannot write the output: No space left on device"
        assert said == ran.stderr.splitlines()[-1]
        assert "Traceback" not in ran.stderr

    def test_reader_that_left_ends_it_quietly(self):
        """
        A command whose reader left exits with 1 and says nothing about it.
        """
        with subprocess.Popen(
            SIMULATE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            process.stdout.close()
            said = process.stderr.read()
        assert 1 == process.returncode
        assert [line for line in said.splitlines() if not line.startswith("simulated ")] == []

    def test_ctrl_c_ends_a_measurement_quietly(self):
        """
        A benchmark that Ctrl-C interrupts exits with 130 and prints no traceback.
        """
        with subprocess.Popen(
            MEASURE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            process.stdout.readline()
            process.send_signal(signal.SIGINT)
            said = process.stderr.read()
        assert (130, "") == (process.returncode, said)
