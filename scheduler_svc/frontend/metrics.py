"""Prometheus metrics of the core's snapshot. Every metric and its unit is listed here."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)

from scheduler_svc.ipc.snapshot import HistogramSnapshot, MetricsSnapshot, Stats

HISTOGRAMS = {
    "time_to_first_token": "From a request's arrival to its first output token.",
    "inter_token": "Between two output tokens of a request.",
    "queue_time": "From a request's arrival to the first time in a batch.",
    "request_time": "From a request's arrival to its end.",
    "step_time": "From sending a batch to its result.",
    "schedule_time": "Planning one step, by the policy that orders admission.",
    "executor_queue_time": "A step's wait in the executor, sent ahead, before it is computed.",
    "executor_forward_time": "Forward pass of a step, as the executor measured it.",
    "executor_sample_time": "Sampling of a step, as the executor measured it.",
}
"""Help text of the metric `tandem_<key>_seconds` by the snapshot's key."""


class SnapshotMetrics:
    """Stand-in for a Prometheus registry that holds one snapshot."""

    def __init__(self, snapshot: MetricsSnapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics of the snapshot."""
        yield from _gauges(self._snapshot)
        yield from _counters(self._snapshot)
        for key, text in HISTOGRAMS.items():
            histogram = self._snapshot.histograms.get(key)
            if histogram is not None:
                yield _histogram(f"tandem_{key}_seconds", text, histogram, self._labels(key))
        yield InfoMetricFamily(
            "tandem_model",
            "Model served.",
            value={
                "name": self._snapshot.model_name,
                "revision": self._snapshot.model_fingerprint,
            },
        )

    def _labels(self, key: str) -> dict[str, str]:
        is_by_policy = key == "schedule_time"
        return {"policy": self._snapshot.stats.schedule_policy} if is_by_policy else {}


def _gauges(snapshot: MetricsSnapshot) -> Iterator[Metric]:
    stats = snapshot.stats
    usage = stats.used_blocks / stats.total_blocks if stats.total_blocks else 0.0
    gauges: tuple[tuple[str, str, float], ...] = (
        ("requests_running", "Requests that hold a slot.", stats.running_requests),
        ("requests_waiting", "Requests that wait for a place.", stats.waiting_requests),
        ("kv_cache_usage_ratio", "Share of KV blocks owned by requests, 0 to 1.", usage),
        ("kv_blocks", "All KV blocks.", stats.total_blocks),
        ("kv_blocks_used", "KV blocks owned by requests.", stats.used_blocks),
        ("kv_blocks_cached", "KV blocks kept for the prefix cache alone.", stats.cached_blocks),
        ("host_blocks", "Blocks of host memory for swapped KV.", stats.host_blocks),
        ("host_blocks_used", "Host blocks in use.", stats.used_host_blocks),
        ("requests_paused", "Requests that wait for one more block.", stats.paused_requests),
        ("requests_swapped", "Requests whose KV is in host memory.", stats.swapped_requests),
        (
            "queued_tokens",
            "Uncached prompt tokens of requests that wait for the first time.",
            stats.queued_tokens,
        ),
        (
            "new_token_ratio",
            "Share of max_tokens that running requests are expected to use.",
            stats.new_token_ratio,
        ),
        (
            "requests_suspected",
            "Requests that executors may have died of; while there are any, the others wait.",
            stats.suspected_requests,
        ),
        ("steps_in_flight", "Steps sent whose result is not applied.", stats.steps_in_flight),
        ("executor_attached", "1 while an executor session is attached.", stats.executor_attached),
        ("ready", "1 when a new request would be served at once.", snapshot.ready),
        ("draining", "1 after Drain or SIGTERM.", stats.draining),
        ("uptime_seconds", "Since the scheduler started.", stats.uptime_s),
        (
            "executor_device_memory_bytes",
            "Device memory in use, as the executor last said.",
            snapshot.device_memory_bytes,
        ),
    )
    for name, text, value in gauges:
        yield GaugeMetricFamily(f"tandem_{name}", text, value=float(value))


def _counters(snapshot: MetricsSnapshot) -> Iterator[Metric]:
    stats = snapshot.stats
    requests = CounterMetricFamily(
        "tandem_requests",
        "Requests that ended, by outcome (finished, failed, refused) and reason.",
        labels=["outcome", "reason"],
    )
    for outcome, by_reason in (
        ("finished", snapshot.finished_by_reason),
        ("failed", snapshot.failed_by_reason),
        ("refused", snapshot.refused_by_reason),
    ):
        for reason, count in by_reason.items():
            requests.add_metric([outcome, reason], count)
    yield requests
    tokens = CounterMetricFamily(
        "tandem_tokens",
        "Tokens by kind: prompt and prompt_cached of ended requests, prefill as computed "
        "(recomputation included), output as sampled and kept.",
        labels=["kind"],
    )
    tokens.add_metric(["prompt"], snapshot.prompt_tokens)
    tokens.add_metric(["prompt_cached"], snapshot.cached_prompt_tokens)
    tokens.add_metric(["prefill"], stats.prefill_tokens)
    tokens.add_metric(["output"], stats.output_tokens)
    yield tokens
    refusals = CounterMetricFamily(
        "tandem_refusals", "Requests refused, by the limit that did.", labels=["limit"]
    )
    for limit, count in sorted(stats.refused_by_limit.items()):
        refusals.add_metric([limit], count)
    yield refusals
    for name, text, value in (*_plain_counters(snapshot), *_executor_counters(snapshot.stats)):
        yield CounterMetricFamily(f"tandem_{name}", text, value=value)


def _plain_counters(snapshot: MetricsSnapshot) -> tuple[tuple[str, str, float], ...]:
    stats = snapshot.stats
    return (
        (
            "prefix_cache_lookup_tokens",
            "Tokens that admitted requests looked for in the prefix cache.",
            stats.prefix_cache_lookup_tokens,
        ),
        (
            "prefix_cache_hit_tokens",
            "Those of them that were found.",
            stats.prefix_cache_hit_tokens,
        ),
        ("retractions", "Preemptions for lack of KV blocks.", stats.retractions),
        ("swapped_out_blocks", "KV blocks copied to host memory.", stats.swapped_out_blocks),
        ("swapped_in_blocks", "KV blocks copied back from there.", stats.swapped_in_blocks),
        (
            "swap_fallbacks",
            "Preemptions by swapping that lacked host blocks and are recomputed.",
            stats.swap_fallbacks,
        ),
        ("requests_accepted", "Requests accepted.", stats.accepted_requests),
        ("preemptions", "Requests that lost their KV blocks and queued again.", stats.preemptions),
        ("steps", "Steps whose result was applied.", stats.steps),
        ("graph_steps", "Those of them that a captured graph computed.", stats.graph_steps),
        (
            "merged_updates",
            "Updates merged because a frontend was slow.",
            snapshot.merged_updates,
        ),
        (
            "integrity_failures",
            "Bookkeeping errors found while idle; any is a bug.",
            snapshot.integrity_failures,
        ),
    )


def _executor_counters(stats: Stats) -> tuple[tuple[str, str, float], ...]:
    """Return name, help and value of the counters about executors."""
    return (
        ("executor_sessions", "Executor sessions opened.", stats.executor_sessions),
        (
            "executor_reattachments",
            "Broken step streams attached again with nothing lost.",
            stats.executor_reattachments,
        ),
        ("executor_losses", "Executor sessions lost.", stats.executor_losses),
        ("steps_sent_again", "Steps a broken stream did not deliver.", stats.steps_sent_again),
        (
            "recomputed_tokens",
            "Tokens whose KV was lost with an executor and that are computed again.",
            stats.recomputed_tokens,
        ),
        (
            "state_hash_mismatches",
            "Sessions lost because both ends held different slots; any is a bug.",
            stats.state_hash_mismatches,
        ),
        (
            "executor_deaths",
            "Executors that died while they computed a step.",
            stats.executor_deaths,
        ),
        (
            "poison_requests",
            "Requests that failed since executors die of them.",
            stats.poison_requests,
        ),
        (
            "out_of_memory_steps",
            "Steps that executors had no memory for; steps are smaller after each.",
            stats.out_of_memory_steps,
        ),
        (
            "executor_fencings",
            "Sessions lost to another scheduler.",
            stats.executor_fencings,
        ),
    )


def _histogram(
    name: str, text: str, histogram: HistogramSnapshot, labels: dict[str, str]
) -> Metric:
    buckets = [
        (str(bound), float(count))
        for bound, count in zip(histogram.upper_bounds_s, histogram.cumulative_counts, strict=True)
    ]
    buckets.append(("+Inf", float(histogram.count)))
    family = HistogramMetricFamily(name, text, labels=list(labels))
    family.add_metric(list(labels.values()), buckets=buckets, sum_value=histogram.sum_s)
    return family
