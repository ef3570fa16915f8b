"""PyTorch's profiler writes nothing of its own where an executor computes on a CPU."""

from __future__ import annotations

import subprocess
import sys

import pytest

RECORD = """
import os, threading
from executor_svc.profile.quiet import silence_profiler

silence_profiler(os.environ)
import torch
from executor_svc.profile.torch_recorder import begin_in_this_thread, profile

{begin}
recorded = []

def record():
    with profile(use_kineto=True) as found:
        torch.ones(3).add(1)
    recorded.extend(event.name for event in found.function_events)

thread = threading.Thread(target=record)
thread.start()
thread.join()
assert "aten::add" in recorded, recorded
"""


@pytest.mark.slow
class TestProfilerStart:
    def test_recording_in_another_thread_is_silent(self):
        """
        Once the profiler was started in the main thread another one records, and nothing is written.
        """
        outcome = subprocess.run(
            [sys.executable, "-c", RECORD.format(begin="begin_in_this_thread()")],
            capture_output=True,
            text=True,
            check=True,
        )

        assert ("", "") == (outcome.stdout, outcome.stderr)
