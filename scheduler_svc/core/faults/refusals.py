"""Batches that the executor refused: bugs of ours, for which nothing else is blamed."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler_svc.core.request.request import Request
from scheduler_svc.core.state.ends import fail
from scheduler_svc.core.state.replica import Replica
from tandem.errors import InternalError


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """
    Batch of ours that the executor refused, which is our bug.

    Attributes:
        step: Index of its step, counted from the oldest in flight.
        slot: Slot whose part of it was refused; None if that is not told.
        is_repeated: Session after session ended before any step succeeded.
        problem: What the executor found wrong.
    """

    step: int
    slot: int | None
    is_repeated: bool
    problem: str


def lose_refused(replica: Replica, refusal: Refusal) -> None:
    """Start over with an empty executor; see `Scheduler.batch_refused`."""
    requests = _requests_of(replica, refusal)
    replica.start_over(replica.limits)
    for request in requests:
        message = (
            f"the scheduler made a batch that the executor refused ({refusal.problem}), which is a "
            f"bug: report it with the scheduler's log and the id of this request, "
            f"{request.new.request_id}"
        )
        fail(replica.cell, request, InternalError(message))


def _requests_of(replica: Replica, refusal: Refusal) -> list[Request]:
    """
    Return the live requests that fail for a refusal: the one in its slot. Where no slot is told, a
    new session may mend what was wrong, so those of the whole step fail only if none has.
    """
    if refusal.step >= len(replica.steps.in_flight):
        return []
    if refusal.slot is None and not refusal.is_repeated:
        return []
    found = [
        replica.request_at(*key)
        for key, _ in replica.steps.in_flight[refusal.step].tokens_by_key()
        if refusal.slot in (None, key[0])
    ]
    return [request for request in found if request is not None]
