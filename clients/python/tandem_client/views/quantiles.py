"""Quantiles of what a histogram gained between two snapshots."""

from __future__ import annotations

from tandem_client.admin.activity import Histogram


def gained(now: Histogram, before: Histogram | None) -> Histogram:
    """
    Return the histogram of the values that came since `before`; None = all of them.

    A histogram that counts less than before, or in other buckets, belongs to another start of the
    server, and is returned whole.
    """
    if before is None or before.upper_bounds_s != now.upper_bounds_s:
        return now
    counts = tuple(new - old for new, old in zip(now.counts, before.counts, strict=True))
    if min(counts, default=0) < 0:
        return now
    return Histogram(
        upper_bounds_s=now.upper_bounds_s, counts=counts, sum_s=now.sum_s - before.sum_s
    )


def quantile_s(histogram: Histogram, share: float) -> float | None:
    """
    Return the value in seconds below which a share of all values lies; None without any value.

    Within a bucket values are taken as spread evenly, as Prometheus' `histogram_quantile` takes
    them; what lies in the bucket without a bound counts as the largest bound.

    Args:
        histogram: Values, shape ``[B]`` bounds and ``[B + 1]`` counts.
        share: Above 0, at most 1.
    """
    wanted = share * sum(histogram.counts)
    if not wanted:
        return None
    below, lower_s = 0.0, 0.0
    for upper_s, count in zip(histogram.upper_bounds_s, histogram.counts, strict=False):
        if below + count >= wanted:
            return lower_s + (upper_s - lower_s) * (wanted - below) / count
        below, lower_s = below + count, upper_s
    return lower_s
