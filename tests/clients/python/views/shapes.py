"""Snapshots of a server, made for a test."""

from __future__ import annotations

from tandem_client.admin import Stats
from tandem_client.admin.activity import Activity, Histogram
from tandem_client.views.snapshot import Snapshot
from tests.stats import changed

BOUNDS_S = (0.1, 0.2, 0.4)
ZERO = Stats()


def histogram(*counts: int) -> Histogram:
    """Return a histogram of four buckets with these counts; those left out are 0."""
    padded = (*counts, *[0] * (len(BOUNDS_S) + 1 - len(counts)))
    return Histogram(upper_bounds_s=BOUNDS_S, counts=padded, sum_s=0.0)


def activity(uptime_s: float = 0.0, **changes: object) -> Activity:
    values = {"uptime_s": uptime_s, "histograms": {}, "steps": (), "faults": ()}
    return Activity(**(values | changes))


def snapshot(uptime_s: float, *, ttft: Histogram | None = None, **changes: object) -> Snapshot:
    """Return a snapshot of a server of this age, with these statistics."""
    histograms = {} if ttft is None else {"time_to_first_token": ttft}
    return Snapshot(
        stats=changed(ZERO, uptime_s=uptime_s, **changes),
        activity=activity(uptime_s, histograms=histograms),
    )
