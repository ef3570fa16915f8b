"""Counters and histograms of the core."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

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
class RequestCounters:
    """Requests by what became of them."""

    accepted_requests: int = 0
    finished_requests: int = 0
    failed_requests: int = 0
    refused_requests: int = 0
    refused_by_limit: Counter[str] = field(default_factory=Counter)

    def note_refused(self, limit: str | None) -> None:
        """Count a refused request, by the limit that refused it; None where it was not a limit."""
        self.refused_requests += 1
        if limit is not None:
            self.refused_by_limit[limit] += 1


@dataclass(slots=True, eq=False, kw_only=True)
class ComputeCounters:
    """Steps, and the tokens that they computed or that the prefix cache spared them."""

    steps: int = 0
    prefill_tokens: int = 0
    output_tokens: int = 0
    prefix_cache_lookup_tokens: int = 0
    prefix_cache_hit_tokens: int = 0
    scored_prompt_tokens: int = 0


@dataclass(slots=True, eq=False, kw_only=True)
class PreemptionCounters:
    """Preemptions, and the KV blocks that they swapped."""

    preemptions: int = 0
    retractions: int = 0
    swapped_out_blocks: int = 0
    swapped_in_blocks: int = 0
    swap_fallbacks: int = 0


@dataclass(slots=True, eq=False, kw_only=True)
class FaultCounters:
    """Failures of executors, and what they cost."""

    executor_deaths: int = 0
    poison_requests: int = 0
    out_of_memory_steps: int = 0
    recomputed_tokens: int = 0


class Counters:
    """
    Numbers that only grow.

    Those in a part are told to operators: tandem.admin.v1.GetStatsResponse has a field of the same
    name for each, and says what it counts.

    Attributes:
        requests: Part on requests.
        compute: Part on steps and tokens.
        preemption: Part on preemptions.
        faults: Part on failures of executors.
        decode_steps: Number of steps planned with decodes; the core alone uses it.
    """

    __slots__ = ("compute", "decode_steps", "faults", "preemption", "requests")

    def __init__(self) -> None:
        self.requests = RequestCounters()
        self.compute = ComputeCounters()
        self.preemption = PreemptionCounters()
        self.faults = FaultCounters()
        self.decode_steps = 0

    def by_field(self) -> dict[str, Any]:
        """Return the counters of all parts by their fields of the message, for its constructor."""
        parts = (self.requests, self.compute, self.preemption, self.faults)
        return {name: getattr(part, name) for part in parts for name in part.__slots__}
