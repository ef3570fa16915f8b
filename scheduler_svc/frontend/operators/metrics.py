"""
Prometheus metrics of the core's snapshot.

Those of statistics that operators also get by GetStats are declared beside these, by the options
`counter` and `gauge` in `tandem/admin/v1/stats.proto`; all others are listed here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import Metric
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)

from scheduler_svc.frontend.operators.process_metrics import process_metrics
from scheduler_svc.ipc.snapshot import ExecutorRow, HistogramSnapshot, MetricsSnapshot
from tandem.admin.v1.stats_pb2 import GetStatsResponse as Stats
from tandem.common.v1 import metric_pb2
from tandem.installation import version

HISTOGRAMS = {
    "time_to_first_token": "From a request's arrival to its first output token.",
    "inter_token_latency": "Between two output tokens of a request.",
    "request_queue_time": "From a request's arrival to the first time in a batch.",
    "e2e_request_latency": "From a request's arrival to its end.",
    "step_time": "From sending a batch to its result.",
    "schedule_time": "Planning one step, by the policy that orders admission.",
    "executor_queue_time": "A step's wait in the executor, sent ahead, before it is computed.",
    "executor_forward_time": "Forward pass of a step, as the executor measured it.",
    "executor_sample_time": "Sampling of a step, as the executor measured it.",
}
"""Help text of the metric `tandem_<key>_seconds` by the snapshot's key."""

SIZES = {
    "request_prompt_tokens": "Prompt tokens of a request that ended.",
    "request_generation_tokens": "Output tokens of a request that ended.",
    "step_tokens": "Tokens that one step computes, of all its rows.",
}
"""Help text of the histogram `tandem_<key>` by the snapshot's key."""

WITH_SESSION = frozenset({"serving", "draining", "suspended", "silent"})
"""States of an executor in which it has a session, whose stream may be broken at the moment."""

OF_EXECUTORS: dict[
    str, tuple[type[CounterMetricFamily | GaugeMetricFamily], str, Callable[[ExecutorRow], float]]
] = {
    "attached": (
        GaugeMetricFamily,
        "1 while it has a session, and steps can reach it.",
        lambda row: row.state in WITH_SESSION and not row.away_s,
    ),
    "requests_running": (
        GaugeMetricFamily,
        "Requests that run there.",
        lambda row: row.running_requests,
    ),
    "kv_blocks_used": (
        GaugeMetricFamily,
        "Its KV blocks owned by requests.",
        lambda row: row.used_blocks,
    ),
    "kv_blocks": (GaugeMetricFamily, "All its KV blocks.", lambda row: row.total_blocks),
    "steps": (CounterMetricFamily, "Its steps whose result was applied.", lambda row: row.steps),
    "session_losses": (CounterMetricFamily, "Its sessions lost.", lambda row: row.losses),
}
"""
Kind, help text and value of the metric `tandem_each_executor_<key>`, which has a sample for each
executor, by its address; `tandem_executor_...` are of all of them together.
"""

# Generated stubs type an extension otherwise than the stubs of protobuf itself: hence Any.
_FAMILIES: tuple[tuple[Any, type[CounterMetricFamily | GaugeMetricFamily]], ...] = (
    (metric_pb2.counter, CounterMetricFamily),
    (metric_pb2.gauge, GaugeMetricFamily),
)


class SnapshotMetrics:
    """Stand-in for a Prometheus registry that holds one snapshot."""

    def __init__(self, snapshot: MetricsSnapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics of the snapshot."""
        yield from _declared(self._snapshot.stats)
        yield from _gauges(self._snapshot)
        yield from _counters(self._snapshot)
        yield from _of_executors(self._snapshot)
        for key, text in HISTOGRAMS.items():
            histogram = self._snapshot.histograms.get(key)
            if histogram is not None:
                yield _histogram(f"tandem_{key}_seconds", text, histogram, self._labels(key))
        for key, text in SIZES.items():
            if (histogram := self._snapshot.histograms.get(key)) is not None:
                yield _histogram(f"tandem_{key}", text, histogram, {})
        yield from process_metrics(self._snapshot.processes)
        yield InfoMetricFamily("tandem_build", "Version of the service.", {"version": version()})
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


def _declared(stats: Stats) -> Iterator[Metric]:
    """Yield the metrics of the fields that the proto marks as counters or gauges."""
    for field in Stats.DESCRIPTOR.fields:
        options = field.GetOptions()
        for mark, family in _FAMILIES:
            if options.HasExtension(mark):
                metric: metric_pb2.Metric = options.Extensions[mark]
                name = f"tandem_{metric.name or field.name}"
                yield family(name, metric.help, value=float(getattr(stats, field.name)))


def _gauges(snapshot: MetricsSnapshot) -> Iterator[Metric]:
    """Yield the gauges that the statistics lack."""
    for name, text, value in (
        ("ready", "1 when a new request would be served at once.", snapshot.ready),
        ("progressing", "0 while a step takes far longer than steps do.", snapshot.progressing),
        (
            "frontends_alive",
            "0 while a frontend process is silent for longer than liveness allows.",
            snapshot.frontends_alive,
        ),
        (
            "executor_device_memory_bytes",
            "Device memory in use, as the executor last said.",
            snapshot.device_memory_bytes,
        ),
        (
            "requests_limit",
            "Most requests in the system at a time, max_num_seqs; 0 before the first executor.",
            snapshot.max_num_seqs,
        ),
    ):
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
    for name, text, value in (
        ("prompt_tokens", "Prompt tokens of ended requests.", snapshot.prompt_tokens),
        (
            "prompt_tokens_cached",
            "Those of them that came from the prefix cache.",
            snapshot.cached_prompt_tokens,
        ),
        (
            "prefill_tokens",
            "Tokens computed in prefills, recomputation included.",
            stats.prefill_tokens,
        ),
        ("generation_tokens", "Output tokens sampled and kept.", stats.output_tokens),
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
    ):
        yield CounterMetricFamily(f"tandem_{name}", text, value=value)
    refusals = CounterMetricFamily(
        "tandem_refusals", "Requests refused, by the limit that did.", labels=["limit"]
    )
    for limit, count in sorted(stats.refused_by_limit.items()):
        refusals.add_metric([limit], count)
    yield refusals


def _of_executors(snapshot: MetricsSnapshot) -> Iterator[Metric]:
    """Yield what is counted of each executor by itself."""
    for key, (kind, text, value) in OF_EXECUTORS.items():
        family = kind(f"tandem_each_executor_{key}", text, labels=["executor"])
        for row in snapshot.executors:
            family.add_metric([row.address], float(value(row)))
        yield family
    states = GaugeMetricFamily(
        "tandem_each_executor_state",
        "1 for the state that it is in: connecting, refused, serving, silent, suspended, draining "
        "or drained.",
        labels=["executor", "state"],
    )
    for row in snapshot.executors:
        states.add_metric([row.address, row.state], 1)
    yield states


def _histogram(
    name: str, text: str, histogram: HistogramSnapshot, labels: dict[str, str]
) -> Metric:
    buckets = [
        (str(bound), float(count))
        for bound, count in zip(histogram.upper_bounds, histogram.cumulative_counts, strict=True)
    ]
    buckets.append(("+Inf", float(histogram.count)))
    family = HistogramMetricFamily(name, text, labels=list(labels))
    family.add_metric(list(labels.values()), buckets=buckets, sum_value=histogram.total)
    return family
