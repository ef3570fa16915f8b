import pytest
import structlog

from scheduler_svc.core.request.events import ProgressKind
from scheduler_svc.core.request.request import FinishReason
from scheduler_svc.ipc import snapshot
from scheduler_svc.ipc.messages import Accepted, Availability
from scheduler_svc.ipc.sockets import FrontendGone
from scheduler_svc.service.publisher import RETRY_S
from tandem.admin.v1.stats_pb2 import GetStatsResponse
from tests.scheduler_svc.service.fakes.arithmetic_runner import expected_outputs
from tests.scheduler_svc.service.three_requests import stats_of
from tests.waiting import wait_until

STATES = ("waiting", "prefill", "decode")


def _stats(bench, frontend) -> GetStatsResponse:
    return snapshot.decode_stats(bench.reply(frontend, "stats").result)


def _is_gone(bench, frontend) -> bool:
    try:
        bench.socket.try_send(frontend.index, Accepted(0))
    except FrontendGone:
        return True
    return False


def _is_drained(bench) -> bool:
    return not bench.link.runner.slots.live.any()


class TestServing:
    def test_tokens_come_in_order_and_then_the_end(self, bench):
        """A request's tokens arrive whole, followed by one end that counts them."""
        frontend = bench.frontend()
        frontend.submit(1, [5, 6, 7], 10)
        bench.until(lambda: 1 in frontend.ended)
        assert expected_outputs([5, 6, 7], 10) == frontend.tokens[1]
        end = frontend.ended[1]
        assert (FinishReason.MAX_TOKENS, 3, 10) == (
            end.reason,
            end.num_prompt_tokens,
            end.num_output_tokens,
        )

    @pytest.mark.parametrize("window", [1, 2, 4])
    def test_many_requests_of_two_frontends(self, make_bench, window):
        """Requests of several frontends share steps and each gets its own tokens."""
        bench = make_bench(window=window)
        bench.link.boot("boot-1")
        frontends = [bench.frontend(0), bench.frontend(1)]
        for frontend in frontends:
            for stream_id in range(12):
                prompt = [3 + frontend.index, *range(5, 5 + stream_id)]
                frontend.submit(stream_id, prompt, 1 + 2 * stream_id)
        bench.until(lambda: all(len(frontend.ended) == 12 for frontend in frontends))
        for frontend in frontends:
            for stream_id in range(12):
                prompt = [3 + frontend.index, *range(5, 5 + stream_id)]
                expected = expected_outputs(prompt, 1 + 2 * stream_id)
                assert expected == frontend.tokens[stream_id]
        bench.until(lambda: _is_drained(bench))

    def test_model_and_availability_are_told(self, make_bench):
        """A frontend learns the model once there is one, and that requests can be served."""
        bench = make_bench()
        frontend = bench.frontend()
        assert [] == frontend.models
        assert frontend.availabilities == [
            Availability(executor_attached=False, ready=False, draining=False)
        ]
        bench.link.boot("boot-1")
        bench.until(lambda: frontend.availabilities[-1].ready)
        assert ["sums"] == [model.name for model in frontend.models]
        later = bench.frontend(1)
        assert ["sums"] == [model.name for model in later.models]
        assert later.availabilities[-1].ready

    def test_stats_are_consistent_while_running(self, bench):
        """A snapshot taken between steps counts blocks and requests once."""
        frontend = bench.frontend()
        bench.link.is_holding = True
        for stream_id in range(10):
            frontend.submit(stream_id, [9] * 6, 4)
        bench.until(lambda: len(frontend.accepted) == 10)
        stats = _stats(bench, frontend)
        assert 10 == stats.accepted_requests == stats.running_requests + stats.waiting_requests
        assert 2 == stats.steps_in_flight
        assert 64 == stats.total_blocks == stats.used_blocks + stats.free_blocks
        assert stats.executor_attached

    @pytest.mark.parametrize(("computes_s", "in_flight"), [(0.001, 5), (0.02, 2)])
    def test_short_steps_run_ahead_while_nobody_waits(self, make_bench, computes_s, in_flight):
        """The number of steps in flight is the core's choice for steps of the usual length."""
        bench = make_bench(window=2, run_ahead=5)
        bench.link.computes_s = computes_s
        bench.link.boot("boot-1")
        frontend = bench.frontend()
        frontend.submit(1, [9] * 6, 40)
        bench.until(lambda: len(frontend.tokens.get(1, ())) >= 3)
        bench.link.is_holding = True
        for _ in range(20):
            bench.turn()
        assert in_flight == _stats(bench, frontend).steps_in_flight

    def test_waiting_requests_learn_their_place(self, bench):
        """A waiting request is told how many are ahead of it."""
        frontend = bench.frontend()
        bench.link.is_holding = True
        for stream_id in range(10):
            frontend.submit(stream_id, [9] * 6, 4)
        bench.until(lambda: len(frontend.accepted) == 10)
        bench.let_pass(0.5)
        queued = int(ProgressKind.QUEUED)
        places = {p.stream_id: p.value for p in frontend.progress if p.kind == queued}
        assert places[8] + 1 == places[9]

    def test_metrics_count_what_happened(self, bench):
        """Histograms and counters add up to the requests served."""
        frontend = bench.frontend()
        for stream_id in range(3):
            frontend.submit(stream_id, [4, 5], 5)
        frontend.submit(9, [4], 1000)
        bench.until(lambda: len(frontend.ended) == 3 and frontend.refused)
        bench.until(lambda: _stats(bench, frontend).steps == bench.link.runner.num_steps)
        metrics = snapshot.decode_metrics(bench.reply(frontend, "metrics").result)
        assert {"MAX_TOKENS": 3} == metrics.finished_by_reason
        assert {"TOTAL_TOO_LONG": 1} == metrics.refused_by_reason
        assert (15, 6) == (metrics.stats.output_tokens, metrics.prompt_tokens)
        counts = {name: histogram.count for name, histogram in metrics.histograms.items()}
        assert (3, 12, 3) == (
            counts["time_to_first_token"],
            counts["inter_token_latency"],
            counts["e2e_request_latency"],
        )
        assert metrics.stats.steps == counts["step_time"] == bench.link.runner.num_steps
        assert 0 == metrics.integrity_failures

    def test_config_shows_limits_of_the_executor(self, bench):
        """The configuration in force has the executor's limits where nothing was set."""
        frontend = bench.frontend()
        bench.until(lambda: frontend.models)
        entries = snapshot.decode_config(bench.reply(frontend, "config").result).entries
        (block_size,) = [entry for entry in entries if entry.name == "block_size"]
        assert ("4", "executor") == (block_size.json_value, block_size.source)

    @pytest.mark.parametrize(("kind", "argument"), [("nonsense", b"{}"), ("drain", b"[")])
    def test_bad_query_is_answered_with_an_error(self, bench, kind, argument):
        """A query that makes no sense gets an error instead of silence."""
        frontend = bench.frontend()
        error = bench.reply(frontend, kind, argument).error
        assert error is not None
        assert error.reason == "INTERNAL"


class TestRefusals:
    def test_before_any_executor(self, make_bench):
        """A request before any executor is attached is refused, with advice when to try again."""
        bench = make_bench()
        frontend = bench.frontend()
        frontend.submit(1, [5], 1)
        bench.until(lambda: 1 in frontend.refused)
        assert ("NO_EXECUTOR", 1.0) == (
            frontend.refused[1].reason,
            frontend.refused[1].retry_after_s,
        )

    def test_full_queue(self, make_bench):
        """
        Requests over max_num_seqs are refused, naming the limit; requests that ended make room.
        """
        bench = make_bench(max_num_seqs=3)
        bench.link.boot("boot-1")
        frontend = bench.frontend()
        bench.link.is_holding = True
        for stream_id in range(5):
            frontend.submit(stream_id, [9] * 6, 4)
        bench.until(lambda: len(frontend.refused) == 2)
        assert {"QUEUE_FULL"} == {refused.reason for refused in frontend.refused.values()}
        assert frontend.refused[4].metadata["limit"] == "max_num_seqs"
        bench.link.is_holding = False
        bench.link.compute()
        bench.until(lambda: len(frontend.ended) == 3)
        frontend.submit(7, [9], 1)
        bench.until(lambda: 7 in frontend.ended)

    def test_duplicate_request_id(self, bench):
        """The id of a live request cannot be used again, from any frontend."""
        first, second = bench.frontend(0), bench.frontend(1)
        bench.link.is_holding = True
        first.submit(1, [5], 3, request_id="same")
        bench.until(lambda: first.accepted)
        second.submit(1, [5], 3, request_id="same")
        bench.until(lambda: second.refused)
        assert second.refused[1].reason == "DUPLICATE_REQUEST_ID"

    @pytest.mark.parametrize(
        ("name", "value"),
        [("top_p", 0.0), ("top_p", 1e-60), ("temperature", 5.0), ("top_k", 10**12), ("seed", -1)],
    )
    def test_row_that_the_link_refuses_costs_its_request_alone(self, bench, name, value):
        """
        A request whose row no executor would take fails as a bug of ours, with the parameter's name
        in answer and log; it never reaches the link, no session is lost, and others go on.
        """
        frontend = bench.frontend()
        frontend.submit(1, [5], 3)
        bench.until(lambda: 1 in frontend.accepted)
        with structlog.testing.capture_logs() as logs:
            frontend.submit(2, [5], 3, **{name: value})
            bench.until(lambda: 2 in frontend.refused)
        assert "INTERNAL" == frontend.refused[2].reason
        (line,) = [line for line in logs if line["event"] == "request_not_sendable"]
        assert "error" == line["log_level"]
        bench.until(lambda: 1 in frontend.ended)
        assert 0 == stats_of(bench, frontend).executor_losses

    def test_broken_prompt_column(self, bench):
        """A prompt that is not whole tokens is refused as a bug, and the loop goes on."""
        frontend = bench.frontend()
        frontend.submit(1, [5], 1, raw_prompt=b"abc")
        bench.until(lambda: 1 in frontend.refused)
        assert frontend.refused[1].reason == "INTERNAL"


class TestEnding:
    def _bring_to(self, bench, frontend, state: str) -> None:
        """Bring request 1 to a state, with its step in flight if it has one."""
        if state == "waiting":
            bench.link.is_holding = True
            for stream_id in range(100, 108):
                frontend.submit(stream_id, [9], 30)
            bench.until(lambda: len(frontend.accepted) == 8)
        if state == "prefill":
            bench.link.is_holding = True
        frontend.submit(1, list(range(3, 33)), 30)
        bench.until(lambda: 1 in frontend.accepted)
        if state == "decode":
            bench.until(lambda: len(frontend.tokens.get(1, [])) >= 3)
            bench.link.is_holding = True
            bench.turn()

    @pytest.mark.parametrize("state", STATES)
    @pytest.mark.parametrize("by", ["stream", "abort", "deadline"])
    def test_in_every_state(self, bench, state, by):
        """A request can be ended in any state, gets one end, and its blocks are free soon."""
        frontend = bench.frontend()
        self._bring_to(bench, frontend, state)
        if by == "stream":
            frontend.end(1)
        elif by == "abort":
            assert bench.reply(frontend, "abort", b'{"request_id": "0-1"}').error is None
        else:
            frontend.submit(2, [5], 9, deadline_s=0.0)
            bench.until(lambda: 2 in frontend.ended)
            assert FinishReason.DEADLINE == frontend.ended[2].reason
            frontend.end(1)
        bench.until(lambda: 1 in frontend.ended)
        assert FinishReason.CANCELLED == frontend.ended[1].reason
        for stream_id in range(100, 108):
            frontend.end(stream_id)
        bench.link.is_holding = False
        bench.link.compute()
        bench.until(lambda: _is_drained(bench))
        assert 0 == _stats(bench, frontend).used_blocks

    def test_stop_string_end_counts_to_its_token(self, bench):
        """An end that the frontend found is reported with the count that it gave."""
        frontend = bench.frontend()
        frontend.submit(1, [5], 60)
        bench.until(lambda: len(frontend.tokens.get(1, [])) >= 4)
        frontend.end(1, FinishReason.STOP_STRING, 2)
        bench.until(lambda: 1 in frontend.ended)
        end = frontend.ended[1]
        assert (FinishReason.STOP_STRING, 2) == (end.reason, end.num_output_tokens)

    def test_unknown_stream_is_ignored(self, bench):
        """Ending a request that already ended changes nothing."""
        frontend = bench.frontend()
        frontend.submit(1, [5], 1)
        bench.until(lambda: 1 in frontend.ended)
        frontend.end(1)
        frontend.submit(2, [5], 1)
        bench.until(lambda: 2 in frontend.ended)

    def test_abort_ends_the_request_of_the_tenant_it_names(self, bench):
        """
        Two tenants' requests with one id are served at once, and an abort ends one of them.
        """
        frontend = bench.frontend()
        bench.link.is_holding = True
        for stream_id, tenant in ((1, "red"), (2, "blue")):
            frontend.submit(stream_id, [5, stream_id], 6, request_id="r", tenant=tenant)
        bench.until(lambda: {1, 2} == set(frontend.accepted))
        assert bench.reply(frontend, "abort", b'{"request_id": "r"}').error is not None
        answer = bench.reply(frontend, "abort", b'{"request_id": "r", "tenant": "blue"}')
        assert answer.error is None
        bench.until(lambda: 2 in frontend.ended)
        assert {2: FinishReason.CANCELLED} == {
            stream_id: end.reason for stream_id, end in frontend.ended.items()
        }

    def test_abort_of_an_unknown_request_is_an_error(self, bench):
        """Aborting an id that is not live answers REQUEST_NOT_FOUND."""
        frontend = bench.frontend()
        error = bench.reply(frontend, "abort", b'{"request_id": "none"}').error
        assert error is not None
        assert error.reason == "REQUEST_NOT_FOUND"


class TestFrontends:
    def test_full_pipe_merges_and_loses_nothing(self, bench):
        """Steps go on while a frontend does not read, and later it gets every token in order."""
        slow, other = bench.frontend(0), bench.frontend(1)
        slow.submit(0, [5], 60)
        bench.until(lambda: 0 in slow.accepted)
        bench.frontends.remove(slow)
        # Each answer fills the pipe a little; what the kernel and zmq buffer is finite.
        while not bench.loop._publisher.has_unsent:
            slow.ask("metrics")
            bench.turn()
        for stream_id in range(20):
            slow.submit(stream_id + 1, [5, stream_id], 60)
        total = 21 * 60
        bench.until(lambda: _stats(bench, other).output_tokens >= total)
        bench.frontends.append(slow)
        bench.until(lambda: len(slow.ended) == 21, turn_s=RETRY_S)
        for stream_id in range(20):
            assert expected_outputs([5, stream_id], 60) == slow.tokens[stream_id + 1]
        metrics = snapshot.decode_metrics(bench.reply(other, "metrics").result)
        assert metrics.merged_updates > 0
        assert slow.num_updates < metrics.stats.steps

    def test_death_frees_what_its_requests_held(self, bench):
        """
        Requests end with the process of their frontend, and other frontends are not disturbed.
        """
        dying, other = bench.frontend(0), bench.frontend(1)
        dying.submit(1, [5], 60)
        other.submit(1, [6], 60)
        bench.until(lambda: len(dying.tokens.get(1, [])) >= 2)
        bench.drop(dying)
        bench.loop.frontend_died(0)
        bench.until(lambda: 1 in other.ended)
        assert expected_outputs([6], 60) == other.tokens[1]
        bench.until(lambda: _is_drained(bench))

    def test_vanished_frontend_is_found_by_sending(self, bench):
        """A frontend that died unreported is noticed when a message cannot reach it."""
        dying, other = bench.frontend(0), bench.frontend(1)
        bench.link.is_holding = True
        dying.submit(1, [5], 60)
        bench.until(lambda: dying.accepted)
        bench.drop(dying)
        wait_until(lambda: _is_gone(bench, dying), "its connection to be over")
        bench.link.is_holding = False
        bench.link.compute()
        bench.until(lambda: _stats(bench, other).running_requests == 0)
        bench.until(lambda: _is_drained(bench))
        metrics = snapshot.decode_metrics(bench.reply(other, "metrics").result)
        assert {"CANCELLED": 1} == metrics.finished_by_reason

    def test_restarted_frontend_starts_empty(self, bench):
        """A second Hello with the same index ends the requests of the first."""
        frontend = bench.frontend(0)
        bench.link.is_holding = True
        frontend.submit(1, [5], 60)
        bench.until(lambda: frontend.accepted)
        bench.drop(frontend)
        again = bench.frontend(0)
        bench.link.is_holding = False
        bench.link.compute()
        again.submit(1, [7], 5)
        bench.until(lambda: 1 in again.ended)
        assert expected_outputs([7], 5) == again.tokens[1]

    def test_request_right_behind_a_second_hello_is_served(self, bench):
        """Requests that come in the same turn as a second Hello are the new frontend's, whatever their numbers."""
        frontend = bench.frontend(0)
        bench.link.is_holding = True
        frontend.submit(1, [5], 60)
        bench.until(lambda: frontend.accepted)
        bench.drop(frontend)
        again = bench.late_frontend(0)
        again.submit(1, [7], 5)
        again.submit(2, [8], 5)
        bench.turn()
        assert {1, 2} == again.accepted
        bench.link.is_holding = False
        bench.link.compute()
        bench.until(lambda: len(again.ended) == 2)
        assert expected_outputs([7], 5) == again.tokens[1]
        assert [0, 0] == [hello.frontend_index for hello in bench.hellos]

    def test_garbage_does_not_stop_the_loop(self, bench):
        """A frame that is no message is dropped, and its sender is served on."""
        frontend = bench.frontend()
        frontend.send_frame(b"\xff\x00")
        frontend.submit(1, [5], 2)
        bench.until(lambda: 1 in frontend.ended)


class TestDraining:
    def test_drain_query_waits_for_running_requests(self, bench):
        """Drain refuses new requests and is answered when the last one has ended."""
        frontend = bench.frontend()
        bench.link.is_holding = True
        frontend.submit(1, [5], 3)
        bench.until(lambda: frontend.accepted)
        query_id = frontend.ask("drain", b'{"grace_s": 30}')
        bench.until(lambda: frontend.availabilities[-1].draining)
        assert not frontend.availabilities[-1].ready
        frontend.submit(2, [5], 3)
        bench.until(lambda: 2 in frontend.refused)
        assert frontend.refused[2].reason == "DRAINING"
        assert query_id not in frontend.replies
        bench.link.is_holding = False
        bench.link.compute()
        bench.until(lambda: query_id in frontend.replies)
        result = snapshot.decode_drain_result(frontend.replies[query_id].result)
        assert 0 == result.remaining_requests
        bench.until(lambda: 1 in frontend.ended)
        assert expected_outputs([5], 3) == frontend.tokens[1]

    def test_drain_query_whose_grace_was_lengthened_tells_who_runs_still(self, bench):
        """
        A later drain gives requests longer: the earlier one is answered in its own time and counts
        them.
        """
        frontend = bench.frontend()
        bench.link.is_holding = True
        frontend.submit(1, [5], 3)
        bench.until(lambda: frontend.accepted)
        first = frontend.ask("drain", b'{"grace_s": 5}')
        second = frontend.ask("drain", b'{"grace_s": 500}')
        bench.until(lambda: frontend.availabilities[-1].draining)
        bench.lead_s += 6.0
        bench.until(lambda: first in frontend.replies)
        answer = snapshot.decode_drain_result(frontend.replies[first].result)
        assert (1, {}) == (answer.remaining_requests, frontend.failed)
        assert second not in frontend.replies

    def test_drain_query_hands_over_what_is_left(self, bench):
        """
        Requests that are left when the grace time is over fail with HANDED_OVER and are counted,
        and the executor is given back.
        """
        frontend = bench.frontend()
        bench.link.is_holding = True
        frontend.submit(1, [5], 3, num_choices=2, temperature=1.0)
        bench.until(lambda: frontend.accepted)
        reply = bench.reply(frontend, "drain", b'{"grace_s": 0}')
        assert 2 == snapshot.decode_drain_result(reply.result).remaining_requests
        bench.until(lambda: {1, 2} == set(frontend.failed))
        assert {"HANDED_OVER"} == {failure.reason for failure in frontend.failed.values()}
        assert "release" == bench.link.commands[-1]
        again = bench.reply(frontend, "drain", b'{"grace_s": 0}')
        assert 0 == snapshot.decode_drain_result(again.result).remaining_requests
        bench.lead_s += 1000.0
        bench.until(lambda: not frontend.availabilities[-1].executor_attached)
        assert "release" == bench.link.commands[-1]

    def test_latest_call_sets_the_grace(self, bench):
        """A second drain shortens or lengthens the time that running requests have."""
        frontend = bench.frontend()
        bench.link.is_holding = True
        frontend.submit(1, [5], 3)
        bench.until(lambda: frontend.accepted)
        first = frontend.ask("drain", b'{"grace_s": 3000}')
        bench.until(lambda: frontend.availabilities[-1].draining)
        assert first not in frontend.replies
        frontend.ask("drain", b'{"grace_s": 0}')
        bench.until(lambda: first in frontend.replies)
        assert 1 == snapshot.decode_drain_result(frontend.replies[first].result).remaining_requests

    def test_stop_lets_requests_finish(self, bench):
        """A stopping core serves its requests and then ends by itself."""
        frontend = bench.frontend()
        frontend.submit(1, [5], 40)
        bench.until(lambda: frontend.accepted)
        bench.loop.stop(30.0)
        bench.until(lambda: not bench.loop._is_running)
        bench.until(lambda: 1 in frontend.ended)
        assert expected_outputs([5], 40) == frontend.tokens[1]

    def test_stop_hands_over_what_is_left(self, bench):
        """Requests that have not ended when the grace time is over fail with HANDED_OVER."""
        frontend = bench.frontend()
        bench.link.is_holding = True
        frontend.submit(1, [5], 40)
        bench.until(lambda: frontend.accepted)
        bench.loop.stop(0.0)
        bench.until(lambda: not bench.loop._is_running)
        bench.until(lambda: 1 in frontend.failed)
        assert frontend.failed[1].reason == "HANDED_OVER"
