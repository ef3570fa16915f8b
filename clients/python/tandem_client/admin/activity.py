"""Plain values of the admin API about what happened lately: latencies, steps and faults."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from tandem.admin.v1 import activity_pb2


class FaultKind(enum.IntEnum):
    """Kind of a fault; see tandem.admin.v1.FaultKind."""

    UNSPECIFIED = 0
    EXECUTOR_LOST = 1
    REQUESTS_FAILED = 2
    FRONTEND_GONE = 3
    BOOKKEEPING = 4

    @classmethod
    def _missing_(cls, value: object) -> FaultKind:  # noqa: ARG003  # enum's signature
        return cls.UNSPECIFIED  # a newer server may know more


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """
    Counts of values since the server started.

    Attributes:
        upper_bounds_s: Upper bounds of buckets in seconds, inclusive, strictly growing.
        counts: Values in each bucket alone, one more than bounds: the last bucket has no bound.
        sum_s: Sum of all values in seconds.
    """

    upper_bounds_s: tuple[float, ...]
    counts: tuple[int, ...]
    sum_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSample:
    """
    One step whose result was applied; tandem.admin.v1.StepSample tells what each field means.
    """

    number: int
    executor: str
    at_s: float
    total_s: float
    compute_s: float
    tokens: int
    requests: int
    is_graph: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """
    One fault, or several of one kind, place and reason; tandem.admin.v1.Fault tells what each field
    means.
    """

    kind: FaultKind
    at_s: float
    where: str
    reason: str
    message: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """
    Latencies, steps and faults of late, with times in seconds since the server started.

    Attributes:
        uptime_s: Time of this snapshot.
        histograms: Every histogram of the server's metrics, by its name, as "time_to_first_token".
        steps: The newest steps, oldest first.
        faults: The newest faults, oldest first.
    """

    uptime_s: float
    histograms: dict[str, Histogram]
    steps: tuple[StepSample, ...]
    faults: tuple[Fault, ...]


def activity_from_proto(response: activity_pb2.GetActivityResponse) -> Activity:
    """Decode the answer of GetActivity."""
    return Activity(
        uptime_s=response.uptime_s,
        histograms={
            one.name: Histogram(
                upper_bounds_s=tuple(one.upper_bounds_s),
                counts=tuple(one.counts),
                sum_s=one.sum_s,
            )
            for one in response.histograms
        },
        steps=tuple(
            StepSample(
                number=one.number,
                executor=one.executor,
                at_s=one.at_s,
                total_s=one.total_s,
                compute_s=one.compute_s,
                tokens=one.tokens,
                requests=one.requests,
                is_graph=one.is_graph,
            )
            for one in response.steps
        ),
        faults=tuple(
            Fault(
                kind=FaultKind(one.kind),
                at_s=one.at_s,
                where=one.where,
                reason=one.reason,
                message=one.message,
                count=one.count,
            )
            for one in response.faults
        ),
    )
