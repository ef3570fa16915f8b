"""
Pausing: a decode that lacks a block keeps the blocks it has and skips steps until one is free.

    its last block is full, and no block is free         it is paused: slot and blocks kept, no step
    blocks are free when the decodes are planned         rows are resumed, the first paused first
    paused rows hold more than `paused_budget_blocks`    the last paused row is evicted (preempted)
    all rows that have a slot are paused                 likewise, until one can be resumed

A paused row keeps its slot: the executor holds its block table and its last token there, so
resuming costs nothing but the block. While any row is paused no request is admitted.

Source: the later form of Megatron Core's dynamic engine: there is one pool, the budget only limits
what paused rows may keep, and blocks that rows share count once. We resume the row that was paused
first, so that none is overtaken forever, and rows that need no block keep running.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.core.batch.batch_builder import BatchBuilder
from scheduler_svc.core.observe.step_log import preemption_line
from scheduler_svc.core.request.options import PreemptionMode
from scheduler_svc.core.state.state import CoreState
from tandem.errors import NeverFits


def resume(builder: BatchBuilder) -> list[int]:
    """
    Resume paused rows in the order they were paused, with one block each; returns their slots.

    Then evict the last paused rows while paused rows hold more than the budget or no row runs. The
    only row left is not evicted: it fails.
    """
    state = builder.state
    resumed = _resume_by_free_blocks(builder)
    while state.paused and (_nobody_runs(state) or _is_over_budget(state)):
        if state.slots.num_running == 1:
            fail_alone(builder, next(iter(state.paused)))
            break
        preempt_for_blocks(builder, next(reversed(state.paused)))
        resumed += _resume_by_free_blocks(builder)
    return resumed


def _resume_by_free_blocks(builder: BatchBuilder) -> list[int]:
    state = builder.state
    resumed = list(state.paused)[: state.pool.num_available]
    if resumed:
        slots = np.array(resumed, np.intp)
        blocks = state.pool.try_take_next(state.slots.next_blocks(slots))
        assert blocks is not None
        for slot in resumed:
            state.unpause(slot)
        builder.append_blocks(slots, blocks)
    return resumed


def pause_without_block(
    builder: BatchBuilder, ready: NDArray[np.intp], full: NDArray[np.intp]
) -> NDArray[np.intp]:
    """
    Give the available blocks to the oldest requests and pause the others, within
    `paused_budget_blocks`; returns the slots that decode in this step.
    """
    state, slots = builder.state, builder.state.slots
    for slot in full[np.argsort(slots.number[full])].tolist():
        state.pause(slot)
    resumed = resume(builder)
    kept = ready[slots.decoding[ready]]
    others = np.setdiff1d(np.array(resumed, np.intp), kept)
    return np.concatenate([kept, others[: max(builder.budget - len(kept), 0)]])


def stay_paused(state: CoreState) -> None:
    """Record each paused request of this step, if request events are kept."""
    if state.recorder is not None:
        for slot in state.paused:
            state.recorder.note_pause(state.slots.request_of(slot), state.now_s)


def preempt_for_blocks(builder: BatchBuilder, slot: int) -> None:
    """Preempt a slot for want of blocks, release it at once, and log some of these preemptions."""
    state = builder.state
    request = state.slots.request_of(slot)
    num_fallbacks = state.counters.swap_fallbacks
    state.preempt(slot)
    builder.num_preempted += 1
    state.counters.retractions += 1
    mode = state.options.preemption_mode
    if state.counters.swap_fallbacks > num_fallbacks:
        mode = PreemptionMode.RECOMPUTE
    line = preemption_line(request.new.request_id, mode, state.counters.retractions)
    if line is not None:
        state.events.add_log(line)
    builder.release_ended()


def fail_alone(builder: BatchBuilder, slot: int) -> None:
    """Fail the only running request, which needs more blocks than there are in all."""
    state, request = builder.state, builder.state.slots.request_of(slot)
    message = (
        f"request {request.new.request_id} alone needs more than all {state.limits.num_blocks} KV "
        f"blocks of {state.limits.block_size} tokens: shorten prompt or max_tokens, or raise "
        "max_num_blocks"
    )
    state.fail(request, NeverFits(message, metadata={"limit": "max_num_blocks"}))
    builder.release_ended()


def _nobody_runs(state: CoreState) -> bool:
    return state.slots.num_running == len(state.paused)


def _is_over_budget(state: CoreState) -> bool:
    """Return True when paused rows hold more blocks than they may keep; shared ones count once."""
    budget = state.options.paused_budget_blocks
    return not budget or num_paused_blocks(state) > budget


def num_paused_blocks(state: CoreState) -> int:
    """Return the number of blocks that paused rows hold; shared ones count once."""
    if not state.paused:
        return 0
    slots = state.slots
    tables = [slots.block_table[slot, : slots.num_blocks[slot]] for slot in state.paused]
    return len(np.unique(np.concatenate(tables)))
