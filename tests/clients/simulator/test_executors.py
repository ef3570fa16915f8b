"""Several executors in one simulation: their shares, their sizes, and the loss of one."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tandem.errors import InternalError
from tests.clients.simulator.experiments import run, simulation
from tests.clients.simulator.test_simulation import VARIETY

BUSY = {"requests": "150", "request_rate": "200"}
"""More than one executor of the small workload can do."""
SHARED = {
    **BUSY, "prefix_groups": "6", "prefix_len": "192", "prompt_len": "20", "output_len": "10",
    "max_num_blocks": "60", "request_rate": "100",
}  # fmt: skip
"""Prefixes of which one executor's memory holds only some."""
LOST = {"kill_executor_at": "0.3", "kill_executor": "1", "executor_back_s": "0.4"}
ROUTINGS = ("load_balanced", "longest_prefix", "first_prefix_block", "round_robin")


class TestEnds:
    @pytest.mark.slow
    @pytest.mark.parametrize("changes", VARIETY.values(), ids=VARIETY)
    def test_every_request_ends_once_on_several_executors(self, changes):
        """
        Each completion of any workload ends once with the tokens of unlimited memory, no block stays in use,
        and every executor has had its part.
        """
        outcome = run(executors="3", **changes)
        requests = outcome.results["requests"]

        assert requests["sent"] == requests["finished"] == outcome.recorder.num_sent > 0
        assert 0 == outcome.results["over_time"]["used_blocks"][-1]
        assert all(one["steps"] > 0 for one in outcome.results["executors"])

    @pytest.mark.parametrize("routing", ROUTINGS)
    def test_every_request_ends_under_each_routing(self, routing):
        """
        No policy of routing loses a request, repeats a token or lets a row read another's KV.
        """
        results = run(executors="4", routing=routing, **SHARED).results
        assert (150, 0, 0) == tuple(
            results["requests"][name] for name in ("finished", "failed", "refused")
        )

    @pytest.mark.slow
    def test_sixty_four_executors_compute_what_one_does(self):
        """
        The most executors that may be are as right as one.
        """
        requests = run(executors="64", requests="100", request_rate="2000").results["requests"]
        assert 100 == requests["finished"]

    @pytest.mark.slow
    def test_equal_arguments_give_equal_bytes(self):
        """
        Two runs with several executors print the same, byte for byte, and checks change nothing.
        """
        first, second = run(executors="4", **SHARED), run(executors="4", **SHARED)
        unchecked = run(executors="4", check="false", **SHARED)
        assert json.dumps(first.as_json()) == json.dumps(second.as_json())
        assert first.results == unchecked.results


class TestNumbers:
    def test_numbers_of_executors_add_up_to_those_of_all(self):
        """
        Steps and requests of the executors are those of the run; the shares are means of theirs.
        """
        outcome = run(executors="3", **SHARED)
        results, executors = outcome.results, outcome.results["executors"]
        prompts = [
            outcome.recorder.prompt_len[outcome.recorder.executor == number].sum()
            for number in range(3)
        ]
        hits = [one["cache_hit_ratio"] for one in executors]
        busy = [one["busy_share"] for one in executors]

        assert [0, 1, 2] == [one["executor"] for one in executors]
        assert results["steps"]["count"] == sum(one["steps"] for one in executors)
        assert results["requests"]["sent"] == sum(one["requests"] for one in executors)
        assert results["tokens"]["cache_hit_ratio"] == pytest.approx(
            np.average(hits, weights=prompts)
        )
        assert results["steps"]["busy_share"] == pytest.approx(np.mean(busy))
        assert results["steps"]["imbalance"] == pytest.approx(max(busy) / np.mean(busy))

    def test_steps_of_one_executor_do_not_overlap(self):
        """
        Each executor computes one step after the other, while several compute at the same time.
        """
        recorder = run(executors="3", **BUSY).recorder
        end_s = recorder.step_start_s + recorder.step_s
        for number in range(3):
            mine = recorder.step_executor == number
            assert (recorder.step_start_s[mine][1:] >= end_s[mine][:-1] - 1e-12).all()
        order = np.argsort(recorder.step_start_s)
        assert (recorder.step_start_s[order][1:] < end_s[order][:-1]).any()

    def test_computed_tokens_add_up_over_executors(self):
        """
        Computed tokens are those needed, less what was cached, plus what was computed again, also where a preempted
        request goes on elsewhere.
        """
        outcome = run(executors="2", schedule_conservativeness="0", max_num_blocks="40")
        tokens, finished = outcome.results["tokens"], outcome.results["requests"]["finished"]
        needed = tokens["prompt"] + tokens["output"] - finished - tokens["cached"]
        excess = tokens["computed"] - needed - tokens["recomputed"]
        assert outcome.results["memory"]["preemptions"] > 0
        assert 0 <= excess <= finished

    def test_one_executor_is_always_in_balance(self):
        """
        The longest busy time of one executor is the mean.
        """
        results = run().results
        assert 1.0 == results["steps"]["imbalance"]
        assert results["steps"]["busy_share"] == results["executors"][0]["busy_share"]

    @pytest.mark.slow
    def test_more_executors_answer_sooner(self):
        """
        A load that keeps requests waiting on one executor does not on four.
        """
        one, four = run(**BUSY).results, run(executors="4", **BUSY).results
        assert four["ttft_s"]["p50"] < one["ttft_s"]["p50"] / 2
        assert (
            four["throughput"]["output_tokens_per_s"]
            > 2 * (one["throughput"]["output_tokens_per_s"])
        )

    @pytest.mark.slow
    def test_round_robin_spreads_requests_and_spoils_hits(self):
        """
        Under round_robin all executors have about as many requests, and fewer prompt tokens are cached than where the
        longest prefix decides.
        """
        spread = run(executors="3", routing="round_robin", **SHARED).results
        affine = run(
            executors="3", routing="longest_prefix", prefix_caching_routing_alpha="1", **SHARED
        ).results
        counts = [one["requests"] for one in spread["executors"]]
        assert max(counts) - min(counts) <= 15
        assert spread["tokens"]["cache_hit_ratio"] < affine["tokens"]["cache_hit_ratio"]


class TestTimings:
    def test_results_say_how_long_their_steps_took(self):
        """
        Each result brings the step's time on the executor and the time it waited there for the step before, from which
        the core learns the pace of its executors.
        """
        one = simulation(executors="2", **BUSY)
        engine, found = one.engines[1], []
        apply = engine.port.apply

        def watched(result, now):
            found.append(result.timings)
            apply(result, now)

        engine.port.apply = watched
        recorder = one.run()
        step_s = recorder.step_s[recorder.step_executor == 1]
        # Times of results are whole nanoseconds.
        np.testing.assert_allclose([one.forward_ns / 1e9 for one in found], step_s, atol=1e-9)
        assert all(one.queued_ns + one.forward_ns == one.total_ns for one in found)
        assert any(one.queued_ns > 0 for one in found)


class TestSizes:
    def test_executors_have_the_sizes_that_are_listed(self):
        """
        Sizes are given to executors in turn, and their sum is what memory shares are of.
        """
        outcome = run(executors="3", executor_blocks="120:80")
        one = simulation(executors="3", executor_blocks="120:80")
        assert [120, 80, 120] == [engine.model.geometry.num_blocks for engine in one.engines]
        assert 320 == outcome.results["memory"]["total_blocks"]

    def test_long_requests_run_where_they_fit(self):
        """
        Requests that only the large executor can hold are computed there and not refused.
        """
        long = {"prompt_len": "600", "requests": "20", "max_total_tokens": "512"}
        results = run(executors="2", executor_blocks="120:30", **long).results
        assert 20 == results["requests"]["finished"]
        assert [20, 0] == [one["requests"] for one in results["executors"]]


class TestOutage:
    @pytest.mark.slow
    def test_requests_of_a_lost_executor_go_on_elsewhere(self):
        """
        All requests end with their whole output though an executor was lost while it computed, and what it had
        computed is computed again.
        """
        lost, safe = run(executors="3", **LOST, **BUSY), run(executors="3", **BUSY)
        assert 150 == lost.results["requests"]["finished"]
        assert lost.results["tokens"]["recomputed"] > safe.results["tokens"]["recomputed"]
        assert lost.results["inter_token_s"]["max"] > safe.results["inter_token_s"]["max"]

    def test_lost_executor_computes_nothing_until_it_is_back(self):
        """
        An executor has no step between its loss and its return, and steps again afterwards.
        """
        recorder = run(executors="3", **LOST, **BUSY).recorder
        mine = recorder.step_start_s[recorder.step_executor == 1]
        assert not ((mine > 0.3) & (mine < 0.7)).any()
        assert (mine >= 0.7).any()

    def test_only_executor_is_waited_for(self):
        """
        Without another executor requests wait until the lost one is back.
        """
        lost = {"kill_executor_at": "0.3", "executor_back_s": "2"}
        outcome = run(**lost)
        assert 60 == outcome.results["requests"]["finished"]
        assert outcome.results["inter_token_s"]["max"] > 2

    def test_loss_after_the_last_request_is_none(self):
        """
        An executor that is to be lost when all is done changes no result.
        """
        assert run().results == run(kill_executor_at="1e6").results


class TestChecks:
    def test_wrong_block_table_is_noticed_on_each_executor(self):
        """
        With --check, a row of the second executor that reads another request's KV ends the simulation.
        """
        one = simulation(check="true", executors="2", **BUSY)
        engine = one.engines[1]
        schedule = engine.port.schedule

        def corrupted(now):
            batch = schedule(now)
            if batch is not None and one._num_steps > 30 and len(batch.row_slot):
                engine.model.kv[engine.model.block_table[batch.row_slot[0], 0]] += np.uint64(1)
            return batch

        engine.port.schedule = corrupted
        with pytest.raises(InternalError, match=r"computed from other tokens|unlimited memory"):
            one.run()
