"""Snapshots of the last seconds, and what each interval between two of them showed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from tandem_client.admin import Stats
from tandem_client.views.quantiles import gained, quantile_s
from tandem_client.views.rates import rates_between
from tandem_client.views.snapshot import Snapshot

WINDOW_S = 5.0
"""Number of last seconds that rates cover; they cover one interval if that is longer."""
NUM_POINTS = 120
"""Intervals that are kept for plots."""
MAX_GAP = 3
"""Intervals without a snapshot after which the history begins anew, if they exceed the window."""
GROWING = ("steps", "output_tokens", "prefill_tokens", "finished_requests")
"""Counters that never fall while a server runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """
    One interval between two snapshots, or the moment at its end. None = nothing was measured in it.

    Attributes:
        ttft_p50_ms: Median of the times to first token that ended in it.
        ttft_p99_ms: Their 99th percentile.
        itl_p50_ms: Median of the times between output tokens in it.
        itl_p99_ms: Their 99th percentile.
        output_tokens_per_s: Output tokens per second.
        running: Requests that ran at its end.
        waiting: Requests that waited at its end.
        kv_usage: Share of KV blocks in use at its end, 0 to 1.
    """

    ttft_p50_ms: float | None
    ttft_p99_ms: float | None
    itl_p50_ms: float | None
    itl_p99_ms: float | None
    output_tokens_per_s: float | None
    running: int
    waiting: int
    kv_usage: float


class SnapshotHistory:
    """Snapshots of the last seconds, oldest first, and a point for each of the last intervals."""

    def __init__(self, first: Snapshot, interval_s: float = 1.0) -> None:
        """
        Args:
            first: The first snapshot.
            interval_s: Seconds between two snapshots of a server that answers at once.
        """
        self._interval_s = interval_s
        self._last_s = interval_s
        """Seconds between the two newest snapshots: a slow server makes them longer."""
        self._kept = deque([first])
        self._points: deque[Point] = deque(maxlen=NUM_POINTS)

    @property
    def newest(self) -> Snapshot:
        """Newest snapshot."""
        return self._kept[-1]

    @property
    def oldest(self) -> Snapshot | None:
        """Snapshot from which rates count; None until there are two of the same server run."""
        return self._kept[0] if len(self._kept) > 1 else None

    @property
    def now(self) -> Stats:
        """Newest snapshot."""
        return self.newest.stats

    @property
    def before(self) -> Stats | None:
        """Snapshot from which rates count; None until there are two of the same server run."""
        return None if self.oldest is None else self.oldest.stats

    @property
    def points(self) -> tuple[Point, ...]:
        """Points of the last intervals, oldest first."""
        return tuple(self._points)

    def add(self, snapshot: Snapshot) -> None:
        """
        Add a snapshot; drop those that are too old, and all from before a restart of the server or
        a gap: a rate over hours in which no snapshot was taken is that of no moment.
        """
        stats = snapshot.stats
        passed_s = stats.uptime_s - self.now.uptime_s
        longest_s = max(WINDOW_S, MAX_GAP * max(self._interval_s, self._last_s))
        self._last_s = passed_s
        if passed_s < 0 or passed_s > longest_s or _has_fallen(stats, self.now):
            self._kept.clear()
            self._points.clear()
        else:
            self._points.append(_point(snapshot, self.newest))
        self._kept.append(snapshot)
        while len(self._kept) > 2 and stats.uptime_s - self._kept[1].stats.uptime_s >= WINDOW_S:
            self._kept.popleft()


def _has_fallen(now: Stats, before: Stats) -> bool:
    return any(getattr(now, name) < getattr(before, name) for name in GROWING)


def _point(now: Snapshot, before: Snapshot) -> Point:
    ttft = _quantiles_ms(now, before, "time_to_first_token")
    itl = _quantiles_ms(now, before, "inter_token_latency")
    return Point(
        ttft_p50_ms=next(ttft),
        ttft_p99_ms=next(ttft),
        itl_p50_ms=next(itl),
        itl_p99_ms=next(itl),
        output_tokens_per_s=rates_between(now.stats, before.stats).output_tokens_per_s,
        running=now.stats.running_requests,
        waiting=now.stats.waiting_requests,
        kv_usage=now.stats.token_usage,
    )


def _quantiles_ms(now: Snapshot, before: Snapshot, name: str) -> Iterator[float | None]:
    """Yield the median and the 99th percentile of a histogram's values between two snapshots."""
    later = None if now.activity is None else now.activity.histograms.get(name)
    earlier = None if before.activity is None else before.activity.histograms.get(name)
    for share in (0.5, 0.99):
        # Without the earlier one the values of this interval cannot be told from all before it.
        if later is None or earlier is None:
            yield None
            continue
        value_s = quantile_s(gained(later, earlier), share)
        yield None if value_s is None else 1000 * value_s
