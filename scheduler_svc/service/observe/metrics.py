"""Counters and histograms that the core process keeps beside the core's own."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from itertools import accumulate

from scheduler_svc.core.observe.stats import Histogram
from scheduler_svc.core.observe.stats import HistogramSnapshot as CoreHistogram
from scheduler_svc.core.request.events import CoreEvents
from scheduler_svc.ipc.snapshot import HistogramSnapshot
from tandem.link.batch import Batch
from tandem.link.commands import Command
from tandem.link.results import StepResult

WAIT_BOUNDS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0
)  # fmt: skip
STEP_BOUNDS_S = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0
)  # fmt: skip

SCHEDULE_BOUNDS_S = (
    0.00001, 0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.25
)  # fmt: skip
TOKEN_BOUNDS = (
    1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072
)  # fmt: skip


class CoreMetrics:
    """Counters and histograms since the start. Owned by the core loop."""

    def __init__(self) -> None:
        self.finished_by_reason: Counter[str] = Counter()
        self.failed_by_reason: Counter[str] = Counter()
        self.refused_by_reason: Counter[str] = Counter()
        self.prompt_tokens = 0
        self.cached_prompt_tokens = 0
        self.integrity_failures = 0
        self.graph_steps = 0
        self._histograms = {
            "request_queue_time": Histogram(WAIT_BOUNDS_S),
            "e2e_request_latency": Histogram(WAIT_BOUNDS_S),
            "step_time": Histogram(STEP_BOUNDS_S),
            "executor_queue_time": Histogram(STEP_BOUNDS_S),
            "executor_forward_time": Histogram(STEP_BOUNDS_S),
            "executor_sample_time": Histogram(STEP_BOUNDS_S),
            "schedule_time": Histogram(SCHEDULE_BOUNDS_S),
            "request_prompt_tokens": Histogram(TOKEN_BOUNDS),
            "request_generation_tokens": Histogram(TOKEN_BOUNDS),
            "step_tokens": Histogram(TOKEN_BOUNDS),
        }

    def count_events(self, events: CoreEvents) -> None:
        """Count the requests that ended or failed, by reason, with their tokens and times."""
        for end in events.ended:
            self.finished_by_reason[end.reason.name] += 1
            self.prompt_tokens += end.num_prompt_tokens
            self.cached_prompt_tokens += end.num_cached_tokens
            self._observe("request_queue_time", end.queue_s)
            self._observe("e2e_request_latency", end.total_s)
            self._observe("request_prompt_tokens", end.num_prompt_tokens)
            self._observe("request_generation_tokens", end.num_output_tokens)
        for failure in events.failed:
            self.failed_by_reason[failure.error.reason] += 1

    def count_step(self, command: Command, result: StepResult, step_s: float) -> int:
        """
        Count one step, and return the number of its tokens.

        Args:
            command: Batch or command of the step.
            result: Result of the step.
            step_s: Seconds from sending the step to its result.
        """
        num_tokens = 0
        if isinstance(command, Batch):
            num_tokens = command.num_tokens
            self._observe("step_tokens", num_tokens)
        self._observe("step_time", step_s)
        self._observe("executor_queue_time", result.timings.queued_ns / 1e9)
        self._observe("executor_forward_time", result.timings.forward_ns / 1e9)
        self._observe("executor_sample_time", result.timings.sample_ns / 1e9)
        self.graph_steps += result.graph > 0
        return num_tokens

    def sum_s(self, name: str) -> float:
        """Return the sum of all observations of a histogram, in seconds."""
        return self._histograms[name].total

    def count_schedule(self, seconds: float) -> None:
        """Count the time that planning one step took."""
        self._observe("schedule_time", seconds)

    def histograms(self, of_core: Mapping[str, CoreHistogram]) -> dict[str, HistogramSnapshot]:
        """Return these histograms and those of the core, by name."""
        own = {name: one.snapshot() for name, one in self._histograms.items()}
        snapshots = {**own, **of_core}
        return {name: _cumulative(one) for name, one in snapshots.items()}

    def _observe(self, name: str, value: float) -> None:
        """Count one value without building an array, which would cost more than the counting."""
        histogram = self._histograms[name]
        histogram.counts[bisect_left(histogram.bounds, value)] += 1
        histogram.total += value


def _cumulative(histogram: CoreHistogram) -> HistogramSnapshot:
    counts = tuple(accumulate(histogram.counts))
    return HistogramSnapshot(
        upper_bounds=histogram.bounds,
        cumulative_counts=counts[:-1],
        count=counts[-1],
        total=histogram.total,
    )
