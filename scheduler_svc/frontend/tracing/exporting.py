"""Export of spans on a thread of its own, which loses spans and never delays a request."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import structlog
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import Tracer

from tandem.network.address import names_this_machine

_log: structlog.stdlib.BoundLogger = structlog.get_logger()

SERVICE = "tandem-scheduler"
QUEUE_VARIABLE, BATCH_VARIABLE = "OTEL_BSP_MAX_QUEUE_SIZE", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE"
DEFAULT_QUEUE_SPANS = 2048
"""Spans that may wait for the exporter: OpenTelemetry's own default of `QUEUE_VARIABLE`."""
DEFAULT_BATCH_SPANS = 64
"""
Most spans of one export. OpenTelemetry's own default is 512, for which the thread that exports
would compete with the event loop for tens of milliseconds at a time.
"""
LOG_INTERVAL_S = 10.0
"""Seconds from one line about lost spans to the next."""


class SpanCounts:
    """
    Counts of ended spans, by what became of them. Any thread may change them.

    Attributes:
        exported: Spans that the collector took.
        lost: Spans that it did not take, or that found the queue full.
    """

    def __init__(self, max_pending: int) -> None:
        self._max_pending = max_pending
        self._lock = threading.Lock()
        self._num_pending = 0
        self._num_told = 0
        self._told_s = -LOG_INTERVAL_S
        self.exported = 0
        self.lost = 0

    def take(self) -> bool:
        """Return True, and count a span as pending, if there is room for it; else it is lost."""
        with self._lock:
            has_room = self._num_pending < self._max_pending
            self._num_pending += has_room
            self.lost += not has_room
        return has_room

    def note_export(self, num_spans: int, *, is_taken: bool) -> None:
        """Count pending spans as exported or lost, and log from time to time that some were."""
        with self._lock:
            self._num_pending -= num_spans
            self.exported += num_spans * is_taken
            self.lost += num_spans * (not is_taken)
            now_s = time.monotonic()
            num_new = self.lost - self._num_told
            if not num_new or now_s - self._told_s < LOG_INTERVAL_S:
                return
            self._num_told, self._told_s = self.lost, now_s
        _log.warning("spans_lost", spans=num_new, message="the collector did not take them in time")


class _CountingExporter(SpanExporter):
    """Exporter that counts what became of spans; runs on the thread of the batch processor."""

    def __init__(self, inner: SpanExporter, counts: SpanCounts) -> None:
        self._inner = inner
        self._counts = counts

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        is_taken = False
        try:
            result = self._inner.export(spans)
            is_taken = result is SpanExportResult.SUCCESS
        finally:
            self._counts.note_export(len(spans), is_taken=is_taken)
        return result

    def shutdown(self) -> None:
        self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._inner.force_flush(timeout_millis)


class _BoundedProcessor(SpanProcessor):
    """
    Processor that hands spans to a batch processor while its queue has room.

    The SDK's own counts of dropped spans are not public, so that the bound is kept here; the queue
    behind it has twice the room, and is never full.
    """

    def __init__(self, inner: SpanProcessor, counts: SpanCounts) -> None:
        self._inner = inner
        self._counts = counts

    def on_end(self, span: ReadableSpan) -> None:
        if span.context is not None and span.context.trace_flags.sampled and self._counts.take():
            self._inner.on_end(span)

    def shutdown(self) -> None:
        self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._inner.force_flush(timeout_millis)


class OpenExporter:
    """
    Tracer whose spans are exported.

    Attributes:
        tracer: The tracer.
        step_tracer: Tracer of steps, each of which is recorded, as the requests in it are.
        counts: What became of the spans of both.
    """

    def __init__(
        self, provider: TracerProvider, step_provider: TracerProvider, counts: SpanCounts
    ) -> None:
        self._provider = provider
        self.tracer: Tracer = provider.get_tracer("tandem")
        self.step_tracer: Tracer = step_provider.get_tracer("tandem")
        self.counts = counts

    def close(self) -> None:
        """Export what is left, for as long as one export may take, and end the thread."""
        self._provider.shutdown()


def open_exporter(endpoint: str, instance: str) -> OpenExporter:
    """
    Start the thread that exports spans.

    Args:
        endpoint: URL of the collector.
        instance: Name of this process among those of the service.
    """
    # Its sentences about a collector that is away have no place among lines of JSON: `spans_lost`
    # tells of it.
    quiet = logging.getLogger("opentelemetry")
    quiet.addHandler(logging.NullHandler())
    quiet.propagate = False
    max_pending = _number(QUEUE_VARIABLE, DEFAULT_QUEUE_SPANS)
    counts = SpanCounts(max_pending)
    options: Any = None
    if names_this_machine(urlsplit(endpoint).netloc):
        options = (("grpc.enable_http_proxy", 0),)  # a proxy cannot reach this machine for us
    exporter = _CountingExporter(
        OTLPSpanExporter(endpoint=endpoint, channel_options=options), counts
    )
    batches = BatchSpanProcessor(
        exporter,
        max_queue_size=2 * max_pending,
        max_export_batch_size=min(_number(BATCH_VARIABLE, DEFAULT_BATCH_SPANS), max_pending),
    )
    own = {SERVICE_INSTANCE_ID: instance}
    given = os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    if not os.environ.get("OTEL_SERVICE_NAME") and f"{SERVICE_NAME}=" not in given:
        own[SERVICE_NAME] = SERVICE
    resource = Resource.create(own)
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    # A sampler that takes a share of traces would lose the steps of those that it took: each step
    # is a trace of its own.
    steps = TracerProvider(sampler=ALWAYS_ON, resource=resource, shutdown_on_exit=False)
    processor = _BoundedProcessor(batches, counts)
    for one in (provider, steps):
        one.add_span_processor(processor)
    return OpenExporter(provider, steps, counts)


def _number(variable: str, default: int) -> int:
    """Return the number of a variable; one that cannot be used counts as unset, as in the SDK."""
    try:
        number = int(os.environ.get(variable, default))
    except ValueError:
        return default
    return number if number > 0 else default
