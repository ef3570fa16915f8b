"""Counters and histograms of the core."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field, fields
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


_FIELDS = {
    "accepted": "accepted_requests",
    "finished": "finished_requests",
    "failed": "failed_requests",
    "refused": "refused_requests",
    "prefix_lookup_tokens": "prefix_cache_lookup_tokens",
    "prefix_hit_tokens": "prefix_cache_hit_tokens",
}
"""Fields of tandem.admin.v1.GetStatsResponse that have another name than their counter."""


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

    def by_field(self) -> dict[str, Any]:
        """Return a copy of the counters by their fields of the message, for its constructor."""
        return {
            _FIELDS.get(field.name, field.name): getattr(self, field.name)
            for field in fields(self)
            if field.name != "decode_steps"
        }
