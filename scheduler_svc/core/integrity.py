"""Consistency checks of the core's state; called when idle, and by tests after steps."""

from __future__ import annotations

from collections import Counter

from scheduler_svc.core.invariants import require
from scheduler_svc.core.listing import num_outputs
from scheduler_svc.core.state.replica import Replica


def check_integrity(replica: Replica) -> None:
    """
    Check every invariant of the core's state: those of the requests, of their executor, and of both
    together.

    Raises:
        InternalError: The first one that does not hold.
    """
    replica.cell.check_integrity()
    replica.check_integrity()
    _check_places(replica)
    _check_events(replica)


def _check_places(replica: Replica) -> None:
    """Check that each live request waits, drains or has a slot, and is nowhere twice."""
    cell = replica.cell
    found = [*cell.queue, *replica.draining.values(), *replica.slots.running_requests()]
    places = Counter(request.number for request in found)
    live = Counter(request.number for request in cell.requests)
    require(places == live, "a request is in no place or in two")


def _check_events(replica: Replica) -> None:
    cell = replica.cell
    if cell.recorder is not None:
        seen = [(one, num_outputs(replica, one) - one.terms.num_prior) for one in cell.requests]
        cell.recorder.check_integrity(seen)
