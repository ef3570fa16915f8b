"""Plain values of the admin API about single executors."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from tandem.admin.v1 import executors_pb2


class ExecutorState(enum.IntEnum):
    """State of an executor; see tandem.admin.v1.ExecutorState."""

    UNSPECIFIED = 0
    SERVING = 1
    DRAINING = 2
    DRAINED = 3
    SUSPENDED = 4
    SILENT = 5
    CONNECTING = 6
    REFUSED = 7

    @classmethod
    def _missing_(cls, value: object) -> ExecutorState:  # noqa: ARG003  # enum's signature
        return cls.UNSPECIFIED  # a newer server may know more


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorSummary:
    """
    One executor that serves or is expected to; tandem.admin.v1.ExecutorSummary tells what each
    field means. Times are in seconds, and what the server does not know yet is empty or 0.
    """

    address: str
    reached_at: str
    state: ExecutorState
    why: str
    boot_id: str
    model: str
    device: str
    dtype: str
    running_requests: int
    max_requests: int
    used_blocks: int
    total_blocks: int
    cached_blocks: int
    steps: int
    usual_step_s: float
    sessions: int
    losses: int
    device_memory_bytes: int
    away_s: float


def executors_from_proto(
    response: executors_pb2.ListExecutorsResponse,
) -> tuple[ExecutorSummary, ...]:
    """Decode the answer of ListExecutors."""
    return tuple(
        ExecutorSummary(
            address=one.address,
            reached_at=one.reached_at,
            state=ExecutorState(one.state),
            why=one.why,
            boot_id=one.boot_id,
            model=one.model,
            device=one.device,
            dtype=one.dtype,
            running_requests=one.running_requests,
            max_requests=one.max_requests,
            used_blocks=one.used_blocks,
            total_blocks=one.total_blocks,
            cached_blocks=one.cached_blocks,
            steps=one.steps,
            usual_step_s=one.usual_step_s,
            sessions=one.sessions,
            losses=one.losses,
            device_memory_bytes=one.device_memory_bytes,
            away_s=one.away_s,
        )
        for one in response.executors
    )
