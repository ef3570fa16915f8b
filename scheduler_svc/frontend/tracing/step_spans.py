"""
Spans of steps, each with links to the spans of the traced requests that the step computed.

A step serves many requests, so that it is no child of one: it is a trace of its own, and links lead
from it to its requests, as OpenTelemetry has it for batches.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from opentelemetry.context import Context
from opentelemetry.trace import Link, SpanContext, SpanKind, TraceFlags, Tracer
from opentelemetry.util.types import AttributeValue

from scheduler_svc.frontend.tracing.faults import SpanFaults
from scheduler_svc.ipc.messages import StepSpan

NAME = "step"
_NO_CONTEXT = Context()
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)


class StepTracer:
    """Maker of the spans of steps that the core tells to this process. Owned by the event loop."""

    def __init__(self, tracer: Tracer, clock: Callable[[], float], faults: SpanFaults) -> None:
        """
        Args:
            tracer: Makes the spans; it must sample all of them.
            clock: The clock of the service, in seconds.
            faults: Guards the making.
        """
        self._tracer = tracer
        self._clock = clock
        self._faults = faults

    def note(self, step: StepSpan) -> None:
        """Make the span of a step, from the sending of its batch to the applying of its result."""
        with self._faults:
            offset_ns = time.time_ns() - round(self._clock() * 1e9)
            span = self._tracer.start_span(
                NAME,
                _NO_CONTEXT,
                SpanKind.INTERNAL,
                _attributes(step),
                [_link(*ids) for ids in step.links],
                start_time=round(step.sent_s * 1e9) + offset_ns,
            )
            span.end(round(step.applied_s * 1e9) + offset_ns)


def _link(trace_id: str, span_id: str) -> Link:
    return Link(
        SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=_SAMPLED)
    )


def _attributes(step: StepSpan) -> dict[str, AttributeValue]:
    return {
        "tandem.step.id": step.step_id,
        "tandem.session_epoch": step.session_epoch,
        "tandem.executor.address": step.executor,
        "tandem.executor.boot_id": step.boot_id,
        "tandem.step.prefill_rows": step.num_prefills,
        "tandem.step.decode_rows": step.num_decodes,
        "tandem.step.prefill_tokens": step.prefill_tokens,
        "tandem.step.mode": "graph" if step.graph_tokens else "eager",
        "tandem.step.graph_tokens": step.graph_tokens,
        "tandem.step.executor_queue_s": step.queued_ns / 1e9,
        "tandem.step.forward_s": step.forward_ns / 1e9,
        "tandem.step.sample_s": step.sample_ns / 1e9,
        "tandem.step.compute_s": step.compute_ns / 1e9,
        "tandem.step.requests_left_out": step.num_left_out,
        "tandem.step.steps_skipped": step.num_skipped,
    }
