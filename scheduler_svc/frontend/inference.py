"""Public inference service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import grpc

from scheduler_svc.core.request.request import FinishReason
from scheduler_svc.frontend.calls.call_id import call_id, name_call
from scheduler_svc.frontend.core_client import CoreClient
from scheduler_svc.frontend.models import NamesModel, check_model, check_page, describe_model
from scheduler_svc.frontend.request.requests import prepare_request
from scheduler_svc.frontend.request.tokens import detokenize, tokenize
from scheduler_svc.frontend.request.unknown_fields import refuse_unknown_fields
from scheduler_svc.frontend.request.validation import check_tenant, is_request_id
from scheduler_svc.frontend.stream.delta import OutputDelta, encode_response
from scheduler_svc.frontend.stream.inbox import Received, StreamInbox
from scheduler_svc.frontend.stream.stream import Message, stream_messages
from scheduler_svc.frontend.stream.whole import collect
from scheduler_svc.frontend.text.served_model import LoadedModel
from scheduler_svc.frontend.text.tokenizer_threads import TokenizerThreads
from scheduler_svc.ipc.snapshot import AbortArgument, encode_json
from tandem.errors import InvalidParameter, TandemError
from tandem.inference.v1 import inference_service_pb2 as pb
from tandem.inference.v1 import inference_service_pb2_grpc, model_pb2, tokens_pb2

Context = grpc.aio.ServicerContext[Any, Any]


class InferenceServicer(inference_service_pb2_grpc.InferenceServiceServicer):
    """Inference service of one process; the interceptor turns TandemErrors into statuses."""

    def __init__(
        self,
        core: CoreClient,
        threads: TokenizerThreads,
        clock: Callable[[], float],
        *,
        max_request_bytes: int,
    ) -> None:
        self._core = core
        self._max_request_bytes = max_request_bytes
        self._threads = threads
        self._clock = clock

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:  # noqa: N802  # named by the proto
        """Stream the completions of one prompt."""
        num_sent: int | None = None
        try:
            async with self._serve(request, context) as (inbox, messages):
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
        if request.request.HasField("resume"):
            raise InvalidParameter(
                "Complete gives whole outputs: resume with Generate.", field="request.resume"
            )
        try:
            async with self._serve(request.request, context) as (_, messages):
                return await collect(messages)
        except TandemError as error:
            if error.field is not None:
                error.field = f"request.{error.field}"
            raise

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:  # noqa: N802  # named by the proto
        """End a live request of the caller's tenant."""
        del context
        refuse_unknown_fields(request)
        if not request.request_id:
            raise InvalidParameter("request_id must not be empty.", field="request_id")
        check_tenant(request.tenant)
        argument = AbortArgument(request_id=request.request_id, tenant=request.tenant)
        await self._core.query("abort", encode_json(argument))
        return pb.AbortResponse()

    async def Tokenize(  # noqa: N802  # named by the proto
        self, request: tokens_pb2.TokenizeRequest, context: Context
    ) -> tokens_pb2.TokenizeResponse:
        """Return the ids of a prompt."""
        del context
        refuse_unknown_fields(request)
        loaded = await self._loaded(request)
        return await tokenize(request, loaded, self._threads)

    async def Detokenize(  # noqa: N802  # named by the proto
        self, request: tokens_pb2.DetokenizeRequest, context: Context
    ) -> tokens_pb2.DetokenizeResponse:
        """Return the text of ids."""
        del context
        refuse_unknown_fields(request)
        return await detokenize(request, await self._loaded(request), self._threads)

    async def GetModel(  # noqa: N802  # named by the proto
        self, request: model_pb2.GetModelRequest, context: Context
    ) -> model_pb2.GetModelResponse:
        """Describe a served model."""
        del context
        refuse_unknown_fields(request)
        loaded = await self._loaded(request)
        return model_pb2.GetModelResponse(model=describe_model(loaded, self._max_request_bytes))

    async def ListModels(  # noqa: N802  # named by the proto
        self, request: model_pb2.ListModelsRequest, context: Context
    ) -> model_pb2.ListModelsResponse:
        """Describe all that is served, which is one model."""
        del context
        refuse_unknown_fields(request)
        check_page(request)
        loaded = await self._core.served.get()
        return model_pb2.ListModelsResponse(
            models=[describe_model(loaded, self._max_request_bytes)]
        )

    async def _loaded(self, request: NamesModel) -> LoadedModel:
        loaded = await self._core.served.get()
        check_model(request, loaded.model)
        return loaded

    @asynccontextmanager
    async def _serve(
        self, request: pb.GenerateRequest, context: Context
    ) -> AsyncIterator[tuple[StreamInbox, AsyncGenerator[Message, None]]]:
        """Yield a request's inbox and messages; leaving the block early cancels it in the core."""
        arrival_s = self._clock()
        if is_request_id(request.request_id):
            name_call(request.request_id)
        refuse_unknown_fields(request)
        loaded = await self._loaded(request)
        request_id = request.request_id or call_id()
        prepared = await prepare_request(
            request,
            loaded,
            self._threads,
            request_id=request_id,
            now_s=arrival_s,
            left_s=context.time_remaining(),
        )
        name_call(request_id)
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
