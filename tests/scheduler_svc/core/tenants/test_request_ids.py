"""Ids of requests, which are each tenant's own."""

from __future__ import annotations

import pytest

from scheduler_svc.core.observe.request_events import EventKind
from scheduler_svc.core.request.options import CoreOptions
from scheduler_svc.core.request.request import FinishReason
from tandem.errors import DuplicateRequestId, RequestNotFound
from tests.scheduler_svc.core.harness import Rig

OPTIONS = CoreOptions(track_request_events=True)


def rig_of_two() -> tuple[Rig, int, int]:
    """Return a rig in which tenants "red" and "blue" use the id "r" at once, and their handles."""
    rig = Rig(options=OPTIONS)
    red = rig.submit(request_id="r", tenant="red")
    return rig, red, rig.submit(request_id="r", tenant="blue")


class TestIdsOfTenants:
    def test_two_tenants_use_one_id_at_once(self):
        """
        Requests of two tenants with one id are both listed, and both run to their ends.
        """
        rig, red, blue = rig_of_two()
        rows = [(row.request_id, row.tenant) for row in rig.core.list_requests()]
        assert [("r", "red"), ("r", "blue")] == rows
        rig.run()
        assert {red, blue} == rig.ended.keys()
        assert [rig.expected(red), rig.expected(blue)] == [rig.outputs[red], rig.outputs[blue]]

    def test_an_id_is_used_once_by_a_tenant(self):
        """
        A tenant's second live request with an id is refused, and so is one without a tenant.
        """
        rig, _, _ = rig_of_two()
        with pytest.raises(DuplicateRequestId):
            rig.submit(request_id="r", tenant="blue")
        rig.submit(request_id="r")
        with pytest.raises(DuplicateRequestId):
            rig.submit(request_id="r")

    def test_only_the_tenant_s_own_request_ends(self):
        """
        Ending a request by its id leaves those of other tenants alone; a tenant that does not use
        the id ends none.
        """
        rig, red, blue = rig_of_two()
        for tenant in ("", "green"):
            with pytest.raises(RequestNotFound):
                rig.core.end_request("r", FinishReason.CANCELLED, rig.now, tenant=tenant)
        rig.core.end_request("r", FinishReason.CANCELLED, rig.now, tenant="red")
        rig.run()
        assert FinishReason.CANCELLED is rig.ended[red].reason
        assert FinishReason.MAX_TOKENS is rig.ended[blue].reason

    def test_only_the_tenant_s_own_request_is_preempted(self):
        """
        Preempting a request by its id leaves those of other tenants in their slots.
        """
        rig, red, blue = rig_of_two()
        rig.step()
        rig.core.preempt("r", "blue")
        rig.run()
        assert (0, 1) == (rig.ended[red].num_preemptions, rig.ended[blue].num_preemptions)

    def test_events_are_of_one_tenant_s_request(self):
        """
        Events are asked for by tenant; without one they are those of the latest request, of one
        tenant even where two arrived at once.
        """
        rig, _, _ = rig_of_two()
        rig.core.end_request("r", FinishReason.CANCELLED, rig.now, tenant="red")
        red, blue, latest = (rig.core.request_events("r", one) for one in ("red", "blue", None))
        assert [EventKind.ADD, EventKind.FINISH] == [event.kind for event in red]
        assert [EventKind.ADD] == [event.kind for event in blue]
        assert latest in (red, blue)
        with pytest.raises(RequestNotFound):
            rig.core.request_events("r", "green")
