"""
One step's plan: who computes how many tokens next.

    release what ended
    every decode that has something to compute   one token each; a block where the last is full;
                                                 preempt until there are enough blocks
    running prefills, oldest first               as many tokens as the budget leaves
    the queue, head first                        while slots, budget, threshold and blocks allow
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.core.events import Progress, ProgressKind
from scheduler_svc.core.request import Request, RequestState
from scheduler_svc.core.state import CoreState, PlannedRows
from scheduler_svc.core.victims import VictimPolicy
from tandem.errors import NeverFits
from tandem.link.batch import ROW_SAMPLES, Admission, Batch, Int32Column, UInt8Column

_NO_INT32 = np.empty(0, np.int32)
_NO_SLOT = np.empty(0, np.intp)


class Draft:
    """The batch being planned; state is changed as rows are added."""

    __slots__ = (
        "admits",
        "append_block",
        "append_slot",
        "budget",
        "decodes",
        "num_preempted",
        "prefills",
        "released",
        "state",
    )

    def __init__(self, state: CoreState) -> None:
        self.state = state
        self.budget = state.limits.max_total_tokens
        self.released: list[int] = []
        self.decodes: NDArray[np.intp] = _NO_SLOT
        self.append_slot: Int32Column = _NO_INT32
        self.append_block: Int32Column = _NO_INT32
        self.prefills: list[tuple[int, int, int]] = []
        """(slot, tokens, flags) per prefill row."""
        self.admits: list[Admission] = []
        self.num_preempted = 0

    def release_ended(self) -> None:
        """Free every slot whose request went."""
        for slot in self.state.slots.ended:
            self.state.release(slot)
            self.released.append(slot)
        self.state.slots.ended.clear()

    def batch(self) -> Batch | None:
        """The finished batch, noted as in flight; None when there is nothing to send."""
        num_decodes = len(self.decodes)
        if not num_decodes and not self.prefills and not self.released:
            return None
        slots = self.state.slots
        slot = self.decodes
        num_tokens: Int32Column = np.ones(num_decodes, np.int32)
        flags: UInt8Column = np.full(num_decodes, ROW_SAMPLES, np.uint8)
        if self.prefills:
            columns = np.array(self.prefills, np.int32)
            slot = np.concatenate([slot, columns[:, 0]])
            num_tokens = np.concatenate([num_tokens, columns[:, 1]])
            flags = np.concatenate([flags, columns[:, 2].astype(np.uint8)])
        start = slots.planned[slot]
        if len(slot):
            slots.advance(slot, start + num_tokens)
        self._note_in_flight(slot, num_tokens, flags)
        return Batch(
            admits=tuple(self.admits),
            row_slot=slot.astype(np.int32),
            row_num_tokens=num_tokens,
            row_start=start,
            row_flags=flags,
            append_slot=self.append_slot,
            append_block=self.append_block,
            release_slot=np.array(self.released, np.int32) if self.released else _NO_INT32,
        )

    def _note_in_flight(
        self, slot: NDArray[np.intp], num_tokens: Int32Column, flags: UInt8Column
    ) -> None:
        generation = self.state.slots.generation[slot]
        samples = slice(None) if not self.prefills else flags == ROW_SAMPLES
        self.state.in_flight.append(
            PlannedRows(
                slot=slot,
                generation=generation,
                num_tokens=num_tokens,
                sampling_slot=slot[samples],
                sampling_generation=generation[samples],
                num_decodes=len(self.decodes),
            )
        )


def plan(state: CoreState, now: float, choose_victim: VictimPolicy) -> Batch | None:
    """Plan the next batch; None when there is nothing to send."""
    draft = Draft(state)
    draft.release_ended()
    _plan_decodes(draft, choose_victim)
    if draft.budget:
        _continue_prefills(draft)
    # Who was preempted stands first in the queue, also while it drains.
    if state.queue and draft.budget and not draft.num_preempted and not state.draining:
        _admit(draft, now)
    return draft.batch()


def _plan_decodes(draft: Draft, choose_victim: VictimPolicy) -> None:
    slots = draft.state.slots
    ready = (slots.decoding & (slots.planned < slots.stop_len - 1)).nonzero()[0]
    if not len(ready):
        return
    if len(ready) > draft.budget:
        ready = _least_served(draft, ready)
    ready = _grow(draft, ready, choose_victim)
    draft.decodes = ready
    draft.budget -= len(ready)


def _least_served(draft: Draft, ready: NDArray[np.intp]) -> NDArray[np.intp]:
    """Those who waited longest for a token, oldest requests first, as many as the budget allows."""
    slots = draft.state.slots
    order = np.lexsort((slots.number[ready], slots.served[ready]))
    chosen: NDArray[np.intp] = ready[order[: draft.budget]]
    slots.served[chosen] = slots.served.max() + 1 + np.arange(len(chosen))
    return chosen


def _grow(draft: Draft, ready: NDArray[np.intp], choose_victim: VictimPolicy) -> NDArray[np.intp]:
    """
    Give a block to each decode whose last one is full, at the cost of others if need be; returns
    who is left.
    """
    state, slots = draft.state, draft.state.slots
    full = ready[slots.planned[ready] == slots.num_blocks[ready] * slots.block_size]
    if not len(full):
        return ready
    while (blocks := state.pool.try_take(len(full))) is None:
        candidates = np.flatnonzero(slots.running)
        if len(candidates) == 1:
            _fail_alone(state, state.slots.request_of(int(candidates[0])))
        else:
            state.preempt(choose_victim(slots, candidates))
            draft.num_preempted += 1
        draft.release_ended()
        full, ready = full[slots.running[full]], ready[slots.running[ready]]
    draft.append_slot, draft.append_block = full.astype(np.int32), blocks
    slots.append_blocks(full, blocks)
    return ready


def _fail_alone(state: CoreState, request: Request) -> None:
    message = (
        f"request {request.new.request_id} alone needs more than all {state.limits.num_blocks} KV "
        f"blocks of {state.limits.block_size} tokens: shorten prompt or max_tokens, or raise "
        "max_num_blocks"
    )
    state.fail(request, NeverFits(message, metadata={"limit": "max_num_blocks"}))


def _continue_prefills(draft: Draft) -> None:
    slots = draft.state.slots
    if slots.num_running == np.count_nonzero(slots.decoding):
        return
    started = np.flatnonzero(slots.running & ~slots.decoding)
    for slot in started[np.argsort(slots.number[started])].tolist():
        if not draft.budget:
            return
        _add_chunk(draft, slot)


def _add_chunk(draft: Draft, slot: int) -> None:
    """
    Compute as much of a slot's admitted tokens as the budget allows; its blocks are held since
    admission.
    """
    slots = draft.state.slots
    left = int(slots.admitted[slot] - slots.planned[slot])
    chunk = min(left, draft.budget)
    is_last = chunk == left
    draft.prefills.append((slot, chunk, int(ROW_SAMPLES) if is_last else 0))
    draft.budget -= chunk
    if is_last:
        slots.decoding[slot] = True
        slots.request_of(slot).move(RequestState.DECODE)


def _admit(draft: Draft, now: float) -> None:
    state, slots, limits = draft.state, draft.state.slots, draft.state.limits
    while draft.budget and slots.num_running < limits.max_running and slots.num_free:
        request = state.queue.head()
        if request is None or state.under_pressure():
            return
        num_blocks = limits.blocks_for(request.num_known)
        # One block kept back for each row that may still grow: else the newcomer is the next
        # victim.
        if num_blocks + slots.num_may_grow() > state.pool.num_free:
            return
        blocks = state.pool.try_take(num_blocks)
        assert blocks is not None
        state.queue.discard(request)
        request.move(RequestState.PREFILL)
        if request.scheduled_s is None:
            request.scheduled_s = now
        slot = slots.occupy(request, blocks, limits.blocks_for(request.stop_len - 1))
        draft.admits.append(
            Admission(
                slot=slot,
                generation=int(slots.generation[slot]),
                token_ids=request.known_tokens(),
                num_prompt_tokens=request.prompt_len,
                num_cached_tokens=0,
                block_ids=blocks,
                sampling=request.new.sampling,
            )
        )
        event = Progress(handle=request.new.handle, kind=ProgressKind.SCHEDULED, value=0)
        state.events.add(event)
        _add_chunk(draft, slot)
