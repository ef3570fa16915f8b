"""One request of the API from its body to its answer; the client may leave at any time."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import structlog
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from tandem.errors import QueueFull, TandemError
from tandem.inference.v1.inference_service_pb2 import GenerateRequest
from tandem_openai_gateway.answers.format import AnswerFormat, Head, comment
from tandem_openai_gateway.answers.output import ChoiceOutput, Output, WholeOutput
from tandem_openai_gateway.api.body import Bodies
from tandem_openai_gateway.api.common import Asked
from tandem_openai_gateway.api.headers import key_of, metadata_of
from tandem_openai_gateway.api.message_size import check_fits, check_prompt_fits
from tandem_openai_gateway.api.scheduler_errors import answered, api_error
from tandem_openai_gateway.client_left import ClientLeft, until_left
from tandem_openai_gateway.delta_interval import DeltaIntervals
from tandem_openai_gateway.envelope import JsonResponse
from tandem_openai_gateway.errors import ApiError
from tandem_openai_gateway.metrics import Metrics
from tandem_openai_gateway.scheduler_calls.batch_call import Metadata
from tandem_openai_gateway.scheduler_calls.schedulers import Schedulers
from tandem_openai_gateway.served_model import ServedModel
from tandem_openai_gateway.upstream import (
    Delta,
    Done,
    Finished,
    Started,
    Usage,
    generate_request,
    progress_of,
)

NUMBERS_OF_REQUESTS = frozenset({"max_num_seqs", "max_queued_requests", "max_tenant_requests"})
"""Limits of a full scheduler that count requests; each choice of a prompt is one."""
STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold events back
]

_log: structlog.stdlib.BoundLogger = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """
    One path that generates.

    Attributes:
        read: Function that decodes the body of a request.
        form: Function that makes the form of the answer.
    """

    read: Callable[[bytes], Asked]
    form: Callable[[Head, Asked], AnswerFormat]


class Answering:
    """Generation for all endpoints; it owns nothing but the way of a request."""

    def __init__(
        self,
        schedulers: Schedulers,
        model: ServedModel,
        metrics: Metrics,
        *,
        intervals: DeltaIntervals,
        bodies: Bodies,
    ) -> None:
        self._schedulers = schedulers
        self._intervals = intervals
        self._model = model
        self._metrics = metrics
        self._bodies = bodies

    async def answer(self, endpoint: Endpoint, request: Request) -> Answer:
        """
        Have the schedulers accept a request; return its answer, which is yet to be sent.

        Raises:
            ApiError, TandemError: The request cannot be served.
        """
        metadata = metadata_of(request)
        await self._model.admit(metadata)
        request_id: str = request.scope["tandem.request_id"]

        max_bytes = self._model.max_request_bytes

        def read(body: bytes) -> tuple[Asked, list[GenerateRequest]]:
            asked = endpoint.read(body)
            with answered(asked.naming):
                requests = requests_of(asked, request_id, max_bytes)
            return asked.without_prompts(), requests

        async with self._bodies.decoded(request, key_of(metadata), read) as (asked, requests):
            with answered(asked.naming), self._model.forgetting(metadata):
                return await self._accepted(endpoint, request, asked, requests, metadata)

    async def _accepted(
        self,
        endpoint: Endpoint,
        request: Request,
        asked: Asked,
        requests: Sequence[GenerateRequest],
        metadata: Metadata,
    ) -> Answer:
        name = await self._model.check(asked.model, metadata)
        output = self._output(requests, metadata)
        try:
            started = await until_left(request.receive, output.accepted())
        except QueueFull as full:
            output.close()
            raise never_fits(asked, full) or full from None
        except BaseException:
            output.close()
            raise
        self._model.note(started)
        head = Head(
            request_id=request.scope["tandem.request_id"],
            created_s=int(time.time()),
            model=name,
            fingerprint=started.model_revision,
        )
        return Answer(
            asked,
            endpoint.form(head, asked),
            output,
            self._metrics,
            forgetting=lambda: self._model.forgetting(metadata),
        )

    def _output(self, requests: Sequence[GenerateRequest], metadata: Metadata) -> Output:
        interval_s = self._intervals.begin(len(requests))
        if interval_s:
            for one in requests:
                one.response.min_delta_interval_s = interval_s
        streams = [self._schedulers.generate(one, metadata) for one in requests]
        return Output(streams, on_close=lambda: self._intervals.end(len(requests)))


def requests_of(asked: Asked, request_id: str, max_bytes: int | None) -> list[GenerateRequest]:
    """
    Return the Tandem requests of the prompts, in their order.

    Args:
        asked: What the request asks for.
        request_id: Its id.
        max_bytes: Size of the largest message that the schedulers take; None = not known.

    Raises:
        ApiError: One is larger.
        InvalidParameter: A value cannot be sent.
    """
    ids = [request_id]
    if len(asked.prompts) > 1:
        ids = [f"{request_id}-{place}" for place in range(len(asked.prompts))]
    for prompt in asked.prompts:
        check_prompt_fits(prompt, max_bytes)
    requests = [
        generate_request(prompt, asked.options, one)
        for prompt, one in zip(asked.prompts, ids, strict=True)
    ]
    for request in requests:
        check_fits(request, max_bytes)
    return requests


def never_fits(asked: Asked, full: QueueFull) -> ApiError | None:
    """
    Return the answer for prompts that are more than a limit lets into the system at once, which
    would be refused again and again; None if they fit once there is room.
    """
    limit, bound = full.metadata.get("limit"), full.metadata.get("value", "")
    num_outputs = len(asked.prompts) * asked.num_choices
    if limit not in NUMBERS_OF_REQUESTS or not bound.isdecimal() or num_outputs <= int(bound):
        return None
    return ApiError(
        400,
        f"{len(asked.prompts)} prompts with {asked.num_choices} choices each are more than "
        f"{limit}, which is {bound}: send fewer at a time",
        param="prompt",
        code="never_fits",
    )


class Answer:
    """Answer of an accepted request, as an ASGI app that sends it."""

    def __init__(
        self,
        asked: Asked,
        form: AnswerFormat,
        output: Output,
        metrics: Metrics,
        *,
        forgetting: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """
        Args:
            asked: What the request asks for.
            form: Form of the answer.
            output: Output to answer with.
            metrics: Metrics to count its tokens in.
            forgetting: Makes a block that has the key of the request forgotten if that is why it
                fails.
        """
        self._forgetting = forgetting
        self._asked = asked
        self._form = form
        self._output = output
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer; a client that leaves ends the generation."""
        sent = self._stream(send) if self._asked.is_streamed else self._whole(scope, receive, send)
        try:
            await until_left(receive, sent)
        except ClientLeft:
            _log.debug("client_left", id=scope["tandem.request_id"])
        finally:
            self._output.close()

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        num_choices = self._asked.num_choices
        whole = WholeOutput(
            [[ChoiceOutput() for _ in range(num_choices)] for _ in self._asked.prompts]
        )
        with answered(self._asked.naming), self._forgetting():
            async for place, event in self._output.events():
                whole.add(place, event)
        self._metrics.output_tokens.inc(sum(one.output_tokens for one in whole.usages))
        await JsonResponse(self._form.whole(whole))(scope, receive, send)

    async def _stream(self, send: Send) -> None:
        async def write(part: bytes, *, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": part, "more_body": more})

        await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        try:
            with self._forgetting():
                await self._write_events(write)
        except TandemError as error:
            _log.warning("stream_failed", reason=error.reason, why=error.message)
            await write(self._form.failed(api_error(error, self._asked.naming).body))
        await write(b"", more=False)

    async def _write_events(self, write: Callable[[bytes], Awaitable[None]]) -> None:
        form, usages = self._form, list[Usage]()
        count = self._metrics.output_tokens.inc
        if opening := form.opening():
            await write(opening)
        async for place, event in self._output.events():
            match event:
                case Delta():
                    count(len(event.token_ids))
                    await write(form.delta(place, event))
                case Finished():
                    await write(form.finished(place, event))
                case Done():
                    usages.append(event.usage)
                case Started():
                    pass
                case _:
                    await write(comment(progress_of(event)))
        await write(form.closing(usages))
