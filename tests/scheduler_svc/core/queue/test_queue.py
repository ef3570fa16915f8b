"""The waiting queue: returned requests, levels, ageing, and the entries it keeps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_svc.core.queue.keyed_heap import KeyedHeap
from scheduler_svc.core.queue.queue import AGED_AFTER, WaitingQueue
from scheduler_svc.core.request.new_request import NewRequest
from scheduler_svc.core.request.options import CoreOptions, SchedulePolicy
from scheduler_svc.core.request.request import Request
from scheduler_svc.core.request.request_parts import Terms
from tests.scheduler_svc.core.harness import GREEDY

AGEING_S = 5.0
AGED_S = AGED_AFTER * AGEING_S


def request(number: int, priority: int = 0, max_tokens: int = 4) -> Request:
    new = NewRequest(
        request_id=str(number),
        handle=number,
        prompt=np.ones(3, np.int32),
        sampling=GREEDY,
        max_tokens=max_tokens,
        arrival_s=0.0,
        priority=priority,
    )
    return Request(
        new=new, number=number, terms=Terms(stop_len=3 + max_tokens, queued_tokens=number + 1)
    )


def queue_of(policy: SchedulePolicy = SchedulePolicy.FCFS, ageing_s: float = AGEING_S):
    return WaitingQueue(CoreOptions(schedule_policy=policy, ageing_s=ageing_s))


def numbers(queue: WaitingQueue, now: float = 0.0) -> list[int]:
    queue.check_integrity()
    return [entry.number for entry in queue.in_order(now, None)]


class TestPlaces:
    def test_new_requests_leave_in_arrival_order(self):
        """
        The first candidate under fcfs is the request that came first.
        """
        queue = queue_of()
        for number in range(3):
            queue.add(request(number), 0.0)
        assert [0, 1, 2] == numbers(queue)

    def test_returned_requests_stand_in_front_in_arrival_order(self):
        """
        Requests that ran go ahead of new ones, among themselves by arrival.
        """
        queue, ran = queue_of(), [request(number) for number in range(3)]
        queue.add(request(3), 0.0)
        for number in (1, 2, 0):
            queue.put_back(ran[number], 0.0)
        assert [0, 1, 2, 3] == numbers(queue)

    def test_a_returned_request_is_ahead_of_new_ones_that_waited_longer(self):
        """
        A request that overtook others under its policy and lost its slot is still ahead of those,
        whatever level they have reached.
        """
        queue, late = queue_of(SchedulePolicy.LOF), request(2, max_tokens=9)
        queue.add(request(0), 0.0)
        queue.add(request(1), 6.0)
        queue.add(late, 12.0)
        queue.take(late, 13.0)
        queue.put_back(late, 30.0)
        assert [2, 0, 1] == numbers(queue, 30.0)

    def test_a_returned_request_keeps_to_its_priority(self):
        """
        A request that ran stays behind new ones of better priority.
        """
        queue, ran = queue_of(), request(0, priority=1)
        queue.add(request(1, priority=0), 0.0)
        queue.add(request(2, priority=1), 0.0)
        queue.put_back(ran, 0.0)
        assert [1, 0, 2] == numbers(queue)

    def test_a_request_can_return_twice(self):
        """
        A request that returns, leaves and returns again has one entry.
        """
        queue, ran = queue_of(), request(0)
        for _ in range(3):
            queue.put_back(ran, 0.0)
            assert ran in queue
            queue.take(ran, 0.0)
            assert ran not in queue
        queue.put_back(ran, 0.0)
        assert [0] == numbers(queue)
        assert 1 == len(queue)

    def test_anyone_can_leave(self):
        """
        A request in the middle can be removed; removing one that does not wait does nothing.
        """
        queue, waiting = queue_of(), [request(number) for number in range(3)]
        for entry in waiting:
            queue.add(entry, 0.0)
        queue.discard(waiting[1])
        queue.discard(request(9))
        assert [0, 2] == numbers(queue)

    def test_an_empty_queue_has_no_candidate(self):
        """
        An empty queue has no candidate and no best priority.
        """
        queue = queue_of()
        assert [] == list(queue.candidates(0.0, None))
        assert (None, 0) == (queue.best_priority(), len(queue))

    def test_the_best_priority_is_of_anyone_who_waits(self):
        """
        The best priority counts requests that ran and requests that did not.
        """
        queue, returned = queue_of(), request(0, priority=-2)
        queue.add(request(1, priority=3), 0.0)
        queue.put_back(returned, 0.0)
        assert -2 == queue.best_priority()
        queue.discard(returned)
        assert 3 == queue.best_priority()

    def test_tokens_of_those_who_never_ran_are_counted(self):
        """
        The queue's tokens are those of requests that never ran.
        """
        queue, first = queue_of(), request(4)
        queue.add(first, 0.0)
        queue.add(request(5), 0.0)
        queue.put_back(request(0), 0.0)
        assert 5 + 6 == queue.num_fresh_tokens
        queue.take(first, 0.0)
        assert 6 == queue.num_fresh_tokens


class TestAgeing:
    def test_better_priority_goes_first(self):
        """
        Lower priority numbers go first, negative ones too, then arrival.
        """
        queue = queue_of()
        for number, priority in enumerate([1, 0, -3, 1, 0]):
            queue.add(request(number, priority), 0.0)
        assert [2, 1, 4, 0, 3] == numbers(queue)

    @pytest.mark.parametrize(("wait_s", "order"), [(4.9, [1, 0]), (5.0, [0, 1])])
    def test_one_period_of_waiting_is_worth_one_level(self, wait_s, order):
        """
        A request that has waited ageing_s stands level with one of the next better priority.
        """
        queue = queue_of()
        queue.add(request(0, priority=1), 0.0)
        queue.add(request(1, priority=0), wait_s)
        assert order == numbers(queue, wait_s)

    def test_the_order_of_two_stays_as_they_wait(self):
        """
        Requests that wait together keep their order as time passes, until one is aged.
        """
        queue = queue_of()
        queue.add(request(0, priority=3), 1.0)
        queue.add(request(1, priority=1), 9.0)
        orders = {tuple(numbers(queue, 9.0 + step)) for step in range(41)}
        assert {(1, 0)} == orders

    def test_aged_requests_go_first_in_order_of_arrival(self):
        """
        A request that waited ten periods goes ahead of all that did not, the earliest one first.
        """
        queue = queue_of()
        queue.add(request(0, priority=900), 0.0)
        queue.add(request(1, priority=500), 1.0)
        queue.add(request(2, priority=-900), 40.0)
        assert [2, 1, 0] == numbers(queue, AGED_S - 0.1)
        assert [0, 2, 1] == numbers(queue, AGED_S)
        assert [0, 1, 2] == numbers(queue, AGED_S + 1.0)

    def test_returned_requests_age_among_the_others(self):
        """
        Arrival alone decides among aged requests, whether they ran before or not.
        """
        queue, ran = queue_of(), request(1)
        queue.add(request(0), 0.0)
        queue.add(ran, 1.0)
        queue.take(ran, 2.0)
        queue.add(request(2), 3.0)
        queue.put_back(ran, 3.0)
        assert [1, 0, 2] == numbers(queue, AGED_S - 1.0)
        assert [0, 1, 2] == numbers(queue, AGED_S + 10.0)

    def test_only_waiting_counts(self):
        """
        The time a request ran does not age it; the time it waited before does.
        """
        queue, ran = queue_of(), request(0, priority=9)
        queue.add(ran, 0.0)
        queue.take(ran, 30.0)
        queue.add(request(1), 1000.0)
        queue.put_back(ran, 1000.0)
        assert (30.0, False) == (ran.times.waited_s, ran.setbacks.was_aged)
        assert [1, 0] == numbers(queue, 1019.0)
        assert [0, 1] == numbers(queue, 1020.0)
        queue.take(ran, 1020.0)
        assert (50.0, True) == (ran.times.waited_s, ran.setbacks.was_aged)


class TestCandidates:
    def test_a_skipped_candidate_lets_the_next_pass(self):
        """
        A candidate that is not taken stays, and the next one is offered.
        """
        queue, taken = queue_of(), []
        for number in range(4):
            queue.add(request(number), 0.0)
        for candidate in queue.candidates(0.0, None):
            if candidate.number in {1, 2}:
                continue
            queue.take(candidate, 0.0)
            taken.append(candidate.number)
        assert ([0, 3], [1, 2]) == (taken, numbers(queue))

    @pytest.mark.parametrize("ran", [False, True], ids=["new", "returned"])
    def test_an_aged_candidate_is_never_passed(self, ran):
        """
        No other request is offered after an aged one that is not taken.
        """
        queue = queue_of()
        for number in range(3):
            entry = request(number)
            queue.add(entry, float(number))
            if ran:
                queue.take(entry, float(number))
                queue.put_back(entry, float(number))
        offered = [candidate.number for candidate in queue.candidates(AGED_S, None)]
        assert [0] == offered

    def test_all_who_are_taken_are_offered_once(self):
        """
        All requests are offered when each candidate is taken, aged, returned and new ones.
        """
        queue, offered = queue_of(), []
        queue.add(request(0), 0.0)
        queue.add(request(1), 1.0)
        queue.put_back(request(2, priority=1), 20.0)
        queue.put_back(request(3), 20.0)
        queue.add(request(4, priority=-1), 20.0)
        for candidate in queue.candidates(AGED_S + 1.0, None):
            queue.take(candidate, AGED_S + 1.0)
            offered.append(candidate.number)
        assert [0, 1, 4, 3, 2] == offered
        assert 0 == len(queue)

    def test_a_victim_may_return_while_candidates_are_offered(self):
        """
        A request that loses its slot to a candidate does not disturb the others.
        """
        queue, offered = queue_of(), []
        for number in range(1, 4):
            queue.add(request(number), 0.0)
        for candidate in queue.candidates(0.0, None):
            queue.take(candidate, 0.0)
            offered.append(candidate.number)
            if candidate.number == 2:
                queue.put_back(request(0, priority=5), 0.0)
        assert ([1, 2, 3], [0]) == (offered, numbers(queue))


@st.composite
def _moves(draw):
    return draw(
        st.lists(
            st.tuples(
                st.sampled_from(["add", "take", "back", "leave"]),
                st.integers(-2, 2),
                st.sampled_from([0.0, 0.5, 3.0, 20.0]),
            ),
            max_size=60,
        )
    )


class TestAnyUse:
    @settings(max_examples=150, deadline=None)
    @given(st.sampled_from(SchedulePolicy), _moves())
    def test_the_order_follows_its_rules(self, policy, moves):
        """
        Aged requests stand first, by arrival; returned ones stand ahead of new ones of their
        priority; new ones of equal priority keep to their periods; and each request stands in the
        queue once.
        """
        queue, ran, now, count = queue_of(policy), [], 0.0, 0
        for move, priority, passed_s in moves:
            now += passed_s
            waiting = [entry.number for entry in queue.in_order(now, None)]
            if move == "add":
                queue.add(request(count, priority), now)
                count += 1
            elif move == "back" and ran:
                queue.put_back(ran.pop(0), now)
            elif waiting and move == "take":
                head = next(iter(queue.candidates(now, None)))
                assert waiting[0] == head.number
                queue.take(head, now)
                ran.append(head)
            elif waiting and move == "leave":
                queue.discard(next(one for one in queue if one.number == waiting[-1]))
            self._check(queue, now)

    def _check(self, queue, now):
        queue.check_integrity()
        order = list(queue.in_order(now, None))
        assert sorted(entry.number for entry in queue) == sorted(entry.number for entry in order)
        aged = [now - queue.since_s(entry) >= AGED_S for entry in order]
        assert aged == sorted(aged, reverse=True)
        first = [entry.number for entry, is_aged in zip(order, aged, strict=True) if is_aged]
        assert first == sorted(first)
        rest = order[len(first) :]
        for i, entry in enumerate(rest):
            for later in rest[i + 1 :]:
                if later.new.priority != entry.new.priority:
                    continue
                ran, later_ran = (queue._places[one.number].ran for one in (entry, later))
                assert ran or not later_ran
                if ran == later_ran is True:
                    assert entry.number < later.number
                elif not later_ran and not ran:
                    period, later_period = (queue.since_s(one) // 5 for one in (entry, later))
                    assert period <= later_period


class TestKeyedHeap:
    @settings(max_examples=60, deadline=None)
    @given(st.lists(st.tuples(st.booleans(), st.integers(0, 15)), max_size=200))
    def test_random_use_agrees_with_a_dictionary(self, operations):
        """
        The top is the smallest item that is there, under any pushes and removals, and items that
        come back with another order surface by that.
        """
        heap, model = KeyedHeap(), {}
        for turn, (is_push, number) in enumerate(operations):
            if is_push and number not in model:
                model[number] = (float((number * turn) % 5), number)
                heap.push(*model[number], f"item {number}")
            elif not is_push:
                heap.discard(number)
                model.pop(number, None)
            expected = sorted(model.values())
            assert len(model) == len(heap)
            assert [f"item {number}" for _, number in expected] == list(heap)
            top = heap.peek()
            assert (None if not expected else expected[0][0]) == (None if top is None else top[0])
            assert (f"item {number}" if number in model else None) == heap.get(number)

    def test_items_may_be_removed_as_they_are_seen(self):
        """
        Iteration goes on when the item seen last is removed, and skips none.
        """
        heap, seen = KeyedHeap(), []
        for number in range(8):
            heap.push(float(number % 3), number, number)
        for number in heap:
            seen.append(number)
            if number not in {6, 4}:
                heap.discard(number)
        assert ([0, 3, 6, 1, 4, 7, 2, 5], [6, 4]) == (seen, list(heap))

    def test_only_an_item_in_the_heap_is_due(self):
        """
        The first item is due from its own order on; one that was removed before it never is.
        """
        heap = KeyedHeap()
        heap.push(1.0, 0, "removed")
        heap.push(3.0, 1, "kept")
        heap.discard(0)
        assert [None, None, "kept"] == [heap.peek_due(order) for order in (0.5, 2.0, 3.0)]
        assert "kept" == heap.peek_due(4.0)
        heap.discard(1)
        assert heap.peek_due(4.0) is None

    def test_removed_entries_do_not_pile_up(self):
        """
        A heap that is filled and emptied for ever stays small.
        """
        heap = KeyedHeap()
        for number in range(5000):
            heap.push(1e9 - number, number, "x")
            heap.discard(number)
        assert len(heap._heap) < 200
