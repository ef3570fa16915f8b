"""The admin half of the fake server, and what both halves are told and saw."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field

from tandem.admin.v1 import activity_pb2, executors_pb2, requests_pb2, stats_pb2
from tandem.admin.v1 import admin_service_pb2 as admin
from tandem.admin.v1 import admin_service_pb2_grpc as admin_grpc
from tandem.error_codes import Unauthenticated, Unimplemented
from tandem.errors import EventsNotTracked, InvalidParameter, RequestNotFound, TandemError
from tandem.inference.v1 import inference_service_pb2 as inference
from tandem.inference.v1 import tokens_pb2
from tandem.status import to_grpc_status

LONGEST_ANSWER_S = 60.0
"""Seconds after which GetStats answers all the same."""
REQUESTS = (
    requests_pb2.RequestSummary(
        request_id="first",
        state=requests_pb2.REQUEST_STATE_DECODE,
        tenant="alice",
        priority=-1,
        prompt_tokens=30,
        output_tokens=4,
        cached_tokens=16,
        age_s=1.25,
        preemptions=2,
        time_to_first_token_s=0.5,
    ),
    requests_pb2.RequestSummary(
        request_id="second", choice=1, state=requests_pb2.REQUEST_STATE_WAITING
    ),
)
EVENTS = (
    requests_pb2.RequestEvent(kind=requests_pb2.REQUEST_EVENT_KIND_ADD),
    requests_pb2.RequestEvent(
        kind=requests_pb2.REQUEST_EVENT_KIND_GENERATED_TOKEN,
        at_s=0.25,
        token_id=70,
        blocks=requests_pb2.BlockStats(used_blocks=1, cached_blocks=2, free_blocks=3),
        dropped_events=5,
    ),
    requests_pb2.RequestEvent(
        kind=requests_pb2.REQUEST_EVENT_KIND_FINISH,
        at_s=0.5,
        detail="EOS",
        time_to_first_token_s=0.25,
    ),
)
EXECUTORS = (
    executors_pb2.ExecutorSummary(
        address="box:1",
        reached_at="box:3",
        state=executors_pb2.EXECUTOR_STATE_SERVING,
        boot_id="boot",
        model="fake",
        device="cpu",
        dtype="float32",
        running_requests=2,
        max_requests=32,
        used_blocks=50,
        total_blocks=200,
        cached_blocks=7,
        steps=1_234,
        usual_step_s=0.0125,
        sessions=3,
        losses=2,
        device_memory_bytes=1024,
    ),
    executors_pb2.ExecutorSummary(
        address="box:2",
        state=executors_pb2.EXECUTOR_STATE_REFUSED,
        why="it serves another model",
        away_s=12.5,
    ),
)
FIRST_TOKENS = activity_pb2.Histogram(
    name="time_to_first_token", upper_bounds_s=(0.1, 0.2), counts=(1, 1, 0), sum_s=0.25
)
"""Gain of each snapshot."""
STEPS = (
    activity_pb2.StepSample(
        number=7, executor="box:1", at_s=1.0, total_s=0.02, compute_s=0.005, tokens=64, requests=3
    ),
    activity_pb2.StepSample(
        number=8, executor="box:1", at_s=1.1, total_s=0.02, compute_s=0.0025, tokens=2, requests=2
    ),
)
FAULTS = (
    activity_pb2.Fault(
        kind=activity_pb2.FAULT_KIND_REQUESTS_FAILED, at_s=0.1, reason="EXECUTOR_LOST", count=3
    ),
    activity_pb2.Fault(
        kind=activity_pb2.FAULT_KIND_EXECUTOR_LOST,
        at_s=0.5,
        where="box:1",
        reason="silent",
        message="no message came for 10 s",
        count=1,
    ),
)
SETTINGS = (("block_size", "16", "default"), ("listen", '"127.0.0.1:1"', "flag"))


def _set_event() -> threading.Event:
    event = threading.Event()
    event.set()
    return event


@dataclass
class Seen:
    """Requests that the server got, and its settings, for assertions."""

    generate: list[inference.GenerateRequest] = field(default_factory=list)
    num_batches: int = 0
    """Calls of GenerateBatch."""
    knows_batches: bool = True
    """False for a server without GenerateBatch."""
    complete: list[inference.CompleteRequest] = field(default_factory=list)
    metadata: list[dict[str, str]] = field(default_factory=list)
    cancelled: threading.Event = field(default_factory=threading.Event)
    hanging: threading.Event = field(default_factory=threading.Event)
    drain_grace_s: list[float | None] = field(default_factory=list)
    listed: list[requests_pb2.ListRequestsRequest] = field(default_factory=list)
    aborted: list[inference.AbortRequest] = field(default_factory=list)
    aborted_by_operator: list[requests_pb2.AbortRequest] = field(default_factory=list)
    tokenized: list[tokens_pb2.TokenizeRequest] = field(default_factory=list)
    detokenized: list[tokens_pb2.DetokenizeRequest] = field(default_factory=list)
    num_flushes: int = 0
    num_polls: int = 0
    """Calls of GetStats: each finds the server 1.5 s older."""
    answers_polls: threading.Event = field(default_factory=_set_event)
    """Event that must be set for GetStats to answer."""
    model: str = "fake"
    live: list[requests_pb2.RequestSummary] | None = None
    """Requests that ListRequests finds; None = `REQUESTS`, and more that it leaves off."""
    token_ids_only: bool = False
    """True for a model without a tokenizer, and so without text and chats."""
    max_request_bytes: int = 1 << 24
    """Largest message that it says it takes."""
    model_error: TandemError | None = None
    """Error that GetModel fails with."""
    operator_error: TandemError | None = None
    """Error that GetStats fails with."""
    operator_token: str | None = None
    """Bearer token that GetStats asks for; None = none."""
    operator_tokens: list[str | None] = field(default_factory=list)
    """Values of `authorization` that GetStats got."""
    executor_refusal: str = ""
    """Refusal of the executor, as GetStats tells it."""
    executors: list[executors_pb2.ExecutorSummary] | None = field(default_factory=list)
    """Executors that ListExecutors finds; None = the server has no such call."""
    num_steps_asked: list[int] = field(default_factory=list)
    """Steps that GetActivity was asked for; 0 = unset."""
    tells_activity: bool = True
    """False for a server without GetActivity."""
    executor_changes: list[tuple[str, str, float | None]] = field(default_factory=list)
    """Changes of executors: what, address, and grace if there is one."""
    suspensions: list[int | None] = field(default_factory=list)
    """Modes of suspensions, None for a resumption, in order."""
    profiled: list[admin.ProfileRequest] = field(default_factory=list)
    profile: list[admin.ProfileResponse | TandemError] = field(default_factory=list)
    """Messages that Profile answers; an error ends it."""


class FakeAdmin(admin_grpc.AdminServiceServicer):
    """Fixed answers."""

    def __init__(self, seen: Seen) -> None:
        self._seen = seen

    async def GetStats(self, request, context):  # noqa: N802  # the rpc's name
        sent = dict(context.invocation_metadata() or ()).get("authorization")
        self._seen.operator_tokens.append(sent)
        if self._seen.operator_token is not None and sent != f"Bearer {self._seen.operator_token}":
            error = Unauthenticated("no valid token was sent")
            await context.abort_with_status(to_grpc_status(error))
        if self._seen.operator_error is not None:
            await context.abort_with_status(to_grpc_status(self._seen.operator_error))
        if not self._seen.answers_polls.is_set():
            await asyncio.to_thread(self._seen.answers_polls.wait, LONGEST_ANSWER_S)
        self._seen.num_polls += 1
        polls = self._seen.num_polls
        return stats_pb2.GetStatsResponse(
            running_requests=2,
            used_blocks=5,
            cached_blocks=3,
            free_blocks=1,
            total_blocks=9,
            token_usage=5 / 9,
            uptime_s=1.5 * polls,
            prefix_cache_lookup_tokens=200 * polls,
            prefix_cache_hit_tokens=50 * polls,
            output_tokens=300 * polls,
            prefill_tokens=1_500 * polls,
            first_tokens=2 * polls,
            time_to_first_token_s=0.25 * polls,
            next_tokens=100 * polls,
            inter_token_s=1.25 * polls,
            model=self._seen.model,
            dtype="float32",
            max_model_len=512,
            block_size=16,
            retractions=4,
            refused_by_limit={"max_num_seqs": 6},
            schedule_policy="lpm",
            executor_refusal=self._seen.executor_refusal,
            steps=200 * polls,
            graph_steps=150 * polls,
            executor_queued_s=0.1 * polls,
            executor_forward_s=1.0 * polls,
            executor_sample_s=0.25 * polls,
        )

    async def GetActivity(self, request, context):  # noqa: N802  # the rpc's name
        if not self._seen.tells_activity:
            await context.abort_with_status(to_grpc_status(Unimplemented("no such method")))
        self._seen.num_steps_asked.append(request.max_steps)
        polls = self._seen.num_polls
        gained = activity_pb2.Histogram()
        gained.CopyFrom(FIRST_TOKENS)
        gained.counts[:] = [count * polls for count in FIRST_TOKENS.counts]
        return activity_pb2.GetActivityResponse(
            uptime_s=1.5 * polls, histograms=[gained], steps=STEPS, faults=FAULTS
        )

    async def Drain(self, request, context):  # noqa: N802  # the rpc's name
        grace = request.grace_s if request.HasField("grace_s") else None
        self._seen.drain_grace_s.append(grace)
        return admin.DrainResponse(remaining_requests=1)

    async def GetConfig(self, request, context):  # noqa: N802  # the rpc's name
        entries = [admin.ConfigEntry(name=n, json_value=v, source=s) for n, v, s in SETTINGS]
        return admin.GetConfigResponse(entries=entries)

    async def ListRequests(self, request, context):  # noqa: N802  # the rpc's name
        self._seen.listed.append(request)
        live = self._seen.live
        if live is None:
            return requests_pb2.ListRequestsResponse(requests=REQUESTS, total=7)
        first = int(request.page_token or 0)
        last = first + (request.page_size or 100)
        token = str(last) if last < len(live) else ""
        return requests_pb2.ListRequestsResponse(
            requests=live[first:last], total=len(live), next_page_token=token
        )

    async def Abort(self, request, context):  # noqa: N802  # the rpc's name
        self._seen.aborted_by_operator.append(request)
        if request.request_id != "live":
            error = RequestNotFound(f"no live request has the id {request.request_id!r}")
            await context.abort_with_status(to_grpc_status(error))
        return requests_pb2.AbortResponse()

    async def GetRequestEvents(self, request, context):  # noqa: N802  # the rpc's name
        if request.request_id == "untracked":
            error = EventsNotTracked("events of requests are not kept")
            await context.abort_with_status(to_grpc_status(error))
        return requests_pb2.GetRequestEventsResponse(events=EVENTS)

    async def Suspend(self, request, context):  # noqa: N802  # the rpc's name
        self._seen.suspensions.append(request.kv_mode)
        return admin.SuspendResponse(device_memory_bytes=3 * 2**20)

    async def Resume(self, request, context):  # noqa: N802  # the rpc's name
        self._seen.suspensions.append(None)
        return admin.ResumeResponse()

    async def Profile(self, request, context):  # noqa: N802  # the rpc's name
        self._seen.profiled.append(request)
        for message in self._seen.profile:
            if isinstance(message, TandemError):
                await context.abort_with_status(to_grpc_status(message))
            yield message

    async def ListExecutors(self, request, context):  # noqa: N802  # the rpc's name
        if self._seen.executors is None:
            await context.abort_with_status(to_grpc_status(Unimplemented("no such method")))
        return executors_pb2.ListExecutorsResponse(executors=self._seen.executors)

    async def AddExecutor(self, request, context):  # noqa: N802  # the rpc's name
        self._seen.executor_changes.append(("add", request.address, None))
        if request.address in {one.address for one in self._seen.executors or ()}:
            error = InvalidParameter(f"{request.address} is named already", field="address")
            await context.abort_with_status(to_grpc_status(error))
        return executors_pb2.AddExecutorResponse()

    async def DrainExecutor(self, request, context):  # noqa: N802  # the rpc's name
        grace = request.grace_s if request.HasField("grace_s") else None
        self._seen.executor_changes.append(("drain", request.address, grace))
        return executors_pb2.DrainExecutorResponse(moved_requests=3)

    async def RemoveExecutor(self, request, context):  # noqa: N802  # the rpc's name
        self._seen.executor_changes.append(("remove", request.address, None))
        return executors_pb2.RemoveExecutorResponse()

    async def FlushPrefixCache(self, request, context):  # noqa: N802  # the rpc's name
        self._seen.num_flushes += 1
        return admin.FlushPrefixCacheResponse(freed_blocks=12)
