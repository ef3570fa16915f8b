"""AdminService.GetActivity, the core played by the test."""

from __future__ import annotations

import json

import grpc
import msgspec
import pytest

from scheduler_svc.ipc.activity import ActivitySnapshot, FaultEntry, StepSample
from scheduler_svc.ipc.snapshot import HistogramSnapshot, encode_json
from tandem.admin.v1 import activity_pb2 as pb
from tandem.admin.v1.admin_service_pb2_grpc import AdminServiceStub
from tandem.errors import InvalidParameter
from tests.scheduler_svc.frontend.calls import error_of
from tests.scheduler_svc.frontend.fake_core import within

STEP = StepSample(
    number=7,
    executor="a:1",
    at_s=1.0,
    total_s=0.5,
    compute_s=0.25,
    tokens=64,
    requests=3,
    is_graph=True,
)
FAULT = FaultEntry(kind=2, at_s=0.5, where="a:1", reason="EXECUTOR_LOST", message="gone", count=4)
HISTOGRAM = HistogramSnapshot(upper_bounds=(0.5, 1.0), cumulative_counts=(2, 2), count=5, total=9.0)


@pytest.fixture
async def admin(frontend):
    async with grpc.aio.insecure_channel(frontend.servers.admin_address) as channel:
        yield AdminServiceStub(channel)


@pytest.fixture
def asked(frontend):
    """Let the core answer; return the arguments that it got."""
    seen: list[dict[str, object]] = []

    def answer(argument: bytes) -> bytes:
        seen.append(json.loads(argument))
        return encode_json(
            ActivitySnapshot(
                uptime_s=2.0,
                histograms={"inter_token_latency": HISTOGRAM, "step_tokens": HISTOGRAM},
                steps=(STEP,),
                faults=(FAULT,),
            )
        )

    frontend.core.answers["activity"] = answer
    return seen


class TestGetActivity:
    async def test_every_field_of_the_core_is_passed_on(self, admin, asked):
        """
        Steps and faults have the core's values; a histogram has the count of each bucket alone.
        """
        found = await within(admin.GetActivity(pb.GetActivityRequest()))
        for told, entry in ((found.steps[0], STEP), (found.faults[0], FAULT)):
            names = [field.name for field in told.DESCRIPTOR.fields]
            assert {name: getattr(told, name) for name in names} == msgspec.structs.asdict(entry)
        (one,) = found.histograms
        assert ("inter_token_latency", [0.5, 1.0], [2, 0, 3], 9.0, 2.0) == (
            one.name,
            list(one.upper_bounds_s),
            list(one.counts),
            one.sum_s,
            found.uptime_s,
        )

    async def test_number_of_steps_reaches_the_core(self, admin, asked):
        """
        Unset means all that the core keeps; 0 means none.
        """
        for request in (pb.GetActivityRequest(), pb.GetActivityRequest(max_steps=0)):
            await within(admin.GetActivity(request))
        assert [{"max_steps": 256}, {"max_steps": 0}] == asked

    async def test_more_steps_than_are_kept_are_refused(self, admin, asked):
        """
        A number above the largest is INVALID_PARAMETER, with the name of the field.
        """
        error = await error_of(admin.GetActivity(pb.GetActivityRequest(max_steps=257)))
        assert (InvalidParameter.reason, "max_steps") == (error.reason, error.field)
        assert [] == asked
