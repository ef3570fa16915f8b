"""Snapshot of the core's statistics."""

from __future__ import annotations

from scheduler_svc.core.batch.pausing import num_paused_blocks
from scheduler_svc.core.observe.stats import CoreStats
from scheduler_svc.core.state.state import CoreState


def core_stats(state: CoreState) -> CoreStats:
    """Return the statistics; the time taken does not grow with requests, except paused ones."""
    counters = state.counters
    return CoreStats(
        num_running=state.slots.num_running + len(state.draining),
        num_waiting=len(state.queue),
        num_draining=len(state.draining),
        used_blocks=state.pool.num_used,
        cached_blocks=state.pool.num_cached,
        free_blocks=state.pool.num_free,
        total_blocks=state.pool.num_blocks,
        block_size=state.limits.block_size,
        accepted_requests=counters.accepted,
        finished_requests=counters.finished,
        failed_requests=counters.failed,
        refused_requests=counters.refused,
        refused_by_limit=dict(counters.refused_by_limit),
        prefill_tokens=counters.prefill_tokens,
        output_tokens=counters.output_tokens,
        preemptions=counters.preemptions,
        retractions=counters.retractions,
        swapped_out_blocks=counters.swapped_out_blocks,
        swapped_in_blocks=counters.swapped_in_blocks,
        swap_fallbacks=counters.swap_fallbacks,
        prefix_lookup_tokens=counters.prefix_lookup_tokens,
        prefix_hit_tokens=counters.prefix_hit_tokens,
        recomputed_tokens=counters.recomputed_tokens,
        num_paused=len(state.paused),
        paused_blocks=num_paused_blocks(state),
        paused_budget_blocks=state.options.paused_budget_blocks,
        num_swapped=state.host.num_copies,
        host_blocks=state.host.num_blocks,
        used_host_blocks=state.host.num_blocks - state.host.num_free,
        queued_tokens=state.queue.num_fresh_tokens,
        new_token_ratio=state.ratio.at(counters.decode_steps),
        steps=counters.steps,
        steps_in_flight=len(state.in_flight),
        executor_deaths=counters.executor_deaths,
        num_suspects=state.suspects.num_suspects,
        poison_requests=counters.poison_requests,
        out_of_memory_steps=counters.out_of_memory_steps,
        ttft_s=state.ttft_s.snapshot(),
        inter_token_s=state.inter_token_s.snapshot(),
    )
