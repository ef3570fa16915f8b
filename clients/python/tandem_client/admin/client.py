"""Client of the admin API, which has its own port, and of the health service of any port."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import grpc

from tandem.admin.v1 import activity_pb2, executors_pb2, requests_pb2
from tandem.admin.v1 import admin_service_pb2 as admin
from tandem.admin.v1 import admin_service_pb2_grpc as admin_grpc
from tandem.admin.v1.stats_pb2 import GetStatsResponse
from tandem.status import from_rpc_error
from tandem_client.admin.activity import Activity, activity_from_proto
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
from tandem_client.channel import (
    ADMIN_ADDRESS_VARIABLE,
    DEFAULT_ADMIN_ADDRESS,
    Access,
    ChannelOptions,
)
from tandem_client.client import Connection
from tandem_client.request.names import suggests_names
from tandem_client.streams.retry import RetryPolicy
from tandem_client.targets import address_of

Stats = GetStatsResponse
"""One snapshot of a server: every field of the message, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One value in force; `source` is default, preset, file, environment, flag or executor."""

    name: str
    value: Any
    source: str


def settings_from_proto(response: admin.GetConfigResponse) -> list[Setting]:
    """Decode the answer of GetConfig."""
    return [
        Setting(name=entry.name, value=json.loads(entry.json_value), source=entry.source)
        for entry in response.entries
    ]


@suggests_names
class AdminClient(Connection):
    """A connection to the admin port of one Tandem server; safe to share between threads."""

    def __init__(
        self,
        address: str | Sequence[str] | None = None,
        *,
        retry: RetryPolicy | None = None,
        options: ChannelOptions | None = None,
        **access: Unpack[Access],
    ) -> None:
        """
        Args:
            address: HOST:PORT, [IPv6]:PORT or unix:PATH; several by IP address, or dns:///NAME:PORT,
                take turns. None = that of TANDEM_ADMIN_ADDRESS, else the default one.
            retry: How calls recover by themselves.
            options: Metadata and limits of the connection.
            **access: API key and TLS files, see ChannelOptions; they win over those of `options`.

        Raises:
            InvalidConfig: `address` is not the address of a server, or a file cannot be used.
        """
        where = address_of(address, ADMIN_ADDRESS_VARIABLE, DEFAULT_ADMIN_ADDRESS)
        super().__init__(where, retry, options, access)
        self._stub = admin_grpc.AdminServiceStub(self._channel)  # type: ignore[no-untyped-call]  # generated

    def stats(self, *, deadline_s: float | None = None) -> Stats:
        """Return one consistent snapshot of the counters; the call is cheap and safe to poll."""
        stats: Stats = self._unary(self._stub.GetStats, admin.GetStatsRequest(), deadline_s)
        return stats

    def activity(
        self, *, max_steps: int | None = None, deadline_s: float | None = None
    ) -> Activity:
        """
        Return histograms of latencies, and the newest steps and faults; safe to poll once a second.

        Args:
            max_steps: Most steps to return, 0 to 256; None = all that the server keeps.
            deadline_s: Longest wait for the answer in seconds.
        """
        request = activity_pb2.GetActivityRequest(max_steps=max_steps)
        return activity_from_proto(self._unary(self._stub.GetActivity, request, deadline_s))

    def drain(self, grace_s: float | None = None, *, deadline_s: float | None = None) -> int:
        """
        Stop admission, let running requests finish for a while, hand the rest over, and make the
        scheduler release its executor. Only a restart of the scheduler undoes this.

        Args:
            grace_s: Seconds that requests may go on; None = the server's default, 0 = none.
            deadline_s: Longest wait for the answer in seconds; draining goes on after it.

        Returns:
            Number of choices that were handed over.
        """
        request = admin.DrainRequest()
        if grace_s is not None:
            request.grace_s = grace_s
        remaining: int = self._unary(self._stub.Drain, request, deadline_s).remaining_requests
        return remaining

    def config(self, *, deadline_s: float | None = None) -> list[Setting]:
        """Return the configuration in force, in the order of the documentation."""
        answer = self._unary(self._stub.GetConfig, admin.GetConfigRequest(), deadline_s)
        return settings_from_proto(answer)

    def list_requests(
        self,
        *,
        page_size: int | None = None,
        page_token: str | None = None,
        tenant: str | None = None,
        states: Iterable[RequestState] = (),
        deadline_s: float | None = None,
    ) -> RequestList:
        """
        Return one page of the requests in the system, oldest first, one entry per choice.

        Args:
            page_size: Largest number of entries; None = the server's default, 100.
            page_token: `next_page_token` of the page before; None = the first page.
            tenant: Return only this tenant's requests; "" = only requests without a tenant.
            states: Return only requests in one of these states; empty = all.
            deadline_s: Longest wait for the answer in seconds.
        """
        request = requests_pb2.ListRequestsRequest(
            page_size=page_size,
            page_token=page_token,
            tenant=tenant,
            states=[int(state) for state in states],  # type: ignore[misc]  # numbers are the same
        )
        return list_from_proto(self._unary(self._stub.ListRequests, request, deadline_s))

    def iter_requests(
        self,
        *,
        page_size: int | None = None,
        tenant: str | None = None,
        states: Iterable[RequestState] = (),
        deadline_s: float | None = None,
    ) -> Iterator[RequestSummary]:
        """
        Return an iterator over all requests in the system, page by page; arguments as in
        `list_requests`, `deadline_s` for each page.
        """
        chosen = tuple(states)
        page_token: str | None = None
        while page_token != "":
            page = self.list_requests(
                page_size=page_size,
                page_token=page_token,
                tenant=tenant,
                states=chosen,
                deadline_s=deadline_s,
            )
            yield from page.requests
            page_token = page.next_page_token

    def abort(
        self, request_id: str, *, tenant: str | None = None, deadline_s: float | None = None
    ) -> None:
        """
        End a live request of any tenant; its stream keeps the output produced so far.

        Args:
            request_id: Id of the request, as in `Started.request_id`.
            tenant: Its tenant; "" = the request names none, None = whichever tenant has one of this
                id.
            deadline_s: Longest wait for the answer in seconds.

        Raises:
            RequestNotFound: No live request has this id.
            InvalidParameter: `tenant` is None, and several tenants have a request of this id.
        """
        request = requests_pb2.AbortRequest(request_id=request_id, tenant=tenant)
        self._unary(self._stub.Abort, request, deadline_s)

    def request_events(
        self, request_id: str, *, tenant: str | None = None, deadline_s: float | None = None
    ) -> list[RequestEvent]:
        """
        Return the events of a request that is live or ended lately, in order of time.

        Args:
            request_id: Id of the request, as in `Started.request_id`.
            tenant: Its tenant; "" = the request names none, None = the latest request of this id,
                of any tenant.
            deadline_s: Longest wait for the answer in seconds.

        Raises:
            EventsNotTracked: The server does not keep events.
            RequestNotFound: The server has no events of this request.
        """
        request = requests_pb2.GetRequestEventsRequest(request_id=request_id, tenant=tenant)
        return events_from_proto(self._unary(self._stub.GetRequestEvents, request, deadline_s))

    def suspend(self, kv_mode: KvMode | None = None, *, deadline_s: float | None = None) -> int:
        """
        Stop computing and make the executor release KV memory; requests wait.

        Args:
            kv_mode: Treatment of the KV cache; None = it stays in device memory.
            deadline_s: Longest wait for the answer in seconds; the suspension outlives it.

        Returns:
            Bytes of device memory in use after that; 0 if unknown.

        Raises:
            NoExecutor: No executor is attached.
            OutOfMemory: The host of an executor has no room for `KvMode.OFFLOAD`; nothing is
                suspended.
        """
        mode = 0 if kv_mode is None else int(kv_mode)
        request = admin.SuspendRequest(kv_mode=mode)  # type: ignore[arg-type]  # numbers are the same
        memory: int = self._unary(self._stub.Suspend, request, deadline_s).device_memory_bytes
        return memory

    def resume(self, *, deadline_s: float | None = None) -> None:
        """End a suspension; requests continue as if there had been none."""
        self._unary(self._stub.Resume, admin.ResumeRequest(), deadline_s)

    def flush_prefix_cache(self, *, deadline_s: float | None = None) -> int:
        """Clear the prefix cache of the server; return the number of blocks freed at once."""
        answer = self._unary(
            self._stub.FlushPrefixCache, admin.FlushPrefixCacheRequest(), deadline_s
        )
        freed: int = answer.freed_blocks
        return freed

    def executors(self, *, deadline_s: float | None = None) -> tuple[ExecutorSummary, ...]:
        """Return every executor that serves or is expected to; cheap and safe to poll."""
        request = executors_pb2.ListExecutorsRequest()
        return executors_from_proto(self._unary(self._stub.ListExecutors, request, deadline_s))

    def add_executor(self, address: str, *, deadline_s: float | None = None) -> None:
        """
        Let another executor serve from now on, or again after it was drained.

        Args:
            address: HOST:PORT or unix:PATH at which the scheduler reaches it.
            deadline_s: Longest wait for the answer in seconds; the executor may attach later.

        Raises:
            InvalidParameter: It is no address, or the executor is named already.
        """
        request = executors_pb2.AddExecutorRequest(address=address)
        self._unary(self._stub.AddExecutor, request, deadline_s)

    def drain_executor(
        self, address: str, grace_s: float | None = 30.0, *, deadline_s: float | None = None
    ) -> int:
        """
        Admit no request at an executor, let those that run there finish for a while, move the rest
        to the other executors, and make the scheduler release it. `add_executor` undoes this.

        Args:
            address: As in `ExecutorSummary.address`.
            grace_s: Seconds that requests may go on there; 0 = they move at once, None = the
                server's default.
            deadline_s: Longest wait for the answer in seconds; draining goes on after it.

        Returns:
            Number of choices that moved.

        Raises:
            InvalidParameter: No executor is named so, or the grace is negative or not finite.
        """
        request = executors_pb2.DrainExecutorRequest(address=address, grace_s=grace_s)
        moved: int = self._unary(self._stub.DrainExecutor, request, deadline_s).moved_requests
        return moved

    def remove_executor(self, address: str, *, deadline_s: float | None = None) -> None:
        """
        Move the requests of an executor to the others at once, release it and forget it.

        Args:
            address: As in `ExecutorSummary.address`.
            deadline_s: Longest wait for the answer in seconds.

        Raises:
            InvalidParameter: No executor is named so.
        """
        request = executors_pb2.RemoveExecutorRequest(address=address)
        self._unary(self._stub.RemoveExecutor, request, deadline_s)

    def profile(
        self,
        *,
        num_steps: int | None = None,
        duration_s: float | None = None,
        with_stack: bool = False,
        record_shapes: bool = False,
        on_progress: Callable[[ProfileProgress], None] | None = None,
        deadline_s: float | None = None,
    ) -> Profile:
        """
        Record the executor's next steps with PyTorch's profiler.

        Requests are still served meanwhile, slowed by the recording. The call is never retried.

        Args:
            num_steps: Steps to record, 1 to 100, or to 20 with stacks; None = the server's default,
                20.
            duration_s: Seconds after which the recording ends with the steps it has, over 0 to 60;
                None = the server's default, 10.
            with_stack: Record Python functions too; several times slower.
            record_shapes: Record the shapes of the operands of operations.
            on_progress: Called about twice a second with the progress of the recording.
            deadline_s: Seconds after which the call and the recording end, without a trace.

        Raises:
            InvalidParameter: A number is out of range.
            NoExecutor: No executor is attached.
            ProfileRunning: Another recording is running.
            ProfileUnsupported: The executor cannot record.
            ExecutorLost: The executor was lost meanwhile.
            CorruptMessage: The trace did not arrive whole.
        """
        request = request_of(
            num_steps, duration_s, with_stack=with_stack, record_shapes=record_shapes
        )
        call = self._call(self._stub.Profile, request, self._limit_s(deadline_s))
        try:
            recording = Recording(on_progress)
            for message in call:
                recording.add(message)
            return recording.profile()
        except grpc.RpcError as failure:
            raise from_rpc_error(failure) from None
        finally:
            call.cancel()


def is_serving(
    address: str, service: str, *, timeout_s: float, options: ChannelOptions | None = None
) -> bool:
    """
    Ask a server's standard health service once, and return True if it answers SERVING.

    Args:
        address: Any port of a Tandem service.
        service: "" for liveness, "tandem.ready" or "tandem.progress".
        timeout_s: Longest wait for the answer in seconds.
        options: Encryption, metadata and limits of the connection.

    Raises:
        TandemError: The server cannot be reached, or knows no such health name.
    """
    from grpc_health.v1 import health_pb2, health_pb2_grpc  # noqa: PLC0415  # heavy, rarely used

    options = ChannelOptions() if options is None else options
    with options.open(address) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service=service),
                timeout=timeout_s,
                metadata=options.call_metadata(),
            )
        except grpc.RpcError as failure:
            raise from_rpc_error(failure) from None
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
