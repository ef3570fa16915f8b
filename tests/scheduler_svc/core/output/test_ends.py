"""Ends of requests: by a token, a length, a deadline, from outside, or by an error."""

from __future__ import annotations

import pytest

from scheduler_svc.core.request.events import ProgressKind
from scheduler_svc.core.request.options import CoreOptions
from scheduler_svc.core.request.request import FinishReason
from tandem.errors import ExecutorLost, InvalidLogits, RequestNotFound
from tests.scheduler_svc.core.harness import Rig, small_config


class TestTokens:
    def test_an_eos_token_ends_a_request(self):
        """
        Output ends with the first EOS token, which counts.
        """
        rig = Rig()
        probe = rig.submit(max_tokens=20)
        rig.run()
        eos = rig.outputs[probe][6]
        first = rig.outputs[probe].index(eos)
        handle = rig.submit(
            max_tokens=20, prompt=rig.submitted[probe].prompt, eos_token_ids=frozenset({eos})
        )
        rig.run()
        assert rig.outputs[probe][: first + 1] == rig.outputs[handle]
        assert (FinishReason.EOS, eos) == (
            rig.ended[handle].reason,
            rig.ended[handle].matched_token,
        )
        assert first + 1 == rig.ended[handle].num_output_tokens

    @pytest.mark.parametrize("num_ids", [1, 64])
    def test_a_stop_token_ends_a_request(self, num_ids):
        """
        Output ends with the first of the stop tokens, however many there are.
        """
        rig = Rig()
        probe = rig.submit(max_tokens=20)
        rig.run()
        stop = rig.outputs[probe][4]
        others = range(100, 99 + num_ids)
        handle = rig.submit(
            max_tokens=20,
            prompt=rig.submitted[probe].prompt,
            stop_token_ids=frozenset({stop, *others}),
        )
        rig.run()
        assert FinishReason.STOP_TOKEN == rig.ended[handle].reason
        assert stop == rig.ended[handle].matched_token
        assert rig.expected(handle) == rig.outputs[handle]

    def test_length_that_the_context_set_ends_with_context_limit(self):
        """
        Output that may fill the context ends with CONTEXT_LIMIT, and output of a requested length
        with MAX_TOKENS.
        """
        rig = Rig()
        filling = rig.submit(max_tokens=6, fills_context=True)
        asked = rig.submit(max_tokens=6)
        rig.run()
        assert FinishReason.CONTEXT_LIMIT == rig.ended[filling].reason
        assert FinishReason.MAX_TOKENS == rig.ended[asked].reason

    def test_eos_wins_over_stop_token_and_length(self):
        """
        EOS comes before stop tokens and these before max_tokens where several ends meet at one
        token.
        """
        rig = Rig()
        probe = rig.submit(max_tokens=1)
        rig.run()
        token, prompt = rig.outputs[probe][0], rig.submitted[probe].prompt
        ids = frozenset({token})
        both = rig.submit(max_tokens=1, prompt=prompt, eos_token_ids=ids, stop_token_ids=ids)
        stop = rig.submit(max_tokens=1, prompt=prompt, stop_token_ids=ids)
        rig.run()
        reasons = [rig.ended[handle].reason for handle in (probe, both, stop)]
        assert [FinishReason.MAX_TOKENS, FinishReason.EOS, FinishReason.STOP_TOKEN] == reasons

    def test_one_requests_end_ids_do_not_end_another(self):
        """
        A token that ends one request is like any other to its neighbours.
        """
        rig = Rig()
        everything = rig.submit(max_tokens=20, eos_token_ids=frozenset(range(50)))
        other = rig.submit(max_tokens=20)
        rig.run()
        assert (1, 20) == (len(rig.outputs[everything]), len(rig.outputs[other]))

    @pytest.mark.parametrize("delay", [1, 2, 4])
    def test_rows_in_flight_past_an_end_are_dropped(self, delay):
        """
        Tokens computed past an EOS are dropped, and blocks are back in the next batch planned.
        """
        rig = Rig(delay=delay)
        handle = rig.submit(max_tokens=30, eos_token_ids=frozenset(range(25)))
        while handle not in rig.ended:
            rig.step()
        assert rig.expected(handle) == rig.outputs[handle]
        batch = rig.step()
        assert [0] == batch.release_slot.tolist()
        assert 0 == rig.core.stats().used_blocks
        rig.run()


class TestEndRequest:
    @pytest.mark.parametrize("delay", [1, 2, 4])
    @pytest.mark.parametrize("steps", [0, 1, 2, 3, 5, 9])
    def test_an_abort_takes_effect_in_the_next_batch(self, delay, steps):
        """
        An abort frees a request's slot and blocks in the next batch planned, whatever it is doing.
        """
        rig = Rig(small_config(max_total_tokens=4), delay=delay)
        handle = rig.submit(prompt_len=11, max_tokens=20)
        for _ in range(steps):
            rig.step()
        rig.core.end_request("r0", FinishReason.CANCELLED, rig.now)
        rig.collect()
        assert FinishReason.CANCELLED == rig.ended[handle].reason
        assert len(rig.outputs[handle]) == rig.ended[handle].num_output_tokens
        num_rows = 0 if (batch := rig.step()) is None else len(batch.row_slot)
        assert (0, 0) == (num_rows, rig.core.stats().used_blocks)
        rig.run()
        assert rig.expected(handle)[: len(rig.outputs[handle])] == rig.outputs[handle]

    def test_an_abort_of_a_draining_request_drops_what_is_under_way(self):
        """
        Tokens that arrive after the abort of a draining request are dropped.
        """
        rig = Rig(
            small_config(max_num_blocks=8, max_model_len=32),
            delay=4,
            options=CoreOptions(schedule_conservativeness=0.0),
        )
        rig.submit(prompt_len=8, max_tokens=20)
        rig.submit(prompt_len=8, max_tokens=20)
        while not rig.core._replica.draining:
            rig.step()
        victim = next(iter(rig.core._replica.draining.values())).new
        rig.core.end_request(victim.request_id, FinishReason.CANCELLED, rig.now)
        before = len(rig.outputs[victim.handle])
        rig.run()
        assert before == len(rig.outputs[victim.handle])
        assert rig.expected(1 - victim.handle) == rig.outputs[1 - victim.handle]

    def test_a_stop_string_end_counts_up_to_its_token(self):
        """
        An end by a stop string is reported with the number of tokens that the caller gives.
        """
        rig = Rig()
        rig.submit(max_tokens=20)
        for _ in range(9):
            rig.step()
        rig.core.end_request("r0", FinishReason.STOP_STRING, rig.now, num_output_tokens=7)
        rig.collect()
        ended = rig.ended[0]
        assert (FinishReason.STOP_STRING, 7) == (ended.reason, ended.num_output_tokens)

    @pytest.mark.parametrize("request_id", ["never", "r0"])
    def test_ending_who_is_not_there_is_an_error(self, request_id):
        """
        An id that never was, or that belongs to a request that has ended, is not found.
        """
        rig = Rig()
        rig.submit(max_tokens=1)
        rig.run()
        with pytest.raises(RequestNotFound, match=request_id):
            rig.core.end_request(request_id, FinishReason.CANCELLED, rig.now)


class TestDeadline:
    def test_a_running_request_keeps_its_partial_output(self):
        """
        A running request ends at its deadline with DEADLINE and what it has produced.
        """
        rig = Rig()
        handle = rig.submit(max_tokens=40, deadline_s=6.0)
        rig.run()
        assert FinishReason.DEADLINE == rig.ended[handle].reason
        assert rig.expected(handle)[:5] == rig.outputs[handle]
        assert 5 == rig.ended[handle].num_output_tokens

    def test_a_waiting_request_ends_without_output(self):
        """
        A request that reaches its deadline while it waits never runs.
        """
        rig = Rig(small_config(max_batch_size=1))
        rig.submit(max_tokens=20)
        waits = rig.submit(max_tokens=20, deadline_s=3.0)
        rig.run()
        ended = rig.ended[waits]
        assert (FinishReason.DEADLINE, 0, None) == (
            ended.reason,
            ended.num_output_tokens,
            ended.first_token_s,
        )

    def test_the_next_deadline_is_known(self):
        """
        The core tells when the earliest live deadline comes.
        """
        rig = Rig()
        rig.submit(deadline_s=50.0)
        rig.submit(deadline_s=40.0)
        assert 40.0 == rig.core.next_deadline_s
        rig.core.end_request("r1", FinishReason.CANCELLED, 0.0)
        assert 50.0 == rig.core.next_deadline_s
        rig.core.end_request("r0", FinishReason.CANCELLED, 0.0)
        assert rig.core.next_deadline_s is None

    def test_deadlines_pass_without_an_executor(self):
        """
        Deadlines are kept also while nothing is planned.
        """
        rig = Rig()
        handle = rig.submit(deadline_s=2.0)
        rig.core.expire(2.0)
        rig.collect()
        assert FinishReason.DEADLINE == rig.ended[handle].reason


class TestRowErrors:
    @pytest.mark.parametrize("delay", [1, 2, 4])
    def test_a_bad_row_fails_alone(self, delay):
        """
        A request with NaN logits fails with INVALID_LOGITS; its neighbours go on.
        """
        rig = Rig(delay=delay)
        handles = [rig.submit(max_tokens=12) for _ in range(3)]
        for _ in range(5):
            rig.step()
        rig.executor.poisoned.add((1, 1))
        rig.run()
        assert isinstance(rig.failed[1].error, InvalidLogits)
        assert "r1" in rig.failed[1].error.message
        for handle in (handles[0], handles[2]):
            assert rig.expected(handle) == rig.outputs[handle]

    def test_a_bad_row_of_a_draining_request_fails_it(self):
        """
        A row error that arrives for a preempted request fails that request.
        """
        rig = Rig(
            small_config(max_num_blocks=8, max_model_len=32),
            delay=4,
            options=CoreOptions(schedule_conservativeness=0.0),
        )
        rig.submit(prompt_len=8, max_tokens=20)
        rig.submit(prompt_len=8, max_tokens=20)
        for _ in range(6):
            rig.step()
        rig.executor.poisoned |= {(0, 1), (1, 1)}
        rig.run()
        assert {0, 1} == set(rig.failed)
        assert 2 == rig.core.stats().failed_requests


class TestFailAll:
    def test_every_request_fails_in_every_state(self):
        """
        Running and waiting requests all end by the error given, and blocks come back.
        """
        rig = Rig(small_config(max_batch_size=2))
        for _ in range(4):
            rig.submit(max_tokens=20)
        for _ in range(3):
            rig.step()
        rig.core.fail_all(ExecutorLost("gone"), rig.now)
        rig.run()
        assert {0, 1, 2, 3} == set(rig.failed)

    def test_only_requests_that_are_named_fail(self):
        """
        Of handles the live ones fail, and the other requests go on.
        """
        rig = Rig(small_config(max_batch_size=2))
        for _ in range(4):
            rig.submit(max_tokens=20)
        for _ in range(3):
            rig.step()
        rig.core.fail_handles({1, 2, 17}, ExecutorLost("gone"), rig.now)
        rig.run()
        assert {1, 2} == set(rig.failed)
        assert {0, 3} == set(rig.ended)


class TestComputed:
    def test_tokens_computed_are_told_of_running_requests(self):
        """
        Tokens whose results were applied are told of a running request, and none of one that waits,
        has lost its slot or is not there.
        """
        rig = Rig(small_config(max_batch_size=1, max_total_tokens=8))
        first = rig.submit(prompt_len=20, max_tokens=4)
        second = rig.submit(prompt_len=20, max_tokens=4)
        found = []
        for _ in range(4):
            rig.step()
            found.append(rig.core.num_computed(first))
        assert [8, 16, 20, 21] == found
        assert 0 == rig.core.num_computed(second)
        rig.core.executor_lost(rig.now)
        assert 0 == rig.core.num_computed(first)
        assert 0 == rig.core.num_computed(17)


class TestEvents:
    def test_progress_tells_of_admission_and_prompt(self):
        """
        A chunked prompt reports that it is scheduled and how far it is.
        """
        rig = Rig(small_config(max_total_tokens=8))
        rig.submit(prompt_len=20, max_tokens=1)
        rig.run()
        found = [(event.kind, event.value) for event in rig.progress]
        assert [
            (ProgressKind.SCHEDULED, 0),
            (ProgressKind.PREFILLED, 8),
            (ProgressKind.PREFILLED, 16),
            (ProgressKind.PREFILLED, 20),
        ] == found

    def test_an_end_tells_usage_and_times(self):
        """
        Ended has token counts and the seconds spent queued, to the first token and in all.
        """
        rig = Rig(small_config(max_batch_size=1))
        rig.submit(prompt_len=3, max_tokens=4)
        handle = rig.submit(prompt_len=6, max_tokens=3)
        rig.run()
        ended = rig.ended[handle]
        assert (6, 3, 0) == (
            ended.num_prompt_tokens,
            ended.num_output_tokens,
            ended.num_cached_tokens,
        )
        assert (5.0, 5.0, 7.0) == (ended.queue_s, ended.first_token_s, ended.total_s)

    def test_events_are_taken_once(self):
        """
        Events that were taken do not come again.
        """
        rig = Rig()
        rig.submit(max_tokens=1)
        rig.run()
        assert not rig.core.take_events()

    def test_find_and_outputs_know_live_requests_only(self):
        """
        A handle leads to its request and outputs while that is live.
        """
        rig = Rig()
        handle = rig.submit(max_tokens=4)
        for _ in range(2):
            rig.step()
        assert "r0" == rig.core.find(handle)
        assert rig.outputs[handle] == rig.core.outputs(handle)
        rig.run()
        assert rig.core.find(handle) is None
        assert rig.core.outputs(handle) is None


class TestStats:
    def test_counts_add_up(self):
        """
        Steps, tokens and requests are counted, and histograms hold one entry per token.
        """
        rig = Rig(small_config(max_num_blocks=64))
        for _ in range(3):
            rig.submit(prompt_len=5, max_tokens=50)
        rig.run()
        stats = rig.core.stats()
        assert (3, 3, 15, 150) == (
            stats.accepted_requests,
            stats.finished_requests,
            stats.prefill_tokens,
            stats.output_tokens,
        )
        assert (3, 147) == (stats.first_tokens, stats.next_tokens)
        assert 147.0 == stats.inter_token_s
        assert len(rig.batches) == stats.steps

    def test_places_and_blocks_are_seen_while_running(self):
        """
        Waiting, running and block counts describe the moment.
        """
        rig = Rig(small_config(max_batch_size=2))
        for _ in range(3):
            rig.submit(prompt_len=5)
        rig.plan()
        stats = rig.core.stats()
        assert (2, 1, 4, 28, 1) == (
            stats.running_requests,
            stats.waiting_requests,
            stats.used_blocks,
            stats.free_blocks,
            stats.steps_in_flight,
        )
