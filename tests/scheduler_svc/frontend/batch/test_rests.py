"""Rests of a GenerateBatch stream between messages that took long to encode."""

import asyncio

import pytest

from scheduler_svc.core.request.request import FinishReason
from scheduler_svc.frontend.batch.stream import LONGEST_REST_S, BatchStream, rest_after
from tests.scheduler_svc.frontend.batch.test_generate_batch import Stream
from tests.scheduler_svc.frontend.fake_core import ended, until, within


@pytest.mark.parametrize(
    ("encoding_s", "expected"), [(0.0005, 0.0), (0.002, 0.006), (0.01, 0.03), (5.0, LONGEST_REST_S)]
)
def test_rest_is_three_times_the_work(encoding_s, expected):
    """
    A call takes a quarter of the event loop at most; short rests are left out, long ones are cut.
    """
    assert rest_after(encoding_s) == pytest.approx(expected)


async def test_output_that_comes_in_a_rest_is_merged(frontend, monkeypatch):
    """
    Tokens that arrive while the stream rests go with the next message, as one Delta of each item.
    """
    goes_on, num_rests = asyncio.Event(), 0

    async def rest(_seconds: float) -> None:
        nonlocal num_rests
        num_rests += 1
        await goes_on.wait()

    monkeypatch.setattr(BatchStream, "_rest", staticmethod(rest))
    stream = Stream(frontend.channel)
    await stream.add(1)
    stream_id = await frontend.core.accept()
    await until(lambda: num_rests == 1)
    for offset, token in enumerate((70, 71, 72)):
        await frontend.core.tokens(stream_id, offset, [token])
    inbox = frontend.client.streams._inboxes[stream_id]
    await until(lambda: inbox.choices[0].num_received == 3)
    goes_on.set()
    await stream.read()
    await stream.read()
    assert ["started", "delta"] == stream.kinds(1)
    assert [70, 71, 72] == stream.ids(1)
    end = ended(stream_id, FinishReason.MAX_TOKENS, 3)
    await frontend.core.tokens(stream_id, 3, [], end=end)
    await within(stream.call.done_writing())
    await stream.rest()
    assert stream.is_over(1)
