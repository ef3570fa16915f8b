"""Calls of operators about single executors: to list, add, drain and remove them."""

from __future__ import annotations

import math

import msgspec

from scheduler_svc.frontend.core_client import CoreClient
from scheduler_svc.ipc.snapshot import (
    ExecutorArgument,
    ExecutorRow,
    decode_executor_drain,
    decode_executors,
    encode_json,
)
from tandem.admin.v1 import executors_pb2 as pb
from tandem.errors import InvalidParameter
from tandem.network.address import check_target

_STATE_PREFIX = "EXECUTOR_STATE_"


def checked_grace_s(grace_s: float) -> float:
    """
    Return a grace time unchanged.

    Raises:
        InvalidParameter: It is negative or not finite.
    """
    if not (math.isfinite(grace_s) and grace_s >= 0):
        raise InvalidParameter(
            f"grace_s must be a finite number of at least 0, got {grace_s}.", field="grace_s"
        )
    return grace_s


async def list_executors(core: CoreClient) -> pb.ListExecutorsResponse:
    """Return every executor that serves or is expected to."""
    rows = decode_executors(await core.query("executors")).executors
    return pb.ListExecutorsResponse(executors=[_summary(row) for row in rows])


async def add_executor(core: CoreClient, request: pb.AddExecutorRequest) -> pb.AddExecutorResponse:
    """Let another executor serve, or one that was drained serve again."""
    address = _checked_address(request.address)
    await core.query("add_executor", encode_json(ExecutorArgument(address=address)))
    return pb.AddExecutorResponse()


async def drain_executor(
    core: CoreClient, request: pb.DrainExecutorRequest, default_grace_s: float
) -> pb.DrainExecutorResponse:
    """Free an executor, and wait until its requests have ended or moved."""
    grace_s = checked_grace_s(request.grace_s if request.HasField("grace_s") else default_grace_s)
    argument = encode_json(ExecutorArgument(address=request.address, grace_s=grace_s))
    answer = await core.query("drain_executor", argument, grace_s=grace_s)
    return pb.DrainExecutorResponse(moved_requests=decode_executor_drain(answer).moved_requests)


async def remove_executor(
    core: CoreClient, request: pb.RemoveExecutorRequest
) -> pb.RemoveExecutorResponse:
    """Move the requests of an executor to the others, and forget it."""
    await core.query("remove_executor", encode_json(ExecutorArgument(address=request.address)))
    return pb.RemoveExecutorResponse()


def _checked_address(address: str) -> str:
    try:
        check_target(address)
    except ValueError as error:
        raise InvalidParameter(f"address {error}, got {address!r}.", field="address") from error
    if "," in address:
        raise InvalidParameter(f"address must name one executor, got {address!r}.", field="address")
    return address


def _summary(row: ExecutorRow) -> pb.ExecutorSummary:
    name = f"{_STATE_PREFIX}{row.state.upper()}"
    values = msgspec.structs.asdict(row)
    values["state"] = dict(pb.ExecutorState.items()).get(name, 0)  # a newer core may know more
    values["usual_step_s"] = values.pop("step_s")  # in JSON it would be taken for `steps`
    return pb.ExecutorSummary(**values)
