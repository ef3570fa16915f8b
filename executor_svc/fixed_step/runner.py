"""Runs steps that compute nothing: slot state and tokens are real, the time is given."""

from __future__ import annotations

import time

import numpy as np

from executor_svc.fixed_step.accounting import IdleAccount
from executor_svc.fixed_step.timer import Timer
from executor_svc.fixed_step.tokens import ChainedTokens
from tandem.errors import SessionLost
from tandem.link.batch import ROW_SAMPLES, Batch, KvMode, StepResult, StepTimings
from tandem.link.slot_state import SlotState


class FixedStepRunner:
    """
    Applies every batch to real slot state and takes `step_ms` from the start of the step to its
    end, the applying included, like a device whose launches are covered by its work.

    Built and used by one thread.
    """

    def __init__(
        self,
        slots: SlotState,
        tokens: ChainedTokens,
        account: IdleAccount,
        *,
        boot_id: str,
        step_ms: float,
    ) -> None:
        self._slots = slots
        self._tokens = tokens
        self._account = account
        self._boot_id = boot_id
        self._step_ns = round(step_ms * 1e6)
        self._timer = Timer()
        self._is_suspended = False

    @property
    def state_hash(self) -> int:
        """Hash of the slot state after the last batch."""
        return self._slots.state_hash

    @property
    def slots(self) -> SlotState:
        """Slot state after the last batch, to be read only."""
        return self._slots

    def reset(self) -> None:
        """Forget all slots; ends a suspension."""
        self._account.forget()
        self._is_suspended = False
        self._slots.reset()

    def suspend(self, mode: KvMode) -> None:
        """
        Run no rows until `resume`.

        Raises:
            SessionLost: RECOMPUTE while slots are live.
        """
        if mode is KvMode.RECOMPUTE and self._slots.live.any():
            raise SessionLost("suspend with RECOMPUTE while slots are live: release them first")
        self._is_suspended = True

    def resume(self) -> None:
        """End a suspension; without one, do nothing."""
        self._is_suspended = False

    def execute(self, batch: Batch, step_id: int) -> StepResult:
        """
        Apply one batch, draw its rows' tokens and wait until the step's time is over.

        Raises:
            SessionLost: The batch contradicts the slot state, or has rows while suspended.
        """
        started_ns = time.monotonic_ns()
        self._account.start(started_ns)
        if self._is_suspended and len(batch.row_slot):
            raise SessionLost("a batch has rows while suspended: resume first")
        self._slots.apply(batch)
        for admission in batch.admits:
            self._tokens.admit(admission)
        slot, end = batch.row_slot, batch.row_start + batch.row_num_tokens
        samples = batch.row_flags == ROW_SAMPLES
        if not samples.all():
            slot, end = slot[samples], end[samples]
        token = self._tokens.draw(slot, end)
        applied_ns = time.monotonic_ns()
        step_ns = self._step_ns if len(batch.row_slot) else 0
        ended_ns = self._timer.wait_until(started_ns + step_ns)
        self._account.end(
            rows=len(batch.row_slot),
            step_ns=step_ns,
            host_ns=applied_ns - started_ns,
            requests_run=bool(self._slots.live.any()),
        )
        return StepResult(
            boot_id=self._boot_id,
            step_id=step_id,
            slot=slot,
            generation=self._slots.generation[slot],
            position=np.asarray(end, np.int32),
            token=token,
            timings=StepTimings(
                forward_ns=ended_ns - started_ns, sample_ns=0, total_ns=ended_ns - started_ns
            ),
        )
