"""Checks of a step's result against the batch that it answers; nothing is changed by them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.core.slots.planned_rows import PlannedRows
from scheduler_svc.core.slots.slots import SlotTable
from scheduler_svc.core.state.replica import Replica
from tandem.errors import SessionLost
from tandem.link.results import StepResult


def is_as_planned(slots: SlotTable, rows: PlannedRows, result: StepResult) -> bool:
    """
    Return True when all rows still run and the result has exactly their tokens, as it nearly always
    does; the check is cheap.
    """
    return (
        rows.num_departures == slots.num_departures
        and not result.row_errors
        and len(result.token) == len(rows.sampling_slot)
        and result.position.tobytes() == rows.sampling_end.tobytes()
        and result.slot.tobytes() == rows.sampling_slot.tobytes()
        and result.generation.tobytes() == rows.sampling_generation.tobytes()
    )


def check_result(replica: Replica, rows: PlannedRows, result: StepResult) -> NDArray[np.intp]:
    """
    Check that each row that was to sample has one token at its expected position, or a row error.

    Returns:
        Rows of the result for requests that no longer run in their slots, shape ``[L]``.

    Raises:
        SessionLost: It does not; nothing was changed.
    """
    slot, generation = rows.sampling_slot, rows.sampling_generation
    if result.row_errors:
        sampled = _without_errors(rows, result)
        slot, generation = slot[sampled], generation[sampled]
    lengths = {len(slot), len(result.slot), len(result.position), len(result.token)}
    if (
        len(lengths) > 1
        or (slot != result.slot).any()
        or not np.array_equal(generation, result.generation)
    ):
        message = (
            f"result of step {result.step_id} has tokens for slots {result.slot.tolist()}, "
            f"planned were {slot.tolist()}"
        )
        raise SessionLost(message)
    slots = replica.slots
    expected = slots.tokens.known[slot]
    late = late_rows(replica, result)
    for row in late.tolist():
        request = replica.draining.get((int(slot[row]), int(generation[row])))
        # Tokens of requests that ended are dropped, at any position.
        expected[row] = result.position[row] if request is None else request.num_known
    if (expected != result.position).any():
        row = np.flatnonzero(expected != result.position)[0]
        message = (
            f"result of step {result.step_id} has a token at position {result.position[row]} of "
            f"slot {slot[row]}, expected position {expected[row]}"
        )
        raise SessionLost(message)
    return late


def late_rows(replica: Replica, result: StepResult) -> NDArray[np.intp]:
    """Return rows of a result for requests that no longer run in their slots, shape ``[L]``."""
    slots, slot = replica.slots, result.slot
    is_late = (slots.generation[slot] != result.generation) | ~slots.running[slot]
    late: NDArray[np.intp] = is_late.nonzero()[0]
    return late


def _without_errors(rows: PlannedRows, result: StepResult) -> NDArray[np.bool_]:
    """Return a mask of the rows that were to sample: True for those without a row error."""
    failed = {(error.slot, error.generation) for error in result.row_errors}
    planned = zip(rows.slot.tolist(), rows.generation.tolist(), strict=True)
    if strangers := failed.difference(planned):
        message = f"result of step {result.step_id} has errors of rows not planned: {strangers}"
        raise SessionLost(message)
    keys = zip(rows.sampling_slot.tolist(), rows.sampling_generation.tolist(), strict=True)
    return np.array([key not in failed for key in keys], np.bool_)
