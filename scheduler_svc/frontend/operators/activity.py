"""Call of operators for what happened lately: latencies, steps and faults."""

from __future__ import annotations

from itertools import pairwise

import msgspec

from scheduler_svc.frontend.core_client import CoreClient
from scheduler_svc.frontend.operators.metrics import HISTOGRAMS
from scheduler_svc.ipc.activity import MAX_STEPS, ActivityArgument, decode_activity
from scheduler_svc.ipc.snapshot import HistogramSnapshot, encode_json
from tandem.admin.v1 import activity_pb2 as pb
from tandem.errors import InvalidParameter


async def get_activity(core: CoreClient, request: pb.GetActivityRequest) -> pb.GetActivityResponse:
    """
    Return histograms, and the newest steps and faults.

    Raises:
        InvalidParameter: `max_steps` is out of range.
    """
    max_steps = request.max_steps if request.HasField("max_steps") else MAX_STEPS
    if max_steps > MAX_STEPS:
        raise InvalidParameter(
            f"max_steps must be in [0, {MAX_STEPS}], got {max_steps}.", field="max_steps"
        )
    answer = await core.query("activity", encode_json(ActivityArgument(max_steps)))
    found = decode_activity(answer)
    return pb.GetActivityResponse(
        uptime_s=found.uptime_s,
        histograms=[
            _histogram(name, one) for name, one in found.histograms.items() if name in HISTOGRAMS
        ],
        steps=[pb.StepSample(**msgspec.structs.asdict(one)) for one in found.steps],
        faults=[pb.Fault(**msgspec.structs.asdict(one)) for one in found.faults],
    )


def _histogram(name: str, one: HistogramSnapshot) -> pb.Histogram:
    """Return a histogram with the count of each bucket alone, made from cumulative ones."""
    cumulative = (0, *one.cumulative_counts, one.count)
    return pb.Histogram(
        name=name,
        upper_bounds_s=one.upper_bounds,
        counts=[after - before for before, after in pairwise(cumulative)],
        sum_s=one.total,
    )
