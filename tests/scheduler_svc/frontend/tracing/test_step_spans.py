"""Spans of steps, and how they are tied to those of the requests that they compute."""

import pytest

from scheduler_svc.ipc.messages import Accepted
from tandem.inference.v1 import inference_service_pb2 as pb
from tests.otlp_collector import TRACE, values_of
from tests.scheduler_svc.frontend.calls import rest_of, stub_of
from tests.scheduler_svc.frontend.fake_core import (
    ended,
    model,
    running_frontend,
    serve,
    step_span,
    update,
    within,
)
from tests.scheduler_svc.frontend.tracing.traced_frontend import (
    MAX_TOKENS,
    METADATA,
    REQUEST,
    seconds,
    traced,
)


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
