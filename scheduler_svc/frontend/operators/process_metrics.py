"""Prometheus metrics of the processes of the service, from their reports."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from scheduler_svc.ipc.snapshot import ProcessReport
from tandem.error_codes import Unauthenticated
from tandem.errors import InternalError, SlowConsumer

CORE = "core"
"""Name of the process that has no clients."""
ALWAYS_TOLD = (InternalError.reason, SlowConsumer.reason, Unauthenticated.reason)
"""Reasons that alerts watch: shown as 0 too, as an increase is seen only from a first sample on."""


def process_metrics(reports: Sequence[ProcessReport]) -> Iterator[Metric]:
    """Yield what each process counts by itself, with its name in the label `process`."""
    processor = CounterMetricFamily(
        "tandem_process_cpu_seconds", "Processor time used.", labels=["process"]
    )
    memory = GaugeMetricFamily(
        "tandem_process_resident_memory_bytes", "Resident memory.", labels=["process"]
    )
    streams = GaugeMetricFamily(
        "tandem_open_streams", "Requests that have a client now.", labels=["process"]
    )
    failures = CounterMetricFamily(
        "tandem_call_failures",
        "Calls, and items of calls, that ended with an error, by its reason.",
        labels=["process", "reason"],
    )
    for one in reports:
        processor.add_metric([one.name], one.cpu_s)
        if one.resident_bytes:
            memory.add_metric([one.name], one.resident_bytes)
        if one.name != CORE:
            streams.add_metric([one.name], one.open_streams)
        told = dict.fromkeys(ALWAYS_TOLD if one.name != CORE else (), 0) | one.failed_calls
        for reason, count in sorted(told.items()):
            failures.add_metric([one.name, reason], count)
    yield from (processor, memory, streams, failures)
    yield from _files(reports)


def _files(reports: Sequence[ProcessReport]) -> Iterator[Metric]:
    certificates = GaugeMetricFamily(
        "tandem_certificate_expiration_timestamp_seconds",
        "Last valid second, since 1970, of a certificate in force, by its file.",
        labels=["process", "certificate"],
    )
    refused = GaugeMetricFamily(
        "tandem_file_reload_failed",
        "1 while the newest content of a file is refused and that before it is in force.",
        labels=["process", "file"],
    )
    for one in reports:
        for path, until_s in sorted(one.certificates.items()):
            certificates.add_metric([one.name, path], until_s)
        for path, is_refused in sorted(one.refused_files.items()):
            refused.add_metric([one.name, path], float(is_refused))
    yield from (certificates, refused)
