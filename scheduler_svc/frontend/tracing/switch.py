"""Decision whether spans are recorded, and for which collector."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import structlog

from tandem.errors import InvalidConfig

if TYPE_CHECKING:
    from scheduler_svc.frontend.tracing.request_spans import RequestTracer

_log: structlog.stdlib.BoundLogger = structlog.get_logger()

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
"""Variables of OpenTelemetry that name a collector; the first one that is set counts."""
EXTRA = "pip install 'tandem-serve[tracing]'"
_EXPORTER = "opentelemetry.exporter.otlp.proto.grpc.trace_exporter"


def open_tracing(
    endpoint: str | None,
    clock: Callable[[], float],
    instance: str,
    environ: Mapping[str, str] = os.environ,
) -> RequestTracer | None:
    """
    Return the tracer of this process; None where no collector is set or OpenTelemetry is off.

    All else is set by the variables of OpenTelemetry, which its SDK reads: the sampler, the headers
    and certificates of the exporter, the size of the queue, attributes of the service.

    Args:
        endpoint: URL of an OTLP collector that speaks gRPC; None for that of the environment.
        clock: The clock of the service, in seconds.
        instance: Name of this process among those of the service.
        environ: Environment of the process.

    Raises:
        InvalidConfig: `endpoint` is given, and OpenTelemetry is not installed.
    """
    named = endpoint or next((environ[name] for name in ENDPOINTS if environ.get(name)), None)
    is_off = environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    if named is None or is_off or environ.get("OTEL_TRACES_EXPORTER", "otlp") == "none":
        return None
    if not _is_installed():
        message = f"spans need OpenTelemetry, which is not installed: {EXTRA}"
        if endpoint is not None:
            raise InvalidConfig(f"otlp_endpoint: {message}", field="otlp_endpoint")
        # The environment may be that of all programs here: it must not end one that lacks it.
        _log.warning("tracing_off", message=message)
        return None
    # OpenTelemetry is an extra, and takes 20 MB where it is not used.
    from scheduler_svc.frontend.tracing.exporting import open_exporter  # noqa: PLC0415
    from scheduler_svc.frontend.tracing.request_spans import RequestTracer  # noqa: PLC0415

    tracer = RequestTracer(open_exporter(named, instance), clock)
    _log.info("tracing_on", endpoint=named)
    return tracer


def _is_installed() -> bool:
    try:
        return importlib.util.find_spec(_EXPORTER) is not None
    except ModuleNotFoundError:
        return False
