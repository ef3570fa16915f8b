"""KEDA's ExternalScaler: how many executors the requests of this scheduler need."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import grpc

from scheduler_svc.frontend.calls.rpc_handlers import write
from scheduler_svc.frontend.core_client import CoreClient
from scheduler_svc.ipc.snapshot import Demand, decode_demand
from tandem.errors import CoreTimeout, HandedOver, InvalidParameter, QueueFull
from tandem.keda.v1 import external_scaler_service_pb2 as pb
from tandem.keda.v1 import external_scaler_service_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]

POLL_INTERVAL_S = 1.0
"""Seconds between two looks at the core for streams; all streams of a process share them."""
UNSERVED_FOR_S = 60.0
"""
Seconds for which a request counts that was refused since no executor was there: twice the default
`pollingInterval` of KEDA, so that a scaler that is only polled sees it.
"""
MAX_STREAMS = 64
"""Most streams of a process at a time; KEDA opens one for each trigger."""
MIN_TARGET, MAX_TARGET = 0.001, 1e9
"""Bounds of a target; a smaller one is 0 in Kubernetes, which counts thousandths."""
MAX_SHOWN_CHARS = 100
"""Most characters of a wrong value that its error repeats."""


@dataclass(frozen=True, slots=True)
class _Metric:
    """
    A metric that triggers may name.

    Attributes:
        default_target: How much of it one executor should have unless the trigger says so.
        value: Returns how much there is.
    """

    default_target: float
    value: Callable[[Demand], int]


METRICS = {
    "queued_requests": _Metric(16, lambda demand: demand.waiting_requests),
    "queued_tokens": _Metric(32_768, lambda demand: demand.queued_tokens),
    "live_requests": _Metric(24, lambda demand: demand.waiting_requests + demand.running_requests),
}
"""Metrics by name; the first is the default."""

_OWN_KEYS = ("metric", "target")
_KEYS_OF_KEDA = frozenset({"scalerAddress", "enableTLS", "unsafeSsl", "tlsCertFile"})


@dataclass(frozen=True, slots=True)
class Trigger:
    """Meaning of a trigger's metadata: a name of `METRICS`, and its target."""

    metric: str
    target: float

    @classmethod
    def read(cls, metadata: Mapping[str, str], path: str) -> Trigger:
        """
        Read the metadata of a trigger.

        Args:
            metadata: Values by key; keys that are KEDA's own are ignored.
            path: Path of the ScaledObjectRef in the caller's message, ending with a dot; empty for
                all of it.

        Raises:
            InvalidParameter: A value cannot be used, or a key looks like a misspelt one.
        """
        path = f"{path}scalerMetadata"
        for key in metadata.keys() - {*_OWN_KEYS, *_KEYS_OF_KEDA}:
            if meant := get_close_matches(key[:MAX_SHOWN_CHARS], _OWN_KEYS, n=1):
                raise InvalidParameter(
                    f"there is no key {key[:MAX_SHOWN_CHARS]!r}: write {meant[0]!r}.",
                    field=f"{path}.{key[:MAX_SHOWN_CHARS]}",
                )
        name = metadata.get("metric") or next(iter(METRICS))
        metric = _known(name, f"{path}.metric")
        if "target" not in metadata:
            return cls(name, metric.default_target)
        return cls(name, _target(metadata["target"], f"{path}.target"))


class ScalerServicer(external_scaler_service_pb2_grpc.ExternalScalerServicer):
    """
    Scaler for KEDA, which queries the core; the interceptor turns TandemErrors into statuses.

    Owned by the event loop.
    """

    def __init__(self, core: CoreClient) -> None:
        self._core = core
        self._num_streams = 0
        self._look: asyncio.Task[Demand] | None = None
        """The look at the core that is under way or was the last one."""
        self._looked_s = -math.inf

    async def IsActive(  # noqa: N802  # named by the proto
        self, request: pb.ScaledObjectRef, context: Context
    ) -> pb.IsActiveResponse:
        """Tell whether there is work for at least one executor."""
        del context
        Trigger.read(request.scalerMetadata, "")
        return pb.IsActiveResponse(result=is_active(await self._demand()))

    async def StreamIsActive(self, request: pb.ScaledObjectRef, context: Context) -> None:  # noqa: N802  # named by the proto
        """
        Send the answer of IsActive now and at each change.

        A late answer of the core is waited for: KEDA waits up to a minute before it comes again to
        a stream that ended with an error, and 2 s after one that just ended, as this one does when
        the scheduler stops.
        """
        Trigger.read(request.scalerMetadata, "")
        if self._num_streams >= MAX_STREAMS:
            raise QueueFull(
                f"this server has {MAX_STREAMS} streams of scalers already: close one, or poll "
                "IsActive",
                metadata={"limit": "lasting_calls", "value": str(MAX_STREAMS)},
            )
        self._num_streams += 1
        last: bool | None = None
        try:
            while True:
                with suppress(CoreTimeout):
                    active = is_active(await self._shared_demand())
                    if active is not last:
                        last = active
                        await write(context, pb.IsActiveResponse(result=active))
                await asyncio.sleep(POLL_INTERVAL_S)
        except HandedOver:
            return
        finally:
            self._num_streams -= 1

    async def GetMetricSpec(  # noqa: N802  # named by the proto
        self, request: pb.ScaledObjectRef, context: Context
    ) -> pb.GetMetricSpecResponse:
        """Return the metric of a trigger, and its target."""
        del context
        trigger = Trigger.read(request.scalerMetadata, "")
        spec = pb.MetricSpec(
            metricName=trigger.metric,
            targetSize=math.ceil(trigger.target),
            targetSizeFloat=trigger.target,
        )
        return pb.GetMetricSpecResponse(metricSpecs=[spec])

    async def GetMetrics(  # noqa: N802  # named by the proto
        self, request: pb.GetMetricsRequest, context: Context
    ) -> pb.GetMetricsResponse:
        """Return how much there is of a metric, for all executors together."""
        del context
        trigger = Trigger.read(request.scaledObjectRef.scalerMetadata, "scaledObjectRef.")
        name = request.metricName or trigger.metric
        value = _known(name, "metricName").value(await self._demand())
        found = pb.MetricValue(metricName=name, metricValue=value, metricValueFloat=value)
        return pb.GetMetricsResponse(metricValues=[found])

    async def _demand(self) -> Demand:
        return decode_demand(await self._core.query("demand"))

    async def _shared_demand(self) -> Demand:
        """Return the demand as of at most half an interval ago; many streams ask the core once."""
        now_s = asyncio.get_running_loop().time()
        if self._look is None or now_s - self._looked_s >= POLL_INTERVAL_S / 2:
            self._looked_s = now_s
            self._look = asyncio.create_task(self._demand())
        return await asyncio.shield(self._look)


def is_active(demand: Demand) -> bool:
    """Return True if there is work for at least one executor."""
    if demand.waiting_requests or demand.running_requests:
        return True
    return demand.unserved_age_s is not None and demand.unserved_age_s < UNSERVED_FOR_S


def _known(name: str, field: str) -> _Metric:
    metric = METRICS.get(name)
    if metric is None:
        raise InvalidParameter(
            f"there is no metric {name[:MAX_SHOWN_CHARS]!r}: write one of {', '.join(METRICS)}.",
            field=field,
        )
    return metric


def _target(text: str, field: str) -> float:
    try:
        target = float(text)
    except ValueError:
        target = math.nan
    if not MIN_TARGET <= target <= MAX_TARGET:
        raise InvalidParameter(
            f"target must be a number from {MIN_TARGET} to {MAX_TARGET:.0f}, got "
            f"{text[:MAX_SHOWN_CHARS]!r}.",
            field=field,
        )
    return target
