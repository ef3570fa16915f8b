"""
`python -m tests.bench.tracing`: CPU that the spans of one request, or one step, cost a frontend.

Requests with one choice are traced as the frontend does it, without serving them; a collector in
another process takes the spans. `loop_us` is the CPU of the thread that traces, the event loop of a
frontend; `export_us` that of all other threads, which export. Both are microseconds of CPU for each
request or step; a step has `links` links, so that other work on the machine counts only by the caches that it shares.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

from scheduler_svc.core.request.events import ProgressKind
from scheduler_svc.core.request.request import FinishReason
from scheduler_svc.frontend.tracing.exporting import open_exporter
from scheduler_svc.frontend.tracing.request_spans import RequestTracer
from scheduler_svc.ipc.messages import StreamProgress
from tandem.inference.v1 import stream_pb2
from tandem.inference.v1.inference_service_pb2 import GenerateRequest
from tests.bench.machine import machine
from tests.otlp_collector import PARENT, TRACE, TRACEPARENT, UNSAMPLED, running_collector
from tests.scheduler_svc.frontend.fake_core import ended, step_span
from tests.waiting import wait_until

RPC = "tandem.inference.v1.InferenceService/Generate"
SPANS = 4
"""Spans of a request: itself and three phases."""
CHUNK = 16
"""Requests that are traced before their spans' export is awaited, so that none is lost."""


def collect(pipe: Connection) -> None:
    """Take spans until the other end of the pipe says so; runs in a process of its own."""
    with running_collector() as collector:
        pipe.send(collector.url)
        pipe.recv()


def trace_one(tracer: RequestTracer, traceparent: str) -> None:
    """Trace one request from its begin to its end."""
    request = GenerateRequest(text="hello")
    end = ended(1, int(FinishReason.MAX_TOKENS), 2)
    started = stream_pb2.Started(request_id="r", model="small", prompt_tokens=3)
    arrival_s = time.monotonic()
    with tracer.request(request, RPC, {"traceparent": traceparent}, arrival_s) as traced:
        if traced is not None:
            traced.follow(started, "tenant", lambda: {0: end}, lambda: None)
            for kind, value in ((ProgressKind.SCHEDULED, 0), (ProgressKind.PREFILLED, 3)):
                traced.note_progress(0, StreamProgress(1, int(kind), value), arrival_s)


def trace_step(tracer: RequestTracer, num_links: int) -> None:
    """Make the span of one step."""
    links = ((TRACE, PARENT),) * num_links
    step = step_span(links, num_prefills=0, num_decodes=num_links, graph_tokens=num_links)
    tracer.steps.note(step)


def measure(
    tracer: RequestTracer, trace_it: Callable[[], None], spans: int, requests: int
) -> dict[str, float]:
    """Return the microseconds of CPU for each call of `trace_it`, which makes so many spans."""
    loop_s, process_s, thread_s = 0.0, time.process_time(), time.thread_time()
    for _ in range(requests // CHUNK):
        wanted = tracer.counts.exported + CHUNK * spans
        began_s = time.thread_time()
        for _ in range(CHUNK):
            trace_it()
        loop_s += time.thread_time() - began_s
        wait_until(lambda wanted=wanted: tracer.counts.exported == wanted, "the export")
    others_s = time.process_time() - process_s - (time.thread_time() - thread_s)
    num_requests = requests // CHUNK * CHUNK
    return {"loop_us": 1e6 * loop_s / num_requests, "export_us": 1e6 * others_s / num_requests}


def main() -> None:
    """Measure requests that are sampled or not, and steps, and print a line of JSON each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="default: 5")
    parser.add_argument("--requests", type=int, default=1600, help="per round; default: 1600")
    given = parser.parse_args()
    print(json.dumps({"machine": machine(), "load": os.getloadavg()[0]}), flush=True)
    os.environ["OTEL_BSP_SCHEDULE_DELAY"] = "5"
    here, there = multiprocessing.Pipe()
    # Forked before gRPC runs here.
    process = multiprocessing.get_context("fork").Process(target=collect, args=(there,))
    process.start()
    exporter = open_exporter(here.recv(), "bench")
    tracer = RequestTracer(exporter, time.monotonic)
    cases: tuple[tuple[dict[str, object], Callable[[], None], int], ...] = (
        ({"requests": "sampled"}, lambda: trace_one(tracer, TRACEPARENT), SPANS),
        ({"requests": "not sampled"}, lambda: trace_one(tracer, UNSAMPLED), 0),
        ({"links": 1}, lambda: trace_step(tracer, 1), 1),
        ({"links": 128}, lambda: trace_step(tracer, 128), 1),
    )
    for name, trace_it, spans in cases:
        measure(tracer, trace_it, spans, CHUNK)
        rounds = [measure(tracer, trace_it, spans, given.requests) for _ in range(given.rounds)]
        row = {**name}
        for figure in ("loop_us", "export_us"):
            values = [one[figure] for one in rounds]
            row[figure] = round(statistics.median(values), 1)
            row[f"{figure}_range"] = [round(min(values), 1), round(max(values), 1)]
        print(json.dumps(row), flush=True)
    exporter.close()
    here.send(None)
    process.join()


if __name__ == "__main__":
    main()
