"""Admin service for operators."""

from __future__ import annotations

from typing import Any

import grpc
import msgspec

from scheduler_svc.executor_client.channel import ExecutorAccess
from scheduler_svc.frontend.calls.rpc_handlers import write
from scheduler_svc.frontend.core_client import CoreClient
from scheduler_svc.frontend.operators.activity import get_activity
from scheduler_svc.frontend.operators.executors import (
    add_executor,
    checked_grace_s,
    drain_executor,
    list_executors,
    remove_executor,
)
from scheduler_svc.frontend.operators.profile import profile
from scheduler_svc.frontend.request.validation import check_request_id, check_tenant
from scheduler_svc.ipc.snapshot import (
    SUSPEND_WAIT_S,
    AbortArgument,
    DrainArgument,
    EventEntry,
    EventsArgument,
    ListArgument,
    SuspendArgument,
    decode_config,
    decode_drain_result,
    decode_event_list,
    decode_executor,
    decode_flush_result,
    decode_request_list,
    decode_stats,
    decode_suspend_result,
    encode_json,
)
from tandem.admin.v1 import (
    activity_pb2,
    admin_service_pb2_grpc,
    executors_pb2,
    requests_pb2,
    stats_pb2,
)
from tandem.admin.v1 import admin_service_pb2 as pb
from tandem.errors import InvalidParameter
from tandem.profile import read_options

Context = grpc.aio.ServicerContext[Any, Any]

DEFAULT_PAGE_SIZE = 100
MAX_PAGE_SIZE = 10_000
MAX_TOKEN_CHARS = 18
"""Digits of the largest arrival number that a page can end with."""
_STATE_PREFIX = "REQUEST_STATE_"


class AdminServicer(admin_service_pb2_grpc.AdminServiceServicer):
    """Admin service, which queries the core; the interceptor turns TandemErrors into statuses."""

    def __init__(
        self, core: CoreClient, executors: ExecutorAccess, *, drain_grace_s: float
    ) -> None:
        self._core = core
        self._executors = executors
        self._drain_grace_s = drain_grace_s

    async def GetStats(  # noqa: N802  # named by the proto
        self, request: pb.GetStatsRequest, context: Context
    ) -> stats_pb2.GetStatsResponse:
        """Return one snapshot of the service's stats."""
        del request, context
        return decode_stats(await self._core.query("stats"))

    async def GetActivity(  # noqa: N802  # named by the proto
        self, request: activity_pb2.GetActivityRequest, context: Context
    ) -> activity_pb2.GetActivityResponse:
        """Return histograms, and the newest steps and faults."""
        del context
        return await get_activity(self._core, request)

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:  # noqa: N802  # named by the proto
        """Stop admission, and wait until live requests have ended or the grace time is over."""
        del context
        grace_s = checked_grace_s(
            request.grace_s if request.HasField("grace_s") else self._drain_grace_s
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
        """Return the configuration in force."""
        del request, context
        config = decode_config(await self._core.query("config"))
        return pb.GetConfigResponse(
            entries=[
                pb.ConfigEntry(name=entry.name, json_value=entry.json_value, source=entry.source)
                for entry in config.entries
            ]
        )

    async def Suspend(self, request: pb.SuspendRequest, context: Context) -> pb.SuspendResponse:  # noqa: N802  # named by the proto
        """Stop computing and give device memory back as `kv_mode` says."""
        del context
        if request.kv_mode not in pb.KvMode.values():
            raise InvalidParameter(f"there is no kv_mode {request.kv_mode}.", field="kv_mode")
        mode = request.kv_mode or pb.KV_MODE_PERSIST
        argument = encode_json(SuspendArgument(int(mode)))
        answer = await self._core.query("suspend", argument, grace_s=SUSPEND_WAIT_S)
        memory = decode_suspend_result(answer).device_memory_bytes
        return pb.SuspendResponse(device_memory_bytes=memory)

    async def Resume(self, request: pb.ResumeRequest, context: Context) -> pb.ResumeResponse:  # noqa: N802  # named by the proto
        """End a suspension."""
        del request, context
        await self._core.query("resume", grace_s=SUSPEND_WAIT_S)
        return pb.ResumeResponse()

    async def ListRequests(  # noqa: N802  # named by the proto
        self, request: requests_pb2.ListRequestsRequest, context: Context
    ) -> requests_pb2.ListRequestsResponse:
        """List the live choices that match."""
        del context
        answer = await self._core.query("requests", encode_json(_list_argument(request)))
        found = decode_request_list(answer)
        return requests_pb2.ListRequestsResponse(
            requests=[
                requests_pb2.RequestSummary(
                    **(msgspec.structs.asdict(one) | {"state": _state_number(one.state)})
                )
                for one in found.requests
            ],
            total=found.total,
            next_page_token="" if found.last is None else str(found.last),
        )

    async def Abort(  # noqa: N802  # named by the proto
        self, request: requests_pb2.AbortRequest, context: Context
    ) -> requests_pb2.AbortResponse:
        """End a live request of any tenant."""
        del context
        check_request_id(request.request_id)
        tenant = _tenant(request)
        argument = AbortArgument(request_id=request.request_id, tenant=tenant)
        await self._core.query("abort", encode_json(argument))
        return requests_pb2.AbortResponse()

    async def GetRequestEvents(  # noqa: N802  # named by the proto
        self, request: requests_pb2.GetRequestEventsRequest, context: Context
    ) -> requests_pb2.GetRequestEventsResponse:
        """Return the recorded events of one request."""
        del context
        check_request_id(request.request_id)
        argument = encode_json(EventsArgument(request.request_id, _tenant(request)))
        events = decode_event_list(await self._core.query("events", argument)).events
        return requests_pb2.GetRequestEventsResponse(events=[_event(event) for event in events])

    async def FlushPrefixCache(  # noqa: N802  # named by the proto
        self, request: pb.FlushPrefixCacheRequest, context: Context
    ) -> pb.FlushPrefixCacheResponse:
        """Empty the prefix cache: no KV computed so far can be found again."""
        del request, context
        result = decode_flush_result(await self._core.query("flush"))
        return pb.FlushPrefixCacheResponse(freed_blocks=result.freed_blocks)

    async def Profile(self, request: pb.ProfileRequest, context: Context) -> None:  # noqa: N802  # named by the proto
        """Stream a trace of the executor's next steps."""
        read_options(request.options)
        executor = decode_executor(await self._core.query("executor"))
        async for message in profile(executor, request.options, self._executors):
            await write(context, message)

    async def ListExecutors(  # noqa: N802  # named by the proto
        self, request: executors_pb2.ListExecutorsRequest, context: Context
    ) -> executors_pb2.ListExecutorsResponse:
        """List the executors that serve or are to."""
        del request, context
        return await list_executors(self._core)

    async def AddExecutor(  # noqa: N802  # named by the proto
        self, request: executors_pb2.AddExecutorRequest, context: Context
    ) -> executors_pb2.AddExecutorResponse:
        """Let another executor serve."""
        del context
        return await add_executor(self._core, request)

    async def DrainExecutor(  # noqa: N802  # named by the proto
        self, request: executors_pb2.DrainExecutorRequest, context: Context
    ) -> executors_pb2.DrainExecutorResponse:
        """Free an executor; its requests finish there or move."""
        del context
        return await drain_executor(self._core, request, self._drain_grace_s)

    async def RemoveExecutor(  # noqa: N802  # named by the proto
        self, request: executors_pb2.RemoveExecutorRequest, context: Context
    ) -> executors_pb2.RemoveExecutorResponse:
        """Forget an executor; its requests move at once."""
        del context
        return await remove_executor(self._core, request)


def _tenant(
    request: requests_pb2.ListRequestsRequest
    | requests_pb2.AbortRequest
    | requests_pb2.GetRequestEventsRequest,
) -> str | None:
    """Return the tenant that a request is about; None for any."""
    check_tenant(request.tenant)
    return request.tenant if request.HasField("tenant") else None


def _list_argument(request: requests_pb2.ListRequestsRequest) -> ListArgument:
    page_size = request.page_size if request.HasField("page_size") else DEFAULT_PAGE_SIZE
    if not 1 <= page_size <= MAX_PAGE_SIZE:
        raise InvalidParameter(
            f"page_size must be in [1, {MAX_PAGE_SIZE}], got {page_size}.", field="page_size"
        )
    token = request.page_token
    if token and not (token.isascii() and token.isdigit() and len(token) <= MAX_TOKEN_CHARS):
        raise InvalidParameter(
            "page_token must be empty or the next_page_token of the page before.",
            field="page_token",
        )
    known = requests_pb2.RequestState.values()
    for at, state in enumerate(request.states):
        if state == 0 or state not in known:
            raise InvalidParameter(f"there is no request state {state}.", field=f"states[{at}]")
    return ListArgument(
        page_size=page_size,
        after=int(token) if token else -1,
        tenant=_tenant(request),
        states=tuple(
            requests_pb2.RequestState.Name(state).removeprefix(_STATE_PREFIX).lower()
            for state in request.states
        ),
    )


def _state_number(state: str) -> int:
    name = f"{_STATE_PREFIX}{state.upper()}"
    return requests_pb2.RequestState.Value(name) if name in requests_pb2.RequestState.keys() else 0  # noqa: SIM118  # no dict


def _event(event: EventEntry) -> requests_pb2.RequestEvent:
    values = msgspec.structs.asdict(event)
    if event.blocks is not None:
        values["blocks"] = requests_pb2.BlockStats(**msgspec.structs.asdict(event.blocks))
    return requests_pb2.RequestEvent(**values)
