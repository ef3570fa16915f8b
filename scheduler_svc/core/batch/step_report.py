"""The lines that a step's plan writes to the operators' log."""

from __future__ import annotations

from scheduler_svc.core.batch.batch_builder import BatchBuilder
from scheduler_svc.core.observe.step_log import StepSnapshot
from scheduler_svc.core.state.state import CoreState


def report_step(builder: BatchBuilder, now: float) -> None:
    """Log the prompts that a step computes, and every 40th step with decodes."""
    state, log = builder.state, builder.state.step_log
    snapshot = snapshot_of(state)
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
        state.events.add_log(line)
    if state.counters.decode_steps >= log.due_step:
        state.events.add_log(log.decode_line(snapshot, state.counters.output_tokens, now))


def snapshot_of(state: CoreState) -> StepSnapshot:
    """Return the core's numbers for the step log as they are now."""
    return StepSnapshot(
        num_running=state.slots.num_running - len(state.paused),
        num_queued=len(state.queue),
        used_blocks=state.pool.num_used,
        num_blocks=state.pool.num_blocks,
        block_size=state.limits.block_size,
    )
