"""Consistency checks of one executor's parts with one another."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler_svc.core.invariants import require
from scheduler_svc.core.request.request import RequestState

if TYPE_CHECKING:
    from scheduler_svc.core.state.replica import Replica


def check_replica(replica: Replica) -> None:
    """
    Compare slots, paused and draining requests, steps in flight and the requests of the cell.

    Raises:
        InternalError: The first invariant that does not hold.
    """
    num_running, most = replica.slots.num_running, replica.limits.max_running
    require(num_running <= most, "more slots run than max_batch_size")
    _check_running(replica)
    _check_in_flight(replica)
    _check_bound(replica)
    running = {request.number for request in replica.slots.running_requests()}
    may_give_way = {request.number for request in replica.may_give_way}
    require(may_give_way <= running, "a request that does not run may give way")


def _check_running(replica: Replica) -> None:
    """Check that running requests are in the state that their slots are in."""
    slots = replica.slots
    for request in slots.running_requests():
        slot, name = request.place.slot, request.new.request_id
        state = RequestState.DECODE if slots.decoding[slot] else RequestState.PREFILL
        if slot in replica.paused:
            state = RequestState.PAUSED
        wrong = f"{name} is {request.state.value}, expected {state.value}"
        require(request.state is state, wrong)
    for slot in replica.paused:
        require(bool(slots.running[slot]), f"slot {slot} is paused without running")
        require(not slots.decoding[slot], f"slot {slot} is paused and decodes")


def _check_in_flight(replica: Replica) -> None:
    """Check that what slots and draining requests wait for is in flight."""
    slots, in_flight = replica.slots, replica.steps.tokens_by_key()
    for slot in slots.live.nonzero()[0].tolist():
        num_sent = int(slots.planned[slot] - slots.tokens.applied[slot])
        is_sent = in_flight[slot, int(slots.generation[slot])] == num_sent
        require(is_sent, f"slot {slot} has planned tokens that are not in flight")
    for key, request in replica.draining.items():
        place = request.place
        require(request.state is RequestState.DRAINING, "a request drains in another state")
        require(place.key == key, "a draining request is under another's key")
        require(place.num_in_flight > 0, "a request drains with nothing in flight")
        is_sent = in_flight[key] == place.num_in_flight
        require(is_sent, "a draining request waits for what is not in flight")


def _check_bound(replica: Replica) -> None:
    """Check that what this executor has is of requests that were admitted here last."""
    own = replica.slots.replica
    for request in replica.cell.requests:
        has_copy = replica.kv.host.copy_of(request.number) is not None
        is_bound = request.place.replica == own
        require(is_bound or not has_copy, "an executor has a copy of another one's request")
    found = [*replica.slots.running_requests(), *replica.draining.values()]
    is_here = all(request.place.replica == own for request in found)
    require(is_here, "an executor runs a request that was admitted to another")
