"""
The real executor with a runner that misbehaves on request.

A prompt that begins with a mark harms its own row or the whole process. A file in the folder
$FAULTS_DIR harms the next step, which removes it:

    raise   the step raises
    hang    the step never returns

If that folder has a file `gate`, steps wait at this `StepGate`. Warm-up steps, of id 0, and steps
without rows ignore both files and gate: an order is for an executor that works.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from torch import Tensor

import executor_svc.__main__ as executor_main
import executor_svc.engine as executor_engine
from executor_svc.device.queue import Mark
from executor_svc.step.runner import ModelRunner
from tandem.link.batch import Batch
from tandem.link.results import StepResult
from tests.e2e.step_gate import StepGate
from tests.faults.processes.step_count import StepCount
from tests.faults.workload.marks import BAD_ROW_MARK, MARK_LEN, POISON_LATER_MARK, POISON_MARK

LATER_TOKENS = 3
"""Number of output tokens after which a row marked to kill later does so."""


class InjectedFault(RuntimeError):
    """Error that a step raises when it is told to."""


class FaultyRunner(ModelRunner):
    """
    Attributes:
        folder: Folder of the files that order faults.
        gate: Gate at which steps wait, if there is one.
    """

    folder: Path
    gate: StepGate | None

    def launch(self, batch: Batch, step_id: int) -> Callable[[], StepResult]:
        """Follow the orders that there are, then compute."""
        if step_id and len(batch.row_slot):
            self._obey()
        marks = self.__dict__.setdefault("_marks", {})
        for slot in batch.release_slot.tolist():
            marks.pop(slot, None)
        for admission in batch.admits:
            marks.pop(admission.slot, None)
            if len(admission.token_ids) >= MARK_LEN:
                mark = tuple(admission.token_ids[:MARK_LEN].tolist())
                marks[admission.slot] = mark, admission.num_prompt_tokens
        self._kill_if_poisoned(batch, marks)
        collect = super().launch(batch, step_id)
        if step_id:
            self._count_step()
        return collect

    def _obey(self) -> None:
        if _take(self.folder / "raise"):
            raise InjectedFault("told to raise")
        if _take(self.folder / "hang"):
            while True:
                time.sleep(3600)
        if self.gate is not None:
            self.gate.pass_through()

    def _kill_if_poisoned(
        self, batch: Batch, marks: dict[int, tuple[tuple[int, ...], int]]
    ) -> None:
        for slot, start in zip(batch.row_slot.tolist(), batch.row_start.tolist(), strict=True):
            mark, num_prompt_tokens = marks.get(slot, ((), 0))
            is_late = start >= num_prompt_tokens + LATER_TOKENS
            if mark == POISON_MARK or (mark == POISON_LATER_MARK and is_late):
                os.kill(os.getpid(), signal.SIGKILL)

    def _forward(self, batch: Batch) -> tuple[Mark, Tensor]:
        started, hidden = super()._forward(batch)
        marks = self.__dict__.get("_marks", {})
        last_rows = np.cumsum(batch.row_num_tokens) - 1
        for slot, row in zip(batch.row_slot.tolist(), last_rows.tolist(), strict=True):
            if marks.get(slot, ((), 0))[0] == BAD_ROW_MARK:
                hidden[row] = float("nan")
        return started, hidden

    def _count_step(self) -> None:
        """Count the steps computed here, so that tests can tell which executor works."""
        if "_count" not in self.__dict__:
            self.__dict__["_count"] = StepCount(self.folder, os.getpid(), create=True)
        self.__dict__["_count"].add()


def _take(order: Path) -> bool:
    try:
        order.unlink()
    except FileNotFoundError:
        return False
    return True


def main(argv: list[str]) -> int:
    """Run an executor; return its exit code."""
    FaultyRunner.folder = Path(os.environ["FAULTS_DIR"])
    gate = FaultyRunner.folder / "gate"
    FaultyRunner.gate = StepGate(gate) if gate.exists() else None
    vars(executor_engine)["ModelRunner"] = FaultyRunner
    return executor_main.main(argv)
