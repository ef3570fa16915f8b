"""Export of spans: a collector that is away, and a service that has none."""

import asyncio
import subprocess
import sys

import pytest
from structlog.testing import capture_logs

from scheduler_svc.frontend.tracing import switch
from scheduler_svc.frontend.tracing.exporting import DEFAULT_BATCH_SPANS, open_exporter
from scheduler_svc.frontend.tracing.request_spans import RequestTracer
from scheduler_svc.frontend.tracing.switch import open_tracing
from tandem.errors import InvalidConfig
from tests.ports import free_port
from tests.waiting import wait_until


def end_spans(exporter, count: int) -> None:
    for number in range(count):
        exporter.tracer.start_span(f"span {number}").end()


class TestLosses:
    def test_refused_spans_are_counted_and_later_ones_arrive(self, collector, monkeypatch):
        """
        Spans that the collector does not take are counted as lost, with one line in the log; once
        it takes them again they arrive.
        """
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
        collector.refuses = True
        with capture_logs() as lines:
            exporter = open_exporter(collector.url, "test")
            end_spans(exporter, 3)
            wait_until(lambda: exporter.counts.lost == 3, "the loss")
            collector.refuses = False
            end_spans(exporter, 2)
            wait_until(lambda: exporter.counts.exported == 2, "the export")
            exporter.close()
        assert 2 == len(collector.spans())
        assert 3 == exporter.counts.lost
        assert ["spans_lost"] == [line["event"] for line in lines]

    def test_full_queue_loses_the_newest(self, collector, monkeypatch):
        """
        Spans that find the queue full are lost at once; those in it are exported.
        """
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "3600000")
        monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "4")
        exporter = open_exporter(collector.url, "test")
        end_spans(exporter, 3)
        assert 0 == exporter.counts.lost
        end_spans(exporter, 200)
        exporter.close()
        counts = exporter.counts
        assert 203 == counts.exported + counts.lost
        assert counts.exported == len(collector.spans())
        assert counts.exported >= 4
        assert counts.lost > 0


class TestBatches:
    @pytest.mark.parametrize(("variable", "most"), [(None, DEFAULT_BATCH_SPANS), ("5", 5)])
    def test_exports_are_small(self, collector, monkeypatch, variable, most):
        """
        One export has as many spans as the variable of OpenTelemetry says, by default 64.
        """
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "3600000")
        if variable is not None:
            monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", variable)
        exporter = open_exporter(collector.url, "test")
        end_spans(exporter, 3 * most)
        exporter.close()
        assert 3 * most == sum(collector.sizes)
        assert most == max(collector.sizes)


class TestEnd:
    async def test_collector_that_is_away_holds_up_no_end(self, monkeypatch):
        """
        A process ends in time although the collector takes no span.
        """
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "3600000")
        exporter = open_exporter(f"http://127.0.0.1:{free_port()}", "test")
        end_spans(exporter, 3)
        await asyncio.wait_for(RequestTracer(exporter, lambda: 0.0).close(0.05), 60)
        assert 0 == exporter.counts.exported


class TestSwitch:
    @pytest.mark.parametrize(
        ("environ", "is_on"),
        [
            ({}, False),
            ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}, True),
            ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:1"}, True),
            (
                {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_SDK_DISABLED": "true"},
                False,
            ),
            (
                {
                    "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1",
                    "OTEL_TRACES_EXPORTER": "none",
                },
                False,
            ),
        ],
    )
    async def test_variables_of_opentelemetry_are_honoured(self, environ, is_on):
        """
        A collector of the environment is used, unless OpenTelemetry or its traces are off there.
        """
        tracer = open_tracing(None, lambda: 0.0, "test", environ)
        assert is_on is (tracer is not None)
        if tracer is not None:
            await tracer.close(60.0)

    def test_missing_package_is_told(self, monkeypatch):
        """
        Where OpenTelemetry is missing, the option ends the service with what to install; variables,
        which may be meant for other programs, only make a line in the log.
        """
        monkeypatch.setattr(switch, "_is_installed", lambda: False)
        with pytest.raises(InvalidConfig, match=r"tandem-serve\[tracing\]"):
            open_tracing("http://127.0.0.1:1", lambda: 0.0, "test", {})
        with capture_logs() as lines:
            environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}
            assert open_tracing(None, lambda: 0.0, "test", environ) is None
        assert ["tracing_off"] == [line["event"] for line in lines]

    def test_nothing_is_loaded_without_a_collector(self):
        """
        A frontend without a collector loads no module of OpenTelemetry.
        """
        code = (
            "import sys, scheduler_svc.frontend.run\n"
            "from scheduler_svc.frontend.tracing.switch import open_tracing\n"
            "assert open_tracing(None, lambda: 0.0, 'test', {}) is None\n"
            "assert not [name for name in sys.modules if name.startswith('opentelemetry')]\n"
        )
        subprocess.run([sys.executable, "-c", code], check=True)
