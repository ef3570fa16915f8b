"""A full queue: a tenant with fewer waiting requests gets the place of one with more."""

from __future__ import annotations

import pytest

from scheduler_svc.core.request.options import CoreOptions
from scheduler_svc.core.request.tenant import TenantLimits
from tandem.errors import QueueFull
from tests.scheduler_svc.core.harness import Rig, small_config


def full_of_red(**options) -> tuple[Rig, list[int]]:
    """Return a rig of one slot that tenant "red" has filled, and its handles."""
    config = small_config(max_batch_size=1, max_num_seqs=64 if options else 6)
    rig = Rig(config, options=CoreOptions(**options))
    handles = [rig.submit(prompt_len=4, max_tokens=30, tenant="red")]
    rig.step()
    handles += [rig.submit(prompt_len=4, tenant="red") for _ in range(5)]
    with pytest.raises(QueueFull):
        rig.submit(prompt_len=4, tenant="red")
    return rig, handles


class TestCrowding:
    @pytest.mark.parametrize(
        ("limit", "options"),
        [
            ("max_num_seqs", {}),
            ("max_queued_requests", {"max_queued_requests": 5}),
            ("max_queued_tokens", {"max_queued_tokens": 20}),
        ],
    )
    def test_the_latest_of_the_longest_queue_gives_its_place(self, limit, options):
        """
        Another tenant's request is accepted in a full queue, and the latest waiting one of the
        tenant that fills it fails QUEUE_FULL with the limit's name.
        """
        rig, handles = full_of_red(**options)
        blue = rig.submit(prompt_len=4, tenant="blue")
        rig.collect()
        assert {handles[-1]} == set(rig.failed)
        error = rig.failed[handles[-1]].error
        assert ("QUEUE_FULL", limit) == (error.reason, error.metadata["limit"])
        rig.run()
        assert {*handles[:-1], blue} == set(rig.ended)

    def test_places_are_given_until_queues_are_as_long(self):
        """
        Tenants end up with about as many waiting requests each, and none loses one to a tenant that
        has as many.
        """
        rig, _ = full_of_red()
        for _ in range(2):
            rig.submit(prompt_len=4, tenant="blue")
        with pytest.raises(QueueFull, match="max_num_seqs"):
            rig.submit(prompt_len=4, tenant="blue")
        rig.collect()
        assert 2 == len(rig.failed)

    def test_a_heavier_tenant_keeps_more_places(self):
        """
        Queues are compared by weight.
        """
        rig, _ = full_of_red()
        limits = TenantLimits(weight=0.25)
        rig.submit(prompt_len=4, tenant="blue", tenant_limits=limits)
        with pytest.raises(QueueFull):
            rig.submit(prompt_len=4, tenant="blue", tenant_limits=limits)

    def test_better_priorities_and_requests_that_ran_stay(self):
        """
        A request gives its place only to one of its own priority or better, and none that ran does.
        """
        rig, _ = full_of_red()
        with pytest.raises(QueueFull):
            rig.submit(prompt_len=4, tenant="blue", priority=1)
        assert {} == rig.failed

    def test_a_request_goes_with_all_its_choices_or_stays(self):
        """
        All choices of a request give their places; where one of them runs, the request stays.
        """
        rig = Rig(small_config(max_batch_size=1, max_num_seqs=4))
        rig.submit(num_choices=2, tenant="red", max_tokens=30)
        rig.step()
        rig.submit(num_choices=2, tenant="red", request_id="second", handle=2)
        rig.submit(tenant="blue", request_id="third", handle=10)
        rig.collect()
        assert {2, 3} == set(rig.failed)
        with pytest.raises(QueueFull):
            rig.submit(tenant="green", num_choices=2, request_id="fourth", handle=20)

    def test_a_request_that_is_refused_for_itself_takes_no_place(self):
        """
        No request loses its place to one that its tenant's own limit refuses.
        """
        rig, _ = full_of_red()
        own = TenantLimits(tokens_per_minute=8)
        rig.submit(prompt_len=8, tenant="blue", tenant_limits=own)
        rig.collect()
        num_failed = len(rig.failed)
        with pytest.raises(QueueFull, match="tenant_tokens_per_minute"):
            rig.submit(prompt_len=8, tenant="blue", tenant_limits=own)
        rig.collect()
        assert num_failed == len(rig.failed) == 1
