"""Snapshots of a server, and what intervals between them show."""

from __future__ import annotations

import pytest

from tandem_client.admin.activity import Histogram
from tandem_client.views.history import GROWING, NUM_POINTS, WINDOW_S, SnapshotHistory
from tandem_client.views.quantiles import gained, quantile_s
from tandem_client.views.rates import rates_between
from tests.clients.python.views.shapes import histogram, snapshot


class TestQuantiles:
    @pytest.mark.parametrize(
        ("counts", "share", "expected"),
        [
            ((), 0.5, None),
            ((4,), 0.5, 0.05),
            ((2, 2), 0.5, 0.1),
            ((0, 4), 1.0, 0.2),
            ((0, 0, 4), 0.25, 0.25),
            ((98, 0, 2), 0.99, 0.3),
            ((0, 0, 0, 7), 0.5, 0.4),
        ],
    )
    def test_value_is_spread_evenly_in_its_bucket(self, counts, share, expected):
        """
        A quantile lies in its bucket as far as its share of the bucket's values; beyond all bounds it is the last one.
        """
        found = quantile_s(histogram(*counts), share)
        # The sums of shares are not exact in binary.
        assert expected == (found if found is None else pytest.approx(found, abs=1e-12))

    def test_gain_is_what_came_since(self):
        """
        Values that were counted before a snapshot do not count after it.
        """
        assert (0, 3, 0, 1) == gained(histogram(9, 5, 0, 1), histogram(9, 2)).counts

    @pytest.mark.parametrize(
        "before",
        [None, histogram(10), Histogram(upper_bounds_s=(1.0,), counts=(0, 0), sum_s=0.0)],
        ids=["none", "restarted", "other-bounds"],
    )
    def test_what_cannot_be_compared_counts_whole(self, before):
        """
        Without a histogram of the same run and buckets before, all values count.
        """
        assert (9, 5, 0, 0) == gained(histogram(9, 5), before).counts


class TestSnapshotHistory:
    def test_rates_are_of_the_last_seconds(self):
        """
        Rates count from the oldest snapshot that is needed for the window, whatever was before.
        """
        history = SnapshotHistory(snapshot(10.0, output_tokens=9_000))
        assert history.before is None
        for second in range(1, 9):
            history.add(snapshot(10.0 + second, output_tokens=9_000 + second**2))
        assert history.before.uptime_s == history.now.uptime_s - WINDOW_S
        assert (64 - 9) / 5 == rates_between(history.now, history.before).output_tokens_per_s

    def test_server_that_was_restarted_begins_anew(self):
        """
        Counters and plots of a server before its restart are forgotten: no rate is negative.
        """
        history = SnapshotHistory(snapshot(10.0, output_tokens=9_000))
        history.add(snapshot(11.0, output_tokens=9_010))
        history.add(snapshot(1.0))

        assert (None, ()) == (history.before, history.points)
        assert rates_between(history.now, history.before).output_tokens_per_s is None

    @pytest.mark.parametrize("name", GROWING)
    def test_older_server_with_lower_counters_is_another(self, name):
        """
        A counter that fell tells of a restart, also if the new server is older than the one before was when it was seen.
        """
        history = SnapshotHistory(snapshot(10.0, **{name: 9_000}))
        history.add(snapshot(11.0, **{name: 9_010}))
        history.add(snapshot(12.0, **{name: 40}))
        assert (None, ()) == (history.before, history.points)

    @pytest.mark.parametrize(("interval_s", "gap_s"), [(1.0, WINDOW_S), (20.0, 60.0)])
    def test_history_begins_anew_after_a_gap(self, interval_s, gap_s):
        """
        After a time without snapshots that is longer than the window and three intervals, what was before is forgotten.
        """
        history = SnapshotHistory(snapshot(10.0), interval_s)
        history.add(snapshot(10.0 + gap_s))
        assert 1 == len(history.points)
        history = SnapshotHistory(snapshot(10.0), interval_s)
        history.add(snapshot(10.5 + gap_s))
        assert (None, ()) == (history.before, history.points)

    def test_slow_server_has_rates(self):
        """
        A server whose every answer comes late is seen at longer intervals, which are no gaps.
        """
        history = SnapshotHistory(snapshot(0.0))
        for number in range(1, 5):
            history.add(snapshot(8.0 * number, output_tokens=80 * number))
        assert 10.0 == rates_between(history.now, history.before).output_tokens_per_s

    def test_each_interval_has_its_own_percentiles(self):
        """
        A point has the percentiles of the values that came in its interval; None where none came.
        """
        history = SnapshotHistory(snapshot(1.0, ttft=histogram(1000)))
        for now in (histogram(1000, 4), histogram(1000, 4), histogram(1000, 4, 10)):
            history.add(snapshot(history.now.uptime_s + 1, ttft=now))
        assert [150.0, None, 300.0] == [
            one.ttft_p50_ms and pytest.approx(one.ttft_p50_ms) for one in history.points
        ]

    def test_point_has_the_load_at_its_end(self):
        """
        Requests, KV memory and tokens per second of a point are those of its interval.
        """
        history = SnapshotHistory(snapshot(1.0, output_tokens=100))
        history.add(
            snapshot(
                3.0, output_tokens=300, running_requests=2, waiting_requests=1, token_usage=0.5
            )
        )
        (point,) = history.points
        assert (100.0, 2, 1, 0.5) == (
            point.output_tokens_per_s,
            point.running,
            point.waiting,
            point.kv_usage,
        )

    def test_only_the_last_points_are_kept(self):
        """
        Plots never grow beyond their number of points.
        """
        history = SnapshotHistory(snapshot(0.0))
        for second in range(1, NUM_POINTS + 10):
            history.add(snapshot(float(second), running_requests=second))
        assert (NUM_POINTS, 10) == (len(history.points), history.points[0].running)
