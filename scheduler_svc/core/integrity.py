"""Consistency checks of the core's state; called when idle, and by tests after steps."""

from __future__ import annotations

from collections import Counter

from scheduler_svc.core.invariants import require
from scheduler_svc.core.listing import num_outputs
from scheduler_svc.core.state.fleet import Fleet


def check_integrity(fleet: Fleet) -> None:
    """
    Check every invariant of the core's state: those of the requests, of each executor, and of
    all together.

    Raises:
        InternalError: The first one that does not hold.
    """
    fleet.cell.check_integrity()
    fleet.check_integrity()
    for replica in fleet:
        replica.check_integrity()
    _check_places(fleet)
    _check_quarantine(fleet)
    _check_events(fleet)


def _check_places(fleet: Fleet) -> None:
    """Check that each live request waits, drains or has a slot, and is nowhere twice."""
    cell = fleet.cell
    found = list(cell.queue)
    for replica in fleet:
        found += [*replica.draining.values(), *replica.slots.running_requests()]
    places = Counter(request.number for request in found)
    live = Counter(request.number for request in cell.requests)
    require(places == live, "a request is in no place or in two")


def _check_quarantine(fleet: Fleet) -> None:
    """Check that requests with marks run on one executor only."""
    suspects = fleet.cell.suspects
    number = suspects.quarantine.number
    numbers = {replica.slots.replica for replica in fleet}
    require(number is None or number in numbers, "the quarantined executor has left")
    for mark in suspects.marks():
        place = mark.request.place
        is_here = place.slot is None or place.replica == number
        require(is_here, "a request with a mark runs on another executor than the quarantined one")


def _check_events(fleet: Fleet) -> None:
    cell, recorder = fleet.cell, fleet.cell.telemetry.recorder
    if recorder is not None:
        seen = [(one, num_outputs(fleet, one) - one.terms.num_prior) for one in cell.requests]
        recorder.check_integrity(seen)
