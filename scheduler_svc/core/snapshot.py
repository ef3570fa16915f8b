"""Statistics and histograms of the core, as it tells them."""

from __future__ import annotations

from scheduler_svc.core.observe.stats import HistogramSnapshot
from scheduler_svc.core.state.state import CoreState
from tandem.admin.v1.stats_pb2 import GetStatsResponse as Stats


def core_stats(state: CoreState) -> Stats:
    """Return the core's part of the statistics; the time taken does not grow with requests."""
    pool, host, ttft_s, inter_token_s = state.pool, state.host, state.ttft_s, state.inter_token_s
    return Stats(
        **state.counters.by_field(),
        running_requests=state.slots.num_running + len(state.draining),
        waiting_requests=len(state.queue),
        paused_requests=len(state.paused),
        swapped_requests=host.num_copies,
        suspected_requests=state.suspects.num_suspects,
        queued_tokens=state.queue.num_fresh_tokens,
        used_blocks=pool.num_used,
        cached_blocks=pool.num_cached,
        free_blocks=pool.num_free,
        total_blocks=pool.num_blocks,
        token_usage=pool.usage,
        block_size=state.limits.block_size,
        host_blocks=host.num_blocks,
        used_host_blocks=host.num_blocks - host.num_free,
        steps_in_flight=len(state.in_flight),
        new_token_ratio=state.ratio.at(state.counters.decode_steps),
        first_tokens=sum(ttft_s.counts),
        time_to_first_token_s=ttft_s.total,
        next_tokens=sum(inter_token_s.counts),
        inter_token_s=inter_token_s.total,
    )


def core_histograms(state: CoreState) -> dict[str, HistogramSnapshot]:
    """Return copies of the core's histograms, by their names in the metrics."""
    return {
        "time_to_first_token": state.ttft_s.snapshot(),
        "inter_token": state.inter_token_s.snapshot(),
    }
