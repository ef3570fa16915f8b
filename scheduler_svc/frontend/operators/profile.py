"""Profiles of the executor's steps, which the executor records and sends."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc

from scheduler_svc.executor_client.channel import ExecutorAccess
from scheduler_svc.ipc.snapshot import ExecutorInUse
from tandem.admin.v1 import admin_service_pb2 as pb
from tandem.common.v1.profile_pb2 import ProfileOptions
from tandem.error_codes import DeadlineExceeded
from tandem.errors import Draining, ExecutorLoading, ExecutorLost, ProfileUnsupported, TandemError
from tandem.executor.v1.executor_service_pb2 import ProfileRequest
from tandem.executor.v1.executor_service_pb2_grpc import ExecutorServiceStub
from tandem.profile import FEATURE, read_options
from tandem.status import CallCancelled, PeerUnavailable, from_rpc_error

AFTER_RECORDING_S = 300.0
"""Seconds for the step in flight to end and for the trace to be written and sent."""

_AWAY = (PeerUnavailable, Draining, ExecutorLoading, CallCancelled, DeadlineExceeded)


async def profile(
    executor: ExecutorInUse, options: ProfileOptions, access: ExecutorAccess
) -> AsyncIterator[pb.ProfileResponse]:
    """
    Have an executor record its steps, over a separate connection: the step link is not involved.

    Raises:
        InvalidParameter: An option is out of range.
        ProfileUnsupported: This executor cannot record profiles.
        ExecutorLost: The executor ended, or cannot be reached.
        TandemError: The executor answered with this error.
    """
    duration_s = read_options(options).duration_s
    if FEATURE not in executor.features:
        raise ProfileUnsupported(f"the executor at {executor.address} cannot record profiles")
    async with access.open_async(executor.address) as channel:
        stub = ExecutorServiceStub(channel)  # type: ignore[no-untyped-call]  # generated code
        call = stub.Profile(
            ProfileRequest(options=options),
            timeout=duration_s + AFTER_RECORDING_S,
            metadata=access.metadata(),
        )
        try:
            async for message in call:
                if message.HasField("progress"):
                    yield pb.ProfileResponse(progress=message.progress)
                else:
                    yield pb.ProfileResponse(trace=message.trace)
        except grpc.RpcError as broken:
            raise _lost(from_rpc_error(broken), executor.address) from None


def _lost(error: TandemError, address: str) -> TandemError:
    """Return the operator's error: an executor that stops does not mean that the service stops."""
    if not isinstance(error, _AWAY):
        return error
    return ExecutorLost(
        f"the executor at {address} was lost before its profile was complete ({error.message}): "
        "ask again"
    )
