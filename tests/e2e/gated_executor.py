"""
`python -m tests.e2e.gated_executor`: the real executor with steps that wait at a gate, the file
that $STEP_GATE names. While the file that $HOST_LIMIT names exists, a suspension finds so many
bytes of free memory on the host as it says.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

from executor_svc.device.idle_threads import let_idle_threads_sleep
from executor_svc.profile.quiet import silence_profiler

let_idle_threads_sleep(os.environ)
silence_profiler(os.environ)

import executor_svc.__main__ as executor_main  # noqa: E402  # these import PyTorch, which reads that
import executor_svc.engine as executor_engine  # noqa: E402
import executor_svc.memory.kv_memory as executor_kv_memory  # noqa: E402
from executor_svc.step.runner import ModelRunner  # noqa: E402
from tandem.link.batch import Batch  # noqa: E402
from tandem.link.commands import KvMode  # noqa: E402
from tandem.link.results import StepResult  # noqa: E402
from tests.e2e.step_gate import StepGate  # noqa: E402


class GatedRunner(ModelRunner):
    """
    Attributes:
        gate: Gate at which steps wait.
    """

    gate: StepGate

    def launch(self, batch: Batch, step_id: int) -> Callable[[], StepResult]:
        """
        Compute when the gate allows it; steps of id 0, which warm up, and steps without rows always
        may.
        """
        if step_id and len(batch.row_slot):
            self.gate.pass_through()
        return super().launch(batch, step_id)

    def suspend(self, mode: KvMode) -> None:
        """Suspend on a host with as much free memory as the file of the limit says, if it exists."""
        file = Path(os.environ["HOST_LIMIT"])
        if not file.exists():
            return super().suspend(mode)
        left = int(file.read_text())
        with patch.object(executor_kv_memory, "available_bytes", lambda _device: left):
            return super().suspend(mode)


if __name__ == "__main__":
    GatedRunner.gate = StepGate(Path(os.environ["STEP_GATE"]))
    vars(executor_engine)["ModelRunner"] = GatedRunner
    sys.exit(executor_main.main())
