"""An executor without a model: the next token is a function of the last one and its position."""

from __future__ import annotations

import numpy as np

from scheduler_svc.core.request.geometry import ExecutorGeometry
from tandem.errors import SessionLost, TandemError
from tandem.link.batch import ROW_SAMPLES, Batch
from tandem.link.commands import Resume, Step, Suspend
from tandem.link.results import StepResult
from tandem.link.slots.slot_state import SlotState

GEOMETRY = ExecutorGeometry(
    num_blocks=64,
    block_size=4,
    num_slots=8,
    max_batch_size=8,
    max_total_tokens=64,
    max_model_len=64,
)


def next_token(token: int, position: int) -> int:
    """Return the token at `position`, after `token`; never under 3."""
    return 3 + (token * 31 + position * 7) % 997


def expected_outputs(prompt: list[int], num_tokens: int) -> list[int]:
    """Return the tokens that a request must produce, whatever happens on the way."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens[-1], len(tokens)))
    return tokens[len(prompt) :]


class ArithmeticRunner:
    """
    Runner that checks every batch and hash as a real executor does, and samples by plain
    arithmetic.
    """

    def __init__(self, boot_id: str, geometry: ExecutorGeometry = GEOMETRY) -> None:
        self.boot_id = boot_id
        self.geometry = geometry
        width = -(-geometry.max_model_len // geometry.block_size)
        self.slots = SlotState(
            geometry.num_slots,
            width,
            geometry.block_size,
            geometry.num_blocks,
            geometry.num_host_blocks,
        )
        self._tokens: dict[int, list[int]] = {}
        self.num_steps = 0
        self.commands: list[Suspend | Resume] = []
        self.refuses_to_suspend: TandemError | None = None

    def reset(self) -> None:
        """Start a session."""
        self.slots.reset()
        self._tokens.clear()

    def execute(self, step: Step) -> StepResult:
        """
        Compute one step.

        Raises:
            SessionLost: The batch or the hash is wrong.
            TandemError: `refuses_to_suspend` is set, and the step is to suspend.
        """
        batch = step.command
        if not isinstance(batch, Batch):
            if isinstance(batch, Suspend) and self.refuses_to_suspend is not None:
                raise self.refuses_to_suspend
            self.commands.append(batch)
            batch = Batch()
        elif self.commands and isinstance(self.commands[-1], Suspend):
            raise SessionLost("a batch came while suspended")
        self.slots.apply(batch)
        if self.slots.state_hash != step.state_hash:
            raise SessionLost(f"state hash of step {step.step_id} does not match")
        for admission in batch.admits:
            self._tokens[admission.slot] = admission.token_ids.tolist()
        self.num_steps += 1
        sampled = batch.row_flags == ROW_SAMPLES
        slot = batch.row_slot[sampled]
        position = (batch.row_start + batch.row_num_tokens)[sampled]
        return StepResult(
            boot_id=self.boot_id,
            step_id=step.step_id,
            slot=slot,
            generation=self.slots.generation[slot],
            position=position.astype(np.int32),
            token=np.array(
                [self._sample(s, p) for s, p in zip(slot.tolist(), position.tolist(), strict=True)],
                np.int32,
            ),
        )

    def _sample(self, slot: int, position: int) -> int:
        tokens = self._tokens[slot]
        assert len(tokens) == position
        tokens.append(next_token(tokens[-1], position))
        return tokens[-1]
