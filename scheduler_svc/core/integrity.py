"""Consistency checks of the core's state; called when idle, and by tests after steps."""

from __future__ import annotations

from collections import Counter

import numpy as np

from scheduler_svc.core.listing import num_outputs
from scheduler_svc.core.request.request import RequestState
from scheduler_svc.core.slots.slot_checks import check_slots
from scheduler_svc.core.state.replica import Replica
from tandem.errors import InternalError


def check_integrity(replica: Replica) -> None:
    """
    Check every invariant of the core's state.

    Raises:
        InternalError: The first one that does not hold.
    """
    cell = replica.cell
    without_slot = {request.number for request in cell.requests if request.place.slot is None}
    replica.kv.check_integrity(replica.slots, without_slot)
    cell.queue.check_integrity()
    cell.requests.check_integrity()
    cell.suspects.check_integrity({request.number for request in cell.requests})
    check_slots(replica.slots)
    _check_states(replica)
    _check_places(replica)
    _check_paused(replica)
    _check_counters(replica)
    _check_events(replica)


def _check_states(replica: Replica) -> None:
    slots, limits = replica.slots, replica.limits
    _require(slots.num_running <= limits.max_running, "more slots run than max_batch_size")
    for request in slots.running_requests():
        slot, name = request.place.slot, request.new.request_id
        expected = RequestState.DECODE if slots.decoding[slot] else RequestState.PREFILL
        if slot in replica.paused:
            expected = RequestState.PAUSED
        wrong = f"{name} is {request.state.value}, expected {expected.value}"
        _require(request.state is expected, wrong)


def _check_places(replica: Replica) -> None:
    cell = replica.cell
    places = Counter[int]()
    for request in cell.queue:
        _require(request.state is RequestState.WAITING, "a request waits in another state")
        _require(request.place.slot is None, "a waiting request has a slot")
        places[request.number] += 1
    for key, request in replica.draining.items():
        _require(request.state is RequestState.DRAINING, "a request drains in another state")
        _require(request.place.key == key, "a draining request is under another's key")
        _require(
            request.place.applied < request.place.planned, "a request drains with nothing in flight"
        )
        places[request.number] += 1
    for request in replica.slots.running_requests():
        places[request.number] += 1
    expected = Counter(request.number for request in cell.requests)
    _require(places == expected, "a request is in no place or in two")


def _check_paused(replica: Replica) -> None:
    slots = replica.slots
    for slot in replica.paused:
        _require(bool(slots.running[slot]), f"slot {slot} is paused without running")
        _require(not slots.decoding[slot], f"slot {slot} is paused and decodes")
    may_give_way = {request.number for request in replica.may_give_way}
    running = {request.number for request in slots.running_requests()}
    _require(may_give_way <= running, "a request that does not run may give way")


def _check_counters(replica: Replica) -> None:
    cell, slots = replica.cell, replica.slots
    in_flight = Counter[tuple[int, int]]()
    for rows in replica.in_flight:
        columns = zip(
            rows.slot.tolist(), rows.generation.tolist(), rows.num_tokens.tolist(), strict=True
        )
        for slot, generation, num_tokens in columns:
            in_flight[slot, generation] += num_tokens
    for slot in np.flatnonzero(slots.live).tolist():
        expected = int(slots.planned[slot] - slots.tokens.applied[slot])
        key = (slot, int(slots.generation[slot]))
        _require(
            in_flight[key] == expected, f"slot {slot} has planned tokens that are not in flight"
        )
    for key, request in replica.draining.items():
        expected = request.place.planned - request.place.applied
        _require(in_flight[key] == expected, "a draining request waits for what is not in flight")
    counters = cell.counters.requests
    num_ended = counters.finished_requests + counters.failed_requests
    in_system = counters.accepted_requests - num_ended
    _require(in_system == len(cell.requests), "accepted requests were lost or ended twice")


def _check_events(replica: Replica) -> None:
    cell = replica.cell
    if cell.recorder is not None:
        seen = [(one, num_outputs(replica, one) - one.terms.num_prior) for one in cell.requests]
        cell.recorder.check_integrity(seen)


def _require(holds: bool, what_is_wrong: str) -> None:
    if not holds:
        raise InternalError(what_is_wrong)
