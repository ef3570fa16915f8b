"""Blocks for rows that grow, at the cost of others when there are not enough."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.core.draft import Draft
from scheduler_svc.core.request import Request
from scheduler_svc.core.state import CoreState
from scheduler_svc.core.victims import fewest_generated
from tandem.errors import NeverFits


def grow(draft: Draft, ready: NDArray[np.intp]) -> NDArray[np.intp]:
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
            state.preempt(fewest_generated(slots, candidates))
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
