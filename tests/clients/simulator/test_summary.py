"""The printed numbers, computed again from every single token."""

from __future__ import annotations

import numpy as np
import pytest

from tandem_simulator.recorder import Recorder
from tandem_simulator.results.summary import MAX_POINTS, series, summarize
from tests.clients.simulator.experiments import SMALL, build, simulation


class Watched:
    """A simulation that also keeps every token's time, request by request, in plain lists."""

    def __init__(self, **changes) -> None:
        self.simulation = simulation(**changes)
        self.tokens: dict[int, list[float]] = {}
        core = self.simulation.core
        take_events = core.take_events

        def watched():
            events = take_events()
            for handle in events.token_handle.tolist():
                self.tokens.setdefault(handle, []).append(self.simulation.clock.now)
            return events

        core.take_events = watched
        self.recorder = self.simulation.run()
        self.results = summarize(self.recorder, total_blocks=120, slo_ttft_s=0.05, slo_tpot_s=0.012)


@pytest.fixture(scope="module")
def watched():
    return Watched()


def expected_spread(values):
    ranks = {f"p{rank}": np.percentile(values, rank) for rank in (50, 90, 99)}
    return {"mean": np.mean(values), **ranks, "max": max(values)}


class TestLatencies:
    def test_first_token_percentiles_are_those_of_numpy(self, watched):
        """
        TTFT is from arrival to the first token of each request.
        """
        arrival_s = watched.recorder.arrival_s
        waits = [times[0] - arrival_s[handle] for handle, times in watched.tokens.items()]
        assert expected_spread(waits) == pytest.approx(watched.results["ttft_s"])

    def test_gap_percentiles_are_those_of_numpy(self, watched):
        """
        Inter-token times are all gaps between a request's successive tokens, preemptions included.
        """
        gaps = [gap for times in watched.tokens.values() for gap in np.diff(times)]
        assert expected_spread(gaps) == pytest.approx(watched.results["inter_token_s"])

    def test_time_per_token_is_a_mean_per_request(self, watched):
        """
        Time per token is each request's mean gap; a single token has none.
        """
        means = [np.mean(np.diff(times)) for times in watched.tokens.values() if len(times) > 1]
        assert expected_spread(means) == pytest.approx(watched.results["tpot_s"])

    def test_end_to_end_is_at_least_queue_and_first_token(self, watched):
        """
        A request waits in the queue before its first token and ends after it.
        """
        for rank in ("mean", "p50", "p90", "p99", "max"):
            spread = [watched.results[key][rank] for key in ("queue_s", "ttft_s", "end_to_end_s")]
            assert sorted(spread) == spread


class TestThroughput:
    def test_rates_are_counts_over_the_whole_time(self, watched):
        """
        Tokens and requests per second are over the time from the first arrival to the last end.
        """
        recorder, rates = watched.recorder, watched.results["throughput"]
        duration_s = recorder.end_s.max() - recorder.arrival_s.min()
        num_tokens = sum(map(len, watched.tokens.values()))
        assert duration_s == pytest.approx(watched.results["duration_s"])
        assert num_tokens / duration_s == pytest.approx(rates["output_tokens_per_s"])
        assert len(watched.tokens) / duration_s == pytest.approx(rates["requests_per_s"])

    def test_goodput_counts_requests_within_both_bounds(self, watched):
        """
        A request is good when its first token and its mean further token were fast enough.
        """
        arrival_s = watched.recorder.arrival_s
        ttft_s, tpot_s = watched.results["ttft_s"]["p50"], watched.results["tpot_s"]["p50"]
        good = [
            times[0] - arrival_s[handle] <= ttft_s
            and (len(times) == 1 or np.mean(np.diff(times)) <= tpot_s)
            for handle, times in watched.tokens.items()
        ]
        rates = summarize(watched.recorder, total_blocks=120, slo_ttft_s=ttft_s, slo_tpot_s=tpot_s)[
            "throughput"
        ]
        assert 0 < sum(good) < len(good) / 2
        assert sum(good) / len(good) == pytest.approx(rates["good_share"])

    def test_computed_tokens_add_up(self, watched):
        """
        The number of computed tokens is what prompts and outputs needed, less what was cached or
        never fed back, plus what was computed again.
        """
        tokens = watched.results["tokens"]
        finished = watched.results["requests"]["finished"]
        needed = tokens["prompt"] + tokens["output"] - finished - tokens["cached"]
        excess = tokens["computed"] - needed - tokens["recomputed"]
        # A row may run one step past an end that its result only shows afterwards.
        assert 0 <= excess <= finished

    def test_preemptions_recompute(self):
        """
        Under too little memory requests are preempted, and what they had computed is computed
        again; the count agrees with the core's.
        """
        tight = Watched(schedule_conservativeness="0", max_num_blocks="40", prefix_caching="false")
        memory = tight.results["memory"]
        assert memory["preemptions"] == tight.simulation.core.stats().preemptions > 0
        assert tight.results["tokens"]["recomputed"] > 0
        assert memory["preempted_requests"] <= memory["preemptions"]


class TestShape:
    def test_series_are_thinned_evenly(self, watched):
        """
        Series over time have equally long columns, at most 200 points, from start to end.
        """
        points = series(watched.recorder)
        assert 1 == len({len(column) for column in points.values()})
        assert len(points["time_s"]) <= MAX_POINTS
        assert points["time_s"] == sorted(points["time_s"])
        assert watched.recorder.samples[-1].time_s == pytest.approx(points["time_s"][-1])

    def test_nothing_has_no_percentiles(self):
        """
        With no request there is no time, and ratios are 0 instead of a division by zero.
        """
        results = summarize(Recorder(4), total_blocks=10, slo_ttft_s=1.0, slo_tpot_s=1.0)
        assert results["ttft_s"] == dict.fromkeys(("mean", "p50", "p90", "p99", "max"))
        assert 0 == results["duration_s"] == results["throughput"]["requests_per_s"]

    def test_kv_usage_is_a_share(self, watched):
        """
        KV use is at most all blocks, and its mean at most its peak.
        """
        memory = watched.results["memory"]
        assert 0 < memory["mean_kv_usage"] <= memory["peak_kv_usage"] <= 1
        assert build(SMALL).setup.limits.max_num_blocks == memory["total_blocks"]
