"""Spans of requests that finish, the core played by the test and the collector a real one of OTLP."""

import time

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from tandem.inference.v1 import inference_service_pb2 as pb
from tests.otlp_collector import PARENT, TRACE, UNSAMPLED, values_of
from tests.scheduler_svc.frontend.calls import rest_of, stub_of
from tests.scheduler_svc.frontend.fake_core import (
    within,
)
from tests.scheduler_svc.frontend.tracing.traced_frontend import (
    METADATA,
    REQUEST,
    SERVICE,
    finish,
    names,
    seconds,
    traced,
)


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
