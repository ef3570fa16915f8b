"""A core that a test plays by hand, and a frontend of this process connected to it."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import grpc
import numpy as np
import zmq
import zmq.asyncio

from scheduler_svc.frontend.core_client import CoreClient
from scheduler_svc.frontend.server import FrontendServers, start_servers
from scheduler_svc.frontend.tracing.switch import open_tracing
from scheduler_svc.ipc.messages import (
    Accepted,
    Availability,
    CoreMessage,
    EndStream,
    Hello,
    Model,
    Query,
    Refused,
    Reply,
    StepSpan,
    StreamEnd,
    StreamLogprobs,
    StreamProgress,
    Submit,
    Update,
    decode_from_frontend,
    encode,
)
from scheduler_svc.ipc.snapshot import Reported, encode_json
from scheduler_svc.ipc.sockets import connect_frontend
from scheduler_svc.process.frontend_settings import FrontendSettings
from tandem.admin.v1.stats_pb2 import GetStatsResponse
from tandem.errors import TandemError
from tandem.sampling_params import SamplingParams

DEADLINE_S = 60.0
NEVER_S = 3600.0

Found = TypeVar("Found")


class FakeCore:
    """
    Core that sorts messages of frontends by kind; it answers queries, and otherwise sends only what
    tests tell it to.
    """

    def __init__(self, path: Path) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.bind(f"ipc://{path}")
        self._identity = b""
        self.hellos: asyncio.Queue[Hello] = asyncio.Queue()
        self.submits: asyncio.Queue[Submit] = asyncio.Queue()
        self.ends: asyncio.Queue[EndStream] = asyncio.Queue()
        self.answers: dict[str, Callable[[bytes], bytes | TandemError | None]] = {
            "stats": lambda _: encode_json(GetStatsResponse()),
            "report": lambda _: encode_json(Reported()),
        }
        self._task = asyncio.create_task(self._receive())

    async def _receive(self) -> None:
        queues = {Hello: self.hellos, Submit: self.submits, EndStream: self.ends}
        while True:
            self._identity, frame = await self._socket.recv_multipart()
            message = decode_from_frontend(frame)
            if isinstance(message, Query):
                await self._answer(message)
            else:
                queues[type(message)].put_nowait(message)

    async def _answer(self, query: Query) -> None:
        answer = self.answers[query.kind](query.argument)
        if isinstance(answer, TandemError):
            error = refused(0, answer)
            await self.send(Reply(query_id=query.query_id, result=b"", error=error))
        elif answer is not None:
            await self.send(Reply(query_id=query.query_id, result=answer, error=None))

    async def send(self, message: CoreMessage) -> None:
        await self._socket.send_multipart((self._identity, encode(message)))

    async def send_raw(self, frame: bytes) -> None:
        await self._socket.send_multipart((self._identity, frame))

    async def accept(self) -> int:
        """Wait for a submission and accept it; return its stream_id."""
        submit = await within(self.submits.get())
        await self.send(Accepted(submit.stream_id))
        return submit.stream_id

    async def accept_of(self, submit: Submit) -> None:
        """Accept a submission."""
        await self.send(Accepted(submit.stream_id))

    async def tokens(self, stream_id: int, offset: int, ids: list[int], **rest: object) -> None:
        await self.send(update(stream_id, offset, ids, **rest))

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._context.destroy(linger=0)


async def within(awaitable, deadline_s: float = DEADLINE_S):
    """Return the result, or fail the test if it does not come in time."""
    return await asyncio.wait_for(awaitable, deadline_s)


async def until(condition: Callable[[], Found], deadline_s: float = DEADLINE_S) -> Found:
    """Poll until the condition is true, or fail the test; return what was found."""
    give_up_s = time.monotonic() + deadline_s
    while not (found := condition()):
        assert time.monotonic() < give_up_s, "condition did not come true in time"
        await asyncio.sleep(0.005)
    return found


def model(directory: Path, **changes: object) -> Model:
    values: dict[str, object] = {
        "name": "small",
        "revision": "rev-1",
        "architecture": "LlamaForCausalLM",
        "dtype": "float32",
        "vocab_size": 512,
        "max_model_len": 256,
        "eos_token_ids": (1,),
        "default_sampling": SamplingParams(temperature=0.75, top_k=20, top_p=0.5),
        "tokenizer_dir": str(directory),
    }
    return Model(**(values | changes))


def refused(stream_id: int, error: TandemError) -> Refused:
    return Refused(
        stream_id=stream_id,
        reason=error.reason,
        message=error.message,
        field=error.field,
        retry_after_s=error.retry_after_s,
        metadata=error.metadata,
    )


def ended(stream_id: int, reason: int, num_output_tokens: int, **changes: object) -> StreamEnd:
    values: dict[str, object] = {
        "stream_id": stream_id,
        "reason": reason,
        "matched_token": None,
        "num_prompt_tokens": 3,
        "num_output_tokens": num_output_tokens,
        "num_cached_tokens": 2,
        "queue_s": 0.25,
        "first_token_s": 0.5,
        "total_s": 1.5,
        "num_preemptions": 1,
    }
    return StreamEnd(**(values | changes))


def update(
    stream_id: int,
    offset: int,
    ids: list[int],
    *,
    end: StreamEnd | None = None,
    failure: TandemError | None = None,
    progress: StreamProgress | None = None,
    logprobs: tuple[StreamLogprobs, ...] = (),
) -> Update:
    return Update(
        token_stream=np.full(len(ids), stream_id, "<u4").tobytes(),
        token_offset=np.arange(offset, offset + len(ids), dtype="<i4").tobytes(),
        token=np.array(ids, "<i4").tobytes(),
        ended=() if end is None else (end,),
        failed=() if failure is None else (refused(stream_id, failure),),
        progress=() if progress is None else (progress,),
        logprobs=logprobs,
    )


def step_span(links: tuple[tuple[str, str], ...], **changes: object) -> StepSpan:
    """A step that took a quarter of a second until now, with links to spans of requests."""
    now_s = time.monotonic()
    values = {
        "step_id": 41,
        "session_epoch": 3,
        "boot_id": "boot-1",
        "executor": "10.0.0.7:50061",
        "sent_s": now_s - 0.25,
        "applied_s": now_s,
        "num_prefills": 1,
        "num_decodes": 2,
        "prefill_tokens": 7,
        "graph_tokens": 0,
        "queued_ns": 1_000_000,
        "forward_ns": 1_500_000,
        "sample_ns": 500_000,
        "compute_ns": 2_000_000,
        "num_left_out": 5,
        "num_skipped": 0,
    }
    return StepSpan(links=links, **{**values, **changes})


def logprobs_of(
    stream_id: int,
    offset: int,
    told: list[tuple[float, list[tuple[int, float]]]],
    ranks: Sequence[int] = (),
) -> StreamLogprobs:
    """
    Return log probabilities of consecutive tokens, each with (id, value) of the likeliest; those of
    prompt tokens have ranks.
    """
    top = [entry for _, entries in told for entry in entries]
    return StreamLogprobs(
        stream=np.full(len(told), stream_id, "<u4").tobytes(),
        offset=np.arange(offset, offset + len(told), dtype="<i4").tobytes(),
        chosen=np.array([chosen for chosen, _ in told], "<f4").tobytes(),
        top_start=np.cumsum([0, *(len(entries) for _, entries in told)]).astype("<i4").tobytes(),
        top_token=np.array([token for token, _ in top], "<i4").tobytes(),
        top=np.array([value for _, value in top], "<f4").tobytes(),
        rank=np.array(ranks, "<i4").tobytes(),
    )


class Clock:
    """Clock of a frontend and all that belongs to it; `lead_s` lets time pass."""

    def __init__(self) -> None:
        self.lead_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.lead_s


class Frontend:
    """A frontend in this process, and a channel to it."""

    def __init__(
        self, core: FakeCore, client: CoreClient, servers: FrontendServers, clock: Clock
    ) -> None:
        self.clock = clock
        self.core = core
        self.client = client
        self.servers = servers
        self.channel = grpc.aio.insecure_channel(servers.address)


@asynccontextmanager
async def running_frontend(
    directory: Path, *, tracing: str | None = None, **changes: object
) -> AsyncIterator[Frontend]:
    """
    Start both ends; the core has sent nothing yet. Limits of time are endless unless set, so that a
    late thread cannot reach one. Spans go to the collector at `tracing`, if one is given; all have
    left when the block ends.
    """
    path = directory / "core.sock"
    settings = FrontendSettings(
        **(
            {
                "index": 0,
                "ipc_path": str(path),
                "listen": "127.0.0.1:0",
                "admin_listen": "127.0.0.1:0",
                "metrics_listen": "127.0.0.1:0",
                "progress_interval_s": NEVER_S,
                "stall_deadline_s": NEVER_S,
                "core_timeout_s": NEVER_S,
                "query_timeout_s": NEVER_S,
            }
            | changes
        )
    )
    core, clock = FakeCore(path), Clock()
    context = zmq.asyncio.Context()
    client = CoreClient(settings, connect_frontend(context, path, 0), clock)
    tracer = None if tracing is None else open_tracing(tracing, clock, "test", {})
    servers = await start_servers(settings, client, clock, tracer)
    pipe = asyncio.create_task(client.run(Hello(0, 1, servers.address)))
    frontend = Frontend(core, client, servers, clock)
    try:
        await within(core.hellos.get())
        yield frontend
    finally:
        await frontend.channel.close()
        await servers.stop(0)
        pipe.cancel()
        await asyncio.gather(pipe, return_exceptions=True)
        if tracer is not None:
            await tracer.close(DEADLINE_S)
        client.close()
        context.destroy(linger=0)
        await core.close()


async def announce(core: FakeCore, served: Model) -> None:
    """Tell the frontend that `served` can be used."""
    await core.send(served)
    await core.send(Availability(executor_attached=True, ready=True, draining=False))


async def serve(frontend: Frontend, served: Model) -> None:
    """Tell the frontend that `served` can be used, and return once it knows."""
    await announce(frontend.core, served)
    await until(lambda: frontend.client.availability.ready)
