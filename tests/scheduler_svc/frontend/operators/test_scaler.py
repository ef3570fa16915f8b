"""KEDA's ExternalScaler, the core played by the test."""

import grpc
import pytest

from scheduler_svc.frontend.operators import scaler
from scheduler_svc.frontend.serving import UNSERVED_INTERVAL_S
from scheduler_svc.ipc.snapshot import Demand, encode_json
from tandem.errors import HandedOver
from tandem.inference.v1 import inference_service_pb2
from tandem.inference.v1.inference_service_pb2_grpc import InferenceServiceStub
from tandem.keda.v1 import external_scaler_service_pb2 as pb
from tandem.keda.v1.external_scaler_service_pb2_grpc import ExternalScalerStub
from tests.scheduler_svc.frontend.calls import error_of
from tests.scheduler_svc.frontend.fake_core import model, running_frontend, serve, until, within

IDLE = {"waiting_requests": 0, "running_requests": 0, "queued_tokens": 0, "unserved_age_s": None}
BUSY = {"waiting_requests": 7, "running_requests": 30, "queued_tokens": 900, "unserved_age_s": 1.5}


@pytest.fixture
async def keda(frontend):
    async with grpc.aio.insecure_channel(frontend.servers.admin_address) as channel:
        yield ExternalScalerStub(channel)


def tell(frontend, **demand):
    """Have the core answer with this demand from now on."""
    frontend.core.answers["demand"] = lambda _: encode_json(Demand(**(IDLE | demand)))


def of(**metadata: str) -> pb.ScaledObjectRef:
    return pb.ScaledObjectRef(name="executors", namespace="serving", scalerMetadata=metadata)


class TestMetrics:
    @pytest.mark.parametrize(
        ("metadata", "spec", "value"),
        [
            ({}, ("queued_requests", 16, 16), 7),
            ({"metric": "queued_requests", "target": "4"}, ("queued_requests", 4, 4), 7),
            ({"metric": "queued_tokens"}, ("queued_tokens", 32_768, 32_768), 900),
            ({"metric": "live_requests", "target": "2.5"}, ("live_requests", 2.5, 3), 37),
            ({"target": "0.001"}, ("queued_requests", 0.001, 1), 7),
            ({"scalerAddress": "x:1", "enableTLS": "true"}, ("queued_requests", 16, 16), 7),
            ({"caCertFromEnv": "CA"}, ("queued_requests", 16, 16), 7),
        ],
    )
    async def test_trigger_names_metric_and_target(self, frontend, keda, metadata, spec, value):
        """
        GetMetricSpec has the trigger's metric and target, GetMetrics how much there is of it; keys
        of KEDA are no one's fault.
        """
        tell(frontend, **BUSY)
        found = (await within(keda.GetMetricSpec(of(**metadata)))).metricSpecs
        assert [spec] == [(one.metricName, one.targetSizeFloat, one.targetSize) for one in found]
        asked = pb.GetMetricsRequest(scaledObjectRef=of(**metadata), metricName=spec[0])
        found = (await within(keda.GetMetrics(asked))).metricValues
        assert [(spec[0], value, value)] == [
            (one.metricName, one.metricValue, one.metricValueFloat) for one in found
        ]

    async def test_metric_of_another_trigger_is_told(self, frontend, keda):
        """
        GetMetrics tells the metric that it is asked for, and that of the trigger if it names none.
        """
        tell(frontend, **BUSY)
        for name, value in (("queued_tokens", 900), ("", 7)):
            asked = pb.GetMetricsRequest(scaledObjectRef=of(), metricName=name)
            found = await within(keda.GetMetrics(asked))
            assert value == found.metricValues[0].metricValue

    @pytest.mark.parametrize(
        ("metadata", "field"),
        [
            ({"metric": "tokens"}, "metric"),
            ({"target": ""}, "target"),
            ({"target": "0"}, "target"),
            ({"target": "0.0009"}, "target"),
            ({"target": "-3"}, "target"),
            ({"target": "nan"}, "target"),
            ({"target": "inf"}, "target"),
            ({"target": "1e10"}, "target"),
            ({"target": "many"}, "target"),
            ({"tagret": "4"}, "tagret"),
            ({"Metric": "queued_tokens"}, "Metric"),
        ],
    )
    async def test_senseless_metadata_are_refused(self, frontend, keda, metadata, field):
        """
        Every rpc refuses a value that it cannot use and a key that looks misspelt, with its path.
        """
        tell(frontend)
        path = f"scalerMetadata.{field}"
        calls = {
            path: [keda.IsActive(of(**metadata)), keda.StreamIsActive(of(**metadata))],
            f"scaledObjectRef.{path}": [
                keda.GetMetrics(pb.GetMetricsRequest(scaledObjectRef=of(**metadata)))
            ],
        }
        calls[path].append(keda.GetMetricSpec(of(**metadata)))
        for where, some in calls.items():
            for call in some:
                error = await error_of(call)
                assert ("INVALID_ARGUMENT", "INVALID_PARAMETER", where) == (
                    error.code,
                    error.reason,
                    error.field,
                )

    async def test_unknown_metric_of_a_call_is_refused(self, frontend, keda):
        """
        GetMetrics refuses a metric that no trigger can name.
        """
        asked = pb.GetMetricsRequest(scaledObjectRef=of(), metricName="s0-queued_requests")
        error = await error_of(keda.GetMetrics(asked))
        assert ("INVALID_PARAMETER", "metricName") == (error.reason, error.field)


class TestActivity:
    @pytest.mark.parametrize(
        ("demand", "active"),
        [
            ({}, False),
            ({"waiting_requests": 1}, True),
            ({"running_requests": 1}, True),
            ({"unserved_age_s": scaler.UNSERVED_FOR_S - 1}, True),
            ({"unserved_age_s": scaler.UNSERVED_FOR_S}, False),
        ],
    )
    async def test_work_makes_it_active(self, frontend, keda, demand, active):
        """
        It is active while anything waits or runs, and for a while after a request that found no
        executor.
        """
        tell(frontend, **demand)
        assert active is (await within(keda.IsActive(of()))).result

    async def test_stream_tells_each_change_once(self, frontend, keda, monkeypatch):
        """
        StreamIsActive sends the state at once, and then only changes.
        """
        monkeypatch.setattr(scaler, "POLL_INTERVAL_S", 0.005)
        looks = []
        answers = {False: encode_json(Demand(**IDLE)), True: encode_json(Demand(**BUSY))}
        active = False

        def answer(_):
            looks.append(active)
            return answers[active]

        frontend.core.answers["demand"] = answer
        call = keda.StreamIsActive(of())
        for _ in range(3):
            assert active is (await within(call.read())).result
            num_looks = len(looks)
            await until(lambda num_looks=num_looks: len(looks) > num_looks + 3)
            active = not active
        call.cancel()

    async def test_late_core_ends_no_stream(self, tmp_path, monkeypatch):
        """
        A stream goes on, and sends what has changed, once the core answers again.
        """
        monkeypatch.setattr(scaler, "POLL_INTERVAL_S", 0.005)
        is_late = num_unanswered = 0

        def answer(_):
            nonlocal num_unanswered
            num_unanswered += is_late
            return None if is_late else encode_json(Demand(**IDLE))

        async with running_frontend(tmp_path, query_timeout_s=0.05) as frontend:
            frontend.core.answers["demand"] = answer
            async with grpc.aio.insecure_channel(frontend.servers.admin_address) as channel:
                call = ExternalScalerStub(channel).StreamIsActive(of())
                assert not (await within(call.read())).result
                is_late = 1
                await until(lambda: num_unanswered >= 2)
                tell(frontend, **BUSY)
                assert (await within(call.read())).result
                call.cancel()

    async def test_stream_just_ends_with_the_scheduler(self, frontend, keda, monkeypatch):
        """
        A scheduler that stops ends a stream without an error, so that KEDA soon opens another one.
        """
        monkeypatch.setattr(scaler, "POLL_INTERVAL_S", 0.005)
        tell(frontend, **BUSY)
        call = keda.StreamIsActive(of())
        assert (await within(call.read())).result
        frontend.client.lose(HandedOver("the scheduler is stopping"))
        assert (await within(call.read())) is grpc.aio.EOF
        assert grpc.StatusCode.OK is await within(call.code())

    async def test_streams_share_looks_at_the_core(self, frontend, keda):
        """
        Many streams that open together ask the core once; one too many is refused, and a place is
        free again when a stream ends.
        """
        looks = []

        def answer(_):
            looks.append(None)
            return encode_json(Demand(**IDLE))

        frontend.core.answers["demand"] = answer
        calls = [keda.StreamIsActive(of()) for _ in range(scaler.MAX_STREAMS)]
        for call in calls:
            assert not (await within(call.read())).result
        assert len(looks) < scaler.MAX_STREAMS / 4
        error = await error_of(keda.StreamIsActive(of()))
        assert ("RESOURCE_EXHAUSTED", "QUEUE_FULL") == (error.code, error.reason)
        for call in calls:
            call.cancel()

        async def is_free() -> bool:
            call = keda.StreamIsActive(of())
            try:
                return not (await within(call.read())).result
            except grpc.aio.AioRpcError:
                return False
            finally:
                call.cancel()

        while not await is_free():
            pass

    async def test_request_without_executor_is_told_to_the_core(self, tmp_path, model_dir):
        """
        The core learns of a request that the frontend refuses because no model is known, and of
        none once there is one.
        """
        told = []

        def note(_):
            told.append(None)
            return b"{}"

        async with running_frontend(tmp_path) as frontend:
            frontend.core.answers["unserved"] = note
            stub = InferenceServiceStub(frontend.channel)
            request = inference_service_pb2.GenerateRequest(text="x")
            error = await error_of(stub.Generate(request))
            assert "NO_EXECUTOR" == error.reason
            await until(lambda: len(told) == 1)
            frontend.clock.lead_s += UNSERVED_INTERVAL_S
            await error_of(stub.Generate(request))
            await until(lambda: len(told) == 2)
            await serve(frontend, model(model_dir))
            call = stub.Generate(request)
            await frontend.core.accept()
            call.cancel()
        assert 2 == len(told)

    async def test_many_requests_without_executor_are_told_once(self, tmp_path):
        """
        The core learns at most once a second that requests find no executor.
        """
        told = []

        def note(_):
            told.append(None)
            return b"{}"

        async with running_frontend(tmp_path) as frontend:
            began_s = frontend.clock()
            frontend.core.answers["unserved"] = note
            stub = InferenceServiceStub(frontend.channel)
            for _ in range(9):
                await error_of(stub.Generate(inference_service_pb2.GenerateRequest(text="x")))
            # A query that is answered shows that the core has read those that came before.
            await within(frontend.client.query("stats"))
            num_whole = int((frontend.clock() - began_s) / UNSERVED_INTERVAL_S)
        assert 1 <= len(told) <= 1 + num_whole


class TestContract:
    def test_bytes_are_those_of_keda(self):
        """
        Names and numbers are KEDA's: its messages have these bytes.
        """
        ref = of(metric="queued_tokens")
        raw = b"\x0a\x09executors\x12\x07serving\x1a\x17\x0a\x06metric\x12\x0dqueued_tokens"
        assert raw == ref.SerializeToString()
        assert b"\x08\x01" == pb.IsActiveResponse(result=True).SerializeToString()
        spec = pb.MetricSpec(metricName="m", targetSize=3, targetSizeFloat=2.5)
        assert b"\x0a\x01m\x10\x03\x19\0\0\0\0\0\0\x04\x40" == spec.SerializeToString()
        specs = pb.GetMetricSpecResponse(metricSpecs=[spec])
        assert b"\x0a\x0e" + spec.SerializeToString() == specs.SerializeToString()
        asked = pb.GetMetricsRequest(scaledObjectRef=pb.ScaledObjectRef(name="n"), metricName="m")
        assert b"\x0a\x03\x0a\x01n\x12\x01m" == asked.SerializeToString()
        value = pb.MetricValue(metricName="m", metricValue=3, metricValueFloat=2.5)
        assert b"\x0a\x01m\x10\x03\x19\0\0\0\0\0\0\x04\x40" == value.SerializeToString()
        values = pb.GetMetricsResponse(metricValues=[value])
        assert b"\x0a\x0e" + value.SerializeToString() == values.SerializeToString()
        service = pb.DESCRIPTOR.services_by_name["ExternalScaler"]
        assert "externalscaler.ExternalScaler" == service.full_name
        assert {"IsActive", "StreamIsActive", "GetMetricSpec", "GetMetrics"} == {
            method.name for method in service.methods
        }
