"""Checks that `--check` makes during a simulation, besides those of each request's tokens."""

from __future__ import annotations

import numpy as np

from scheduler_svc.core.executor_port import ExecutorPort
from scheduler_svc.core.scheduler import Scheduler
from tandem.errors import InternalError, SessionLost
from tandem.link.batch import Batch, Int32Column
from tandem.link.results import StepResult
from tandem.link.slots.slot_state import SlotState
from tandem_simulator.executor.executor_model import ExecutorModel
from tandem_simulator.executor.model_tokens import powers_of_base, token_terms

INTERVAL = 64
"""Steps between two checks of all state."""


class Audit:
    """
    Checks of every batch of one executor, and from time to time of all state of both.

    Each batch must keep the rules of the step link and lead to the core's state hash; every KV
    position that a live slot has computed must hold the fingerprint of that slot's own tokens; the
    core's own integrity check must pass.
    """

    def __init__(self, core: Scheduler, port: ExecutorPort, executor: ExecutorModel) -> None:
        geometry = executor.geometry
        width = -(-geometry.max_model_len // geometry.block_size)
        self._core = core
        self._port = port
        self._executor = executor
        self._mirror = SlotState(
            geometry.num_slots,
            width,
            geometry.block_size,
            geometry.num_blocks,
            geometry.num_host_blocks,
        )
        self._tokens: Int32Column = np.zeros(
            (geometry.num_slots, geometry.max_model_len + 1), np.int32
        )
        self._weights = powers_of_base(geometry.max_model_len)
        self._num_steps = 0

    def before_step(self, batch: Batch) -> None:
        """
        Check a batch that is about to run.

        Raises:
            InternalError: The batch breaks a rule of the step link, the core's state hash is not
                that of the slot state after it, or the KV of a slot that is released is not that of
                its own tokens.
        """
        for slot in batch.release_slot.tolist():
            self._check_kv(slot)
        try:
            self._mirror.apply(batch)
        except SessionLost as error:
            raise InternalError(
                f"a batch breaks a rule of the step link: {error.message}"
            ) from error
        if self._mirror.state_hash != self._port.state_hash:
            raise InternalError("the core's state hash differs from the executor's slot state")
        for admission in batch.admits:
            self._tokens[admission.slot, : len(admission.token_ids)] = admission.token_ids

    def after_step(self, batch: Batch, result: StepResult) -> None:
        """
        Check the KV of the slots that a step's batch admitted; every 64 steps, check everything.

        Raises:
            InternalError: A slot reads KV that is not its own, or the core is inconsistent.
        """
        self._tokens[result.slot, result.position] = result.token
        for admission in batch.admits:
            self._check_kv(admission.slot)
        self._num_steps += 1
        if self._num_steps % INTERVAL == 0:
            self.check_everything()

    def check_everything(self) -> None:
        """
        Check the KV of all live slots and the core's state.

        Raises:
            InternalError: A check failed; the error describes the first one that did.
        """
        self._core.check_integrity()
        for slot in np.flatnonzero(self._mirror.live).tolist():
            self._check_kv(slot)

    def _check_kv(self, slot: int) -> None:
        count = int(self._mirror.planned[slot])
        positions = np.arange(count, dtype=np.int32)
        terms = token_terms(self._tokens[slot, :count], self._weights[:count])
        expected = np.cumsum(terms, dtype=np.uint64)
        found = self._executor.kv.reshape(-1)[
            self._executor.places(np.full(count, slot, np.int32), positions)
        ]
        wrong = np.flatnonzero(found != expected)
        if len(wrong):
            raise InternalError(
                f"slot {slot} reads KV at position {wrong[0]} that was computed from other tokens"
            )
