"""A collector of spans for tests: it takes what an OTLP exporter sends over gRPC."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
"""Ids of a trace and of a span in it."""
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"
"""Header of a sampled call within that span."""
UNSAMPLED = f"00-{TRACE}-{PARENT}-00"


def values_of(attributes: Any) -> dict[str, Any]:
    """Return attributes as plain values; a list becomes a tuple."""
    return {one.key: _value(one.value) for one in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    found = getattr(value, kind)
    return tuple(_value(one) for one in found.values) if kind == "array_value" else found


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """
    Collector that keeps all spans.

    Attributes:
        url: Address to export to.
        resources: Attributes of each resource that sent spans.
        sizes: Number of spans of each export.
        refuses: True while every export is answered with an error that exporters do not retry.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: list[Span] = []
        self.url = ""
        self.resources: list[dict[str, Any]] = []
        self.sizes: list[int] = []
        self.refuses = False

    def Export(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802  # named by the proto
        if self.refuses:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "refused")
        with self._lock:
            num_before = len(self._spans)
            for sent in request.resource_spans:
                self.resources.append(values_of(sent.resource.attributes))
                self._spans += [span for scope in sent.scope_spans for span in scope.spans]
            self.sizes.append(len(self._spans) - num_before)
        return trace_service_pb2.ExportTraceServiceResponse()

    def spans(self, is_wanted: Callable[[Span], bool] = lambda _: True) -> list[Span]:
        """Return the spans so far, by their begin."""
        with self._lock:
            found = [span for span in self._spans if is_wanted(span)]
        return sorted(found, key=lambda span: (span.start_time_unix_nano, span.end_time_unix_nano))

    def requests(self) -> list[Span]:
        """Return the spans of requests so far."""
        return self.spans(lambda span: span.kind == Span.SPAN_KIND_SERVER)

    def children(self, parent: Span) -> list[Span]:
        """Return the spans right below another one."""
        return self.spans(lambda span: span.parent_span_id == parent.span_id)


@contextmanager
def running_collector() -> Iterator[Collector]:
    """Yield a collector that listens on a free port of this machine."""
    collector, server = Collector(), grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    collector.url = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(None).wait()
