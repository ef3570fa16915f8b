"""The waiting queue and the heap behind it."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_svc.core.queue import KeyedHeap, WaitingQueue
from scheduler_svc.core.request import NewRequest, Request
from tests.scheduler_svc.core.harness import GREEDY


def request(number: int) -> Request:
    new = NewRequest(
        request_id=str(number),
        handle=number,
        prompt=np.ones(3, np.int32),
        sampling=GREEDY,
        max_tokens=4,
        arrival_s=0.0,
    )
    return Request(new=new, number=number, stop_len=7)


def numbers(queue) -> list[int]:
    return [entry.number for entry in queue]


class TestWaitingQueue:
    def test_new_requests_leave_in_arrival_order(self):
        """
        The head is who came first.
        """
        queue = WaitingQueue()
        for number in range(3):
            queue.add(request(number))
        assert 0 == queue.head().number
        assert [0, 1, 2] == numbers(queue)

    def test_returned_requests_stand_in_front_in_arrival_order(self):
        """
        Requests that ran go ahead of new ones, among themselves by arrival.
        """
        queue, ran = WaitingQueue(), [request(number) for number in range(3)]
        queue.add(request(3))
        for number in (1, 2, 0):
            queue.put_back(ran[number])
        assert [0, 1, 2, 3] == numbers(queue)

    def test_a_request_can_return_twice(self):
        """
        Returning, leaving and returning again keeps one entry.
        """
        queue, ran = WaitingQueue(), request(0)
        for _ in range(3):
            queue.put_back(ran)
            assert ran in queue
            queue.discard(ran)
            assert ran not in queue
        queue.put_back(ran)
        assert [0] == numbers(queue)
        assert 1 == len(queue)

    def test_anyone_can_leave(self):
        """
        A request in the middle can be removed; removing a stranger does nothing.
        """
        queue, waiting = WaitingQueue(), [request(number) for number in range(3)]
        for entry in waiting:
            queue.add(entry)
        queue.discard(waiting[1])
        queue.discard(request(9))
        assert [0, 2] == numbers(queue)

    def test_an_empty_queue_has_no_head(self):
        """
        When nobody waits there is no head.
        """
        queue = WaitingQueue()
        assert queue.head() is None
        assert not queue


class TestKeyedHeap:
    @settings(max_examples=60, deadline=None)
    @given(st.lists(st.tuples(st.booleans(), st.integers(0, 15)), max_size=200))
    def test_random_use_agrees_with_a_dictionary(self, operations):
        """
        Under any pushes and removals the top is the smallest that is there.
        """
        heap, model = KeyedHeap(), {}
        for is_push, number in operations:
            if is_push:
                heap.push(float(number % 5), number, f"item {number}")
                model[number] = (float(number % 5), number)
            else:
                heap.discard(number)
                model.pop(number, None)
            expected = sorted(model.values())
            assert len(model) == len(heap)
            assert [f"item {number}" for _, number in expected] == list(heap)
            top = heap.peek()
            assert (None if not expected else expected[0][0]) == (None if top is None else top[0])

    def test_removed_entries_do_not_pile_up(self):
        """
        A heap that is filled and emptied for ever stays small.
        """
        heap = KeyedHeap()
        for number in range(5000):
            heap.push(1e9 - number, number, None if number < 0 else "x")
            heap.discard(number)
        assert len(heap._heap) < 200
