"""One trace from a client through a recovery, as a collector gets it from real services."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.sdk.trace import TracerProvider

from tandem_client import Finished
from tests.e2e.cluster import Cluster, wait_idle
from tests.otlp_collector import Collector, running_collector, values_of
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

LIMITS = ["--max-num-blocks=64", "--max-model-len=512", "--max-batch-size=2"]
ASKED = {"max_tokens": 60, "ignore_eos": True, "temperature": 0.0}
PROMPT = [5 + i for i in range(20)]


@pytest.fixture
def collector(monkeypatch):
    """Yield a collector; services that start meanwhile export to it four times in a second."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "250")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
    with running_collector() as running:
        yield running


@pytest.fixture
def cluster(tiny_model, tmp_path, collector):
    options = [f"--otlp-endpoint={collector.url}", "--log-format=json", "--log-level=debug"]
    cluster = Cluster(tiny_model, tmp_path, LIMITS, options)
    try:
        cluster.start_executor()
        yield cluster
    finally:
        cluster.close()


def span_of(collector: Collector, trace_id: str) -> Span:
    """Wait for the span of a trace's one request, and for those of its phases."""

    def found() -> Span | None:
        spans = [span for span in collector.requests() if span.trace_id.hex() == trace_id]
        return spans[0] if spans and len(collector.children(spans[0])) == 3 else None

    span = wait_until(found, "the spans")
    assert span is not None
    return span


def test_client_trace_goes_through_a_recovery(cluster, collector):
    """
    A request that is called within a span of its client, and whose executor is killed and replaced,
    is one span below it, with the loss and the return as events; lines of the log have its trace.
    """
    tracer = TracerProvider(shutdown_on_exit=False).get_tracer("test")
    with cluster.client() as client, tracer.start_as_current_span("caller") as caller:
        expected = client.complete(token_ids=PROMPT, **ASKED).token_ids
        with cluster.held(20):
            stream = client.generate(token_ids=PROMPT, request_id="traced", **ASKED)
            events = [next(stream)]
            wait_until(lambda: cluster.stats().output_tokens > len(expected), "a first token")
            cluster.executor.end()
        cluster.start_executor()
        events += stream
    assert any(isinstance(event, Finished) for event in events)
    ids = [token for event in events for token in getattr(event, "token_ids", ())]
    assert list(expected) == ids

    context = caller.get_span_context()
    trace_id = trace.format_trace_id(context.trace_id)

    def recovered() -> Span | None:
        spans = [one for one in collector.requests() if one.events]
        return spans[0] if spans and len(collector.children(spans[0])) == 3 else None

    span = wait_until(recovered, "the spans")
    assert span is not None
    assert (trace_id, trace.format_span_id(context.span_id)) == (
        span.trace_id.hex(),
        span.parent_span_id.hex(),
    )
    names = [event.name for event in span.events]
    assert ["tandem.executor.lost", "tandem.executor.attached"] == [
        name for name in names if name.startswith("tandem.executor")
    ]
    assert "tandem.rescheduled" in names
    lost, attached = (
        event.time_unix_nano for event in span.events if event.name.startswith("tandem.executor")
    )
    assert span.start_time_unix_nano < lost < attached < span.end_time_unix_nano
    assert ["queue", "prefill", "decode"] == [one.name for one in collector.children(span)]
    assert 60 == values_of(span.attributes)["gen_ai.usage.output_tokens"]
    assert "test" == collector.resources[0]["deployment.environment.name"]


def test_steps_link_the_request_to_lines_of_both_services(cluster, collector):
    """
    The steps of a traced request have spans with links to its own, and step ids by which lines of
    the executor, and by the trace id lines of the scheduler, are found.
    """
    cluster.executor.end()
    cluster.start_executor("--log-level=debug", "--log-format=json")
    tracer = TracerProvider(shutdown_on_exit=False).get_tracer("test")
    with cluster.client() as client, tracer.start_as_current_span("caller") as caller:
        client.complete(token_ids=PROMPT, request_id="joined", **(ASKED | {"max_tokens": 6}))
    trace_id = trace.format_trace_id(caller.get_span_context().trace_id)
    request = span_of(collector, trace_id)

    def steps() -> list[Span]:
        found = collector.spans(lambda span: span.name == "step")
        return found if len(found) >= 6 else []

    spans = wait_until(steps, "the spans of the steps")
    assert {(request.trace_id, request.span_id)} == {
        (link.trace_id, link.span_id) for span in spans for link in span.links
    }
    assert 6 == len({span.trace_id for span in spans} - {request.trace_id})
    told = [values_of(span.attributes) for span in spans]
    assert [20, 0] == [one["tandem.step.prefill_tokens"] for one in told][:2]
    assert all(one["tandem.step.compute_s"] > 0 for one in told)
    keys = {(one["tandem.session_epoch"], one["tandem.step.id"]) for one in told}

    def computed() -> bool:
        lines = lines_of(cluster.executor.log)
        found = {(line["session_epoch"], line["step_id"]) for line in lines if "step_id" in line}
        return keys <= found

    wait_until(computed, "a line of the executor about each step")
    finished = [line for line in lines_of(cluster.scheduler.log) if line.get("trace_id")]
    assert {(trace_id, "joined")} == {(line["trace_id"], line["request_id"]) for line in finished}
    events = {line["event"] for line in finished}
    assert {"request_accepted", "request_finished"} <= events


def lines_of(log: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a log that are JSON."""
    whole = log.read_text().rpartition("\n")[0].splitlines()
    return [json.loads(line) for line in whole if line.startswith("{")]


def test_refused_request_has_its_trace_in_the_log(cluster, collector):
    """
    The line about a refused request has the trace that its spans have.
    """
    with cluster.client() as client, pytest.raises(Exception, match="temperature"):
        client.complete(token_ids=PROMPT, temperature=9.0)
    wait_idle(cluster.stats)
    span = wait_until(lambda: next(iter(collector.requests()), None), "the span")
    assert span is not None
    lines = lines_of(cluster.scheduler.log)
    assert span.trace_id.hex() in {line.get("trace_id") for line in lines}
