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
from scheduler_svc.core.batch.shortage import fail_alone, preempt_for_blocks
from scheduler_svc.core.slots.decode_rows import GrowingRows
from scheduler_svc.core.state.replica import Replica


def resume(builder: BatchBuilder) -> list[int]:
    """
    Resume paused rows in the order they were paused, with one block each; returns their slots.

    Then evict the last paused rows while paused rows hold more than the budget or no row runs. The
    only row left is not evicted: it fails.
    """
    replica = builder.replica
    resumed = _resume_by_free_blocks(builder)
    while replica.paused and (_none_runs(replica) or _is_over_budget(replica)):
        if replica.slots.num_running == 1:
            fail_alone(builder, next(iter(replica.paused)))
            break
        preempt_for_blocks(builder, next(reversed(replica.paused)))
        resumed += _resume_by_free_blocks(builder)
    return resumed


def _resume_by_free_blocks(builder: BatchBuilder) -> list[int]:
    replica = builder.replica
    resumed = list(replica.paused)[: replica.kv.pool.num_available]
    if resumed:
        growing = GrowingRows(np.array(resumed, np.intp))
        blocks = replica.kv.pool.try_take_next(replica.slots.next_blocks(growing))
        assert blocks is not None
        for slot in resumed:
            replica.unpause(slot)
        builder.append_blocks(growing, blocks)
    return resumed


def pause_without_block(
    builder: BatchBuilder, ready: NDArray[np.intp], full: NDArray[np.intp]
) -> NDArray[np.intp]:
    """
    Give the available blocks to the oldest requests and pause the others, within
    `paused_budget_blocks`; returns the slots that decode in this step.
    """
    replica, slots = builder.replica, builder.replica.slots
    for slot in full[np.argsort(slots.admitted.number[full])].tolist():
        replica.pause(slot)
    resumed = resume(builder)
    kept = ready[slots.decoding[ready]]
    others = slots.with_turn(np.setdiff1d(np.array(resumed, np.intp), kept))
    return np.concatenate([kept, others[: max(builder.budget - len(kept), 0)]])


def stay_paused(replica: Replica) -> None:
    """Record each paused request of this step, if request events are kept."""
    recorder, now = replica.cell.telemetry.recorder, replica.cell.now_s
    if recorder is not None:
        for slot in replica.paused:
            recorder.note_pause(replica.slots.request_of(slot), now)


def _none_runs(replica: Replica) -> bool:
    return replica.slots.num_running == len(replica.paused)


def _is_over_budget(replica: Replica) -> bool:
    """Return True when paused rows hold more blocks than they may keep; shared ones count once."""
    budget = replica.cell.options.paused_budget_blocks
    return not budget or num_paused_blocks(replica) > budget


def num_paused_blocks(replica: Replica) -> int:
    """Return the number of blocks that paused rows hold; shared ones count once."""
    if not replica.paused:
        return 0
    slots = replica.slots
    tables = [slots.blocks.of_slot(slot) for slot in replica.paused]
    return len(np.unique(np.concatenate(tables)))
