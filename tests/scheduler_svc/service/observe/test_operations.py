"""Choices, digests and operators' queries, through the whole core process without its sockets."""

import pytest

from scheduler_svc.core.request.request import FinishReason
from scheduler_svc.ipc import snapshot
from tandem.errors import OutOfMemory
from tandem.link.commands import KvMode, Resume, Suspend
from tandem.link.results import StepTimings
from tests.scheduler_svc.service.fakes.arithmetic_runner import expected_outputs

PROMPT = [5, 6, 7, 8, 9]


class TestChoices:
    def test_each_choice_has_its_own_stream(self, bench):
        """One submission gives every choice its tokens and its end, and all are forgotten then."""
        frontend = bench.frontend()
        frontend.submit(10, PROMPT, 6, num_choices=3, temperature=1.0)
        bench.until(lambda: len(frontend.ended) == 3)
        assert {10, 11, 12} == set(frontend.ended)
        assert [expected_outputs(PROMPT, 6)] * 3 == [frontend.tokens[10 + i] for i in range(3)]
        bench.until(lambda: not bench.link.runner.slots.live.any())

    def test_one_choice_ends_alone(self, bench):
        """A frontend that ends one choice lets the others go on to their own ends."""
        frontend = bench.frontend()
        bench.link.is_holding = True
        frontend.submit(10, PROMPT, 6, num_choices=2, temperature=1.0)
        bench.until(lambda: frontend.accepted)
        frontend.end(11, FinishReason.CANCELLED)
        bench.until(lambda: 11 in frontend.ended)
        bench.link.is_holding = False
        bench.link.compute()
        bench.until(lambda: 10 in frontend.ended)
        assert (FinishReason.MAX_TOKENS, FinishReason.CANCELLED) == (
            frontend.ended[10].reason,
            frontend.ended[11].reason,
        )

    def test_a_frontend_that_dies_takes_all_choices_along(self, bench):
        """A frontend that dies takes all choices of its requests along."""
        frontend, other = bench.frontend(0), bench.frontend(1)
        bench.link.is_holding = True
        frontend.submit(10, PROMPT, 50, num_choices=4, temperature=1.0)
        bench.until(lambda: frontend.accepted)
        bench.loop.frontend_died(0)
        bench.link.is_holding = False
        bench.link.compute()

        def is_empty():
            stats = snapshot.decode_stats(bench.reply(other, "stats").result)
            return stats.running_requests + stats.waiting_requests + stats.used_blocks == 0

        bench.until(is_empty)


class TestDigests:
    def test_digests_for_other_blocks_are_not_used(self, bench):
        """A prompt hashed for another block size is served without the use of these digests."""
        frontend = bench.frontend()
        wrong = bytes(32) * 3
        for stream_id, prompt in ((1, [5] * 12), (2, [6] * 12)):
            frontend.submit(stream_id, prompt, 4, block_digests=wrong, digest_block_size=16)
            bench.until(lambda stream_id=stream_id: stream_id in frontend.ended)
        assert [0, 0] == [frontend.ended[number].num_cached_tokens for number in (1, 2)]
        assert expected_outputs([6] * 12, 4) == frontend.tokens[2]


class TestOperators:
    def test_flush_forgets_what_was_cached(self, bench):
        """A second equal prompt finds the first; a third, after a flush, finds nothing."""
        frontend = bench.frontend()
        for stream_id in (1, 2):
            frontend.submit(stream_id, [5] * 12, 2)
            bench.until(lambda stream_id=stream_id: stream_id in frontend.ended)
        flushed = snapshot.decode_flush_result(bench.reply(frontend, "flush").result)
        frontend.submit(3, [5] * 12, 2)
        bench.until(lambda: 3 in frontend.ended)
        assert [0, 11, 0] == [frontend.ended[number].num_cached_tokens for number in (1, 2, 3)]
        assert flushed.freed_blocks > 0

    def test_events_that_are_not_kept_are_a_typed_error(self, bench):
        """A query for events without tracking is refused and says what to switch on."""
        frontend = bench.frontend()
        reply = bench.reply(frontend, "events", b'{"request_id": "0-1"}')
        assert "EVENTS_NOT_TRACKED" == reply.error.reason
        assert "--track-request-events" in reply.error.message

    @pytest.mark.parametrize("mode", list(KvMode))
    def test_suspension_is_a_step_and_answered_once_obeyed(self, bench, mode):
        """
        The executor is suspended before the answer comes, and no step is sent until it is resumed.
        """
        frontend = bench.frontend()
        frontend.submit(1, PROMPT, 40)
        bench.until(lambda: frontend.tokens.get(1))
        argument = snapshot.encode_json(snapshot.SuspendArgument(mode.value))
        assert bench.reply(frontend, "suspend", argument).error is None
        assert [Suspend(kv_mode=mode)] == bench.link.runner.commands
        assert not frontend.availabilities[-1].ready
        assert "an operator suspended it" in frontend.availabilities[-1].blocked_by
        frontend.submit(2, [9], 3)
        bench.until(lambda: 2 in frontend.accepted)
        assert snapshot.decode_stats(bench.reply(frontend, "stats").result).suspended
        assert bench.reply(frontend, "resume").error is None
        assert isinstance(bench.link.runner.commands[-1], Resume)
        bench.until(lambda: len(frontend.ended) == 2)
        assert (True, "") == (
            frontend.availabilities[-1].ready,
            frontend.availabilities[-1].blocked_by,
        )
        assert expected_outputs(PROMPT, 40) == frontend.tokens[1]
        assert expected_outputs([9], 3) == frontend.tokens[2]

    def test_suspension_that_the_executor_has_no_memory_for_is_given_up(self, bench):
        """
        The operator gets the executor's error, with its address; requests go on, and neither is
        the suspension asked for again nor is a request or the size of a step to blame.
        """
        frontend = bench.frontend()
        frontend.submit(1, PROMPT, 40)
        bench.until(lambda: frontend.tokens.get(1))
        bench.link.runner.refuses_to_suspend = OutOfMemory("the host has 1 GiB of free memory")
        argument = snapshot.encode_json(snapshot.SuspendArgument(KvMode.OFFLOAD.value))
        error = bench.reply(frontend, "suspend", argument).error
        assert ("OUT_OF_MEMORY", True) == (error.reason, "fake:1" in error.message)
        assert "the host has 1 GiB of free memory" in error.message
        bench.until(lambda: 1 in frontend.ended)
        assert expected_outputs(PROMPT, 40) == frontend.tokens[1]
        stats = snapshot.decode_stats(bench.reply(frontend, "stats").result)
        assert (1, False) == (stats.executor_losses, stats.suspended)
        assert (0, 0) == (stats.suspected_requests, stats.out_of_memory_steps)
        assert [] == bench.link.runner.commands

    def test_suspension_can_be_asked_for_again_after_it_was_given_up(self, bench):
        """
        A refusal leaves nothing behind: the next suspension is sent, and obeyed.
        """
        frontend = bench.frontend()
        argument = snapshot.encode_json(snapshot.SuspendArgument(KvMode.OFFLOAD.value))
        bench.link.runner.refuses_to_suspend = OutOfMemory("full")
        assert bench.reply(frontend, "suspend", argument).error is not None
        bench.link.runner.refuses_to_suspend = None
        assert bench.reply(frontend, "suspend", argument).error is None
        assert [Suspend(kv_mode=KvMode.OFFLOAD)] == bench.link.runner.commands

    def test_nobody_can_be_suspended_without_an_executor(self, make_bench):
        """Suspending is refused before an executor is attached, and resuming does nothing."""
        bench = make_bench()
        frontend = bench.frontend()
        argument = snapshot.encode_json(snapshot.SuspendArgument(1))
        assert "NO_EXECUTOR" == bench.reply(frontend, "suspend", argument).error.reason
        assert bench.reply(frontend, "resume").error is None


class TestDemand:
    def test_what_waits_and_runs_is_told(self, bench):
        """
        The demand counts choices that wait or run; no request was refused for lack of an executor.
        """
        frontend = bench.frontend()
        bench.link.is_holding = True
        frontend.submit(1, PROMPT, 6, num_choices=3, temperature=1.0)
        bench.until(lambda: 1 in frontend.accepted)
        found = snapshot.decode_demand(bench.reply(frontend, "demand").result)
        assert (3, None) == (
            found.waiting_requests + found.running_requests,
            found.unserved_age_s,
        )

    def test_requests_that_find_no_executor_are_noted(self, make_bench):
        """
        A request that the core refuses for lack of an executor is noted, and so is one that a
        frontend refused.
        """
        for refused_by_core in (True, False):
            bench = make_bench()
            frontend = bench.frontend()
            before = snapshot.decode_demand(bench.reply(frontend, "demand").result)
            assert snapshot.Demand(
                waiting_requests=0, running_requests=0, queued_tokens=0, unserved_age_s=None
            ) == (before)
            if refused_by_core:
                frontend.submit(1, PROMPT, 6)
                bench.until(lambda frontend=frontend: 1 in frontend.refused)
            else:
                assert bench.reply(frontend, "unserved").error is None
            after = snapshot.decode_demand(bench.reply(frontend, "demand").result)
            assert after.unserved_age_s is not None
            assert after.unserved_age_s >= 0


class TestExecutorInUse:
    def test_address_is_told_while_an_executor_is_attached(self, bench, make_bench):
        """
        The executor's address and features are told while one is attached, and the query is refused
        without one.
        """
        frontend = bench.frontend()
        bench.until(lambda: any(one.executor_attached for one in frontend.availabilities))
        executor = snapshot.decode_executor(bench.reply(frontend, "executor").result)
        assert ("fake:1", ("suspend",)) == (executor.address, executor.features)
        without = make_bench()
        assert "NO_EXECUTOR" == without.reply(without.frontend(), "executor").error.reason


class TestStepParts:
    def test_time_and_graphs_of_steps_are_counted(self, bench):
        """
        Times of waiting, forward pass and sampling, and graphs, in results add up in statistics and
        metrics.
        """
        bench.link.parts = StepTimings(queued_ns=1_000_000, forward_ns=4_000_000, sample_ns=500_000)
        bench.link.graph = 8
        frontend = bench.frontend()
        frontend.submit(1, PROMPT, 6)
        bench.until(lambda: 1 in frontend.ended)

        def stats_when_all_is_done():
            stats = snapshot.decode_stats(bench.reply(frontend, "stats").result)
            return None if stats.steps_in_flight else stats

        bench.until(stats_when_all_is_done)
        stats = stats_when_all_is_done()
        assert 6 <= stats.steps == stats.graph_steps
        assert pytest.approx((0.001, 0.004, 0.0005)) == (
            stats.executor_queued_s / stats.steps,
            stats.executor_forward_s / stats.steps,
            stats.executor_sample_s / stats.steps,
        )
        bench.link.graph = 0
        frontend.submit(2, PROMPT, 6)
        bench.until(lambda: 2 in frontend.ended)
        later = snapshot.decode_metrics(bench.reply(frontend, "metrics").result)
        assert stats.graph_steps == later.stats.graph_steps < later.stats.steps
        assert later.stats.steps == later.histograms["executor_queue_time"].count


class TestLiveness:
    def test_frontend_that_is_silent_for_too_long_is_told_to_all(self, bench):
        """
        A frontend that was silent for half a minute is told to all as not alive, until it speaks
        again.
        """
        stuck, other = bench.frontend(0), bench.frontend(1)
        for _ in range(31):
            bench.lead_s += 1.0
            bench.turn()
        bench.until(lambda: not other.availabilities[-1].frontends_alive)
        bench.reply(other, "stats")
        assert not other.availabilities[-1].frontends_alive
        bench.reply(stuck, "stats")
        bench.until(lambda: other.availabilities[-1].frontends_alive)

    def test_time_in_which_the_core_stood_still_is_not_blamed_on_frontends(self, bench):
        """A service that was stopped as a whole for an hour is alive in its first turn after it."""
        frontend = bench.frontend()
        bench.lead_s += 3600.0
        bench.turn()
        bench.reply(frontend, "stats")
        assert all(one.frontends_alive for one in frontend.availabilities)

    def test_frontend_that_is_gone_is_not_waited_for(self, bench):
        """A frontend with a process that ended does not count."""
        bench.frontend(0)
        other = bench.frontend(1)
        bench.loop.frontend_died(0)
        for _ in range(31):
            bench.lead_s += 1.0
            bench.turn()
        bench.reply(other, "stats")
        bench.until(lambda: other.availabilities[-1].frontends_alive)
