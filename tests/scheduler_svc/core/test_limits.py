"""Limits on the requests taken: at each limit, one over it, and what a refusal says and leaves."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_svc.core.admission import MAX_PRIORITY, MIN_PRIORITY
from scheduler_svc.core.queue.retry_advice import MAX_ADVICE_S, MIN_ADVICE_S, WINDOW_S, RetryAdvice
from scheduler_svc.core.queue.tenants import TenantCounts
from scheduler_svc.core.request.options import CoreOptions, OnPressure
from scheduler_svc.core.request.request import FinishReason
from tandem.errors import (
    InternalError,
    InvalidParameter,
    MemoryPressure,
    NeverFits,
    QueueFull,
    TandemError,
)
from tests.scheduler_svc.core.harness import Rig, queue_position, small_config


def rig_of(num_running: int = 0, **options) -> Rig:
    """Return a rig with one row and as many requests as are to be in the system already."""
    rig = Rig(small_config(max_batch_size=1), options=CoreOptions(**options))
    for _ in range(num_running):
        rig.submit()
    rig.step()
    return rig


def limit_of(error) -> tuple[str, str]:
    return error.value.metadata["limit"], error.value.metadata["value"]


class TestQueuedRequests:
    def test_as_many_wait_as_are_allowed(self):
        """
        Three requests are taken beside a running one under max_queued_requests 3, and the next is
        refused.
        """
        rig = rig_of(1, max_queued_requests=3)
        for _ in range(3):
            rig.submit()
        with pytest.raises(
            QueueFull, match="3 requests wait and max_queued_requests is 3"
        ) as error:
            rig.submit()
        assert ("max_queued_requests", "3") == limit_of(error)
        assert error.value.retry_after_s is not None

    def test_a_place_is_free_when_one_is_admitted(self):
        """
        Another request may wait when a waiting one gets a slot.
        """
        rig = rig_of(1, max_queued_requests=1)
        waits = rig.submit()
        with pytest.raises(QueueFull):
            rig.submit()
        rig.core.end_request("r0", FinishReason.CANCELLED, rig.now)
        rig.step()
        assert queue_position(rig.core, waits) is None
        rig.submit()

    def test_all_choices_are_taken_or_none(self):
        """
        A request for three choices is refused whole with two places left, and one for two is taken.
        """
        rig = rig_of(1, max_queued_requests=3)
        rig.submit()
        with pytest.raises(QueueFull):
            rig.submit(num_choices=3, request_id="three")
        assert 2 == rig.core.num_requests
        rig.submit(num_choices=2)
        assert 4 == rig.core.num_requests


class TestQueuedTokens:
    def test_as_many_tokens_wait_as_are_allowed(self):
        """
        Prompts of exactly max_queued_tokens together wait, and one token more is refused.
        """
        rig = rig_of(1, max_queued_tokens=20)
        rig.submit(prompt_len=12)
        with pytest.raises(
            QueueFull, match=r"12 prompt tokens wait .* this request has 9"
        ) as error:
            rig.submit(prompt_len=9)
        assert ("max_queued_tokens", "20") == limit_of(error)
        rig.submit(prompt_len=8)

    def test_a_longer_prompt_never_fits(self):
        """
        A prompt that alone is longer than max_queued_tokens is refused for good, also by an empty
        queue.
        """
        rig = rig_of(max_queued_tokens=20)
        with pytest.raises(NeverFits, match="21 tokens") as error:
            rig.submit(prompt_len=21)
        assert ("max_queued_tokens", "20") == limit_of(error)
        rig.submit(prompt_len=20)

    def test_cached_tokens_do_not_count(self):
        """
        Cached tokens at the start of a prompt do not count, only the rest does.
        """
        rig = rig_of(max_queued_tokens=20)
        prompt = np.arange(20, dtype=np.int32)
        rig.submit(prompt=prompt)
        rig.run()
        rig.submit(prompt_len=15)
        longer = np.append(prompt[:16], np.arange(40, 46, dtype=np.int32))
        with pytest.raises(QueueFull, match="this request has 6 more"):
            rig.submit(prompt=longer)
        rig.submit(prompt=longer[:-1])

    def test_a_further_choice_counts_one_token(self):
        """
        The choices of a request share its prompt, so each further one adds one token.
        """
        rig = rig_of(1, max_queued_tokens=12)
        with pytest.raises(NeverFits):
            rig.submit(prompt_len=10, num_choices=4, request_id="four")
        rig.submit(prompt_len=10, num_choices=3)
        with pytest.raises(QueueFull, match="12 prompt tokens wait"):
            rig.submit(prompt_len=1, request_id="one")

    def test_they_are_counted_without_a_limit_too(self):
        """
        Queued tokens are counted for operators where no limit asks for it, until their requests
        leave the queue.
        """
        rig = rig_of(1)
        rig.submit(prompt_len=12, num_choices=2)
        assert 12 + 1 == rig.core.stats().queued_tokens
        rig.run()
        assert 0 == rig.core.stats().queued_tokens

    def test_those_that_ran_are_not_counted_twice(self):
        """
        A request that lost its slot was counted when it came and does not count again.
        """
        rig = rig_of(1, max_queued_tokens=5)
        rig.core.preempt("r0")
        assert 0 == queue_position(rig.core, 0)
        rig.submit(prompt_len=5)


class TestTenants:
    def test_each_tenant_has_a_limit_of_its_own(self):
        """
        A tenant's third request is refused under max_tenant_requests 2 while another's first is
        taken.
        """
        rig = rig_of(max_tenant_requests=2)
        rig.submit(tenant="red")
        rig.submit(tenant="red")
        with pytest.raises(QueueFull, match="tenant 'red' has 2") as error:
            rig.submit(tenant="red")
        assert ("max_tenant_requests", "2") == limit_of(error)
        rig.submit(tenant="blue", num_choices=2)
        with pytest.raises(QueueFull, match="tenant 'blue' has 2"):
            rig.submit(tenant="blue", request_id="more")

    def test_every_choice_counts_for_its_tenant(self):
        """
        A tenant's request for two choices is refused with one place left, and one for one is taken.
        """
        rig = rig_of(max_tenant_requests=3)
        rig.submit(tenant="red", num_choices=2)
        with pytest.raises(QueueFull, match="tenant 'red' has 2"):
            rig.submit(tenant="red", num_choices=2, request_id="two")
        rig.submit(tenant="red", request_id="one", handle=10)

    def test_nobody_has_no_limit(self):
        """
        Requests without a tenant are not counted.
        """
        rig = rig_of(max_tenant_requests=1)
        handles = [rig.submit() for _ in range(4)]
        handles.append(rig.submit(tenant="red"))
        with pytest.raises(QueueFull, match="tenant 'red' has 1"):
            rig.submit(tenant="red", request_id="one too many")
        handles.append(rig.submit())
        rig.run()
        assert [rig.expected(handle) for handle in handles] == [
            rig.outputs[handle] for handle in handles
        ]

    def test_an_end_makes_room(self):
        """
        A tenant's next request is taken when its running one has ended.
        """
        rig = rig_of(max_tenant_requests=1)
        first = rig.submit(tenant="red")
        with pytest.raises(QueueFull, match="tenant 'red' has 1"):
            rig.submit(tenant="red", request_id="too many")
        rig.run()
        second = rig.submit(tenant="red")
        rig.run()
        assert rig.expected(first) == rig.outputs[first]
        assert rig.expected(second) == rig.outputs[second]

    def test_counts_follow_those_in_the_system(self):
        """
        A tenant without requests is forgotten, and a wrong count is reported.
        """
        tenants = TenantCounts()
        for name in ("a", "b", "a", ""):
            tenants.add(name)
        tenants.remove("b")
        tenants.remove("")
        assert (2, 0, 0) == tuple(tenants.count(name) for name in ("a", "b", ""))
        tenants.check_integrity(["a", "", "a"])
        with pytest.raises(InternalError, match="counted"):
            tenants.check_integrity(["a"])


class TestSystem:
    def test_every_choice_counts_for_max_num_seqs(self):
        """
        A request for two choices is refused with one place left, and one for one is taken.
        """
        rig = Rig(small_config(max_num_seqs=4))
        rig.submit(num_choices=3)
        with pytest.raises(QueueFull, match="3 requests are in the system") as error:
            rig.submit(num_choices=2, request_id="two")
        assert ("max_num_seqs", "4") == limit_of(error)
        rig.submit(request_id="one", handle=10)

    @pytest.mark.parametrize(
        "limit", ["max_num_seqs", "max_queued_requests", "max_tenant_requests"]
    )
    def test_more_choices_than_a_limit_never_fit(self, limit):
        """
        A request for more choices than a limit allows at all is refused for good.
        """
        is_config = limit == "max_num_seqs"
        rig = Rig(small_config(max_num_seqs=4)) if is_config else rig_of(**{limit: 4})
        with pytest.raises(NeverFits, match=f"n is 5 and {limit} is 4") as error:
            rig.submit(num_choices=5, tenant="red")
        assert ((limit, "4"), "n") == (limit_of(error), error.value.field)
        rig.submit(num_choices=4, tenant="red")

    @pytest.mark.parametrize(
        ("changes", "field"),
        [
            ({"num_choices": 0}, "n"),
            ({"priority": MIN_PRIORITY - 1}, "priority"),
            ({"priority": MAX_PRIORITY + 1}, "priority"),
        ],
    )
    def test_values_out_of_range_are_refused(self, changes, field):
        """
        A number of choices or a priority out of range is refused with its field.
        """
        with pytest.raises(InvalidParameter) as error:
            Rig().submit(**changes)
        assert field == error.value.field

    @pytest.mark.parametrize("priority", [MIN_PRIORITY, MAX_PRIORITY])
    def test_the_ends_of_the_range_of_priorities_are_taken(self, priority):
        """
        The lowest and the highest priority are served.
        """
        rig = Rig()
        handle = rig.submit(priority=priority)
        rig.run()
        assert rig.expected(handle) == rig.outputs[handle]


class TestThreshold:
    @pytest.mark.parametrize(
        ("threshold", "num_blocks", "allowed"),
        [(0.5, 10, 5), (0.29, 100, 29), (0.9, 32, 28), (0.07, 100, 7), (0.99, 10, 9)],
    )
    def test_a_prompt_gets_at_most_the_threshold(self, threshold, num_blocks, allowed):
        """
        A prompt of as many blocks as memory_threshold gives prompts is served; one token more can
        never be admitted under it and fails at submission.
        """
        config = small_config(
            memory_threshold=threshold, max_num_blocks=num_blocks, max_model_len=500
        )
        rig, longest = Rig(config), 4 * allowed
        with pytest.raises(NeverFits, match=f"at most {allowed} of {num_blocks}") as error:
            rig.submit(prompt_len=longest + 1, max_tokens=1)
        assert ("memory_threshold", str(threshold)) == limit_of(error)
        handle = rig.submit(prompt_len=longest, max_tokens=1)
        rig.run()
        assert rig.expected(handle) == rig.outputs[handle]


class TestRefusals:
    def test_each_is_counted_under_its_limit(self):
        """
        Refusals count together and per limit; those for other reasons only together.
        """
        rig = rig_of(1, max_queued_requests=1, max_queued_tokens=9, max_tenant_requests=1)
        rig.submit(tenant="red", prompt_len=9)
        refused = [
            {"prompt_len": 10}, {"prompt_len": 9}, {"prompt_len": 0}, {"prompt_len": 3},
            {"prompt_len": 3, "tenant": "red"}, {"prompt_len": 100},
        ]  # fmt: skip
        for changes in refused:
            with pytest.raises(Exception, match=r"token|wait|tenant"):
                rig.submit(**changes)
        stats = rig.core.stats()
        assert {
            "max_queued_tokens": 1, "max_queued_requests": 2, "max_tenant_requests": 1,
            "max_model_len": 1,
        } == stats.refused_by_limit  # fmt: skip
        assert (6, 2) == (stats.refused_requests, stats.accepted_requests)

    def test_memory_pressure_says_when_to_retry(self):
        """
        A refusing engine advises under pressure to come back after the time one end takes.
        """
        config = small_config(max_num_blocks=10, memory_threshold=0.5, max_batch_size=2)
        rig = Rig(config, options=CoreOptions(on_pressure=OnPressure.REFUSE))
        for _ in range(2):
            rig.submit(prompt_len=2, max_tokens=2)
        rig.run()
        rig.submit(prompt_len=18, max_tokens=12)
        for _ in range(3):
            rig.step()
        with pytest.raises(MemoryPressure) as error:
            rig.submit()
        assert ("memory_threshold", "0.5") == limit_of(error)
        assert MIN_ADVICE_S <= error.value.retry_after_s <= MAX_ADVICE_S

    @pytest.mark.slow
    @settings(max_examples=60, deadline=None)
    @given(
        st.lists(
            st.tuples(
                st.integers(0, 40), st.integers(0, 30), st.integers(0, 4), st.sampled_from("ab")
            ),
            max_size=30,
        ),
        st.booleans(),
    )
    def test_any_refusal_leaves_nothing_and_every_limit_holds(self, wanted, refuses):
        """
        Limits hold after each submission, a refused request leaves nothing, and all that were taken
        run to their end, whatever is submitted.
        """
        options = CoreOptions(
            max_queued_requests=5, max_queued_tokens=60, max_tenant_requests=6,
            on_pressure=OnPressure.REFUSE if refuses else OnPressure.QUEUE, prefix_caching=False,
        )  # fmt: skip
        rig = Rig(
            small_config(max_num_seqs=9, max_num_blocks=16, memory_threshold=0.8), options=options
        )
        prompts, num_live = {}, 0
        for i, (prompt_len, max_tokens, num_choices, tenant) in enumerate(wanted):
            before = _without_refusals(rig)
            error = _try_submit(
                rig, prompt_len=prompt_len, max_tokens=max_tokens, num_choices=num_choices,
                tenant=tenant, handle=10 * i, request_id=f"r{i}",
            )  # fmt: skip
            if error is None:
                prompts[i] = prompt_len
                num_live = rig.core.num_requests
            else:
                assert before == _without_refusals(rig)
                is_full = isinstance(error, (QueueFull, MemoryPressure))
                assert error.code == "RESOURCE_EXHAUSTED" if is_full else "INVALID_ARGUMENT"
                assert is_full == (error.retry_after_s is not None)
                assert not is_full or {"limit", "value"} == set(error.metadata)
            rig.core.check_integrity()
            rows = rig.core.list_requests()
            waiting = {row.handle for row in rows} & set(rig.core.waiting_handles())
            fresh = [
                h
                for h in waiting
                if h % 10 == 0 and not rig.core._cell.requests._by_handle[h].outputs
            ]
            assert num_live <= 9
            assert len(waiting) <= 5
            assert sum(prompts[h // 10] for h in fresh) <= 60
            assert all(sum(row.tenant == name for row in rows) <= 6 for name in "ab")
            if i % 3 == 2:
                rig.step()
        rig.run()


def _try_submit(rig: Rig, **request) -> TandemError | None:
    try:
        rig.submit(**request)
    except TandemError as error:
        return error
    return None


def _without_refusals(rig: Rig) -> dict[str, object]:
    stats = rig.core.stats()
    stats.ClearField("refused_requests")
    stats.ClearField("refused_by_limit")
    return {
        "stats": stats,
        "waiting": rig.core.waiting_handles(),
        "ids": set(rig.core._cell.requests._by_id),
    }


class TestRetryAdvice:
    def test_without_ends_there_is_none(self):
        """
        No advice is given before two requests have ended.
        """
        advice = RetryAdvice()
        assert advice.after_ends(1, 0.0) is None
        advice.note_end(1.0)
        assert advice.after_ends(1, 2.0) is None

    def test_it_follows_the_rate_of_ends(self):
        """
        Four more ends take two seconds at one end per half second.
        """
        advice = RetryAdvice()
        for i in range(11):
            advice.note_end(i / 2)
        assert 2.0 == advice.after_ends(4, 5.0)

    def test_it_grows_while_nothing_ends(self):
        """
        The time since the latest end lowers the rate.
        """
        advice = RetryAdvice()
        advice.note_end(0.0)
        advice.note_end(1.0)
        assert [1.0, 5.0, 9.0] == [advice.after_ends(1, now) for now in (1.0, 5.0, 9.0)]

    def test_it_stays_within_bounds(self):
        """
        Advice is at least a tenth of a second and at most a minute, and old ends are forgotten.
        """
        advice = RetryAdvice()
        for i in range(100):
            advice.note_end(i / 1000)
        assert MIN_ADVICE_S == advice.after_ends(1, 0.1)
        assert MAX_ADVICE_S == advice.after_ends(10**6, 0.1)
        assert advice.after_ends(1, WINDOW_S + 1.0) is None

    def test_a_refusal_carries_it(self):
        """
        A request that needs one end is told to come back after one second when requests end every
        second.
        """
        rig = rig_of(max_queued_requests=1)
        for _ in range(8):
            rig.submit(prompt_len=2, max_tokens=1)
            rig.step()
        rig.submit()
        with pytest.raises(QueueFull) as error:
            rig.submit()
        assert 0.5 <= error.value.retry_after_s <= 1.5
