"""Trace that calls of the Python client are part of."""

import subprocess
import sys

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

from tandem.errors import InvalidParameter
from tandem_client import AsyncClient, Client
from tests.otlp_collector import TRACEPARENT, UNSAMPLED


@pytest.fixture
def tracer():
    return TracerProvider(shutdown_on_exit=False).get_tracer("test")


def sent(server) -> list[str | None]:
    return [seen.get("traceparent") for seen in server.seen.metadata]


def header_of(span: trace.Span) -> str:
    context = span.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


class TestCurrentSpan:
    def test_calls_are_part_of_the_current_span(self, server, tracer):
        """
        Each call made within a span names it, streams and batches too; one made outside names none.
        """
        with Client(server.address) as client:
            with tracer.start_as_current_span("caller") as span:
                client.complete("hi")
                list(client.generate("hi"))
                list(client.generate_many(["hi"]))
            client.complete("hi")
        assert [*[header_of(span)] * 3, None] == sent(server)

    async def test_asynchronous_calls_are_too(self, server, tracer):
        """
        Each call of the asynchronous client names the span of its task.
        """
        async with AsyncClient(server.address) as client:
            with tracer.start_as_current_span("caller") as span:
                await client.complete("hi")
                _ = [event async for event in client.generate("hi")]
        assert [header_of(span)] * 2 == sent(server)

    def test_program_without_opentelemetry_does_not_load_it(self):
        """
        A program that does not use OpenTelemetry is not made to load it by a call's metadata.
        """
        code = (
            "import sys\n"
            "from tandem_client.tracing import with_trace\n"
            "assert [('a', 'b')] == with_trace([('a', 'b')])\n"
            "assert not [name for name in sys.modules if name.startswith('opentelemetry')]\n"
        )
        subprocess.run([sys.executable, "-c", code], check=True)


class TestOption:
    def test_given_span_wins(self, server, tracer):
        """
        The option names a span whatever the current one is, and so does metadata of the caller.
        """
        with Client(server.address) as client, tracer.start_as_current_span("caller"):
            client.with_options(traceparent=TRACEPARENT, deadline_s=60.0).complete("hi")
            client.with_options(metadata={"traceparent": UNSAMPLED}).complete("hi")
        assert [TRACEPARENT, UNSAMPLED] == sent(server)

    @pytest.mark.parametrize(
        "wrong",
        [
            "",
            "trace",
            TRACEPARENT.upper(),
            TRACEPARENT[:-1],
            f"ff{TRACEPARENT[2:]}",
            f"00-{'0' * 32}-00f067aa0ba902b7-01",
            f"00-4bf92f3577b34da6a3ce929d0e0e4736-{'0' * 16}-01",
        ],
    )
    def test_wrong_span_is_refused_before_any_call(self, server, wrong):
        """
        A value without the form of the header is refused.
        """
        with Client(server.address) as client, pytest.raises(InvalidParameter) as caught:
            client.with_options(traceparent=wrong)
        assert "traceparent" == caught.value.field
        assert [] == server.seen.metadata
