"""Turns of tenants: whose request goes next, and what is charged for it."""

from __future__ import annotations

from array import array
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_svc.core.queue.queue import AGED_AFTER, WaitingQueue
from scheduler_svc.core.queue.token_counters import FIRST_EXPECTED
from scheduler_svc.core.request.new_request import NewRequest
from scheduler_svc.core.request.options import CoreOptions, SchedulePolicy
from scheduler_svc.core.request.request import Request
from scheduler_svc.core.request.request_parts import Terms
from scheduler_svc.core.request.tenant import TenantLimits
from tests.scheduler_svc.core.harness import GREEDY

AGEING_S = 5.0
AGED_S = AGED_AFTER * AGEING_S


def request(number: int, tenant: str, *, max_tokens: int = 5, weight: float = 1.0, priority=0):
    """Return a request with a prompt of ten tokens."""
    new = NewRequest(
        request_id=str(number), handle=number, prompt=np.ones(10, np.int32), sampling=GREEDY,
        max_tokens=max_tokens, arrival_s=0.0, tenant=tenant, priority=priority,
        tenant_limits=TenantLimits(weight=weight),
    )  # fmt: skip
    terms = Terms(stop_len=10 + max_tokens, queued_tokens=10)
    return Request(new=new, number=number, terms=terms)


def queue_of(policy: SchedulePolicy = SchedulePolicy.FCFS) -> WaitingQueue:
    return WaitingQueue(CoreOptions(schedule_policy=policy, ageing_s=AGEING_S))


def filled(*waiting: Request, now: float = 0.0, policy=SchedulePolicy.FCFS) -> WaitingQueue:
    queue = queue_of(policy)
    for one in waiting:
        queue.add(one, now)
    queue.check_integrity()
    return queue


def taken(queue: WaitingQueue, count: int, now: float = 0.0, *, one_by_one=True) -> list[Request]:
    """Take requests, each by a plan of its own or all by one; returns them in order."""
    order: list[Request] = []
    while len(order) < count:
        assert len(queue)
        for one in queue.candidates(now, None):
            queue.take(one, now)
            queue.check_integrity()
            order.append(one)
            if one_by_one or len(order) == count:
                break
    return order


def end(queue: WaitingQueue, request: Request, num_outputs: int) -> None:
    """End a request that was admitted, with so many outputs."""
    request.outputs = array("i", [1] * num_outputs)
    queue.settle(request)
    queue.check_integrity()


def tenants(requests: list[Request]) -> str:
    return "".join(one.new.tenant for one in requests)


class TestTurns:
    @pytest.mark.parametrize("one_by_one", [True, False], ids=["plans", "one-plan"])
    def test_tenants_of_equal_weight_take_turns(self, one_by_one):
        """
        A backlog that came first shares the turns with each tenant that came later.
        """
        waiting = [request(i, "a" if i < 8 else "bc"[i % 2]) for i in range(14)]
        order = tenants(taken(filled(*waiting), 9, one_by_one=one_by_one))
        assert [Counter("abc")] * 3 == [Counter(order[i : i + 3]) for i in (0, 3, 6)]

    def test_a_plan_lists_the_order_in_which_it_would_offer_them(self):
        """
        The listed order has every request once, each tenant's in its own order.
        """
        queue = filled(*(request(i, "ab"[i % 3 == 0]) for i in range(9)))
        listed = [one.number for one in queue.in_order(0.0, None)]
        assert list(range(9)) == sorted(listed)
        assert [0, 3, 6] == [number for number in listed if number % 3 == 0]

    def test_weights_are_shares(self):
        """
        A tenant with three times the weight is served three times the tokens.
        """
        waiting = [request(i, "ab"[i % 2], weight=3.0 if i % 2 else 1.0) for i in range(40)]
        assert {"a": 5, "b": 15} == Counter(tenants(taken(filled(*waiting), 20)))

    def test_tokens_count_and_not_requests(self):
        """
        A tenant whose requests cost three times as much has a third of the turns.
        """
        short, long = 5, 25  # 10 + 2 * 5 is 20, 10 + 2 * 25 is 60.
        waiting = [request(i, "ab"[i % 2], max_tokens=long if i % 2 else short) for i in range(40)]
        assert {"a": 15, "b": 5} == Counter(tenants(taken(filled(*waiting), 20)))

    def test_requests_without_a_tenant_count_as_one_tenant(self):
        """
        Requests without a tenant take turns with a tenant like another tenant's.
        """
        waiting = [request(i, "a" if i % 2 else "") for i in range(8)]
        assert "aa" == tenants(taken(filled(*waiting), 4))

    def test_a_tenant_that_was_away_has_saved_nothing_up(self):
        """
        A tenant that comes late goes next, and then takes turns; it does not catch up.
        """
        queue = filled(*(request(i, "a") for i in range(20)))
        taken(queue, 10)
        for number in range(20, 30):
            queue.add(request(number, "b"), 0.0)
        order = tenants(taken(queue, 6))
        assert "b" == order[0]
        assert {"a": 3, "b": 3} == Counter(order)

    def test_a_request_that_is_passed_over_lets_the_next_pass(self):
        """
        Where no candidate is taken all are offered in turn: each tenant's own order, and the tenant
        stays ahead that is.
        """
        queue = filled(*(request(i, "ab"[i % 2]) for i in range(6)))
        assert [0, 2, 4, 1, 3, 5] == [one.number for one in queue.candidates(0.0, None)]
        offered: list[int] = []
        for one in queue.candidates(0.0, None):
            offered.append(one.number)
            if one.number in (2, 1):
                queue.take(one, 0.0)
        assert [0, 2, 1, 4, 3, 5] == offered


class TestOrderWithin:
    @given(
        policy=st.sampled_from(SchedulePolicy),
        steps=st.lists(
            st.tuples(st.sampled_from("aatdr"), st.integers(-2, 2), st.integers(1, 9)), max_size=40
        ),
    )
    @settings(max_examples=60, deadline=None)
    def test_one_tenant_alone_sees_the_order_there_was(self, policy, steps):
        """
        A tenant alone has the order of requests without tenants, whatever was admitted, left or ran
        before and however long it waits.
        """
        queues = {name: queue_of(policy) for name in ("", "x")}
        numbers: dict[str, list[int]] = {}
        for name, queue in queues.items():
            now, ran = 0.0, []
            for i, (what, priority, length) in enumerate(steps):
                now += length
                head = next(iter(queue.candidates(now, None)), None)
                if what == "a":
                    queue.add(request(i, name, max_tokens=length, priority=priority), now)
                elif what == "t" and head is not None:
                    queue.take(head, now)
                    ran.append(head)
                elif what == "d" and head is not None:
                    queue.discard(head)
                elif what == "r" and ran:
                    queue.put_back(ran.pop(), now)
                queue.check_integrity()
                numbers.setdefault(name, []).extend(r.number for r in queue.in_order(now, None))
        assert numbers.get("") == numbers.get("x")

    def test_each_tenant_keeps_the_order_of_the_policy(self):
        """
        Under lof each tenant's longest output goes first, as tenants take turns.
        """
        waiting = [request(i, "ab"[i % 2], max_tokens=i + 1) for i in range(8)]
        order = taken(filled(*waiting, policy=SchedulePolicy.LOF), 8)
        for name in "ab":
            own = [one.number for one in order if one.new.tenant == name]
            assert sorted(own, reverse=True) == own

    def test_better_priority_goes_first_whoever_was_served_less(self):
        """
        A tenant's request of better priority goes ahead of another tenant's.
        """
        waiting = [request(i, "a", priority=-1) for i in range(3)] + [request(3, "b")]
        assert "aaab" == tenants(taken(filled(*waiting), 4))


class TestAgeing:
    def test_a_backlog_does_not_outrank_what_others_send_later(self):
        """
        A request goes next after two periods of ageing, and after ten, though another tenant's
        backlog has waited for longer.
        """
        for waited_s in (2 * AGEING_S, 2 * AGED_S):
            queue = filled(*(request(i, "a") for i in range(19)))
            taken(queue, 1)
            for now in range(1, int(waited_s)):
                taken(queue, now % 10 == 0, float(now))
            queue.add(request(20, "b"), waited_s)
            assert "b" in tenants(taken(queue, 2, waited_s))

    def test_a_tenant_of_worse_priority_has_its_turn(self):
        """
        A request that is five levels worse competes after five periods without a turn, while a
        tenant with better ones was served all the time.
        """
        queue = filled(request(0, "b", priority=5))
        for now in range(30):
            queue.add(request(2 * now + 1, "a"), float(now))
            queue.add(request(2 * now + 2, "a"), float(now))
            (one,) = taken(queue, 1, float(now))
            if one.new.tenant == "b":
                break
        assert 26 == now

    def test_a_tenant_without_a_turn_for_ten_periods_goes_ahead_of_all(self):
        """
        An aged request of a tenant that had no turn goes ahead of the best priorities of others,
        and once it has had one its next request waits again.
        """
        queue = filled(request(0, "b", priority=99), request(1, "b", priority=99))
        queue.add(request(2, "a"), AGED_S)
        queue.add(request(3, "a"), AGED_S)
        assert "baab" == tenants(taken(queue, 4, AGED_S))


class TestCharges:
    def test_the_difference_to_the_real_output_is_charged_at_the_end(self):
        """
        A request counts as its expected output until it ends, and then as its real one.
        """
        queue = filled(*(request(i, "ab"[i % 2], max_tokens=5000) for i in range(12)))
        one, other = taken(queue, 2)
        assert {"a", "b"} == {one.new.tenant, other.new.tenant}
        end(queue, one, 4000)
        assert other.new.tenant * 3 == tenants(taken(queue, 3))

    def test_a_short_answer_is_paid_back(self):
        """
        A request that ended early cost its tenant only the tokens that it had.
        """
        queue = filled(*(request(i, "ab"[i % 2], max_tokens=5000) for i in range(30)))
        one, _ = taken(queue, 2)
        end(queue, one, 1)
        assert FIRST_EXPECTED > 1
        assert one.new.tenant == tenants(taken(queue, 1))

    def test_a_request_that_never_ran_costs_nothing(self):
        """
        A request that leaves the queue without having run is not charged.
        """
        queue = filled(*(request(i, "ab"[i % 2]) for i in range(6)))
        for number in (0, 2):
            (gone,) = [one for one in queue if one.number == number]
            queue.discard(gone)
            queue.settle(gone)
        assert {"a": 1, "b": 1} == Counter(tenants(taken(queue, 2)))

    def test_tenants_that_are_gone_take_no_memory(self):
        """
        Tenants without requests are forgotten once no request waits, however many there were.
        """
        queue = queue_of()
        for number in range(300):
            queue.add(request(number, f"t{number}"), 0.0)
            (one,) = taken(queue, 1)
            end(queue, one, 3)
        counters = queue._fresh._counters
        assert (0, 0, 0) == (len(counters._accounts), len(counters._charges), len(queue._fresh))

    def test_a_debt_is_kept_while_others_wait(self):
        """
        A tenant that was served far more than another one that waits stays behind it when it comes
        back, and what it owes is forgotten once the other was served as much.
        """
        queue = filled(request(0, "a", max_tokens=200), *(request(i, "b") for i in range(1, 40)))
        while queue._fresh._counters._accounts["a"].num_charged == 0:
            (one,) = taken(queue, 1)
        end(queue, one, 200)
        queue.add(request(50, "a"), 0.0)
        cost_of_a, cost_of_b = 10 + 2 * 200, 10 + 2 * 5
        assert -(-cost_of_a // cost_of_b) == tenants(taken(queue, 25)).index("a")
