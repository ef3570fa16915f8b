"""
`python -m tests.e2e.gated_executor`: the real executor, whose steps wait at the gate that the file
$STEP_GATE is.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from executor_svc.device.idle_threads import let_idle_threads_sleep
from executor_svc.profile.quiet import silence_profiler

let_idle_threads_sleep(os.environ)
silence_profiler(os.environ)

import executor_svc.__main__ as executor_main  # noqa: E402 - these import PyTorch, which reads that
import executor_svc.engine as executor_engine  # noqa: E402
from executor_svc.step.runner import ModelRunner  # noqa: E402
from tandem.link.batch import Batch, StepResult  # noqa: E402
from tests.e2e.step_gate import StepGate  # noqa: E402


class GatedRunner(ModelRunner):
    """
    Attributes:
        gate: Where steps wait.
    """

    gate: StepGate

    def launch(self, batch: Batch, step_id: int) -> Callable[[], StepResult]:
        """Compute when it may; warm-up steps, of id 0, always may."""
        if step_id and len(batch.row_slot):
            self.gate.pass_through()
        return super().launch(batch, step_id)


if __name__ == "__main__":
    GatedRunner.gate = StepGate(Path(os.environ["STEP_GATE"]))
    vars(executor_engine)["ModelRunner"] = GatedRunner
    sys.exit(executor_main.main())
