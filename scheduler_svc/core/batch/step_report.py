"""The lines that a step's plan writes to the operators' log."""

from __future__ import annotations

from scheduler_svc.core.batch.batch_builder import BatchBuilder
from scheduler_svc.core.observe.step_log import StepSnapshot
from scheduler_svc.core.state.replica import Replica


def report_step(builder: BatchBuilder, now: float) -> None:
    """Log the prompts that a step computes, and every 40th step with decodes."""
    replica, telemetry = builder.replica, builder.replica.cell.telemetry
    cell, log = replica.cell, telemetry.step_log
    snapshot = snapshot_of(replica)
    if builder.prefills:
        num_cached = sum(admission.num_cached_tokens for admission in builder.admits)
        if builder.swaps is not None:
            num_cached -= builder.swaps.num_tokens_in
        line = log.prefill_line(
            snapshot,
            num_seqs=len(builder.prefills),
            num_new=sum(chunk for _, chunk, _ in builder.prefills),
            num_cached=num_cached,
        )
        cell.events.add_log(line)
    if telemetry.is_decode_line_due:
        cell.events.add_log(
            log.decode_line(snapshot, telemetry.counters.compute.output_tokens, now)
        )


def snapshot_of(replica: Replica) -> StepSnapshot:
    """Return the core's numbers for the step log as they are now."""
    return StepSnapshot(
        num_running=replica.slots.num_running - len(replica.paused),
        num_queued=len(replica.cell.queue),
        used_blocks=replica.kv.pool.num_used,
        num_blocks=replica.kv.pool.num_blocks,
        block_size=replica.limits.block_size,
    )
