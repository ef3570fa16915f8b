"""A server that speaks the public and admin API and does what a test tells it, on a free port of its own thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from tandem.admin.v1 import admin_service_pb2_grpc as admin_grpc
from tandem.common.v1 import finish_reason_pb2
from tandem.errors import InvalidParameter, ModelNotFound, RequestNotFound, TandemError
from tandem.inference.v1 import batch_pb2, model_pb2, request_pb2, stream_pb2, tokens_pb2
from tandem.inference.v1 import inference_service_pb2 as inference
from tandem.inference.v1 import inference_service_pb2_grpc as inference_grpc
from tandem.status import to_grpc_status
from tests.clients.python.fake_admin import FakeAdmin, Seen

ANSWER = "Tandem rides uphill, two by two."
"""Answer of the fake server; its token i is the code of character i."""
CHOSEN_SEED = 42
MODEL, ADAPTER = "fake", "fake-adapter"
VOCAB_SIZE = 128
PATIENCE_S = 60.0
"""Seconds to wait for what must come: a slow machine takes its time."""


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
    held: threading.Event | None = None
    """Event that output waits for after its first delta."""
    prompt_parts: tuple[stream_pb2.PromptLogprobs, ...] = ()
    """Messages about the prompt, before output."""


def sampling_of(request: inference.GenerateRequest) -> request_pb2.SamplingParams:
    """Fill in defaults as a server does."""
    sampling = request_pb2.SamplingParams(
        temperature=1.0,
        top_k=0,
        top_p=0.9,
        seed=CHOSEN_SEED,
        repetition_penalty=1.0,
        frequency_penalty=0.0,
        presence_penalty=0.0,
        min_p=0.0,
    )
    sampling.MergeFrom(request.sampling)
    return sampling


def stopping_of(request: inference.GenerateRequest) -> request_pb2.StoppingParams:
    """Fill in defaults as a server does."""
    stopping = request_pb2.StoppingParams(
        max_tokens=100, ignore_eos=False, min_tokens=0, clamp_max_tokens=False
    )
    stopping.MergeFrom(request.stopping)
    return stopping


def num_choices(request: inference.GenerateRequest) -> int:
    """Return how many completions are asked for."""
    return request.n if request.HasField("n") else 1


def started(request: inference.GenerateRequest, act: Act) -> stream_pb2.Started:
    """Return the first message of a stream."""
    return stream_pb2.Started(
        request_id=request.request_id or "chosen-id",
        sampling=sampling_of(request),
        stopping=stopping_of(request),
        response=request.response,
        n=num_choices(request),
        priority=request.priority,
        model=MODEL,
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
    if not request.response.HasField("logprobs"):
        return []
    places = range(request.response.logprobs)
    tells_bytes = request.response.token_bytes
    return [
        stream_pb2.TokenLogprobs(
            logprob=-token_id / 64,
            top_token_ids=[token_id + place for place in places],
            top_logprobs=[0.0 - place for place in places],
            text=chr(token_id),
            top_texts=[chr(token_id + place) for place in places],
            token_bytes=chr(token_id).encode() if tells_bytes else b"",
            top_token_bytes=[chr(token_id + one).encode() for one in places] * tells_bytes,
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
                token_ids=() if request.response.omit_token_ids else ids,
                text="" if request.response.omit_text else text,
                logprobs=logprobs_of(request, ids),
            )
            offsets[choice] += len(text)
        turn += 1


class _Aborted(Exception):
    def __init__(self, status: bytes) -> None:
        self.status = status


@dataclass
class _ItemContext:
    """Context of one item of a batch."""

    of_stream: grpc.aio.ServicerContext

    def invocation_metadata(self):
        return self.of_stream.invocation_metadata()

    async def abort_with_status(self, status: grpc.Status) -> None:
        raise _Aborted(dict(status.trailing_metadata)["grpc-status-details-bin"])


async def held_pieces(
    act: Act, request: inference.GenerateRequest
) -> AsyncIterator[stream_pb2.Delta]:
    """Yield the act's output; after the first delta it waits for the act's event."""
    for delta in pieces(act, request):
        yield delta
        if act.held is not None:
            await asyncio.to_thread(act.held.wait)


class FakeInference(inference_grpc.InferenceServiceServicer):
    """Plays one act per call; the last one again and again."""

    def __init__(self, seen: Seen) -> None:
        self.acts: list[Act] = [Act()]
        self._seen = seen

    def _note_metadata(self, context: grpc.aio.ServicerContext) -> None:
        self._seen.metadata.append(
            {key: str(value) for key, value in context.invocation_metadata()}
        )

    def _next_act(self, context: grpc.aio.ServicerContext) -> Act:
        self._note_metadata(context)
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
            for part in act.prompt_parts:
                yield inference.GenerateResponse(prompt_logprobs=part)
            async for delta in held_pieces(act, request):
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

    async def GenerateBatch(self, requests, context):  # noqa: N802  # the rpc's name
        """Plays one act per item, each as Generate would."""
        if not self._seen.knows_batches:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
        self._seen.num_batches += 1
        events: asyncio.Queue[batch_pb2.BatchEvent | None] = asyncio.Queue()
        reading = asyncio.create_task(self._read_items(requests, context, events))
        try:
            while (event := await events.get()) is not None:
                yield batch_pb2.GenerateBatchResponse(events=[event])
        finally:
            reading.cancel()

    async def _read_items(self, requests, context, events) -> None:
        items: dict[int, asyncio.Task] = {}
        try:
            async for message in requests:
                for one in message.add:
                    items[one.item] = asyncio.create_task(self._play(one, context, events))
                for number in message.cancel:
                    items[number].cancel()
            await asyncio.gather(*items.values(), return_exceptions=True)
            events.put_nowait(None)
        finally:
            for task in items.values():
                task.cancel()

    async def _play(self, one, context, events) -> None:
        try:
            async for response in self.Generate(one.request, _ItemContext(context)):
                event = batch_pb2.BatchEvent.FromString(response.SerializeToString())
                event.item = one.item
                events.put_nowait(event)
            if not event.HasField("done"):
                events.put_nowait(None)  # the whole stream ends early
        except _Aborted as failure:
            events.put_nowait(batch_pb2.BatchEvent(item=one.item, error=failure.status))

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
        self._seen.aborted.append(request)
        if request.request_id != "live":
            error = RequestNotFound(f"no live request has the id {request.request_id!r}")
            await context.abort_with_status(to_grpc_status(error))
        return inference.AbortResponse()

    async def GetModel(self, request, context):  # noqa: N802  # the rpc's name
        if self._seen.model_error is not None:
            await context.abort_with_status(to_grpc_status(self._seen.model_error))
        await self._refuse_other_model(request, context)
        return model_pb2.GetModelResponse(model=self._model(MODEL))

    async def ListModels(self, request, context):  # noqa: N802  # the rpc's name
        """Tell two models, on a page each."""
        if request.page_token == "second":
            return model_pb2.ListModelsResponse(models=[self._model(ADAPTER)])
        return model_pb2.ListModelsResponse(models=[self._model(MODEL)], next_page_token="second")

    async def Tokenize(self, request, context):  # noqa: N802  # the rpc's name
        self._seen.tokenized.append(request)
        self._note_metadata(context)
        await self._refuse_other_model(request, context)
        text = request.text or "".join(one.content for one in request.chat.messages)
        return tokens_pb2.TokenizeResponse(
            token_ids=map(ord, text),
            token_texts=text if request.with_texts else (),
            max_model_len=512,
        )

    async def Detokenize(self, request, context):  # noqa: N802  # the rpc's name
        self._seen.detokenized.append(request)
        self._note_metadata(context)
        await self._refuse_other_model(request, context)
        if any(not 0 <= one < VOCAB_SIZE for one in request.token_ids):
            error = InvalidParameter("an id is out of the vocabulary", field="token_ids")
            await context.abort_with_status(to_grpc_status(error))
        return tokens_pb2.DetokenizeResponse(text="".join(map(chr, request.token_ids)))

    async def _refuse_other_model(self, request, context):
        if request.model not in ("", MODEL):
            error = ModelNotFound(f"no model {request.model!r} is served", field="model")
            await context.abort_with_status(to_grpc_status(error))

    def _model(self, name: str) -> model_pb2.Model:
        has_text = not self._seen.token_ids_only
        nothing_asked = inference.GenerateRequest()
        return model_pb2.Model(
            name=name,
            revision="revision-1",
            architecture="FakeForCausalLM",
            vocab_size=VOCAB_SIZE,
            max_model_len=512,
            eos_token_ids=[2],
            dtype="float32",
            default_sampling=sampling_of(nothing_asked),
            default_stopping=stopping_of(nothing_asked),
            capabilities=model_pb2.ModelCapabilities(text=has_text, chat=has_text, logprobs=True),
            max_request_bytes=self._seen.max_request_bytes,
            max_complete_bytes=1 << 21,
        )

    async def _hang(self) -> None:
        self._seen.hanging.set()
        try:
            await asyncio.Event().wait()
        finally:
            self._seen.cancelled.set()


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
