"""A server that speaks the public and admin API and does what a test tells it, on a free port of its own thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from tandem.admin.v1 import admin_service_pb2 as admin
from tandem.admin.v1 import admin_service_pb2_grpc as admin_grpc
from tandem.admin.v1 import requests_pb2, stats_pb2
from tandem.common.v1 import finish_reason_pb2
from tandem.errors import EventsNotTracked, RequestNotFound, TandemError
from tandem.inference.v1 import inference_service_pb2 as inference
from tandem.inference.v1 import inference_service_pb2_grpc as inference_grpc
from tandem.inference.v1 import request_pb2, stream_pb2
from tandem.status import to_grpc_status

ANSWER = "Tandem rides uphill, two by two."
"""Answer of the fake server; its token i is the code of character i."""
CHOSEN_SEED = 42
PATIENCE_S = 60.0
"""Seconds to wait for what must come: a slow machine takes its time."""
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
SETTINGS = (("block_size", "16", "default"), ("listen", '"127.0.0.1:1"', "flag"))


@dataclass
class Act:
    """
    Script of one call: stream `answer` in pieces of these lengths, after the part that the request
    brings, unless the act does not resume, then fail, hang or end well.
    """

    answer: str = ANSWER
    piece_lens: tuple[int, ...] = (1, 3)
    num_tokens: int | None = None
    error: TandemError | None = None
    hang: bool = False
    ends_early: bool = False
    """Ends the stream without Finished and Done, and without an error."""
    revision: str = "revision-1"
    accept: bool = True
    truncated: int = 0
    resumes: bool = True
    blocked_by: str = ""
    """Text about the server in its progress messages."""


def _set_event() -> threading.Event:
    event = threading.Event()
    event.set()
    return event


@dataclass
class Seen:
    """Requests that the server got, and its settings, for assertions."""

    generate: list[inference.GenerateRequest] = field(default_factory=list)
    complete: list[inference.CompleteRequest] = field(default_factory=list)
    metadata: list[dict[str, str]] = field(default_factory=list)
    cancelled: threading.Event = field(default_factory=threading.Event)
    hanging: threading.Event = field(default_factory=threading.Event)
    drain_grace_s: list[float | None] = field(default_factory=list)
    listed: list[requests_pb2.ListRequestsRequest] = field(default_factory=list)
    num_flushes: int = 0
    num_looks: int = 0
    """Calls of GetStats: each finds the server 1.5 s older."""
    answers_looks: threading.Event = field(default_factory=_set_event)
    """Event that must be set for GetStats to answer."""
    model: str = "fake"
    live: list[requests_pb2.RequestSummary] | None = None
    """Requests that ListRequests finds; None = `REQUESTS`, and more that it leaves off."""
    token_ids_only: bool = False
    """True for a model without a tokenizer, and so without text and chats."""
    model_error: TandemError | None = None
    """Error that GetModel fails with."""
    executor_refusal: str = ""
    """Refusal of the executor, as GetStats tells it."""
    suspensions: list[int | None] = field(default_factory=list)
    """Modes of suspensions, None for a resumption, in order."""
    profiled: list[admin.ProfileRequest] = field(default_factory=list)
    profile: list[admin.ProfileResponse | TandemError] = field(default_factory=list)
    """Messages that Profile answers; an error ends it."""


def resolved(request: inference.GenerateRequest) -> request_pb2.ResolvedParams:
    """Fill in defaults as a server does."""
    sampling, stopping = request.sampling, request.stopping
    return request_pb2.ResolvedParams(
        temperature=sampling.temperature if sampling.HasField("temperature") else 1.0,
        top_k=sampling.top_k,
        top_p=sampling.top_p if sampling.HasField("top_p") else 0.9,
        seed=sampling.seed if sampling.HasField("seed") else CHOSEN_SEED,
        max_tokens=stopping.max_tokens if stopping.HasField("max_tokens") else 100,
        stop=stopping.stop,
        stop_token_ids=stopping.stop_token_ids,
        ignore_eos=stopping.ignore_eos,
        n=num_choices(request),
        priority=request.priority,
        repetition_penalty=(
            sampling.repetition_penalty if sampling.HasField("repetition_penalty") else 1.0
        ),
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        min_p=sampling.min_p,
        logit_bias=sampling.logit_bias,
        min_tokens=stopping.min_tokens,
        logprobs=request.logprobs if request.HasField("logprobs") else None,
    )


def num_choices(request: inference.GenerateRequest) -> int:
    """Return how many completions are asked for."""
    return request.n if request.HasField("n") else 1


def started(request: inference.GenerateRequest, act: Act) -> stream_pb2.Started:
    """Return the first message of a stream."""
    return stream_pb2.Started(
        request_id=request.request_id or "chosen-id",
        resolved_params=resolved(request),
        prompt_tokens=3,
        model_revision=act.revision,
        truncated_prompt_tokens=act.truncated,
        resumed_tokens=sum(len(one.token_ids) for one in request.resume.choices)
        if act.resumes
        else 0,
    )


def done(num_tokens: int) -> stream_pb2.Done:
    """Return the last message of a stream."""
    return stream_pb2.Done(
        usage=stream_pb2.Usage(prompt_tokens=3, output_tokens=num_tokens),
        timings=stream_pb2.Timings(queue_s=0.25, time_to_first_token_s=0.5, total_s=1.5),
    )


def answer_of(act: Act, choice: int) -> str:
    """
    Return the text of one choice: the act's answer, after choice 0 in capitals with its number.
    """
    return act.answer if choice == 0 else f"{act.answer.upper()}{choice}"


def is_finished(request: inference.GenerateRequest, choice: int) -> bool:
    """Return whether the client has this choice's end."""
    return any(one.choice == choice and one.finished for one in request.resume.choices)


def logprobs_of(
    request: inference.GenerateRequest, token_ids: list[int]
) -> list[stream_pb2.TokenLogprobs]:
    """
    Return the log probabilities of these tokens, if the request asks; they are made up of ids.
    """
    if not request.HasField("logprobs"):
        return []
    places = range(request.logprobs)
    return [
        stream_pb2.TokenLogprobs(
            logprob=-token_id / 64,
            top_token_ids=[token_id + place for place in places],
            top_logprobs=[0.0 - place for place in places],
            text=chr(token_id),
            top_texts=[chr(token_id + place) for place in places],
        )
        for token_id in token_ids
    ]


def pieces(act: Act, request: inference.GenerateRequest) -> Iterator[stream_pb2.Delta]:
    """Yield the act's output in deltas, those of several choices interleaved."""
    answers = [answer_of(act, choice) for choice in range(num_choices(request))]
    offsets, turn = [0] * len(answers), 0
    longest = max(map(len, answers)) if act.num_tokens is None else act.num_tokens
    ends = [min(len(answer), longest) for answer in answers]
    for one in request.resume.choices if act.resumes else ():
        assert [ord(character) for character in answers[one.choice]][: len(one.token_ids)] == list(
            one.token_ids
        )
        offsets[one.choice] = len(one.token_ids)
        ends[one.choice] = (
            offsets[one.choice] if one.finished else max(ends[one.choice], len(one.token_ids))
        )
    while offsets != ends:
        length = act.piece_lens[turn % len(act.piece_lens)]
        for choice, answer in enumerate(answers):
            offset = offsets[choice]
            text = answer[offset : min(ends[choice], offset + length)]
            if not text:
                continue
            ids = [ord(character) for character in text]
            yield stream_pb2.Delta(
                choice=choice,
                first_token_offset=offset,
                token_ids=ids,
                text=text,
                logprobs=logprobs_of(request, ids),
            )
            offsets[choice] += len(text)
        turn += 1


class FakeInference(inference_grpc.InferenceServiceServicer):
    """Plays one act per call; the last one again and again."""

    def __init__(self, seen: Seen) -> None:
        self.acts: list[Act] = [Act()]
        self._seen = seen

    def _next_act(self, context: grpc.aio.ServicerContext) -> Act:
        self._seen.metadata.append(
            {key: str(value) for key, value in context.invocation_metadata()}
        )
        return self.acts.pop(0) if len(self.acts) > 1 else self.acts[0]

    async def Generate(self, request, context):  # noqa: N802  # the rpc's name
        self._seen.generate.append(request)
        act = self._next_act(context)
        if act.accept:
            yield inference.GenerateResponse(started=started(request, act))
            progress = stream_pb2.Progress(
                queued=stream_pb2.Queued(position=0), blocked_by=act.blocked_by
            )
            yield inference.GenerateResponse(progress=progress)
            for delta in pieces(act, request):
                yield inference.GenerateResponse(delta=delta)
        if act.hang:
            if act.accept and act.blocked_by:
                yield inference.GenerateResponse(progress=progress)
            await self._hang()
        if act.error is not None:
            await context.abort_with_status(to_grpc_status(act.error))
        if act.ends_early:
            return
        reason = finish_reason_pb2.FINISH_REASON_STOP_STRING
        for choice in range(num_choices(request)):
            if is_finished(request, choice):
                continue
            finished = stream_pb2.Finished(choice=choice, reason=reason, stop_string="!")
            yield inference.GenerateResponse(finished=finished)
        yield inference.GenerateResponse(done=done(len(act.answer)))

    async def Complete(self, request, context):  # noqa: N802  # the rpc's name
        self._seen.complete.append(request)
        act = self._next_act(context)
        if act.hang:
            await self._hang()
        if act.error is not None:
            await context.abort_with_status(to_grpc_status(act.error))
        completions = [
            inference.Completion(
                choice=choice,
                text=answer_of(act, choice),
                token_ids=[ord(character) for character in answer_of(act, choice)],
                logprobs=logprobs_of(
                    request.request, [ord(character) for character in answer_of(act, choice)]
                ),
                reason=finish_reason_pb2.FINISH_REASON_EOS,
                token_id=2,
            )
            for choice in range(num_choices(request.request))
        ]
        return inference.CompleteResponse(
            started=started(request.request, act),
            completions=completions,
            done=done(len(act.answer)),
        )

    async def Abort(self, request, context):  # noqa: N802  # the rpc's name
        if request.request_id != "live":
            error = RequestNotFound(f"no live request has the id {request.request_id!r}")
            await context.abort_with_status(to_grpc_status(error))
        return inference.AbortResponse()

    async def GetModel(self, request, context):  # noqa: N802  # the rpc's name
        if self._seen.model_error is not None:
            await context.abort_with_status(to_grpc_status(self._seen.model_error))
        return inference.GetModelResponse(
            model="fake",
            model_revision="revision-1",
            architecture="FakeForCausalLM",
            vocab_size=128,
            max_model_len=512,
            eos_token_ids=[2],
            dtype="float32",
            has_chat_template=not self._seen.token_ids_only,
            token_ids_only=self._seen.token_ids_only,
            default_params=request_pb2.ResolvedParams(temperature=1.0, top_p=0.9, max_tokens=100),
        )

    async def _hang(self) -> None:
        self._seen.hanging.set()
        try:
            await asyncio.Event().wait()
        finally:
            self._seen.cancelled.set()


class FakeAdmin(admin_grpc.AdminServiceServicer):
    """Fixed answers."""

    def __init__(self, seen: Seen) -> None:
        self._seen = seen

    async def GetStats(self, request, context):  # noqa: N802  # the rpc's name
        if not self._seen.answers_looks.is_set():
            await asyncio.to_thread(self._seen.answers_looks.wait, PATIENCE_S)
        self._seen.num_looks += 1
        looks = self._seen.num_looks
        return stats_pb2.GetStatsResponse(
            running_requests=2,
            used_blocks=5,
            cached_blocks=3,
            free_blocks=1,
            total_blocks=9,
            token_usage=5 / 9,
            uptime_s=1.5 * looks,
            prefix_cache_lookup_tokens=200 * looks,
            prefix_cache_hit_tokens=50 * looks,
            output_tokens=300 * looks,
            prefill_tokens=1_500 * looks,
            first_tokens=2 * looks,
            time_to_first_token_s=0.25 * looks,
            next_tokens=100 * looks,
            inter_token_s=1.25 * looks,
            model=self._seen.model,
            dtype="float32",
            max_model_len=512,
            block_size=16,
            retractions=4,
            refused_by_limit={"max_num_seqs": 6},
            schedule_policy="lpm",
            executor_refusal=self._seen.executor_refusal,
            steps=200 * looks,
            graph_steps=150 * looks,
            executor_queued_s=0.1 * looks,
            executor_forward_s=1.0 * looks,
            executor_sample_s=0.25 * looks,
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
        return requests_pb2.ListRequestsResponse(requests=live, total=len(live))

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

    async def FlushPrefixCache(self, request, context):  # noqa: N802  # the rpc's name
        self._seen.num_flushes += 1
        return admin.FlushPrefixCacheResponse(freed_blocks=12)


@dataclass
class FakeServer:
    """A running fake: its address, what it saw, and how to direct it."""

    address: str
    seen: Seen
    inference: FakeInference
    set_health: Callable[[str, bool], None]

    def play(self, *acts: Act) -> None:
        """Set what the next calls do."""
        self.inference.acts = list(acts)


@contextmanager
def fake_server(credentials: grpc.ServerCredentials | None = None) -> Iterator[FakeServer]:
    """Run a fake on a free port until the block ends, with TLS where it has credentials."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    seen = Seen()
    servicer = FakeInference(seen)

    async def start() -> tuple[grpc.aio.Server, int, health.aio.HealthServicer]:
        server = grpc.aio.server()
        checks = health.aio.HealthServicer()
        inference_grpc.add_InferenceServiceServicer_to_server(servicer, server)
        admin_grpc.add_AdminServiceServicer_to_server(FakeAdmin(seen), server)
        health_pb2_grpc.add_HealthServicer_to_server(checks, server)
        port = (
            server.add_insecure_port("127.0.0.1:0")
            if credentials is None
            else server.add_secure_port("127.0.0.1:0", credentials)
        )
        await server.start()
        return server, port, checks

    server, port, checks = asyncio.run_coroutine_threadsafe(start(), loop).result()

    def set_health(name: str, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse
        value = status.SERVING if serving else status.NOT_SERVING
        asyncio.run_coroutine_threadsafe(checks.set(name, value), loop).result()

    set_health("tandem.ready", True)
    try:
        yield FakeServer(f"127.0.0.1:{port}", seen, servicer, set_health)
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(None), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
