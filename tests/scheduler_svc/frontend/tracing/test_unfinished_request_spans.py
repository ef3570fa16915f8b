"""Spans of requests that are refused, fail, are given up or live through a loss."""

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from scheduler_svc.core.request.events import ProgressKind
from scheduler_svc.ipc.messages import Accepted, Availability
from tandem.errors import ExecutorLost
from tandem.inference.v1 import inference_service_pb2 as pb
from tests.otlp_collector import values_of
from tests.scheduler_svc.frontend.calls import error_of, rest_of, stub_of
from tests.scheduler_svc.frontend.fake_core import (
    ended,
    update,
    within,
)
from tests.scheduler_svc.frontend.tracing.traced_frontend import (
    MAX_TOKENS,
    METADATA,
    REQUEST,
    names,
    progress,
    traced,
)


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
