"""Statistics and histograms of the core, as it tells them."""

from __future__ import annotations

from scheduler_svc.core.observe.stats import HistogramSnapshot
from scheduler_svc.core.state.replica import Replica
from tandem.admin.v1.stats_pb2 import GetStatsResponse as Stats


def core_stats(replica: Replica) -> Stats:
    """Return the core's part of the statistics; the time taken does not grow with requests."""
    cell, pool, host = replica.cell, replica.kv.pool, replica.kv.host
    ttft_s, inter_token_s = cell.latencies.ttft_s, cell.latencies.inter_token_s
    return Stats(
        **cell.counters.by_field(),
        running_requests=replica.slots.num_running + len(replica.draining),
        waiting_requests=len(cell.queue),
        paused_requests=len(replica.paused),
        swapped_requests=host.num_copies,
        suspected_requests=cell.suspects.num_suspects,
        queued_tokens=cell.queue.num_fresh_tokens,
        used_blocks=pool.num_used,
        cached_blocks=pool.num_cached,
        free_blocks=pool.num_free,
        total_blocks=pool.num_blocks,
        token_usage=pool.usage,
        block_size=replica.limits.block_size,
        host_blocks=host.num_blocks,
        used_host_blocks=host.num_blocks - host.num_free,
        steps_in_flight=len(replica.in_flight),
        new_token_ratio=replica.ratio.at(replica.num_decode_steps),
        first_tokens=sum(ttft_s.counts),
        time_to_first_token_s=ttft_s.total,
        next_tokens=sum(inter_token_s.counts),
        inter_token_s=inter_token_s.total,
    )


def core_histograms(replica: Replica) -> dict[str, HistogramSnapshot]:
    """Return copies of the core's histograms, by their names in the metrics."""
    return {
        "time_to_first_token": replica.cell.latencies.ttft_s.snapshot(),
        "inter_token": replica.cell.latencies.inter_token_s.snapshot(),
    }
