"""Starvation: the bound that `queue.WaitingQueue` states holds under every policy and adversary."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_svc.core.queue.queue import AGED_AFTER
from scheduler_svc.core.request.options import CoreOptions, SchedulePolicy
from scheduler_svc.core.request.request import RequestState
from tests.scheduler_svc.core.harness import GREEDY, Rig, small_config

AGEING_S = 2.0
AGED_S = AGED_AFTER * AGEING_S
LONGEST_RUN = 24
"""Steps that a request of these tests takes at most, also if it is preempted once."""
COMMON = np.arange(16, dtype=np.int32)
"""A prompt that every adversary shares, so that it is always cached."""


@dataclass
class Watch:
    """
    Watch of admissions, each held against the bound.

    The requests ahead of an aged one are those that arrived before it and had not ended: all others
    arrive too late to pass.
    """

    rig: Rig

    def __post_init__(self) -> None:
        self.waited_s: dict[int, float] = defaultdict(float)
        """Seconds waited by handle; a step takes one, and counts if it begins in the queue."""
        self.deadline_s: dict[int, float] = {}

    def step(self) -> None:
        """Run one step, and check that no promise is broken after it."""
        rig, before = self.rig, self.rig.core.waiting_handles()
        for handle in before:
            self.waited_s[handle] += 1.0
        rig.step()
        still = set(rig.core.waiting_handles())
        # Sorted, since the order from before the step is a second old.
        admitted = sorted(handle for handle in before if handle not in still)
        aged = sorted(handle for handle in before if self.waited_s[handle] >= AGED_S)
        taken = [handle for handle in admitted if handle in aged]
        assert taken == aged[: len(taken)], "aged requests are not admitted by arrival"
        if len(taken) < len(aged):
            assert taken == admitted, "somebody passed an aged request"
        for handle in aged:
            num_ahead = sum(row.handle < handle for row in rig.core.list_requests())
            bound_s = rig.now + (num_ahead + 1) * LONGEST_RUN
            assert rig.now <= self.deadline_s.setdefault(handle, bound_s), "waits past its bound"


def rig_of(policy: SchedulePolicy, num_rows: int, delay: int, *, preemption: bool) -> Rig:
    options = CoreOptions(schedule_policy=policy, ageing_s=AGEING_S, priority_preemption=preemption)
    config = small_config(
        max_batch_size=num_rows, max_num_blocks=24, max_num_seqs=10**6, max_total_tokens=32
    )
    return Rig(config, options=options, delay=delay)


@pytest.mark.parametrize("preemption", [False, True], ids=["keep", "preempt"])
@pytest.mark.parametrize("policy", SchedulePolicy)
def test_a_victim_is_served_within_the_bound(policy, preemption):
    """
    A request that every policy and priority puts last is served within ten periods and the time of
    those ahead of it, though better ones arrive in every step.
    """
    rig = rig_of(policy, num_rows=2, delay=2, preemption=preemption)
    watch = Watch(rig)
    for _ in range(3):
        rig.submit(prompt=COMMON, max_tokens=8)
    watch.step()
    victim = rig.submit(prompt_len=9, max_tokens=1, priority=500)
    for _ in range(120):
        if rig.core.state_of(victim) is not RequestState.WAITING:
            break
        rig.submit(prompt=COMMON, max_tokens=8, priority=-500)
        watch.step()
    assert rig.core.state_of(victim) is not RequestState.WAITING
    waited_s = rig.now - rig.submitted[victim].arrival_s
    # The three before it and the two that run when it is aged.
    assert AGED_S <= waited_s <= AGED_S + 5 * LONGEST_RUN


def test_without_ageing_the_victim_would_wait():
    """
    The victim of the adversary is not served where periods are too long to matter.
    """
    options = CoreOptions(schedule_policy=SchedulePolicy.LPM, ageing_s=1e6)
    rig = Rig(small_config(max_batch_size=2, max_num_seqs=10**6), options=options)
    victim = rig.submit(prompt_len=9, max_tokens=1, priority=500)
    for _ in range(120):
        rig.submit(prompt=COMMON, max_tokens=8, priority=-500)
        rig.step()
    assert rig.core.state_of(victim) is RequestState.WAITING


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(SchedulePolicy),
    st.lists(
        st.lists(
            st.tuples(st.integers(-20, 20), st.integers(1, 8), st.integers(0, 16)), max_size=2
        ),
        max_size=50,
    ),
    st.integers(1, 3),
    st.sampled_from([1, 3]),
    st.booleans(),
)
def test_any_arrivals_keep_the_bound(policy, steps, num_rows, delay, preemption):
    """
    Every aged request is admitted in order of arrival and within its bound, and none passes it,
    whatever arrives when.
    """
    rig = rig_of(policy, num_rows, delay, preemption=preemption)
    watch = Watch(rig)
    for arrivals in steps:
        for priority, max_tokens, num_own in arrivals:
            own = np.arange(num_own, dtype=np.int32) + 20 + len(rig.submitted)
            prompt = np.concatenate([COMMON[: 16 - num_own], own])
            rig.submit(prompt=prompt, max_tokens=max_tokens, priority=priority)
        watch.step()
    for _ in range(5000):
        if not rig.core.has_pending_work():
            break
        watch.step()
    assert not rig.core.has_pending_work()


def test_an_aged_choice_lets_the_sibling_run_that_it_waits_for():
    """
    Where the choice that has the prompt scored is preempted, it is admitted at once, though of the
    two only the choice that waits for it is aged, which no other request may pass.
    """
    rig = Rig(small_config(max_total_tokens=4), options=CoreOptions(ageing_s=1.0))
    sampling = replace(GREEDY, prompt_logprobs=1)
    first = rig.submit(prompt_len=56, max_tokens=4, num_choices=2, sampling=sampling)
    while rig.waited[first + 1] <= AGED_AFTER:
        rig.step()
    assert rig.core.state_of(first) is RequestState.PREFILL
    rig.core.preempt("r0")
    rig.run()
    assert {first, first + 1} == rig.ended.keys()
