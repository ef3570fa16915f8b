"""Counters and histograms of the core."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

TTFT_BOUNDS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0
)  # fmt: skip
INTER_TOKEN_BOUNDS_S = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0
)  # fmt: skip


class Histogram:
    """
    Counts per bucket.

    Attributes:
        bounds: Upper bounds, inclusive, ascending.
        counts: Values per bucket, one more than `bounds`; the last one has no upper bound.
        total: Sum of all values.
    """

    __slots__ = ("_bounds", "bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self._bounds = np.array(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, values: NDArray[np.float64]) -> None:
        """Count values, shape ``[N]``."""
        if not len(values):
            return
        low, high = bisect_left(self.bounds, values.min()), bisect_left(self.bounds, values.max())
        if low == high:
            self.counts[low] += len(values)
        else:
            buckets = self._bounds.searchsorted(values)
            for bucket, count in enumerate(np.bincount(buckets).tolist()):
                self.counts[bucket] += count
        self.total += float(values.sum())

    def observe_equal(self, value: float, count: int) -> None:
        """Count one value `count` times."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += value * count

    def snapshot(self) -> HistogramSnapshot:
        """Return a copy that later observations do not change."""
        return HistogramSnapshot(bounds=self.bounds, counts=tuple(self.counts), total=self.total)


@dataclass(frozen=True, slots=True, kw_only=True)
class HistogramSnapshot:
    """Immutable copy of a `Histogram`."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float


@dataclass(slots=True, eq=False, kw_only=True)
class Counters:
    """Numbers that only grow; see tandem.admin.v1.GetStatsResponse for what each counts."""

    accepted: int = 0
    finished: int = 0
    failed: int = 0
    refused: int = 0
    refused_by_limit: Counter[str] = field(default_factory=Counter)
    prefill_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    retractions: int = 0
    swapped_out_blocks: int = 0
    swapped_in_blocks: int = 0
    swap_fallbacks: int = 0
    prefix_lookup_tokens: int = 0
    prefix_hit_tokens: int = 0
    recomputed_tokens: int = 0
    steps: int = 0
    decode_steps: int = 0
    executor_deaths: int = 0
    poison_requests: int = 0
    out_of_memory_steps: int = 0

    def note_refused(self, limit: str | None) -> None:
        """Count a refused request, by the limit that refused it; None where it was not a limit."""
        self.refused += 1
        if limit is not None:
            self.refused_by_limit[limit] += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreStats:
    """
    Snapshot of the core's numbers. Counters count since the core was made.

    `num_running` counts prefill, decode, paused and draining requests, `num_waiting` the others.
    Used, cached and free blocks add up to `total_blocks`. `retractions` are the preemptions for
    want of blocks, `swap_fallbacks` those that are recomputed for want of host blocks.
    `prefix_lookup_tokens` are all tokens of requests when they are admitted, `prefix_hit_tokens`
    those of them found in the prefix cache or shared with another choice. `recomputed_tokens` are
    the tokens of prompts and outputs that lost their KV with the executor while their requests ran.
    `paused_blocks` are held by paused requests, which may keep `paused_budget_blocks`.
    `num_swapped` requests have a copy of their KV in host memory. `queued_tokens` are the uncached
    prompt tokens of requests that wait for the first time.

    `executor_deaths` counts executors known to have died or failed in a step for another reason
    than want of memory, `num_suspects` the requests suspected of that now, and `poison_requests`
    those that failed for it. `out_of_memory_steps` counts steps that failed for want of memory.

    Histograms are in seconds: from arrival to the first token, and between successive tokens of a
    request.
    """

    num_running: int
    num_waiting: int
    num_draining: int
    used_blocks: int
    cached_blocks: int
    free_blocks: int
    total_blocks: int
    block_size: int
    accepted_requests: int
    finished_requests: int
    failed_requests: int
    refused_requests: int
    refused_by_limit: dict[str, int]
    prefill_tokens: int
    output_tokens: int
    preemptions: int
    retractions: int
    swapped_out_blocks: int
    swapped_in_blocks: int
    swap_fallbacks: int
    prefix_lookup_tokens: int
    prefix_hit_tokens: int
    recomputed_tokens: int
    num_paused: int
    paused_blocks: int
    paused_budget_blocks: int
    num_swapped: int
    host_blocks: int
    used_host_blocks: int
    queued_tokens: int
    new_token_ratio: float
    steps: int
    steps_in_flight: int
    executor_deaths: int
    num_suspects: int
    poison_requests: int
    out_of_memory_steps: int
    ttft_s: HistogramSnapshot
    inter_token_s: HistogramSnapshot
