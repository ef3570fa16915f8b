"""`tandem simulate` hands everything to the simulator and its exit code back."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


def simulate(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tandem_client", "simulate", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


class TestSimulate:
    @pytest.mark.slow
    def test_results_come_from_the_simulator(self):
        """
        The command runs the simulator in a process of its own with every argument it got, and its
        stdout is the simulator's.
        """
        outcome = simulate("--json", "--requests", "5", "--prompt-len=50", "--seed=3")
        printed = json.loads(outcome.stdout)
        assert 0 == outcome.returncode
        assert (3, 5) == (printed["settings"]["seed"], printed["results"]["requests"]["finished"])

    @pytest.mark.slow
    def test_errors_and_help_are_the_simulators(self):
        """
        A wrong value exits with the simulator's line and code, and --help lists its options.
        """
        wrong, shown = simulate("--requests=none"), simulate("--help")
        assert (2, "") == (wrong.returncode, wrong.stdout)
        assert "requests is 'none'" in wrong.stderr
        assert 0 == shown.returncode
        assert "--schedule-policy" in shown.stdout
