"""Numbers that bound what the core keeps, passes over and promises."""

from __future__ import annotations

import numpy as np
import pytest

from scheduler_svc.core.observe.request_events import EventKind
from scheduler_svc.core.observe.stats import INTER_TOKEN_BOUNDS_S, TTFT_BOUNDS_S
from scheduler_svc.core.queue.keyed_heap import KeyedHeap
from scheduler_svc.core.queue.retry_advice import RetryAdvice
from scheduler_svc.core.request.events import CoreEvents
from scheduler_svc.core.request.geometry import ExecutorGeometry
from scheduler_svc.core.request.new_request import NewRequest
from scheduler_svc.core.request.options import CoreOptions, SchedulePolicy
from scheduler_svc.core.request.request import FinishReason, RequestState
from scheduler_svc.core.slots.end_ids import MAX_END_ID
from tandem.admin.v1 import requests_pb2
from tandem.common.v1 import finish_reason_pb2
from tests.scheduler_svc.core.harness import GREEDY, Rig, small_config

WIDE = {"max_num_blocks": 400, "max_batch_size": 48, "max_num_seqs": 100, "max_total_tokens": 64}


class TestPassedOver:
    @pytest.mark.parametrize(("num_followers", "is_admitted"), [(31, True), (32, False)])
    def test_one_plan_passes_over_so_many_that_wait_for_a_prefix(self, num_followers, is_admitted):
        """
        A plan looks no further once it has passed 32 requests that wait for a prefix being
        computed.
        """
        options = CoreOptions(schedule_policy=SchedulePolicy.FCFS, schedule_conservativeness=0.0)
        rig = Rig(small_config(**WIDE), options=options)
        prompt = np.arange(32, dtype=np.int32)
        for _ in range(1 + num_followers):
            rig.submit(prompt=prompt, max_tokens=2)
        other = rig.submit(prompt_len=5, max_tokens=2)
        rig.plan()
        expected = RequestState.DECODE if is_admitted else RequestState.WAITING
        assert expected is rig.core.state_of(other)
        assert RequestState.WAITING is rig.core.state_of(1)
        rig.run()


class TestBadRows:
    @pytest.mark.parametrize("caching", [True, False])
    def test_what_a_bad_row_computed_is_not_found(self, caching):
        """
        A prompt is computed anew, and well, after a row error of a request with the same one.
        """
        rig = Rig(options=CoreOptions(prefix_caching=caching))
        rig.submit(prompt_len=9)
        rig.executor.poisoned.add((0, 1))
        rig.run()
        again = rig.submit(prompt=rig.submitted[0].prompt)
        rig.run()
        assert {0} == set(rig.failed)
        assert 0 == rig.ended[again].num_cached_tokens
        assert rig.expected(again) == rig.outputs[again]


class TestUnset:
    def test_what_a_request_leaves_out_is_none(self):
        """
        A request has one choice, priority 0, no tenant, deadline, end ids or outputs where it names none.
        """
        new = NewRequest(
            request_id="r", handle=1, prompt=np.ones(1, np.int32), sampling=GREEDY, max_tokens=1,
            arrival_s=0.0,
        )  # fmt: skip
        assert (1, 0, "", b"", None) == (
            new.num_choices, new.priority, new.tenant, new.cache_salt, new.deadline_s,
        )  # fmt: skip
        assert not (new.eos_token_ids | new.stop_token_ids | new.finished_choices)
        assert ((), b"", False) == (new.prior_outputs, new.block_digests, new.fills_context)

    def test_an_executor_that_says_nothing_of_host_memory_has_none(self):
        """
        Without host blocks nothing is swapped.
        """
        geometry = ExecutorGeometry(
            num_blocks=8, block_size=4, num_slots=2, max_batch_size=2, max_total_tokens=8,
            max_model_len=16,
        )  # fmt: skip
        assert 0 == geometry.num_host_blocks

    def test_columns_of_no_token_cannot_be_written(self):
        """
        Events without tokens share their empty columns, so that none may change them.
        """
        events = CoreEvents()
        for column in (events.token_handle, events.token_offset, events.token):
            assert 0 == len(column)
            assert not column.flags.writeable


class TestCounts:
    def test_the_largest_end_id_is_a_24_bit_number(self):
        """
        Ids that end a request go up to 16,777,215.
        """
        assert 16_777_215 == MAX_END_ID

    @pytest.mark.parametrize("num_choices", [1, 2, 4])
    def test_further_choices_queue_one_token_each(self, num_choices):
        """
        The prompt of a request counts once among the queued tokens, and one for each other choice.
        """
        rig = Rig(options=CoreOptions(max_queued_tokens=100))
        rig.submit(prompt_len=9, num_choices=num_choices)
        assert 9 + num_choices - 1 == rig.core._cell.queue.num_fresh_tokens
        rig.run()

    def test_removed_items_do_not_fill_a_heap(self):
        """
        A heap keeps at most twice its items and 64 more entries.
        """
        heap: KeyedHeap[float, int] = KeyedHeap()
        for number in range(1000):
            heap.push(float(number % 7), number, number)
        entries = heap._heap
        heap.discard(0)
        assert entries is heap._heap  # not built anew for one that goes
        for number in range(1, 990):
            heap.discard(number)
            assert len(heap._heap) <= 2 * len(heap) + 65
        assert sorted(range(990, 1000), key=lambda n: (n % 7, n)) == list(heap)

    def test_a_new_request_has_not_waited(self):
        """
        The waiting time of a request counts from its submission.
        """
        rig = Rig()
        rig.now = 7.0
        rig.submit()
        assert 7.0 == rig.core._cell.queue.since_s(rig.core._cell.requests._by_handle[0])

    @pytest.mark.parametrize(
        ("ends_s", "now", "expected_s"),
        [((0.0, 60.0), 60.0, 60.0), ((0.0, 60.5), 60.5, None), ((0.0, 50.0), 50.0, 60.0),
         ((0.0, 1.0), 1.0, 2.0), ((0.0, 0.001), 0.001, 0.1)],
    )  # fmt: skip
    def test_advice_looks_a_minute_back_and_a_minute_ahead(self, ends_s, now, expected_s):
        """
        Ends of exactly the last minute count, and advice is from a tenth of a second to a minute.
        """
        advice = RetryAdvice()
        for end_s in ends_s:
            advice.note_end(end_s)
        assert expected_s == advice.after_ends(2, now)

    def test_histograms_have_these_bounds(self):
        """
        First tokens are counted up to a minute, gaps between tokens up to ten seconds.
        """
        assert TTFT_BOUNDS_S == (
            0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0
        )  # fmt: skip
        assert INTER_TOKEN_BOUNDS_S == (
            0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0
        )  # fmt: skip

    def test_numbers_are_those_of_the_contract(self):
        """
        Reasons and events have the numbers of their protos.
        """
        for ours, theirs, prefix in (
            (FinishReason, finish_reason_pb2.FinishReason, "FINISH_REASON_"),
            (EventKind, requests_pb2.RequestEventKind, "REQUEST_EVENT_KIND_"),
        ):
            numbers = {name.removeprefix(prefix): number for name, number in theirs.items()}
            assert {one.name: one.value for one in ours} == {
                name: number for name, number in numbers.items() if number
            }


class TestPromises:
    def test_room_is_made_for_each_of_several_better_requests(self):
        """
        Blocks promised to one request are not counted again for the next.
        """
        options = CoreOptions(priority_preemption=True, schedule_conservativeness=0.0)
        config = small_config(max_num_blocks=8, max_batch_size=4, max_total_tokens=32)
        rig = Rig(config, options=options)
        for _ in range(2):
            rig.submit(prompt_len=12, max_tokens=4, priority=5)
        rig.step()
        for _ in range(2):
            rig.submit(prompt_len=12, max_tokens=4, priority=0)
        rig.step()
        assert 2 == rig.core.stats().preemptions
        rig.run()
        assert all(rig.expected(handle) == rig.outputs[handle] for handle in range(4))
