"""A burst of one tenant beside another tenant that asks for one request at a time."""

from __future__ import annotations

from itertools import count

import pytest

from scheduler_svc.core.request.options import CoreOptions, SchedulePolicy
from tandem.errors import QueueFull
from tests.scheduler_svc.core.harness import Rig, small_config

NUM_BURST = 2000
NUM_POLITE = 20


class Load:
    """A core of 16 rows, a burst that fills it or none, and a polite tenant's requests."""

    def __init__(self, *, tenant: str, max_num_seqs: int, num_burst: int, policy: str) -> None:
        config = small_config(
            max_batch_size=16, max_num_blocks=512, max_total_tokens=64, max_num_seqs=max_num_seqs
        )
        options = CoreOptions(schedule_policy=SchedulePolicy(policy), ageing_s=20.0)
        self.rig = Rig(config, options=options, checked=False)
        self.tenant = tenant
        self.num_refused = 0
        for number in range(num_burst):
            try:
                self.rig.submit(prompt_len=8, max_tokens=4 + number * 7 % 17, tenant="greedy")
            except QueueFull:
                self.num_refused += 1
        for _ in range(40 if num_burst else 0):
            self.rig.step()

    def ask(self) -> tuple[int, int]:
        """Send one polite request; returns the steps until its first token and until its end."""
        handle = self.rig.submit(prompt_len=8, max_tokens=16, tenant=self.tenant)
        first = 0
        for num_steps in count(1):
            self.rig.step()
            first = first or (num_steps if self.rig.outputs[handle] else 0)
            assert handle not in self.rig.failed
            if handle in self.rig.ended:
                assert self.rig.expected(handle) == self.rig.outputs[handle]
                return first, num_steps
        raise AssertionError

    def longest_of(self, num_requests: int) -> tuple[int, int]:
        """Return the most steps of polite requests, each sent when the last has ended."""
        first, whole = zip(*(self.ask() for _ in range(num_requests)), strict=True)
        return max(first), max(whole)


class TestBurst:
    @pytest.mark.slow
    @pytest.mark.parametrize(
        "max_num_seqs",
        [pytest.param(4000, id="all-wait", marks=pytest.mark.slow), pytest.param(256, id="full")],
    )
    @pytest.mark.parametrize("policy", ["fcfs", "lpm", "lof"])
    def test_a_polite_tenant_does_not_wait_behind_a_burst(self, policy, max_num_seqs):
        """
        Beside a burst of 2,000 requests, also where it fills the queue, all of a polite tenant's
        requests succeed, and none takes more than twice the steps that they take alone.
        """
        quiet = Load(tenant="polite", max_num_seqs=max_num_seqs, num_burst=0, policy=policy)
        busy = Load(tenant="polite", max_num_seqs=max_num_seqs, num_burst=NUM_BURST, policy=policy)
        assert (max_num_seqs < NUM_BURST) == (busy.num_refused > 0)
        _, alone = quiet.longest_of(NUM_POLITE)
        first, whole = busy.longest_of(min(NUM_POLITE, 8 if busy.num_refused else NUM_POLITE))
        assert whole <= 2 * alone
        assert first <= 8
        assert len(busy.rig.core.waiting_handles()) > 0, "the burst was over, which proves nothing"
        busy.rig.core.check_integrity()
