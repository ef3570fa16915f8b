"""Refusal of a batch by the executor: a bug of the scheduler that made it, not of the executor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tandem.errors import SessionLost
from tandem.link.session import LossCause

_STEP_ID, _SLOT = "step_id", "slot"


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedBatch:
    """
    Place of what was refused, as it travels in `SessionLost.metadata`.

    Attributes:
        step_id: Step of the batch.
        slot: Slot of the row, admission or append that was refused; None where it is not of one
            slot alone.
    """

    step_id: int
    slot: int | None

    @classmethod
    def of(cls, metadata: Mapping[str, str]) -> RefusedBatch | None:
        """Return the place in an error's metadata; None if it does not tell a step."""
        step_id, slot = metadata.get(_STEP_ID, ""), metadata.get(_SLOT, "")
        if not step_id.isdecimal():
            return None
        return cls(step_id=int(step_id), slot=int(slot) if slot.isdecimal() else None)


def in_slot(slot: int) -> dict[str, str]:
    """Return the metadata of an error that one slot's part of a batch causes."""
    return {_SLOT: str(slot)}


def refused_batch(error: SessionLost, step_id: int) -> SessionLost:
    """Return the error that refuses a step's batch; one that has a cause of its own is kept."""
    if "cause" in error.metadata:
        return error
    metadata = LossCause.REFUSED.as_metadata() | {_STEP_ID: str(step_id)} | dict(error.metadata)
    return SessionLost(error.message, metadata=metadata)
