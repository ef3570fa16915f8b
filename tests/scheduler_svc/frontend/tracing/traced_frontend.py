"""A frontend whose spans go to a collector, and requests that the test answers as the core."""

from contextlib import asynccontextmanager

from opentelemetry.proto.trace.v1.trace_pb2 import Span

from scheduler_svc.core.request.events import ProgressKind
from scheduler_svc.core.request.request import FinishReason
from scheduler_svc.ipc.messages import Accepted, StreamProgress
from tests.otlp_collector import TRACEPARENT
from tests.scheduler_svc.frontend.fake_core import (
    ended,
    model,
    running_frontend,
    serve,
    update,
    within,
)

METADATA = (("traceparent", TRACEPARENT), ("tracestate", "vendor=x"))
REQUEST = {"text": "hello", "sampling": {"seed": 2**64 - 1, "temperature": 0.5}}
SERVICE = "tandem.inference.v1.InferenceService"
MAX_TOKENS = int(FinishReason.MAX_TOKENS)


@asynccontextmanager
async def traced(directory, model_dir, collector):
    """Yield a frontend whose spans go to the collector, where all are once the block ends."""
    async with running_frontend(directory, tracing=collector.url) as frontend:
        await serve(frontend, model(model_dir))
        yield frontend


async def finish(core, *, num_tokens: int = 2) -> None:
    """Accept the next request, and send tokens and an end to each of its choices."""
    submit = await within(core.submits.get())
    await core.send(Accepted(submit.stream_id))
    for stream_id in range(submit.stream_id, submit.stream_id + submit.num_choices):
        end = ended(stream_id, MAX_TOKENS, num_tokens)
        await core.send(update(stream_id, 0, [40] * num_tokens, end=end))


async def progress(core, submit, kind: ProgressKind, value: int) -> None:
    news = StreamProgress(submit.stream_id, int(kind), value)
    await core.send(update(submit.stream_id, 0, [], progress=news))


def seconds(span: Span) -> float:
    return (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9


def names(spans: list[Span]) -> list[str]:
    return [span.name for span in spans]
