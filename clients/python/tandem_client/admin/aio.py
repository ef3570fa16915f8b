"""Client of the admin API for asyncio."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Unpack

import grpc

from tandem.admin.v1 import activity_pb2, executors_pb2, requests_pb2
from tandem.admin.v1 import admin_service_pb2 as admin
from tandem.admin.v1 import admin_service_pb2_grpc as admin_grpc
from tandem.status import from_rpc_error
from tandem_client.admin.activity import Activity, activity_from_proto
from tandem_client.admin.client import Setting, Stats, settings_from_proto
from tandem_client.admin.executors import ExecutorSummary, executors_from_proto
from tandem_client.admin.profile import Profile, ProfileProgress, Recording, request_of
from tandem_client.admin.requests import (
    KvMode,
    RequestEvent,
    RequestList,
    RequestState,
    RequestSummary,
    events_from_proto,
    list_from_proto,
)
from tandem_client.aio import AsyncConnection
from tandem_client.channel import (
    ADMIN_ADDRESS_VARIABLE,
    DEFAULT_ADMIN_ADDRESS,
    Access,
    ChannelOptions,
)
from tandem_client.request.names import suggests_names
from tandem_client.streams.retry import RetryPolicy
from tandem_client.targets import address_of


@suggests_names
class AsyncAdminClient(AsyncConnection):
    """
    A client like `AdminClient`, for one event loop: it connects in the loop of its first call.
    Arguments and errors of each call are those of the call of `AdminClient`.
    """

    def __init__(
        self,
        address: str | Sequence[str] | None = None,
        *,
        retry: RetryPolicy | None = None,
        options: ChannelOptions | None = None,
        **access: Unpack[Access],
    ) -> None:
        where = address_of(address, ADMIN_ADDRESS_VARIABLE, DEFAULT_ADMIN_ADDRESS)
        super().__init__(where, retry, options, admin_grpc.AdminServiceStub, access)

    async def stats(self, *, deadline_s: float | None = None) -> Stats:
        """Return one consistent snapshot of the counters; the call is cheap and safe to poll."""
        stats: Stats = await self._unary(self._stub.GetStats, admin.GetStatsRequest(), deadline_s)
        return stats

    async def activity(
        self, *, max_steps: int | None = None, deadline_s: float | None = None
    ) -> Activity:
        """Return what happened lately; arguments as in `AdminClient.activity`."""
        request = activity_pb2.GetActivityRequest(max_steps=max_steps)
        return activity_from_proto(await self._unary(self._stub.GetActivity, request, deadline_s))

    async def drain(self, grace_s: float | None = None, *, deadline_s: float | None = None) -> int:
        """Stop admission, and return the number of choices that were handed over."""
        request = admin.DrainRequest(grace_s=grace_s)
        answer = await self._unary(self._stub.Drain, request, deadline_s)
        remaining: int = answer.remaining_requests
        return remaining

    async def config(self, *, deadline_s: float | None = None) -> list[Setting]:
        """Return the configuration in force, in the order of the documentation."""
        request = admin.GetConfigRequest()
        return settings_from_proto(await self._unary(self._stub.GetConfig, request, deadline_s))

    async def list_requests(
        self,
        *,
        page_size: int | None = None,
        page_token: str | None = None,
        tenant: str | None = None,
        states: Iterable[RequestState] = (),
        deadline_s: float | None = None,
    ) -> RequestList:
        """
        Return one page of the requests in the system; arguments as in `AdminClient.list_requests`.
        """
        request = requests_pb2.ListRequestsRequest(
            page_size=page_size,
            page_token=page_token,
            tenant=tenant,
            states=[int(state) for state in states],  # type: ignore[misc]  # numbers are the same
        )
        return list_from_proto(await self._unary(self._stub.ListRequests, request, deadline_s))

    async def iter_requests(
        self,
        *,
        page_size: int | None = None,
        tenant: str | None = None,
        states: Iterable[RequestState] = (),
        deadline_s: float | None = None,
    ) -> AsyncIterator[RequestSummary]:
        """
        Return an iterator over all requests in the system; arguments as in
        `AdminClient.iter_requests`.
        """
        chosen = tuple(states)
        page_token: str | None = None
        while page_token != "":
            page = await self.list_requests(
                page_size=page_size,
                page_token=page_token,
                tenant=tenant,
                states=chosen,
                deadline_s=deadline_s,
            )
            for request in page.requests:
                yield request
            page_token = page.next_page_token

    async def abort(
        self, request_id: str, *, tenant: str | None = None, deadline_s: float | None = None
    ) -> None:
        """End a live request of any tenant; arguments and errors as in `AdminClient.abort`."""
        request = requests_pb2.AbortRequest(request_id=request_id, tenant=tenant)
        await self._unary(self._stub.Abort, request, deadline_s)

    async def request_events(
        self, request_id: str, *, tenant: str | None = None, deadline_s: float | None = None
    ) -> list[RequestEvent]:
        """Return the events of a request that is live or ended lately, in order of time."""
        request = requests_pb2.GetRequestEventsRequest(request_id=request_id, tenant=tenant)
        return events_from_proto(
            await self._unary(self._stub.GetRequestEvents, request, deadline_s)
        )

    async def suspend(
        self, kv_mode: KvMode | None = None, *, deadline_s: float | None = None
    ) -> int:
        """Stop computing, and return the bytes of device memory in use after that."""
        mode = 0 if kv_mode is None else int(kv_mode)
        request = admin.SuspendRequest(kv_mode=mode)  # type: ignore[arg-type]  # numbers are the same
        answer = await self._unary(self._stub.Suspend, request, deadline_s)
        memory: int = answer.device_memory_bytes
        return memory

    async def resume(self, *, deadline_s: float | None = None) -> None:
        """End a suspension; requests continue as if there had been none."""
        await self._unary(self._stub.Resume, admin.ResumeRequest(), deadline_s)

    async def flush_prefix_cache(self, *, deadline_s: float | None = None) -> int:
        """Clear the prefix cache of the server; return the number of blocks freed at once."""
        request = admin.FlushPrefixCacheRequest()
        answer = await self._unary(self._stub.FlushPrefixCache, request, deadline_s)
        freed: int = answer.freed_blocks
        return freed

    async def executors(self, *, deadline_s: float | None = None) -> tuple[ExecutorSummary, ...]:
        """Return every executor that serves or is expected to; cheap and safe to poll."""
        request = executors_pb2.ListExecutorsRequest()
        answer = await self._unary(self._stub.ListExecutors, request, deadline_s)
        return executors_from_proto(answer)

    async def add_executor(self, address: str, *, deadline_s: float | None = None) -> None:
        """Let another executor serve from now on, or again after it was drained."""
        request = executors_pb2.AddExecutorRequest(address=address)
        await self._unary(self._stub.AddExecutor, request, deadline_s)

    async def drain_executor(
        self, address: str, grace_s: float | None = 30.0, *, deadline_s: float | None = None
    ) -> int:
        """Drain an executor, and return the number of choices that moved to the others."""
        request = executors_pb2.DrainExecutorRequest(address=address, grace_s=grace_s)
        answer = await self._unary(self._stub.DrainExecutor, request, deadline_s)
        moved: int = answer.moved_requests
        return moved

    async def remove_executor(self, address: str, *, deadline_s: float | None = None) -> None:
        """Move the requests of an executor to the others at once, release it and forget it."""
        request = executors_pb2.RemoveExecutorRequest(address=address)
        await self._unary(self._stub.RemoveExecutor, request, deadline_s)

    async def profile(
        self,
        *,
        num_steps: int | None = None,
        duration_s: float | None = None,
        with_stack: bool = False,
        record_shapes: bool = False,
        on_progress: Callable[[ProfileProgress], None] | None = None,
        deadline_s: float | None = None,
    ) -> Profile:
        """Record the executor's next steps with PyTorch's profiler; the call is never retried."""
        request = request_of(
            num_steps, duration_s, with_stack=with_stack, record_shapes=record_shapes
        )
        recording = Recording(on_progress)
        call = self._call(self._stub.Profile, request, self._limit_s(deadline_s))
        try:
            async for message in call:
                recording.add(message)
        except grpc.RpcError as failure:
            raise from_rpc_error(failure) from None
        finally:
            call.cancel()
        return recording.profile()
