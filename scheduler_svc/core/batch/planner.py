"""
The plan of one step: the requests it computes, and how many tokens of each.

    slots that lost their requests               are released
    paused decodes, longest paused first         go on while there are blocks
    every decode that has something to compute   gets one token, and a block if its last is full;
    (of an executor with stages: in its lane)    others are preempted or paused for it if need be
    running prefills, oldest first               get as many tokens as the budget leaves
    the waiting queue, head first                is admitted from while slots, budget, threshold and
                                                 blocks allow

Under prefill-first the prompts are planned before the decodes. The decodes then get the rest of the
budget, those that waited longest for a token first; in the batch their rows still come first.
Decodes that get nothing free no slot, so at most `max_batch_size` prompts go ahead of them in a
row; `max_prefill_share` leaves them a part of every step.

Steps for an executor with pipeline stages decode one of its `lanes` in turn; prompts go on in any
of them, in steps in a row too. A lane that decodes nothing is skipped unless prompts fill the step.

After the executor ran out of memory in a step, steps are smaller than the limits (`step_room`).
While requests are suspected of killing executors, only those of the current trial run, one step at
a time (`faults.precautions`); with several executors on one of them, while the others go on.
"""

from __future__ import annotations

import numpy as np

from scheduler_svc.core.batch.batch_builder import BatchBuilder
from scheduler_svc.core.batch.block_allocation import grow
from scheduler_svc.core.batch.pausing import resume, stay_paused
from scheduler_svc.core.batch.prefill_admission import admit
from scheduler_svc.core.batch.prefills import continue_prefills, use_leftover
from scheduler_svc.core.batch.priority_preemption import make_way
from scheduler_svc.core.batch.step_report import report_step
from scheduler_svc.core.faults.precautions import PlanScope, settle_faults
from scheduler_svc.core.state.replica import Replica
from tandem.link.batch import Batch


def plan(replica: Replica, now: float) -> Batch | None:
    """Plan the next batch; None when there is nothing to send."""
    cell = replica.cell
    scope = settle_faults(replica, now)
    if scope is PlanScope.NONE:
        return None
    builder = BatchBuilder(replica)
    if replica.slots.has_vacated():
        builder.release_ended()
    if scope is PlanScope.ALL:
        make_way(builder, now)
    has_lanes = replica.limits.num_stages > 1
    if has_lanes:
        replica.slots.next_lane()
    if replica.paused:
        resume(builder)
    if cell.options.decodes_first:
        _plan_decodes(builder)
        _plan_prompts(builder, now, others_decode=builder.decodes is not None)
    else:
        _plan_prompts(builder, now, others_decode=replica.slots.num_decoding > 0)
        _plan_decodes(builder)
    if has_lanes:
        _skip_empty_lanes(builder)
    if replica.paused:
        stay_paused(replica)
    if builder.prefills or cell.telemetry.is_decode_line_due:
        report_step(builder, now)
    return builder.batch()


def _plan_prompts(builder: BatchBuilder, now: float, *, others_decode: bool) -> None:
    replica = builder.replica
    cell = replica.cell
    slots = replica.slots
    if slots.num_running == slots.num_decoding and not (cell.queue and slots.num_free()):
        return
    if others_decode and cell.options.max_prefill_share < 1.0:
        num_tokens = replica.room.tokens(replica.limits.max_total_tokens)
        share = int(cell.options.max_prefill_share * num_tokens)
        builder.hold_back(max(builder.budget - max(share, 1), 0))
    if builder.budget > 0:
        continue_prefills(builder)
        # Preempted requests come first in the queue, also while they drain, and paused rows come
        # before all waiting requests.
        is_open = not (replica.gate.is_full or replica.draining or replica.paused)
        if cell.queue and builder.budget > 0 and is_open and not builder.num_preempted:
            admit(builder, now)
        if builder.budget > 0:
            use_leftover(builder)
    builder.free_held_back()


def _skip_empty_lanes(builder: BatchBuilder) -> None:
    """
    Go on to the next lane while the step computes nothing, neither prompts nor decodes.

    Each lane has its turn a second time, as a later one may give it slots or blocks: a plan that
    computes nothing while requests could go on would leave nothing in flight to cause the next one.
    """
    slots = builder.replica.slots
    for _ in range(2 * slots.num_lanes() - 1):
        if builder.computes:
            return
        slots.next_lane()
        _plan_decodes(builder)


def _plan_decodes(builder: BatchBuilder) -> None:
    slots = builder.replica.slots
    rows = slots.decode_rows()
    if builder.prefills:
        # A request with its last chunk in this batch cannot decode before its token is sampled.
        ready = np.setdiff1d(rows.slot, [slot for slot, _, _ in builder.prefills])
        if len(ready) < rows.num_rows:
            rows = slots.rows_of(ready)
    num_rows = rows.num_rows
    if not num_rows or builder.budget <= 0:
        return
    if num_rows > builder.budget:
        rows = slots.rows_of(slots.least_served(rows.slot, builder.budget))
    rows = grow(builder, rows)
    if rows.num_rows:
        builder.add_decodes(rows)
