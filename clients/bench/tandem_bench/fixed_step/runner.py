"""Runner of steps that compute nothing: slot state and tokens are real, the duration is given."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from tandem.errors import SessionLost
from tandem.link.batch import ROW_SAMPLES, Batch, UInt32Column
from tandem.link.commands import KvMode
from tandem.link.results import StepResult, StepTimings
from tandem.link.slots.slot_state import SlotState
from tandem_bench.fixed_step.accounting import IdleAccount, StepTimes
from tandem_bench.fixed_step.timer import Timer
from tandem_bench.fixed_step.tokens import ChainedTokens


class FixedStepRunner:
    """
    Stand-in for the runner of a GPU.

    A launch applies the batch to real slot state on the host. Then the device is busy for
    `step_ms`, from the moment at which it is free, and results are available only at the end of
    that time. The host's work makes the device idle only when the device has nothing else to do.
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
        self._free_ns = 0
        """Time at which the device will have done all steps launched so far, monotonic."""
        self._timer: Timer | None = None
        """Timer of the thread that waits for results, which makes it."""
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
        """Forget all slots and end a suspension."""
        self._account.forget()
        self._is_suspended = False
        self._slots.reset()

    def suspend(self, mode: KvMode) -> None:
        """
        Run no rows until `resume`.

        Raises:
            SessionLost: The mode is RECOMPUTE and slots are live.
        """
        if mode is KvMode.RECOMPUTE and self._slots.live.any():
            raise SessionLost("suspend with RECOMPUTE while slots are live: release them first")
        self._is_suspended = True

    def resume(self) -> None:
        """End a suspension; without one, do nothing."""
        self._is_suspended = False

    def launch(self, batch: Batch, step_id: int) -> Callable[[], StepResult]:
        """
        Apply one batch; the device begins now, or when it has done the steps launched before.

        Returns:
            Function that draws the rows' tokens and waits until the step's time is over.

        Raises:
            SessionLost: The batch contradicts the slot state, or has rows while suspended.
        """
        given_ns = time.monotonic_ns()
        if self._is_suspended and len(batch.row_slot):
            raise SessionLost("a batch has rows while suspended: resume first")
        self._slots.apply(batch)
        samples = batch.row_flags == ROW_SAMPLES
        num_samples = np.count_nonzero(samples)
        slot = batch.row_slot if num_samples == len(samples) else batch.row_slot[samples]
        generation = self._slots.generation[slot]
        launched_ns = time.monotonic_ns()
        start_ns = max(launched_ns, self._free_ns)
        end_ns = start_ns + (self._step_ns if len(batch.row_slot) else 0)
        self._free_ns = end_ns
        self._account.add(
            StepTimes(
                rows=len(batch.row_slot),
                start_ns=start_ns,
                end_ns=end_ns,
                host_ns=launched_ns - given_ns,
            ),
            requests_run=len(batch.row_slot) > 0 or bool(self._slots.live.any()),
        )
        return lambda: self._collect(batch, step_id, generation, start_ns, end_ns)

    def _collect(
        self, batch: Batch, step_id: int, generation: UInt32Column, start_ns: int, end_ns: int
    ) -> StepResult:
        """Draw the tokens, then wait for the step's end; called in step order by one thread."""
        for admission in batch.admits:
            self._tokens.admit(admission)
        slot, position = batch.row_slot, batch.row_start + batch.row_num_tokens
        if len(generation) < len(slot):
            samples = batch.row_flags == ROW_SAMPLES
            slot, position = slot[samples], position[samples]
        token = self._tokens.draw(slot, position)
        if self._timer is None:
            self._timer = Timer()
        ended_ns = self._timer.wait_until(end_ns)
        return StepResult(
            boot_id=self._boot_id,
            step_id=step_id,
            slot=slot,
            generation=generation,
            position=position,
            token=token,
            timings=StepTimings(forward_ns=ended_ns - start_ns, total_ns=ended_ns - start_ns),
        )
