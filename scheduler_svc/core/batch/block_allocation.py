"""
Blocks for decodes that grow, with preemption when there are not enough.

Cached blocks that no row uses are evicted first (by `BlockPool.try_take_next`). Then rows are
retracted, or under `paused_budget` paused (see `pausing`). Retraction frees more than this step
needs: it goes on until 20 tokens are free for each row left, so that the next step does not run out
of blocks again. The last row is never retracted; if it cannot go on alone, it fails.

Source: SGLang 0.3.5. Unlike it, we put retracted requests ahead of those of their priority that
never ran, and check blocks, not tokens, for this step's need.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.core.batch.batch_builder import BatchBuilder
from scheduler_svc.core.batch.pausing import pause_without_block
from scheduler_svc.core.batch.shortage import fail_alone, preempt_for_blocks
from scheduler_svc.core.batch.victims import VICTIM_POLICIES, least_urgent
from scheduler_svc.core.observe.step_log import retraction_line
from scheduler_svc.core.request.options import VictimRule
from scheduler_svc.core.slots.decode_rows import DecodeRows, GrowingRows
from scheduler_svc.core.state.new_token_ratio import RETRACT_STEPS
from scheduler_svc.core.state.replica import Replica


def grow(builder: BatchBuilder, rows: DecodeRows) -> DecodeRows:
    """
    Give one more block to each decode that has filled its last one, preempting or pausing others
    if blocks are short; returns the rows that decode in this step.
    """
    replica, slots = builder.replica, builder.replica.slots
    growing = slots.full_rows(rows)
    if not len(growing.slot):
        return rows
    blocks = replica.kv.pool.try_take_next(slots.next_blocks(growing))
    if blocks is not None:
        builder.append_blocks(growing, blocks)
        return rows
    if replica.cell.options.victim_rule is VictimRule.PAUSED_BUDGET:
        return slots.rows_of(pause_without_block(builder, rows.slot, growing.slot))
    make_room = _grow_oldest if builder.prefills else _retract
    return slots.rows_of(make_room(builder, rows.slot, growing.slot))


def _retract(
    builder: BatchBuilder, ready: NDArray[np.intp], full: NDArray[np.intp]
) -> NDArray[np.intp]:
    """
    Preempt running slots, worst priority first and then by the victim rule, until the others can go
    on: at least one, but never the last.
    """
    replica, slots = builder.replica, builder.replica.slots
    cell = replica.cell
    victim_of = VICTIM_POLICIES[cell.options.victim_rule]
    before, num_retracted = replica.new_token_ratio, 0
    candidates = slots.running.nonzero()[0]
    while len(candidates) > 1:
        preempt_for_blocks(builder, victim_of(slots, least_urgent(slots, candidates)))
        num_retracted += 1
        candidates = slots.running.nonzero()[0]
        full = full[slots.running[full]]
        if _is_enough(replica, len(candidates), len(full)):
            break
    if num_retracted:
        replica.ratio.note_retraction(slots, replica.steps.num_decode + 1)
        after = replica.ratio.at(replica.steps.num_decode + 1)
        cell.events.add_log(retraction_line(num_retracted, before, after))
    growing = GrowingRows(full)
    blocks = replica.kv.pool.try_take_next(slots.next_blocks(growing))
    if blocks is None:
        fail_alone(builder, int(candidates[0]))
    elif len(full):
        builder.append_blocks(growing, blocks)
    return ready[slots.running[ready]]


def _is_enough(replica: Replica, num_left: int, num_growing: int) -> bool:
    """Return True when the rows left can take their blocks and run for `RETRACT_STEPS` more."""
    available = replica.kv.pool.num_available
    free_tokens = available * replica.limits.block_size
    return available >= num_growing and free_tokens >= num_left * RETRACT_STEPS


def _grow_oldest(
    builder: BatchBuilder, ready: NDArray[np.intp], full: NDArray[np.intp]
) -> NDArray[np.intp]:
    """
    Give the available blocks to the oldest requests and leave the others out of this step.

    Under prefill-first the step computes prompts already, and their rows cannot be taken back. When
    these prompts are done, and since none is admitted while blocks are short, a step of decodes
    alone follows, which retracts.
    """
    slots = builder.replica.slots
    oldest = full[np.argsort(slots.admitted.number[full])]
    count = builder.replica.kv.pool.num_available
    growing, left_out = GrowingRows(oldest[:count]), oldest[count:]
    blocks = builder.replica.kv.pool.try_take_next(slots.next_blocks(growing))
    assert blocks is not None
    if count:
        builder.append_blocks(growing, blocks)
    return ready[~np.isin(ready, left_out)]
