"""The event loop: everything ends once, nothing depends on chance, time only goes forward."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest

from scheduler_svc.core.request.request import FinishReason
from tandem.errors import InternalError
from tandem_simulator.simulation import VirtualClock
from tests.clients.simulator.experiments import run, simulation

VARIETY = {
    "plain": {},
    "fcfs": {"schedule_policy": "fcfs"},
    "shared": {"prefix_groups": "3", "prefix_len": "64", "arrivals": "bursts:6"},
    "chat": {"turns": "4", "think_s": "0.3", "prompt_len": "20"},
    "swap": {"preemption_mode": "swap", "schedule_conservativeness": "0"},
    "choices": {"choices": "3", "requests": "25"},
    "deadlines": {"timeout_s": "0.4"},
    "at-once": {"arrivals": "at-once", "priorities": "3", "tenants": "4"},
    "agent": {"turns": "3", "forks": "3", "think_s": "0.2", "prompt_len": "20"},
    "window-1": {"window": "1"},
    "window-4": {"window": "4"},
}


class TestEnds:
    @pytest.mark.parametrize("changes", VARIETY.values(), ids=VARIETY)
    def test_every_request_ends_exactly_once(self, changes):
        """
        Each completion that was sent ends once, whatever the workload, with the tokens that
        unlimited memory would have given, and no block stays in use.
        """
        outcome = run(**changes)
        requests = outcome.results["requests"]

        assert requests["sent"] == outcome.recorder.num_sent > 0
        assert requests["sent"] == requests["finished"] + requests["failed"] + requests["refused"]
        assert requests["finished"] == sum(requests["ends"].values())
        assert 0 == requests["failed"] == requests["refused"]
        assert 0 == outcome.results["over_time"]["used_blocks"][-1]

    def test_outputs_have_the_drawn_lengths(self):
        """
        A request ends with EOS after as many tokens as were drawn for it, or at max_tokens.
        """
        outcome = run(output_len="uniform:5:40", max_tokens="20")
        recorder = outcome.recorder
        sent = slice(0, recorder.num_sent)
        by_length = recorder.end[sent] == FinishReason.MAX_TOKENS

        assert 0 < np.count_nonzero(by_length) < recorder.num_sent
        assert (recorder.num_outputs[sent][by_length] == 20).all()
        assert (recorder.num_outputs[sent][~by_length] <= 20).all()

    def test_refusals_are_counted_by_reason(self):
        """
        A request that the core does not take counts as refused, under the error's reason.
        """
        outcome = run(arrivals="at-once", max_num_seqs="40")
        requests = outcome.results["requests"]

        assert 20 == requests["refused"] == requests["errors"]["QUEUE_FULL"]
        assert 40 == requests["finished"]

    def test_deadlines_end_requests(self):
        """
        A request that is not done at its deadline ends then, with what it has.
        """
        outcome = run(timeout_s="0.2")
        recorder = outcome.recorder
        late = recorder.end == FinishReason.DEADLINE
        lived_s = (recorder.end_s - recorder.arrival_s)[late]

        assert len(lived_s) > 0
        np.testing.assert_allclose(lived_s, 0.2, atol=1e-9)  # float64, of times under 1e6 s


class TestDeterminism:
    def test_equal_arguments_give_equal_bytes(self):
        """
        Two runs with the same seed print the same, byte for byte; another seed does not.
        """
        first, second, other = run(), run(), run(seed="1")

        assert json.dumps(first.as_json()) == json.dumps(second.as_json())
        assert first.results != other.results

    def test_checking_changes_nothing(self):
        """
        The checks only look on: results are the same without them.
        """
        assert run().results == run(check="false").results


class TestClock:
    def test_clock_refuses_to_go_back(self):
        """
        The virtual clock moves forward or stands still.
        """
        clock = VirtualClock()
        clock.advance_to(2.0)
        clock.advance_to(2.0)
        with pytest.raises(InternalError, match="cannot go back"):
            clock.advance_to(1.999)
        with pytest.raises(InternalError, match="cannot go back"):
            clock.advance_to(float("nan"))

    def test_times_are_in_order(self):
        """
        Steps do not overlap, and each request arrives before its first token and that before its
        end.
        """
        recorder = run(turns="2").recorder
        sent = slice(0, recorder.num_sent)
        end_of_step_s = recorder.step_start_s + recorder.step_s

        assert (recorder.step_start_s[1:] >= end_of_step_s[:-1] - 1e-12).all()
        assert (recorder.first_token_s[sent] > recorder.arrival_s[sent]).all()
        assert (recorder.last_token_s[sent] >= recorder.first_token_s[sent]).all()
        assert (recorder.end_s[sent] >= recorder.last_token_s[sent]).all()

    def test_cost_of_the_core_delays_everything(self):
        """
        Time that planning takes passes on the virtual clock too.
        """
        assert run(core_us="5000").results["duration_s"] > run().results["duration_s"]

    def test_measured_cost_is_the_real_one(self, monkeypatch):
        """
        With core_us measured, what passes is what the machine's clock says planning took.
        """
        ticks = itertools.count()
        monkeypatch.setattr("time.perf_counter", lambda: next(ticks) / 256)
        measured = run(core_us="measured", requests="20")
        fixed = run(core_us="3906.25", requests="20")
        assert fixed.results == measured.results

    def test_running_ahead_hides_the_link(self):
        """
        With two steps in flight the executor idles less than with one when the link is slow.
        """
        slow = {"link_s": "0.01"}
        one = run(window="1", **slow).results["steps"]["busy_share"]
        two = run(window="2", **slow).results["steps"]["busy_share"]
        assert two > one

    def test_short_steps_run_further_ahead(self):
        """
        The executor idles less with run_ahead over window when steps are short and no request
        waits; with long steps that changes nothing.
        """
        short = {
            "link_s": "0.002", "overhead_s": "0.001", "weights_s": "0", "token_s": "0",
            "window": "2", "requests": "20",
        }  # fmt: skip
        near = run(run_ahead="2", **short).results["steps"]["busy_share"]
        far = run(run_ahead="8", **short).results["steps"]["busy_share"]
        assert far > near
        long = short | {"overhead_s": "0.01"}
        assert run(run_ahead="2", **long).results == run(run_ahead="8", **long).results


class TestStuck:
    def test_core_that_plans_nothing_is_noticed(self, monkeypatch):
        """
        A simulation in which requests wait and nothing can happen any more fails instead of
        ending as if all was well.
        """
        one = simulation()
        monkeypatch.setattr(type(one.core), "schedule", lambda *_: None)
        with pytest.raises(InternalError, match="the core plans nothing"):
            one.run()


class TestChecks:
    def test_wrong_block_table_is_noticed(self):
        """
        With --check, a row that reads another request's KV ends the simulation.
        """
        one = simulation(check="true")
        schedule = one.core.schedule

        def corrupted(now):
            batch = schedule(now)
            if batch is not None and one._num_steps == 30:
                model = one.engines[0].model
                table = model.block_table
                model.kv[table[batch.row_slot[0], 0]] += np.uint64(1)
            return batch

        one.core.schedule = corrupted
        with pytest.raises(InternalError, match=r"computed from other tokens|unlimited memory"):
            one.run()

    def test_batch_that_breaks_a_rule_of_the_link_is_noticed(self):
        """
        With --check, a batch that an executor would refuse ends the simulation.
        """
        one = simulation(check="true")
        schedule = one.core.schedule

        def corrupted(now):
            batch = schedule(now)
            return batch if one._num_steps < 30 else replace(batch, row_start=batch.row_start + 1)

        one.core.schedule = corrupted
        with pytest.raises(InternalError, match=r"^a batch breaks a rule of the step link: ."):
            one.run()

    def test_wrong_token_is_noticed(self):
        """
        A request with other tokens than unlimited memory gives ends the simulation under --check.
        """
        one = simulation(check="true")
        execute = one.engines[0].model.execute

        def corrupted(batch):
            result, work = execute(batch)
            if one._num_steps == 30:  # some of them are of requests that have ended
                result.token += 1
            return result, work

        one.engines[0].model.execute = corrupted
        with pytest.raises(InternalError, match="with unlimited memory"):
            one.run()
