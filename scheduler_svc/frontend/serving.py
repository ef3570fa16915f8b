"""Way of a request from its message to its output, the same for calls and for items of a batch."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import grpc
import msgspec
import structlog

from scheduler_svc.core.request.request import FinishReason
from scheduler_svc.frontend.calls.call_id import (
    call_id,
    call_trace,
    name_call,
    name_trace,
    trace_headers,
)
from scheduler_svc.frontend.calls.rpc_handlers import write
from scheduler_svc.frontend.core_client import CoreClient
from scheduler_svc.frontend.models import NamesModel, check_model
from scheduler_svc.frontend.request.requests import PreparedRequest, prepare_request
from scheduler_svc.frontend.request.unknown_fields import refuse_unknown_fields
from scheduler_svc.frontend.request.validation import is_request_id
from scheduler_svc.frontend.stream.inbox import Received, StreamInbox
from scheduler_svc.frontend.stream.shared_write import ItemBell
from scheduler_svc.frontend.stream.stream import RequestOutput
from scheduler_svc.frontend.text.served_model import LoadedModel
from scheduler_svc.frontend.text.tokenizer_threads import TokenizerThreads
from scheduler_svc.ipc.messages import StreamProgress, Submit
from tandem.errors import NoExecutor, SlowConsumer, TandemError
from tandem.inference.v1 import inference_service_pb2 as pb

if TYPE_CHECKING:
    from scheduler_svc.frontend.tracing.request_spans import RequestTrace, RequestTracer

_log: structlog.stdlib.BoundLogger = structlog.get_logger()

Context = grpc.aio.ServicerContext[Any, Any]

UNSERVED_INTERVAL_S = 1.0
"""Least seconds between two messages to the core that requests found no executor."""
_SERVICE = pb.DESCRIPTOR.services_by_name["InferenceService"].full_name


class Writing(Protocol):
    """Watch over a client that takes messages; `slow` is set when it cancelled the writing task."""

    @property
    def slow(self) -> SlowConsumer | None:
        """Error of a client that is too slow."""

    def begin_write(self, now_s: float) -> None:
        """Note that the calling task starts to wait for the client to take a message."""

    def end_write(self, now_s: float) -> None:
        """Note that the client took the message."""


class RequestServing:
    """Preparation, submission and output of the requests of one process."""

    def __init__(
        self,
        core: CoreClient,
        threads: TokenizerThreads,
        clock: Callable[[], float],
        tracer: RequestTracer | None = None,
    ) -> None:
        """
        Args:
            core: The core.
            threads: Threads for long prompts.
            clock: Clock of the core.
            tracer: Makes spans of requests; None where none are recorded.
        """
        self._threads = threads
        self._tracer = tracer
        self._told_unserved_s = -math.inf
        self.clock = clock
        self.core = core
        if tracer is not None:
            core.on_change(lambda: tracer.look(core.availability))
            core.on_step = tracer.steps.note

    async def loaded(self, request: NamesModel) -> LoadedModel:
        """Return the served model, which the request may name."""
        loaded = await self.core.served.get()
        check_model(request, loaded.model)
        return loaded

    @asynccontextmanager
    async def serve(
        self,
        request: pb.GenerateRequest,
        *,
        rpc: str,
        left_s: float | None,
        bell: ItemBell | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """
        Yield a request's output; leaving the block early cancels it in the core.

        Args:
            request: The client's request.
            rpc: Name of the rpc that it came by.
            left_s: Seconds until the call's deadline, if it has one.
            bell: Is rung at news, on a stream that many requests share; None for one of its own.

        Raises:
            TandemError: The request is refused; field paths start at GenerateRequest.
        """
        arrival_s = self.clock()
        with self._traced(request, rpc, arrival_s) as traced:
            if traced is not None:
                name_trace(*traced.ids)
            prepared, loaded = await self._prepare(request, arrival_s, left_s)
            core = self.core
            before = [Received(len(one.prior.token_ids), one.is_over) for one in prepared.starts]
            with core.submit(
                lambda stream_id: _with_trace(prepared.submit(stream_id)),
                before=before,
                with_logprobs=prepared.with_logprobs,
                with_scores=prepared.scored_prompt is not None and len(prepared.prompt) > 1,
                bell=bell,
            ) as inbox:

                def end_at_stop_string(choice: int, num_output_tokens: int) -> None:
                    core.end(
                        inbox.choices[choice].stream_id,
                        reason=FinishReason.STOP_STRING,
                        num_output_tokens=num_output_tokens,
                    )

                output = RequestOutput(
                    inbox,
                    prepared.starts,
                    started=prepared.started,
                    scored_prompt=prepared.scored_prompt,
                    end_at_stop_string=end_at_stop_string,
                    blocked_by=lambda: core.availability.blocked_by,
                    text_of=loaded.text.token_text,
                )
                if traced is not None:
                    self._follow(traced, output, request.tenant)
                try:
                    yield output
                finally:
                    # It holds the trace, which holds the output and by it the inbox: the span would
                    # stay until the collector of cycles comes by.
                    inbox.on_progress = None
                    _tell_end(output)

    async def _prepare(
        self, request: pb.GenerateRequest, arrival_s: float, left_s: float | None
    ) -> tuple[PreparedRequest, LoadedModel]:
        """Check a request and make it ready for the core; its call has its id from then on."""
        if is_request_id(request.request_id):
            name_call(request.request_id)
        refuse_unknown_fields(request)
        try:
            loaded = await self.loaded(request)
        except NoExecutor:
            self._tell_unserved(arrival_s)
            raise
        request_id = request.request_id or call_id()
        prepared = await prepare_request(
            request,
            loaded,
            self._threads,
            request_id=request_id,
            now_s=arrival_s,
            left_s=left_s,
        )
        name_call(request_id)
        return prepared, loaded

    def _tell_unserved(self, now_s: float) -> None:
        """Tell the core that a request found no executor; many at a time are one to it."""
        if now_s - self._told_unserved_s >= UNSERVED_INTERVAL_S:
            self._told_unserved_s = now_s
            self.core.tell("unserved")

    def _traced(
        self, request: pb.GenerateRequest, rpc: str, arrival_s: float
    ) -> AbstractContextManager[RequestTrace | None]:
        if self._tracer is None:
            return nullcontext()
        return self._tracer.request(request, f"{_SERVICE}/{rpc}", trace_headers(), arrival_s)

    def _follow(self, traced: RequestTrace, output: RequestOutput, tenant: str) -> None:
        """Have a trace told what becomes of its request."""

        def note_progress(choice: int, progress: StreamProgress) -> None:
            traced.note_progress(choice, progress, self.clock())

        traced.follow(output.started, tenant, lambda: output.ends, lambda: output.failure)
        output.inbox.on_progress = note_progress

    def cancel(self, inbox: StreamInbox) -> None:
        """Ask the core to end all choices of a request; their output comes to its end."""
        for choice in inbox.choices:
            if not choice.is_over:
                self.core.end(
                    choice.stream_id, reason=FinishReason.CANCELLED, num_output_tokens=None
                )

    async def write(self, writing: Writing, message: bytes, context: Context) -> None:
        """
        Write one message and wait until the client's window has room for it.

        Raises:
            SlowConsumer: The client did not take it in time.
        """
        writing.begin_write(self.clock())
        try:
            await write(context, message)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if writing.slow is None or task is None:
                raise
            task.uncancel()
            raise writing.slow from None
        writing.end_write(self.clock())


def _with_trace(submit: Submit) -> Submit:
    """Add the trace that the calling task's request is part of, if there is one."""
    trace_id, span_id = call_trace()
    if not trace_id:
        return submit
    return msgspec.structs.replace(submit, trace_id=trace_id, span_id=span_id)


def _tell_end(output: RequestOutput) -> None:
    """Write the line of a request of which the core ended a choice; its task names its ids."""
    if not (ends := [*output.ends.values()]):
        return
    first_s = [end.first_token_s for end in ends if end.first_token_s is not None]
    _log.debug(
        "request_finished",
        reasons=[FinishReason(end.reason).name for end in ends],
        prompt_tokens=ends[0].num_prompt_tokens,
        cached_tokens=ends[0].num_cached_tokens,
        output_tokens=sum(end.num_output_tokens for end in ends),
        queue_s=min(end.queue_s for end in ends),
        first_token_s=min(first_s, default=None),
        total_s=max(end.total_s for end in ends),
    )


def with_tokens_emitted(error: TandemError, num_tokens: int) -> TandemError:
    """Return a copy of the error with `tokens_emitted`; one error object may end many streams."""
    return type(error)(
        error.message,
        field=error.field,
        retry_after_s=error.retry_after_s,
        metadata={**error.metadata, "tokens_emitted": str(num_tokens)},
    )
