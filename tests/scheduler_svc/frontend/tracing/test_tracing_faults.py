"""Faults of tracing, and what it leaves behind."""

import gc

import pytest
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from structlog.testing import capture_logs

from scheduler_svc.core.request.events import ProgressKind
from scheduler_svc.frontend.tracing import request_spans
from scheduler_svc.frontend.tracing.exporting import SpanCounts
from scheduler_svc.frontend.tracing.request_spans import RequestTrace, RequestTracer
from scheduler_svc.ipc.messages import Accepted
from tandem.inference.v1 import inference_service_pb2 as pb
from tests.scheduler_svc.frontend.calls import error_of, rest_of, stub_of
from tests.scheduler_svc.frontend.fake_core import (
    ended,
    until,
    update,
    within,
)
from tests.scheduler_svc.frontend.tracing.traced_frontend import (
    MAX_TOKENS,
    METADATA,
    REQUEST,
    finish,
    progress,
    traced,
)


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
                await until(lambda: len(frontend.client.streams) == 0)
                await until(lambda: not traces())
            finally:
                gc.enable()
