"""Want of blocks: a running request is preempted for them, or fails where no other is left."""

from __future__ import annotations

from scheduler_svc.core.batch.batch_builder import BatchBuilder
from scheduler_svc.core.observe.step_log import preemption_line
from scheduler_svc.core.state.ends import fail
from tandem.errors import NeverFits


def preempt_for_blocks(builder: BatchBuilder, slot: int) -> None:
    """Preempt a slot for want of blocks, release it at once, and log some of these preemptions."""
    replica = builder.replica
    cell = replica.cell
    request = replica.slots.request_of(slot)
    counters = cell.telemetry.counters.preemption
    mode = replica.preempt(slot)
    builder.note_preemption()
    counters.retractions += 1
    line = preemption_line(request.new.log_ids, mode, counters.retractions)
    if line is not None:
        cell.events.add_log(line)
    builder.release_ended()


def fail_alone(builder: BatchBuilder, slot: int) -> None:
    """Fail the only running request, which needs more blocks than there are in all."""
    replica, limits = builder.replica, builder.replica.limits
    request = replica.slots.request_of(slot)
    message = (
        f"request {request.new.request_id} alone needs more than all {limits.num_blocks} KV "
        f"blocks of {limits.block_size} tokens: shorten prompt or max_tokens, or raise "
        "max_num_blocks"
    )
    fail(replica.cell, request, NeverFits(message, metadata={"limit": "max_num_blocks"}))
    builder.release_ended()
