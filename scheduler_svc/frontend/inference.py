"""Public inference service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import grpc
import structlog

from scheduler_svc.core.request.request import FinishReason
from scheduler_svc.frontend.core_client import CoreClient
from scheduler_svc.frontend.request.requests import default_params, prepare_request
from scheduler_svc.frontend.request.validation import MAX_REQUEST_ID_CHARS
from scheduler_svc.frontend.stream.delta import OutputDelta, encode_response, logprobs_of
from scheduler_svc.frontend.stream.inbox import Received, StreamInbox
from scheduler_svc.frontend.stream.stream import Message, stream_messages
from scheduler_svc.frontend.text.tokenizer_threads import TokenizerThreads
from scheduler_svc.ipc.snapshot import AbortArgument, encode_json
from tandem.errors import InvalidParameter, TandemError
from tandem.inference.v1 import inference_service_pb2 as pb
from tandem.inference.v1 import inference_service_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]


class InferenceServicer(inference_service_pb2_grpc.InferenceServiceServicer):
    """Inference service of one process; the interceptor turns TandemErrors into statuses."""

    def __init__(
        self, core: CoreClient, threads: TokenizerThreads, clock: Callable[[], float]
    ) -> None:
        self._core = core
        self._threads = threads
        self._clock = clock

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:  # noqa: N802  # named by the proto
        """Stream the completions of one prompt."""
        num_sent: int | None = None
        try:
            async with self._serve(request) as (inbox, messages):
                async for message in messages:
                    await self._write(inbox, encode_response(message), context)
                    num_sent = num_sent or 0
                    if isinstance(message, OutputDelta):
                        num_sent += len(message.chunk.token_ids)
        except TandemError as error:
            if num_sent is None:
                raise
            raise _with_tokens_emitted(error, num_sent) from None

    async def Complete(self, request: pb.CompleteRequest, context: Context) -> pb.CompleteResponse:  # noqa: N802  # named by the proto
        """Return the whole completions of one prompt."""
        del context
        if request.request.HasField("resume"):
            raise InvalidParameter(
                "Complete gives whole outputs: resume with Generate.", field="request.resume"
            )
        try:
            async with self._serve(request.request) as (_, messages):
                return await _collect(messages)
        except TandemError as error:
            if error.field is not None:
                error.field = f"request.{error.field}"
            raise

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:  # noqa: N802  # named by the proto
        """End a live request of any client."""
        del context
        if not request.request_id:
            raise InvalidParameter("request_id must not be empty.", field="request_id")
        argument = encode_json(AbortArgument(request_id=request.request_id))
        await self._core.query("abort", argument)
        return pb.AbortResponse()

    async def GetModel(self, request: pb.GetModelRequest, context: Context) -> pb.GetModelResponse:  # noqa: N802  # named by the proto
        """Describe the served model."""
        del request, context
        loaded = await self._core.served.get()
        model = loaded.model
        return pb.GetModelResponse(
            model=model.name,
            model_revision=model.revision,
            architecture=model.architecture,
            vocab_size=model.vocab_size,
            max_model_len=model.max_model_len,
            eos_token_ids=model.eos_token_ids,
            dtype=model.dtype,
            has_chat_template=loaded.text.has_chat_template,
            default_params=default_params(model),
            token_ids_only=not loaded.text.has_tokenizer,
        )

    @asynccontextmanager
    async def _serve(
        self, request: pb.GenerateRequest
    ) -> AsyncIterator[tuple[StreamInbox, AsyncGenerator[Message, None]]]:
        """Yield a request's inbox and messages; leaving the block early cancels it in the core."""
        arrival_s = self._clock()
        if len(request.request_id) <= MAX_REQUEST_ID_CHARS and request.request_id.isprintable():
            structlog.contextvars.bind_contextvars(request_id=request.request_id)
        loaded = await self._core.served.get()
        prepared = await prepare_request(request, loaded, self._threads, now_s=arrival_s)
        structlog.contextvars.bind_contextvars(request_id=prepared.request_id)
        before = [Received(len(start.prior.token_ids), start.is_over) for start in prepared.starts]
        with self._core.submit(
            prepared.submit, before=before, with_logprobs=prepared.with_logprobs
        ) as inbox:

            def end_at_stop_string(choice: int, num_output_tokens: int) -> None:
                self._core.end(
                    inbox.choices[choice].stream_id,
                    reason=FinishReason.STOP_STRING,
                    num_output_tokens=num_output_tokens,
                )

            messages = stream_messages(
                inbox,
                prepared.starts,
                started=prepared.started,
                end_at_stop_string=end_at_stop_string,
                blocked_by=lambda: self._core.availability.blocked_by,
                text_of=loaded.text.token_text,
            )
            async with aclosing(messages):
                yield inbox, messages

    async def _write(self, inbox: StreamInbox, message: bytes, context: Context) -> None:
        inbox.begin_write(self._clock())
        try:
            await context.write(message)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if inbox.slow is None or task is None:
                raise
            task.uncancel()
            raise inbox.slow from None
        except grpc.aio.InternalError:
            # The client left, and gRPC noticed it at this write before it cancelled the call.
            raise asyncio.CancelledError from None
        inbox.end_write(self._clock())


def _with_tokens_emitted(error: TandemError, num_tokens: int) -> TandemError:
    """Return a copy of the error with `tokens_emitted`; one error object may end many streams."""
    return type(error)(
        error.message,
        field=error.field,
        retry_after_s=error.retry_after_s,
        metadata={**error.metadata, "tokens_emitted": str(num_tokens)},
    )


async def _collect(messages: AsyncIterator[Message]) -> pb.CompleteResponse:
    response = pb.CompleteResponse()
    completions: dict[int, pb.Completion] = {}
    texts: dict[int, list[str]] = {}
    async for message in messages:
        if isinstance(message, OutputDelta):
            choice, chunk, _ = message
            completion = completions.setdefault(choice, pb.Completion())
            completion.token_ids.extend(chunk.token_ids)
            completion.logprobs.extend(logprobs_of(message))
            texts.setdefault(choice, []).append(chunk.text)
            continue
        match message.WhichOneof("event"):
            case "started":
                response.started.CopyFrom(message.started)
            case "finished":
                finished = message.finished
                completion = completions.setdefault(finished.choice, pb.Completion())
                completion.choice = finished.choice
                completion.reason = finished.reason
                completion.text = "".join(texts.get(finished.choice, ()))
                if finished.HasField("stop_string"):
                    completion.stop_string = finished.stop_string
                elif finished.HasField("token_id"):
                    completion.token_id = finished.token_id
            case "done":
                response.done.CopyFrom(message.done)
    response.completions.extend(completions[choice] for choice in sorted(completions))
    return response
