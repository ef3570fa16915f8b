"""
Pausing: who lacks a block keeps those it has and sits out until there is one.

    a decode whose last block is full, and no block      paused: slot and blocks kept, in no step
    blocks are there at the start of a plan              resumed, who was paused first goes first
    paused rows hold more than `paused_budget_blocks`    who was paused last is evicted (preempted)
    nobody is left who runs                              the same, until somebody does

A paused row keeps its slot: the executor holds its block table and its last token there, so that
going on costs nothing but the block. While anyone is paused nobody is admitted.

Source: Megatron Core's dynamic engine, whose later form this follows: one pool, the budget only
limits what paused rows may keep, and blocks that rows share count once. We resume the one who was
paused first, so that nobody is overtaken for ever, and keep rows that need no block running.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.core.batch.batch_builder import Draft
from scheduler_svc.core.observe.step_log import preemption_line
from scheduler_svc.core.request.options import PreemptionMode
from scheduler_svc.core.state.state import CoreState
from tandem.errors import NeverFits


def resume(draft: Draft) -> list[int]:
    """
    Let paused rows go on in the order they were paused, with a block each, and evict what paused
    rows hold beyond the budget, or all there is while nobody runs; returns who goes on.
    """
    state = draft.state
    resumed = _resume_by_free_blocks(draft)
    while state.paused and (_nobody_runs(state) or _is_over_budget(state)):
        if state.slots.num_running == 1:
            fail_alone(draft, next(iter(state.paused)))
            break
        preempt_for_blocks(draft, next(reversed(state.paused)))
        resumed += _resume_by_free_blocks(draft)
    return resumed


def _resume_by_free_blocks(draft: Draft) -> list[int]:
    state = draft.state
    resumed = list(state.paused)[: state.pool.num_available]
    if resumed:
        slots = np.array(resumed, np.intp)
        blocks = state.pool.try_take_next(state.slots.next_blocks(slots))
        assert blocks is not None
        for slot in resumed:
            state.unpause(slot)
        draft.append_blocks(slots, blocks)
    return resumed


def pause_without_block(
    draft: Draft, ready: NDArray[np.intp], full: NDArray[np.intp]
) -> NDArray[np.intp]:
    """
    Give the blocks there are to those who arrived first and pause the others, within the budget;
    returns who is left to run in this step.
    """
    state, slots = draft.state, draft.state.slots
    for slot in full[np.argsort(slots.number[full])].tolist():
        state.pause(slot)
    resumed = resume(draft)
    kept = ready[slots.decoding[ready]]
    others = np.setdiff1d(np.array(resumed, np.intp), kept)
    return np.concatenate([kept, others[: max(draft.budget - len(kept), 0)]])


def stay_paused(state: CoreState) -> None:
    """Tell of everyone who is left out of a step, if anybody asked."""
    if state.recorder is not None:
        for slot in state.paused:
            state.recorder.note_pause(state.slots.request_of(slot), state.now_s)


def preempt_for_blocks(draft: Draft, slot: int) -> None:
    """Take a slot away for want of blocks, which are free at once, and warn now and then."""
    state = draft.state
    request = state.slots.request_of(slot)
    num_fallbacks = state.counters.swap_fallbacks
    state.preempt(slot)
    draft.num_preempted += 1
    state.counters.retractions += 1
    mode = state.options.preemption_mode
    if state.counters.swap_fallbacks > num_fallbacks:
        mode = PreemptionMode.RECOMPUTE
    line = preemption_line(request.new.request_id, mode, state.counters.retractions)
    if line is not None:
        state.events.add_log(line)
    draft.release_ended()


def fail_alone(draft: Draft, slot: int) -> None:
    """End the only request that runs, which needs more blocks than there are."""
    state, request = draft.state, draft.state.slots.request_of(slot)
    message = (
        f"request {request.new.request_id} alone needs more than all {state.limits.num_blocks} KV "
        f"blocks of {state.limits.block_size} tokens: shorten prompt or max_tokens, or raise "
        "max_num_blocks"
    )
    state.fail(request, NeverFits(message, metadata={"limit": "max_num_blocks"}))
    draft.release_ended()


def _nobody_runs(state: CoreState) -> bool:
    return state.slots.num_running == len(state.paused)


def _is_over_budget(state: CoreState) -> bool:
    """True when paused rows hold more blocks than they may keep; shared ones count once."""
    budget = state.options.paused_budget_blocks
    return not budget or num_paused_blocks(state) > budget


def num_paused_blocks(state: CoreState) -> int:
    """Blocks that paused rows hold; shared ones count once."""
    if not state.paused:
        return 0
    slots = state.slots
    tables = [slots.block_table[slot, : slots.num_blocks[slot]] for slot in state.paused]
    return len(np.unique(np.concatenate(tables)))
