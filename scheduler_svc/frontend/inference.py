"""Public inference service."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING

from scheduler_svc.frontend.batch.item_counts import ItemCounts
from scheduler_svc.frontend.batch.item_turns import ItemTurns
from scheduler_svc.frontend.batch.stream import BatchStream
from scheduler_svc.frontend.calls.refusal_lines import RefusalLines
from scheduler_svc.frontend.core_client import CoreClient
from scheduler_svc.frontend.identity.call_shares import CallShares
from scheduler_svc.frontend.identity.identity import current_tenant
from scheduler_svc.frontend.models import check_page, describe_model
from scheduler_svc.frontend.request.tokens import detokenize, tokenize
from scheduler_svc.frontend.request.unknown_fields import refuse_unknown_fields
from scheduler_svc.frontend.request.validation import check_tenant
from scheduler_svc.frontend.serving import Context, RequestServing, with_tokens_emitted
from scheduler_svc.frontend.stream.delta import OutputDelta, encode_response
from scheduler_svc.frontend.stream.stream import stream_messages
from scheduler_svc.frontend.stream.whole import collect
from scheduler_svc.frontend.text.served_model import LoadedModel
from scheduler_svc.frontend.text.tokenizer_threads import TokenizerThreads
from scheduler_svc.ipc.snapshot import AbortArgument, encode_json
from tandem.errors import InvalidParameter, TandemError
from tandem.inference.v1 import inference_service_pb2 as pb
from tandem.inference.v1 import inference_service_pb2_grpc, model_pb2, tokens_pb2

if TYPE_CHECKING:
    from scheduler_svc.frontend.tracing.request_spans import RequestTracer


class InferenceServicer(inference_service_pb2_grpc.InferenceServiceServicer):
    """Inference service of one process; the interceptor turns TandemErrors into statuses."""

    def __init__(
        self,
        core: CoreClient,
        threads: TokenizerThreads,
        clock: Callable[[], float],
        *,
        max_request_bytes: int,
        max_items: int,
        shares: CallShares,
        refusals: RefusalLines,
        max_pending_bytes: int,
        scores_prompts: bool,
        tracer: RequestTracer | None = None,
    ) -> None:
        """
        Args:
            core: The core.
            threads: Threads for long prompts.
            clock: Clock of the core.
            max_request_bytes: Largest request message.
            max_items: Most items of batches that one connection may have at a time.
            shares: Calls of each tenant, among which items of batches count.
            refusals: Sums up lines about refused items.
            max_pending_bytes: Most output of one batch that may wait for its client.
            scores_prompts: The core accepts requests for log probabilities of their prompts.
            tracer: Makes spans of requests; None where none are recorded.
        """
        self._core = core
        self._max_request_bytes = max_request_bytes
        self._scores_prompts = scores_prompts
        self._threads = threads
        self._serving = RequestServing(core, threads, clock, tracer)
        self._counts = ItemCounts(max_items, shares)
        self._item_turns = ItemTurns(clock)
        self._refusals = refusals
        self._max_pending_bytes = max_pending_bytes
        self._batches: set[BatchStream] = set()
        core.on_change(self._ring_batches)

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:  # noqa: N802  # named by the proto
        """Stream the completions of one prompt."""
        num_sent: int | None = None
        serving, left_s = self._serving, context.time_remaining()
        try:
            async with (
                serving.serve(request, rpc="Generate", left_s=left_s) as output,
                aclosing(stream_messages(output)) as messages,
            ):
                async for message in messages:
                    await serving.write(output.inbox, encode_response(message), context)
                    num_sent = num_sent or 0
                    if isinstance(message, OutputDelta):
                        num_sent += len(message.chunk.token_ids)
        except TandemError as error:
            if num_sent is None:
                raise
            raise with_tokens_emitted(error, num_sent) from None

    async def GenerateBatch(  # noqa: N802  # named by the proto
        self, requests: AsyncIterator[pb.GenerateBatchRequest], context: Context
    ) -> None:
        """Serve many requests on one stream."""
        batch = BatchStream(
            self._serving,
            self._counts,
            self._item_turns,
            context,
            refusals=self._refusals,
            max_pending_bytes=self._max_pending_bytes,
        )
        self._batches.add(batch)
        try:
            await batch.run(requests)
        finally:
            self._batches.discard(batch)

    async def Complete(self, request: pb.CompleteRequest, context: Context) -> pb.CompleteResponse:  # noqa: N802  # named by the proto
        """Return the whole completions of one prompt."""
        if request.request.HasField("resume"):
            raise InvalidParameter(
                "Complete gives whole outputs: resume with Generate.", field="request.resume"
            )
        try:
            async with (
                self._serving.serve(
                    request.request, rpc="Complete", left_s=context.time_remaining()
                ) as output,
                aclosing(stream_messages(output)) as messages,
            ):
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
        loaded = await self._serving.loaded(request)
        return await tokenize(request, loaded, self._threads, tenant=current_tenant())

    async def Detokenize(  # noqa: N802  # named by the proto
        self, request: tokens_pb2.DetokenizeRequest, context: Context
    ) -> tokens_pb2.DetokenizeResponse:
        """Return the text of ids."""
        del context
        refuse_unknown_fields(request)
        loaded = await self._serving.loaded(request)
        return await detokenize(request, loaded, self._threads, tenant=current_tenant())

    async def GetModel(  # noqa: N802  # named by the proto
        self, request: model_pb2.GetModelRequest, context: Context
    ) -> model_pb2.GetModelResponse:
        """Describe a served model."""
        del context
        refuse_unknown_fields(request)
        loaded = await self._serving.loaded(request)
        return model_pb2.GetModelResponse(model=self._described(loaded))

    async def ListModels(  # noqa: N802  # named by the proto
        self, request: model_pb2.ListModelsRequest, context: Context
    ) -> model_pb2.ListModelsResponse:
        """Describe all that is served, which is one model."""
        del context
        refuse_unknown_fields(request)
        check_page(request)
        loaded = await self._core.served.get()
        return model_pb2.ListModelsResponse(models=[self._described(loaded)])

    def _described(self, loaded: LoadedModel) -> model_pb2.Model:
        return describe_model(
            loaded,
            self._max_request_bytes,
            self._counts.max_items,
            scores_prompts=self._scores_prompts,
        )

    def _ring_batches(self) -> None:
        """Let batches without items end when the service drains."""
        for batch in self._batches:
            batch.ring()
