"""Streams: their result, the texts of their choices, and their end when they are dropped."""

from __future__ import annotations

import asyncio

import pytest

from tandem_client import (
    NO_RETRY,
    AsyncClient,
    CallCancelled,
    Client,
    Draining,
    FinishReason,
    QueueFull,
    Started,
)
from tests.clients.python.fake_server import ANSWER, PATIENCE_S, Act

SECOND = f"{ANSWER.upper()}1"
"""Text of choice 1 of the fake server."""


@pytest.fixture
def client(server):
    """A client of the fake."""
    with Client(server.address) as connected:
        yield connected


@pytest.fixture
async def aclient(server):
    """A client of the fake, for asyncio."""
    async with AsyncClient(server.address) as connected:
        yield connected


class TestResult:
    def test_result_is_the_completion_with_what_was_read_before(self, client, server):
        """
        `result` returns the whole of each choice, however much was read, over a break too.
        """
        server.play(Act(num_tokens=7, error=Draining("bye", retry_after_s=0.0)), Act())
        stream = client.generate("hi", n=2, logprobs=1)
        next(piece for piece in stream.text)
        completion = stream.result()
        assert [ANSWER, SECOND] == [choice.text for choice in completion.choices]
        assert tuple(map(ord, ANSWER)) == completion.token_ids
        assert len(ANSWER) == len(completion.logprobs)
        assert FinishReason.STOP_STRING == completion.reason
        assert completion == stream.result()

    def test_result_raises_what_the_stream_raises(self, server):
        """
        A request that fails raises its error from `result`.
        """
        server.play(Act(accept=False, error=QueueFull("full")))
        with Client(server.address, retry=NO_RETRY) as client, pytest.raises(QueueFull):
            client.generate("hi").result()

    def test_closed_stream_has_no_result(self, client, server):
        """
        A stream that was closed before its end raises CallCancelled.
        """
        server.play(Act(num_tokens=2, hang=True))
        stream = client.generate("hi")
        assert isinstance(next(stream), Started)
        stream.close()
        with pytest.raises(CallCancelled, match="was closed"):
            stream.result()

    async def test_task_gets_the_same_result(self, aclient):
        """
        `result` of an asynchronous stream returns the whole of each choice.
        """
        completion = await aclient.generate("hi", n=2).result()
        assert [ANSWER, SECOND] == [choice.text for choice in completion.choices]

    async def test_closed_stream_of_a_task_has_no_result(self, aclient, server):
        """
        An asynchronous stream that was closed before its end raises CallCancelled.
        """
        server.play(Act(num_tokens=2, hang=True))
        stream = aclient.generate("hi")
        await anext(stream)
        await stream.close()
        with pytest.raises(CallCancelled, match="was closed"):
            await stream.result()


class TestTexts:
    def test_pieces_of_all_choices_come_with_their_choice(self, client):
        """
        `texts` yields the new text of every choice with its number.
        """
        texts = {0: "", 1: ""}
        for choice, text in client.generate("hi", n=2).texts:
            texts[choice] += text
        assert {0: ANSWER, 1: SECOND} == texts

    async def test_task_gets_the_same_pieces(self, aclient):
        """
        `texts` of an asynchronous stream yields the same.
        """
        texts = {0: "", 1: ""}
        async for choice, text in aclient.generate("hi", n=2).texts:
            texts[choice] += text
        assert {0: ANSWER, 1: SECOND} == texts


class TestDropped:
    @pytest.mark.parametrize("view", [lambda stream: stream, lambda stream: stream.text])
    def test_break_out_of_a_loop_ends_the_call_at_once(self, client, server, view):
        """
        Leaving a loop over a stream that has no other name cancels the request, without a garbage
        collection.
        """
        server.play(Act(num_tokens=5, hang=True))
        for _ in view(client.generate("hi")):
            assert server.seen.hanging.wait(PATIENCE_S)
            break
        assert server.seen.cancelled.wait(PATIENCE_S)

    def test_break_out_of_a_loop_leaves_a_stream_that_has_a_name(self, client):
        """
        A stream that is still named goes on after a `break`, where the loop left it.
        """
        stream = client.generate("hi")
        first = next(piece for piece in stream.text)
        assert ANSWER == first + "".join(stream.text)

    @pytest.mark.parametrize("view", [lambda stream: stream, lambda stream: stream.text])
    async def test_break_out_of_a_loop_of_a_task_ends_the_call_too(self, aclient, server, view):
        """
        Leaving an asynchronous loop cancels the request too.
        """
        server.play(Act(num_tokens=5, hang=True))
        async for _ in view(aclient.generate("hi")):
            assert await asyncio.to_thread(server.seen.hanging.wait, PATIENCE_S)
            break
        assert await asyncio.to_thread(server.seen.cancelled.wait, PATIENCE_S)
