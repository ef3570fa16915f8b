"""Statistics and histograms of the core, as it tells them."""

from __future__ import annotations

from scheduler_svc.core.observe.stats import HistogramSnapshot
from scheduler_svc.core.state.cell import Cell
from scheduler_svc.core.state.fleet import Fleet
from tandem.admin.v1.stats_pb2 import GetStatsResponse as Stats


def core_stats(fleet: Fleet) -> Stats:
    """
    Return the core's part of the statistics, sums over all executors; the time taken does not grow
    with requests.
    """
    cell = fleet.cell
    pools, hosts = [one.kv.pool for one in fleet], [one.kv.host for one in fleet]
    num_blocks, num_used = sum(one.num_blocks for one in pools), sum(one.num_used for one in pools)
    ttft_s, inter_token_s = cell.telemetry.latencies.ttft_s, cell.telemetry.latencies.inter_token_s
    return Stats(
        **cell.telemetry.counters.by_field(),
        running_requests=sum(one.slots.num_running + len(one.draining) for one in fleet),
        waiting_requests=len(cell.queue),
        paused_requests=sum(len(one.paused) for one in fleet),
        swapped_requests=sum(one.num_copies for one in hosts),
        suspected_requests=cell.suspects.num_suspects,
        queued_tokens=cell.queue.num_fresh_tokens,
        used_blocks=num_used,
        cached_blocks=sum(one.num_cached for one in pools),
        free_blocks=sum(one.num_free for one in pools),
        total_blocks=num_blocks,
        token_usage=num_used / num_blocks,
        block_size=fleet.largest.limits.block_size,
        host_blocks=sum(one.num_blocks for one in hosts),
        used_host_blocks=sum(one.num_blocks - one.num_free for one in hosts),
        steps_in_flight=sum(len(one.steps.in_flight) for one in fleet),
        new_token_ratio=max(one.new_token_ratio for one in fleet),
        first_tokens=sum(ttft_s.counts),
        time_to_first_token_s=ttft_s.total,
        next_tokens=sum(inter_token_s.counts),
        inter_token_s=inter_token_s.total,
    )


def core_histograms(cell: Cell) -> dict[str, HistogramSnapshot]:
    """Return copies of the core's histograms, by their names in the metrics."""
    return {
        "time_to_first_token": cell.telemetry.latencies.ttft_s.snapshot(),
        "inter_token_latency": cell.telemetry.latencies.inter_token_s.snapshot(),
    }
