"""Consistency checks of the core's state; called when idle and by every test."""

from __future__ import annotations

from collections import Counter

import numpy as np

from scheduler_svc.core.listing import num_outputs
from scheduler_svc.core.request.request import Request, RequestState
from scheduler_svc.core.state.state import CoreState
from tandem.errors import InternalError


def check_integrity(state: CoreState) -> None:
    """
    Check every invariant of the core's state.

    Raises:
        InternalError: The first one that does not hold.
    """
    state.pool.check_integrity(state.slots.owned_blocks())
    state.prefix_cache.check_integrity()
    _check_slots(state)
    _check_places(state)
    _check_paused(state)
    _check_leaving(state)
    _check_counters(state)
    _check_suspects(state)
    _check_events(state)
    if state.slots.recomputed_hash() != state.slots.state_hash:
        raise InternalError("the state hash differs from the one recomputed from the slot columns")


def _check_slots(state: CoreState) -> None:
    slots = state.slots
    live = np.flatnonzero(slots.live)
    num_running = int(np.count_nonzero(slots.running))
    ended = [int(slot) for slot in live if slots.requests[slot] is None]
    held = [slot for slot, request in enumerate(slots.requests) if request is not None]
    _require(sorted(slots.ended) == ended, "the slots to release are not those without a request")
    _require(sorted(state.leaving) == ended, "whose slots are to be released is not known")
    _require(held == np.flatnonzero(slots.running).tolist(), "a slot runs without a request")
    _require(num_running == slots.num_running, "the count of running slots is wrong")
    _require(num_running <= state.limits.max_running, "more slots run than max_batch_size")
    _require(len(live) + slots.num_free == len(slots.live), "a slot is neither live nor free")
    _require(not (slots.decoding & ~slots.running).any(), "a slot decodes without running")
    capacity = slots.num_blocks[live] * slots.block_size
    _require(bool((slots.planned[live] <= capacity).all()), "a slot computes past its blocks")
    _require(
        bool((slots.applied <= slots.planned)[live].all()), "a slot has more applied than planned"
    )
    for slot in held:
        _check_holder(state, slot, slots.request_of(slot))


def _check_holder(state: CoreState, slot: int, request: Request) -> None:
    slots, name = state.slots, request.new.request_id
    expected = RequestState.DECODE if slots.decoding[slot] else RequestState.PREFILL
    if slot in state.paused:
        expected = RequestState.PAUSED
    num_outputs = len(request.outputs) + slots.tail_len(slot)
    _require(request.slot == slot, f"{name} does not know its slot")
    _require(request.slot_key == (slot, slots.generation[slot]), f"{name} has a wrong slot key")
    _require(
        request.state is expected, f"{name} is {request.state.value}, expected {expected.value}"
    )
    _require(num_outputs == slots.num_outputs(slot), f"{name} has outputs that were not counted")
    _require(bool(slots.known[slot] < slots.stop_len[slot]), f"{name} runs past its end")
    _require(bool(slots.planned[slot] < slots.stop_len[slot]), f"{name} computes past its end")
    admitted, applied = int(slots.admitted[slot]), int(slots.applied[slot])
    known_len = applied + 1 if applied >= admitted else admitted
    _require(int(slots.known[slot]) == known_len, f"{name} lost or gained a token")


def _check_places(state: CoreState) -> None:
    places = Counter[int]()
    for request in state.queue:
        _require(request.state is RequestState.WAITING, "a request waits in another state")
        _require(request.slot is None, "a waiting request has a slot")
        places[request.number] += 1
    for key, request in state.draining.items():
        _require(request.state is RequestState.DRAINING, "a request drains in another state")
        _require(request.slot_key == key, "a draining request is under another's key")
        _require(request.applied < request.planned, "a request drains with nothing in flight")
        places[request.number] += 1
    for running in state.slots.requests:
        if running is not None:
            places[running.number] += 1
    expected = Counter(request.number for request in state.by_handle.values())
    _require(places == expected, "a request is in no place or in two")
    state.queue.check_integrity()
    state.tenants.check_integrity(request.new.tenant for request in state.by_handle.values())
    by_id = [request for choices in state.by_id.values() for request in choices]
    _require(len(by_id) == len(state.by_handle), "request ids and handles differ in number")
    for request in by_id:
        siblings = state.by_id[request.new.request_id]
        _require(request.siblings is siblings, "a request does not know its siblings")


def _check_paused(state: CoreState) -> None:
    slots = state.slots
    for slot in state.paused:
        _require(bool(slots.running[slot]), f"slot {slot} is paused without running")
        _require(not slots.decoding[slot], f"slot {slot} is paused and decodes")
    may_give_way = {request.number for request in state.may_give_way}
    running = {request.number for request in slots.requests if request is not None}
    _require(may_give_way <= running, "a request that does not run may give way")


def _check_leaving(state: CoreState) -> None:
    _require(sorted(state.leaving) == sorted(state.slots.ended), "a slot's last owner is unknown")
    swapping = {number for slot, number in state.swapping.items() if slot in state.leaving}
    _require(len(swapping) == len(state.swapping), "a slot is to be swapped out and not released")
    owners = state.by_handle.values()
    state.host.check_integrity({r.number for r in owners if r.slot is None})


def _check_counters(state: CoreState) -> None:
    slots = state.slots
    in_flight = Counter[tuple[int, int]]()
    for rows in state.in_flight:
        columns = zip(
            rows.slot.tolist(), rows.generation.tolist(), rows.num_tokens.tolist(), strict=True
        )
        for slot, generation, num_tokens in columns:
            in_flight[slot, generation] += num_tokens
    for slot in np.flatnonzero(slots.live).tolist():
        expected = int(slots.planned[slot] - slots.applied[slot])
        key = (slot, int(slots.generation[slot]))
        _require(
            in_flight[key] == expected, f"slot {slot} has planned tokens that are not in flight"
        )
    for key, request in state.draining.items():
        expected = request.planned - request.applied
        _require(in_flight[key] == expected, "a draining request waits for what is not in flight")
    counters = state.counters
    in_system = counters.accepted - counters.finished - counters.failed
    _require(in_system == len(state.by_handle), "accepted requests were lost or ended twice")


def _check_suspects(state: CoreState) -> None:
    suspects, marks = state.suspects, state.suspects.marks()
    live = {request.number for request in state.by_handle.values()}
    marked = {mark.request.number for mark in marks}
    _require(marked <= live, "a request that left is still suspected")
    _require(suspects.trial.keys() <= marked, "a request is tried that nothing speaks against")
    count = sum(mark.is_suspect for mark in marks)
    _require(suspects.num_suspects == count, "the suspects were miscounted")
    _require(count > 0 or not suspects.trial, "a trial goes on without suspects")


def _check_events(state: CoreState) -> None:
    if state.recorder is not None:
        live = state.by_handle.values()
        seen = [(request, num_outputs(state, request) - request.num_prior) for request in live]
        state.recorder.check_integrity(seen)


def _require(holds: bool, what_is_wrong: str) -> None:
    if not holds:
        raise InternalError(what_is_wrong)
