"""Spans of requests, the core played by the test and the collector a real one of OTLP."""

import gc
import time
from contextlib import asynccontextmanager

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from structlog.testing import capture_logs

from scheduler_svc.core.request.events import ProgressKind
from scheduler_svc.core.request.request import FinishReason
from scheduler_svc.frontend.tracing import request_spans
from scheduler_svc.frontend.tracing.exporting import SpanCounts
from scheduler_svc.frontend.tracing.request_spans import RequestTrace, RequestTracer
from scheduler_svc.ipc.messages import Accepted, Availability, StreamProgress
from tandem.errors import ExecutorLost
from tandem.inference.v1 import inference_service_pb2 as pb
from tests.otlp_collector import PARENT, TRACE, TRACEPARENT, UNSAMPLED, running_collector, values_of
from tests.scheduler_svc.frontend.calls import error_of, rest_of, stub_of
from tests.scheduler_svc.frontend.fake_core import (
    ended,
    model,
    running_frontend,
    serve,
    step_span,
    until,
    update,
    within,
)

METADATA = (("traceparent", TRACEPARENT), ("tracestate", "vendor=x"))
REQUEST = {"text": "hello", "sampling": {"seed": 2**64 - 1, "temperature": 0.5}}
SERVICE = "tandem.inference.v1.InferenceService"
MAX_TOKENS = int(FinishReason.MAX_TOKENS)


@pytest.fixture
def collector():
    with running_collector() as running:
        yield running


@asynccontextmanager
async def traced(directory, model_dir, collector):
    """Yield a frontend whose spans go to the collector, where all are once the block ends."""
    async with running_frontend(directory, tracing=collector.url) as frontend:
        await serve(frontend, model(model_dir))
        yield frontend


async def finish(core, *, num_tokens: int = 2) -> None:
    """Accept the next request, and send tokens and an end to each of its choices."""
    submit = await within(core.submits.get())
    await core.send(Accepted(submit.stream_id))
    for stream_id in range(submit.stream_id, submit.stream_id + submit.num_choices):
        end = ended(stream_id, MAX_TOKENS, num_tokens)
        await core.send(update(stream_id, 0, [40] * num_tokens, end=end))


async def progress(core, submit, kind: ProgressKind, value: int) -> None:
    news = StreamProgress(submit.stream_id, int(kind), value)
    await core.send(update(submit.stream_id, 0, [], progress=news))


def seconds(span: Span) -> float:
    return (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9


def names(spans: list[Span]) -> list[str]:
    return [span.name for span in spans]


class TestFinished:
    async def test_request_has_a_span_within_the_clients(self, tmp_path, model_dir, collector):
        """
        The span of a request is a child of the client's and has what the conventions name, without
        any text.
        """
        before_ns = time.time_ns()
        async with traced(tmp_path, model_dir, collector) as frontend:
            request = pb.GenerateRequest(**REQUEST, request_id="r-1", tenant="acme")
            request.stopping.max_tokens = 2
            call = stub_of(frontend).Generate(request, metadata=METADATA)
            await finish(frontend.core)
            await rest_of(call)
        (span,) = collector.requests()
        assert (TRACE, PARENT) == (span.trace_id.hex(), span.parent_span_id.hex())
        assert ("text_completion small", "vendor=x") == (span.name, span.trace_state)
        assert Status.STATUS_CODE_UNSET == span.status.code
        assert before_ns <= span.start_time_unix_nano <= time.time_ns()
        expected = {
            "gen_ai.operation.name": "text_completion",
            "gen_ai.provider.name": "tandem",
            "gen_ai.request.model": "small",
            "gen_ai.response.model": "small",
            "gen_ai.response.id": "r-1",
            "gen_ai.request.max_tokens": 2,
            "gen_ai.request.temperature": 0.5,
            "gen_ai.request.seed": str(2**64 - 1),
            "gen_ai.usage.input_tokens": 3,
            "gen_ai.usage.output_tokens": 2,
            "gen_ai.usage.cache_read.input_tokens": 2,
            "gen_ai.response.finish_reasons": ("MAX_TOKENS",),
            "gen_ai.response.time_to_first_chunk": 0.5,
            "rpc.system.name": "grpc",
            "rpc.method": f"{SERVICE}/Generate",
            "tandem.tenant": "acme",
            "tandem.preemptions": 1,
        }
        found = values_of(span.attributes)
        assert expected == {name: found.get(name) for name in expected}
        assert "hello" not in str(span)
        resource = collector.resources[0]
        assert ("tandem-scheduler", "test") == (
            resource["service.name"],
            resource["service.instance.id"],
        )

    async def test_phases_follow_one_another(self, tmp_path, model_dir, collector):
        """
        Queue, prefill and decode are children of the request's span, one after the other, by the
        core's times.
        """
        async with traced(tmp_path, model_dir, collector) as frontend:
            call = stub_of(frontend).Generate(pb.GenerateRequest(**REQUEST), metadata=METADATA)
            await finish(frontend.core)
            await rest_of(call)
        (span,) = collector.requests()
        phases = collector.children(span)
        queue, prefill, decode = phases
        assert ["queue", "prefill", "decode"] == names(phases)
        assert {TRACE} == {one.trace_id.hex() for one in phases}
        assert span.start_time_unix_nano == queue.start_time_unix_nano
        assert queue.end_time_unix_nano == prefill.start_time_unix_nano
        assert prefill.end_time_unix_nano == decode.start_time_unix_nano
        assert [0.25, 0.25, 1.0] == pytest.approx(
            [seconds(one) for one in phases],
            abs=1e-6,  # whole nanoseconds
        )
        assert 2 == values_of(prefill.attributes)["gen_ai.usage.cache_read.input_tokens"]
        assert 2 == values_of(decode.attributes)["gen_ai.usage.output_tokens"]

    @pytest.mark.parametrize("rpc", ["Complete", "GenerateBatch"])
    async def test_other_rpcs_are_traced_too(self, tmp_path, model_dir, collector, rpc):
        """
        A request of Complete has a span, and so has each item of a batch, within the call's parent.
        """
        requests = [pb.GenerateRequest(**REQUEST) for _ in range(1 if rpc == "Complete" else 3)]
        async with traced(tmp_path, model_dir, collector) as frontend:
            stub = stub_of(frontend)
            if rpc == "Complete":
                call = stub.Complete(pb.CompleteRequest(request=requests[0]), metadata=METADATA)
            else:
                items = [pb.BatchItem(item=at + 1, request=one) for at, one in enumerate(requests)]
                adds = [pb.GenerateBatchRequest(add=items)]
                call = stub.GenerateBatch(iter(adds), metadata=METADATA)
            for _ in requests:
                await finish(frontend.core)
            await (within(call) if rpc == "Complete" else rest_of(call))
        spans = collector.requests()
        assert [(f"{SERVICE}/{rpc}", TRACE, PARENT)] * len(requests) == [
            (
                values_of(span.attributes)["rpc.method"],
                span.trace_id.hex(),
                span.parent_span_id.hex(),
            )
            for span in spans
        ]
        assert [3] * len(requests) == [len(collector.children(span)) for span in spans]

    async def test_choices_have_phases_of_their_own(self, tmp_path, model_dir, collector):
        """
        Of many choices the first ones have spans of their phases, and all count in the request's.
        """
        async with traced(tmp_path, model_dir, collector) as frontend:
            call = stub_of(frontend).Generate(pb.GenerateRequest(**REQUEST, n=10))
            await finish(frontend.core)
            await rest_of(call)
        (span,) = collector.requests()
        values = values_of(span.attributes)
        assert (10, 20) == (
            values["gen_ai.request.choice.count"],
            values["gen_ai.usage.output_tokens"],
        )
        children = [values_of(one.attributes)["tandem.choice"] for one in collector.children(span)]
        assert sorted([*range(8)] * 3) == sorted(children)

    async def test_call_without_parent_begins_a_trace(self, tmp_path, model_dir, collector):
        """
        A call without `traceparent`, or with one that is none, has a trace of its own.
        """
        async with traced(tmp_path, model_dir, collector) as frontend:
            for metadata in ((), (("traceparent", "00-what-01"),)):
                call = stub_of(frontend).Generate(pb.GenerateRequest(**REQUEST), metadata=metadata)
                await finish(frontend.core)
                await rest_of(call)
        one, other = collector.requests()
        assert (b"", b"") == (one.parent_span_id, other.parent_span_id)
        assert 2 == len({one.trace_id, other.trace_id})

    async def test_client_decides_what_is_sampled(self, tmp_path, model_dir, collector):
        """
        A call whose parent is not sampled has no span.
        """
        async with traced(tmp_path, model_dir, collector) as frontend:
            metadata = (("traceparent", UNSAMPLED),)
            call = stub_of(frontend).Generate(pb.GenerateRequest(**REQUEST), metadata=metadata)
            await finish(frontend.core)
            await rest_of(call)
        assert [] == collector.spans()


class TestSteps:
    async def test_step_has_links_to_the_spans_of_its_requests(
        self, tmp_path, model_dir, collector, monkeypatch
    ):
        """
        A step that the core tells has a span in a trace of its own, linked to the span that its
        request has, although the sampler took no trace that begins here.
        """
        monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
        async with traced(tmp_path, model_dir, collector) as frontend:
            call = stub_of(frontend).Generate(pb.GenerateRequest(**REQUEST), metadata=METADATA)
            submit = await within(frontend.core.submits.get())
            await frontend.core.send(Accepted(submit.stream_id))
            await frontend.core.send(step_span(((submit.trace_id, submit.span_id),)))
            end = ended(submit.stream_id, MAX_TOKENS, 1)
            await frontend.core.send(update(submit.stream_id, 0, [40], end=end))
            await rest_of(call)
        (request,) = collector.requests()
        (step,) = collector.spans(lambda span: span.name == "step")
        assert TRACE == submit.trace_id
        assert [(request.trace_id, request.span_id)] == [
            (link.trace_id, link.span_id) for link in step.links
        ]
        assert b"" == step.parent_span_id
        assert step.trace_id != request.trace_id
        assert 0.25 == pytest.approx(
            seconds(step),
            abs=1e-6,  # whole nanoseconds, of a clock that counts in seconds
        )
        expected = {
            "tandem.step.id": 41,
            "tandem.session_epoch": 3,
            "tandem.executor.address": "10.0.0.7:50061",
            "tandem.step.prefill_rows": 1,
            "tandem.step.mode": "eager",
            "tandem.step.compute_s": 0.002,
            "tandem.step.requests_left_out": 5,
        }
        found = values_of(step.attributes)
        assert expected == {name: found.get(name) for name in expected}

    async def test_trace_goes_to_the_core_without_a_collector(self, tmp_path, model_dir):
        """
        Where no spans are made, the core is told the trace of the call, and no span.
        """
        async with running_frontend(tmp_path) as frontend:
            await serve(frontend, model(model_dir))
            call = stub_of(frontend).Generate(pb.GenerateRequest(**REQUEST), metadata=METADATA)
            submit = await within(frontend.core.submits.get())
            call.cancel()
        assert (TRACE, "") == (submit.trace_id, submit.span_id)


class TestNotFinished:
    async def test_refusal_is_an_error_without_phases(self, tmp_path, model_dir, collector):
        """
        A request that is refused has its reason, and no time in a queue where it never was in one.
        """
        async with traced(tmp_path, model_dir, collector) as frontend:
            request = pb.GenerateRequest(text="x", sampling={"temperature": 9.0})
            await error_of(stub_of(frontend).Generate(request, metadata=METADATA))
        (span,) = collector.requests()
        values = values_of(span.attributes)
        assert ("INVALID_PARAMETER", "INVALID_ARGUMENT") == (
            values["error.type"],
            values["rpc.response.status_code"],
        )
        assert Status.STATUS_CODE_ERROR == span.status.code
        assert "INVALID_PARAMETER: sampling.temperature" == span.status.message
        assert [] == collector.children(span)

    async def test_status_quotes_no_prompt(self, tmp_path, model_dir, collector):
        """
        A refusal whose message quotes the prompt tells the span its reason and field alone.
        """
        async with traced(tmp_path, model_dir, collector) as frontend:
            request = pb.GenerateRequest(token_ids={"ids": [5, 123_456_789]})
            error = await error_of(stub_of(frontend).Generate(request, metadata=METADATA))
        (span,) = collector.requests()
        assert "123456789" in error.message.replace(",", "")
        assert f"{error.reason}: {error.field}" == span.status.message
        assert "123456789" not in str(span)

    @pytest.mark.parametrize("rpc", ["Generate", "GenerateBatch"])
    async def test_failure_keeps_the_phases_that_were_seen(
        self, tmp_path, model_dir, collector, rpc
    ):
        """
        A request that fails has its reason, and the phases that its progress told, the last of them
        up to its end.
        """
        async with traced(tmp_path, model_dir, collector) as frontend:
            stub, core = stub_of(frontend), frontend.core
            request = pb.GenerateRequest(**REQUEST)
            if rpc == "Generate":
                call = stub.Generate(request, metadata=METADATA)
            else:
                adds = [pb.GenerateBatchRequest(add=[pb.BatchItem(item=1, request=request)])]
                call = stub.GenerateBatch(iter(adds), metadata=METADATA)
            submit = await within(core.submits.get())
            await core.send(Accepted(submit.stream_id))
            await progress(core, submit, ProgressKind.SCHEDULED, 0)
            await progress(core, submit, ProgressKind.PREFILLED, len(submit.prompt) // 4)
            await core.send(update(submit.stream_id, 0, [40], failure=ExecutorLost("it is gone")))
            if rpc == "Generate":
                assert "EXECUTOR_LOST" == (await error_of(call)).reason
            else:
                await rest_of(call)
        (span,) = collector.requests()
        assert "EXECUTOR_LOST" == values_of(span.attributes)["error.type"]
        status = (Status.STATUS_CODE_ERROR, "EXECUTOR_LOST")
        assert status == (span.status.code, span.status.message)
        phases = collector.children(span)
        assert {"queue", "prefill", "decode"} == set(names(phases))
        assert 3 == len(phases)
        assert span.end_time_unix_nano == max(one.end_time_unix_nano for one in phases)

    async def test_client_that_leaves_is_no_error(self, tmp_path, model_dir, collector):
        """
        A request whose client left has the status of its call, and the time that it waited.
        """
        async with traced(tmp_path, model_dir, collector) as frontend:
            call = stub_of(frontend).Generate(pb.GenerateRequest(**REQUEST), metadata=METADATA)
            await frontend.core.accept()
            await within(call.read())
            call.cancel()
            await within(frontend.core.ends.get())
        (span,) = collector.requests()
        assert "CANCELLED" == values_of(span.attributes)["rpc.response.status_code"]
        assert Status.STATUS_CODE_UNSET == span.status.code
        assert ["queue"] == names(collector.children(span))

    async def test_recovery_is_told_by_events(self, tmp_path, model_dir, collector):
        """
        A request that lived through the loss of an executor is one span, with an event for the
        loss, for the return, and for its second start.
        """
        why = "the executor is lost"
        async with traced(tmp_path, model_dir, collector) as frontend:
            core = frontend.core
            call = stub_of(frontend).Generate(pb.GenerateRequest(**REQUEST), metadata=METADATA)
            submit = await within(core.submits.get())
            await core.send(Accepted(submit.stream_id))
            await progress(core, submit, ProgressKind.SCHEDULED, 0)
            await core.send(
                Availability(executor_attached=False, ready=False, draining=False, blocked_by=why)
            )
            await core.send(Availability(executor_attached=True, ready=True, draining=False))
            await progress(core, submit, ProgressKind.SCHEDULED, 3)
            end = ended(submit.stream_id, MAX_TOKENS, 2)
            await core.send(update(submit.stream_id, 0, [40, 41], end=end))
            await rest_of(call)
        (span,) = collector.requests()
        assert [
            ("tandem.executor.lost", {"tandem.blocked_by": why}),
            ("tandem.executor.attached", {}),
            ("tandem.rescheduled", {"tandem.choice": 0, "tandem.cached_tokens": 3}),
        ] == [(event.name, values_of(event.attributes)) for event in span.events]
        assert 3 == len(collector.children(span))


class TestFaults:
    @pytest.mark.parametrize(
        "broken",
        [
            (TraceContextTextMapPropagator, "extract"),
            (RequestTrace, "_note_started"),
            (RequestTrace, "_note_progress"),
            (RequestTracer, "_note_ends"),
            (RequestTracer, "_add_phases"),
            (SpanCounts, "take"),
        ],
    )
    async def test_fault_of_tracing_ends_no_request(
        self, tmp_path, model_dir, collector, monkeypatch, broken
    ):
        """
        Requests are served although tracing fails wherever it can, and the log tells of it once; a
        span that began ends.
        """

        def fail(*_args, **_kwargs):
            raise ZeroDivisionError("a bug")

        monkeypatch.setattr(*broken, fail)
        with capture_logs() as lines:
            async with traced(tmp_path, model_dir, collector) as frontend:
                for _ in range(2):
                    request = pb.GenerateRequest(**REQUEST)
                    call = stub_of(frontend).Generate(request, metadata=METADATA)
                    submit = await within(frontend.core.submits.get())
                    await frontend.core.send(Accepted(submit.stream_id))
                    await progress(frontend.core, submit, ProgressKind.SCHEDULED, 0)
                    end = ended(submit.stream_id, MAX_TOKENS, 1)
                    await frontend.core.send(update(submit.stream_id, 0, [40], end=end))
                    assert await rest_of(call)
        assert ["span_broken"] == [line["event"] for line in lines if line["log_level"] == "error"]
        has_spans = broken[1] not in {"extract", "take"}
        assert (2 if has_spans else 0) == len(collector.requests())

    async def test_error_of_a_request_outlives_a_fault(
        self, tmp_path, model_dir, collector, monkeypatch
    ):
        """
        A client gets the error of its request although tracing fails at the same time.
        """
        monkeypatch.setattr(request_spans, "_note_failure", None)
        monkeypatch.setattr(request_spans, "_usage", None)
        async with traced(tmp_path, model_dir, collector) as frontend:
            request = pb.GenerateRequest(text="x", sampling={"temperature": 9.0})
            error = await error_of(stub_of(frontend).Generate(request, metadata=METADATA))
        assert "INVALID_PARAMETER" == error.reason
        assert 1 == len(collector.requests())


class TestMemory:
    async def test_request_that_is_over_leaves_no_trace_behind(
        self, tmp_path, model_dir, collector
    ):
        """
        The trace of a request goes with it, without the collector of cycles.
        """

        def traces() -> int:
            return sum(type(one) is RequestTrace for one in gc.get_objects())

        async with traced(tmp_path, model_dir, collector) as frontend:
            gc.collect()
            gc.disable()
            try:
                call = stub_of(frontend).Generate(pb.GenerateRequest(**REQUEST), metadata=METADATA)
                await finish(frontend.core)
                await rest_of(call)
                del call
                await until(lambda: frontend.client.num_streams == 0)
                await until(lambda: not traces())
            finally:
                gc.enable()
