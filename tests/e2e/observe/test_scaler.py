"""KEDA's client of the scheduler's ExternalScaler, from no executor to a full queue and back."""

from __future__ import annotations

import contextlib

import grpc
import pytest

from tandem.errors import NoExecutor
from tandem.keda.v1 import external_scaler_service_pb2 as pb
from tandem.keda.v1.external_scaler_service_pb2_grpc import ExternalScalerStub
from tests.e2e.cluster import Cluster, wait_idle
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

LIMITS = ["--max-num-blocks=64", "--max-model-len=512", "--max-batch-size=2"]
LONG = {"max_tokens": 100, "ignore_eos": True}
PROMPT = [5 + i for i in range(20)]


def of(metric: str) -> pb.ScaledObjectRef:
    metadata = {"scalerAddress": "scheduler:50052", "metric": metric, "target": "2"}
    return pb.ScaledObjectRef(name="executors", namespace="serving", scalerMetadata=metadata)


def value(keda: ExternalScalerStub, metric: str) -> int:
    """Return how much there is of a metric, asked as KEDA asks."""
    spec = keda.GetMetricSpec(of(metric)).metricSpecs[0]
    assert (metric, 2) == (spec.metricName, spec.targetSizeFloat)
    asked = pb.GetMetricsRequest(scaledObjectRef=of(metric), metricName=spec.metricName)
    return keda.GetMetrics(asked).metricValues[0].metricValue


@pytest.fixture
def cluster(tiny_model, tmp_path):
    """Yield a scheduler that no executor was ever attached to."""
    cluster = Cluster(tiny_model, tmp_path, LIMITS, ["--max-num-seqs=16"])
    try:
        yield cluster
    finally:
        cluster.close()


def test_scaler_follows_the_queue_of_a_running_scheduler(cluster):
    """
    Without an executor a request is refused and makes the scaler active; with one that is held the
    metrics are what waits and runs; once all is done there is nothing to scale for.
    """
    channel = grpc.insecure_channel(cluster.admin_address)
    with channel, cluster.client() as client, contextlib.ExitStack() as streams:
        keda = ExternalScalerStub(channel)
        pushed = iter(keda.StreamIsActive(of("queued_requests")))
        assert not next(pushed).result
        assert not keda.IsActive(of("queued_requests")).result
        with pytest.raises(NoExecutor):
            client.complete(token_ids=PROMPT, max_tokens=1)
        wait_until(lambda: keda.IsActive(of("queued_requests")).result, "the refusal to count")
        assert next(pushed).result
        assert 0 == value(keda, "queued_requests")

        cluster.start_executor()
        with cluster.held():
            opened = [
                streams.enter_context(client.generate(token_ids=[n, *PROMPT], **LONG))
                for n in range(7)
            ]
            for stream in opened:
                next(stream)  # a stream's call begins when it is read
            wait_until(lambda: cluster.stats().steps_in_flight, "a step that is held")
            queued = value(keda, "queued_requests")
            stats = cluster.stats()
            assert (queued, 7) == (stats.waiting_requests, value(keda, "live_requests"))
            assert queued >= 5  # two run at a time
            assert stats.queued_tokens == value(keda, "queued_tokens") >= 5 * len(PROMPT)
            assert keda.IsActive(of("queued_requests")).result
        for stream in opened:
            for _ in stream:
                pass
        wait_idle(cluster.stats)
        metrics = ("queued_requests", "queued_tokens", "live_requests")
        assert dict.fromkeys(metrics, 0) == {name: value(keda, name) for name in metrics}
