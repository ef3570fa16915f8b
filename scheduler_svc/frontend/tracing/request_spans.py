"""
Spans of one request: itself, its time in the queue, its prefill and its decode.

They are made once, when the request ends, of times that the core tells of every request: a traced
request costs the core nothing. Names of attributes are those of OpenTelemetry's semantic
conventions for RPC and for generative AI where these have one; all others begin with `tandem.`. No
attribute and no status has text or token ids of a prompt or an output, as messages of errors may.

A fault in here ends no request: all that others call runs guarded (see `SpanFaults`).
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from scheduler_svc.core.request.events import ProgressKind
from scheduler_svc.core.request.request import FinishReason
from scheduler_svc.frontend.tracing.exporting import OpenExporter, SpanCounts
from scheduler_svc.frontend.tracing.faults import SpanFaults
from scheduler_svc.frontend.tracing.phases import Phase, Seen, phases_by_core, phases_by_progress
from scheduler_svc.frontend.tracing.step_spans import StepTracer
from scheduler_svc.ipc.messages import Availability, StreamEnd, StreamProgress
from tandem.errors import TandemError
from tandem.inference.v1 import stream_pb2
from tandem.inference.v1.inference_service_pb2 import GenerateRequest

MAX_CHOICES = 8
"""Choices of a request, from the first on, that have spans of their own."""
MAX_EVENTS = 64
"""Events of a request, as its losses and returns of executors, that its span keeps."""
MAX_FIELD_CHARS = 100
"""Characters of the path of a wrong field that a status repeats."""
_SAMPLING = {
    "temperature": None,
    "top_p": 1.0,
    "top_k": 0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "seed": None,
}
"""
Sampling parameters that the conventions know, with the value that changes nothing, which has no
attribute: each attribute of a span costs time.
"""
_MAX_INT = 2**63 - 1
_NO_CONTEXT = Context()


def _none() -> None:
    """Return None, for a request that has no error."""


@dataclass(slots=True, eq=False)
class RequestTrace:
    """
    Trace of one request that is being served. Owned by the event loop.

    Attributes:
        operation: What the conventions call it.
        faults: Guards what the request's way has to do with its trace.
        is_submitted: True once the core was asked to serve it.
    """

    span: Span
    arrival_s: float
    offset_ns: int
    """Unix time minus the time of the service's clock, in nanoseconds."""
    operation: str
    faults: SpanFaults
    is_submitted: bool = False
    num_prompt_tokens: int = 0
    num_events: int = 0
    seen: dict[int, Seen] = field(default_factory=dict)
    _ends: Callable[[], dict[int, StreamEnd]] = field(default=dict, init=False)
    _failure: Callable[[], TandemError | None] = field(default=_none, init=False)

    @property
    def ids(self) -> tuple[str, str]:
        """The ids of the trace and of the request's span, in hexadecimal digits."""
        own = self.span.get_span_context()
        return trace.format_trace_id(own.trace_id), trace.format_span_id(own.span_id)

    def ns(self, time_s: float) -> int:
        """Return a time of the service's clock as Unix time in nanoseconds."""
        return round(time_s * 1e9) + self.offset_ns

    def follow(
        self,
        started: stream_pb2.Started,
        tenant: str,
        ends: Callable[[], dict[int, StreamEnd]],
        failure: Callable[[], TandemError | None],
    ) -> None:
        """
        Note what a request is, once it was checked, and how its end will be known.

        Args:
            started: Its first message.
            tenant: Tenant that it counts for.
            ends: Returns the core's account of each choice that ended, by its number.
            failure: Returns the error that ended the request, for one whose call goes on.
        """
        with self.faults:
            self._ends, self._failure = ends, failure
            self._note_started(started, tenant)

    def ends(self) -> dict[int, StreamEnd]:
        """Return the core's account of each choice that ended, by its number."""
        return self._ends()

    def failure(self) -> TandemError | None:
        """Return the error that ended the request, for one whose call goes on."""
        return self._failure()

    def note_progress(self, choice: int, progress: StreamProgress, now_s: float) -> None:
        """Note progress of a choice; one that is scheduled again has an event for it."""
        with self.faults:
            self._note_progress(choice, progress, now_s)

    def add_event(self, name: str, values: dict[str, AttributeValue], now_s: float) -> None:
        """Add an event to the request's span, unless it has many already."""
        with self.faults:
            self.num_events += 1
            if self.num_events <= MAX_EVENTS:
                self.span.add_event(name, values, timestamp=self.ns(now_s))

    def _note_started(self, started: stream_pb2.Started, tenant: str) -> None:
        self.is_submitted, self.num_prompt_tokens = True, started.prompt_tokens
        self.span.update_name(f"{self.operation} {started.model}")
        attributes: dict[str, AttributeValue] = {
            "gen_ai.request.model": started.model,
            "gen_ai.response.model": started.model,
            "gen_ai.response.id": started.request_id,
            "gen_ai.request.max_tokens": started.stopping.max_tokens,
            "gen_ai.usage.input_tokens": started.prompt_tokens,
            "tandem.model_revision": started.model_revision,
            "tandem.priority": started.priority,
        }
        if started.n > 1:
            attributes["gen_ai.request.choice.count"] = started.n
        if started.resumed_tokens:
            attributes["tandem.resumed_tokens"] = started.resumed_tokens
        if tenant:
            attributes["tandem.tenant"] = tenant
        for name, neutral in _SAMPLING.items():
            value = getattr(started.sampling, name)
            if value != neutral:
                # A seed has 64 bits, and numbers of attributes have a sign.
                attributes[f"gen_ai.request.{name}"] = value if value <= _MAX_INT else str(value)
        self.span.set_attributes(attributes)

    def _note_progress(self, choice: int, progress: StreamProgress, now_s: float) -> None:
        if choice >= MAX_CHOICES:
            return
        seen = self.seen.setdefault(choice, Seen())
        if progress.kind == ProgressKind.SCHEDULED:
            seen.num_scheduled += 1
            if seen.num_scheduled > 1:
                values: dict[str, AttributeValue] = {
                    "tandem.choice": choice,
                    "tandem.cached_tokens": progress.value,
                }
                self.add_event("tandem.rescheduled", values, now_s)
            elif seen.scheduled_s is None:
                seen.scheduled_s = now_s
        elif (
            progress.kind == ProgressKind.PREFILLED
            and progress.value >= self.num_prompt_tokens
            and seen.prefilled_s is None
        ):
            seen.prefilled_s = now_s


class RequestTracer:
    """
    Maker of the spans of one process's requests. Owned by the event loop.

    Attributes:
        counts: What became of the spans.
        steps: Makes the spans of steps that computed them.
    """

    def __init__(self, exporter: OpenExporter, clock: Callable[[], float]) -> None:
        self._exporter = exporter
        self._tracer = exporter.tracer
        self._clock = clock
        self._propagator = TraceContextTextMapPropagator()
        self._faults = SpanFaults()
        self._live: set[RequestTrace] = set()
        self._attached: bool | None = None
        self.counts: SpanCounts = exporter.counts
        self.steps = StepTracer(exporter.step_tracer, clock, self._faults)

    @contextmanager
    def request(
        self, request: GenerateRequest, rpc: str, headers: dict[str, str], arrival_s: float
    ) -> Iterator[RequestTrace | None]:
        """
        Trace a request for as long as the block runs; None if it is not sampled.

        Args:
            request: The client's request.
            rpc: Full name of its rpc, as package.Service/Method.
            headers: `traceparent` and `tracestate` of its call, those that it has.
            arrival_s: Time at which it came.
        """
        traced: RequestTrace | None = None
        with self._faults:
            traced = self._begin(request, rpc, headers, arrival_s)
        if traced is None:
            yield None
            return
        self._live.add(traced)
        try:
            yield traced
        except BaseException as error:
            self._end(traced, error)
            raise
        else:
            self._end(traced, None)

    def look(self, availability: Availability) -> None:
        """Add an event to each live request where executors went or came back."""
        is_attached = availability.executor_attached
        if is_attached is self._attached:
            return
        was_attached, self._attached = self._attached, is_attached
        if was_attached is None:
            return
        name = "tandem.executor.attached" if is_attached else "tandem.executor.lost"
        values: dict[str, AttributeValue] = {}
        if availability.blocked_by:
            values["tandem.blocked_by"] = availability.blocked_by
        now_s = self._clock()
        for one in self._live:
            one.add_event(name, values, now_s)

    async def close(self, within_s: float) -> None:
        """Export what is left, and return after `within_s` even if the collector is away."""
        loop, closed = asyncio.get_running_loop(), asyncio.Event()

        def close() -> None:
            self._exporter.close()
            with suppress(RuntimeError):  # the loop may be closed by now
                loop.call_soon_threadsafe(closed.set)

        # A thread of the loop's own pool would hold up the end of the process.
        threading.Thread(target=close, name="spans-end", daemon=True).start()
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await closed.wait()

    def _begin(
        self, request: GenerateRequest, rpc: str, headers: dict[str, str], arrival_s: float
    ) -> RequestTrace | None:
        """Start the span of a request; None if it is not sampled."""
        operation = "chat" if request.HasField("chat") else "text_completion"
        offset_ns = time.time_ns() - round(self._clock() * 1e9)
        span = self._tracer.start_span(
            operation,
            self._propagator.extract(headers, _NO_CONTEXT),
            SpanKind.SERVER,
            {
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "tandem",
                "rpc.system.name": "grpc",
                "rpc.method": rpc,
            },
            start_time=round(arrival_s * 1e9) + offset_ns,
        )
        if not span.is_recording():
            return None
        return RequestTrace(span, arrival_s, offset_ns, operation, self._faults)

    def _end(self, traced: RequestTrace, error: BaseException | None) -> None:
        """End the span, whatever fails before that; `error` is what left the request's block."""
        self._live.discard(traced)
        now_s = self._clock()
        with self._faults:
            if (failure := error or traced.failure()) is not None:
                _note_failure(traced.span, failure)
        with self._faults:
            self._note_ends(traced, now_s)
        with self._faults:
            traced.span.end(traced.ns(now_s))

    def _note_ends(self, traced: RequestTrace, now_s: float) -> None:
        """Make the spans of the phases, and note on the request's what its choices came to."""
        span, ends = traced.span, traced.ends()
        context = trace.set_span_in_context(span, _NO_CONTEXT)
        choices = {*traced.seen, *ends} or ({0} if traced.is_submitted else set())
        for choice in sorted(choices):
            if choice >= MAX_CHOICES:
                break
            end = ends.get(choice)
            if end is None:
                phases = phases_by_progress(
                    traced.seen.get(choice, Seen()), traced.arrival_s, now_s
                )
            else:
                phases = phases_by_core(end, traced.arrival_s)
            self._add_phases(traced, context, choice, phases)
        span.set_attributes(_usage(list(ends.values())))
        if traced.num_events > MAX_EVENTS:
            span.set_attribute("tandem.dropped_events", traced.num_events - MAX_EVENTS)

    def _add_phases(
        self,
        traced: RequestTrace,
        context: Context,
        choice: int,
        phases: Sequence[Phase],
    ) -> None:
        for phase in phases:
            span = self._tracer.start_span(
                phase.name,
                context,
                attributes={"tandem.choice": choice, **phase.attributes},
                start_time=traced.ns(phase.begin_s),
            )
            span.end(traced.ns(phase.end_s))


def _usage(ends: Sequence[StreamEnd]) -> dict[str, AttributeValue]:
    """Return the attributes of a request that its ended choices tell."""
    if not ends:
        return {}
    first_s = [end.first_token_s for end in ends if end.first_token_s is not None]
    values: dict[str, AttributeValue] = {
        "gen_ai.response.finish_reasons": tuple(FinishReason(end.reason).name for end in ends),
        "gen_ai.usage.input_tokens": ends[0].num_prompt_tokens,
        "gen_ai.usage.output_tokens": sum(end.num_output_tokens for end in ends),
        "gen_ai.usage.cache_read.input_tokens": ends[0].num_cached_tokens,
        "tandem.preemptions": sum(end.num_preemptions for end in ends),
    }
    if first_s:
        values["gen_ai.response.time_to_first_chunk"] = min(first_s)
    return values


def _note_failure(span: Span, error: BaseException) -> None:
    """Note why a request did not end well; a client that left is no error of this service."""
    if isinstance(error, TandemError):
        span.set_attributes({"error.type": error.reason, "rpc.response.status_code": error.code})
        where = f": {error.field[:MAX_FIELD_CHARS]}" if error.field else ""
        span.set_status(StatusCode.ERROR, f"{error.reason}{where}")
    elif isinstance(error, asyncio.CancelledError | GeneratorExit):
        span.set_attribute("rpc.response.status_code", "CANCELLED")
    else:
        span.set_attribute("error.type", type(error).__qualname__)
        span.set_status(StatusCode.ERROR, "a bug of the service: see its log")
