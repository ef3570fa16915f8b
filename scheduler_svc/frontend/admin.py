"""The operators' service."""

from __future__ import annotations

import math
from typing import Any

import grpc
import msgspec

from scheduler_svc.frontend.core_client import CoreClient
from scheduler_svc.ipc.snapshot import (
    DrainArgument,
    decode_config,
    decode_drain_result,
    decode_stats,
    encode_json,
)
from tandem.admin.v1 import admin_service_pb2 as pb
from tandem.admin.v1 import admin_service_pb2_grpc
from tandem.errors import InvalidParameter

Context = grpc.aio.ServicerContext[Any, Any]


class AdminServicer(admin_service_pb2_grpc.AdminServiceServicer):
    """Asks the core; TandemErrors become statuses in the interceptor."""

    def __init__(self, core: CoreClient, *, drain_grace_s: float) -> None:
        self._core = core
        self._drain_grace_s = drain_grace_s

    async def GetStats(self, request: pb.GetStatsRequest, context: Context) -> pb.GetStatsResponse:  # noqa: N802  # named by the proto
        """One snapshot of the core."""
        del request, context
        stats = decode_stats(await self._core.query("stats"))
        return pb.GetStatsResponse(**msgspec.structs.asdict(stats))

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:  # noqa: N802  # named by the proto
        """Stop admission and wait for what is running."""
        del context
        grace_s = request.grace_s if request.HasField("grace_s") else self._drain_grace_s
        if not (math.isfinite(grace_s) and grace_s >= 0):
            raise InvalidParameter(
                f"grace_s must be a finite number of at least 0, got {grace_s}.", field="grace_s"
            )
        answer = await self._core.query(
            "drain",
            encode_json(DrainArgument(grace_s=grace_s)),
            grace_s=grace_s,
        )
        return pb.DrainResponse(remaining_requests=decode_drain_result(answer).remaining_requests)

    async def GetConfig(  # noqa: N802  # named by the proto
        self, request: pb.GetConfigRequest, context: Context
    ) -> pb.GetConfigResponse:
        """The configuration in force."""
        del request, context
        config = decode_config(await self._core.query("config"))
        return pb.GetConfigResponse(
            entries=[
                pb.ConfigEntry(name=entry.name, json_value=entry.json_value, source=entry.source)
                for entry in config.entries
            ]
        )
