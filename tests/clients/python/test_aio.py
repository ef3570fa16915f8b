"""The asyncio client."""

from __future__ import annotations

import asyncio

import pytest

from tandem.error_codes import DeadlineExceeded
from tandem.errors import Draining, InvalidParameter, QueueFull, RequestNotFound
from tandem_client import AsyncClient, Delta, FinishReason, RetryPolicy, Started
from tests.clients.python.fake_server import ANSWER, CHOSEN_SEED, PATIENCE_S, Act

SOON = RetryPolicy(max_attempts=4, initial_delay_s=0.001, max_delay_s=0.001)


@pytest.fixture
async def client(server):
    """A client of the fake that retries at once."""
    async with AsyncClient(server.address, retry=SOON) as connected:
        yield connected


class TestGenerate:
    async def test_text_is_the_whole_answer_in_pieces(self, client):
        """
        The pieces of `text` concatenate to the output, and the stream keeps what framed them.
        """
        stream = client.generate("hi")

        assert ANSWER == "".join([piece async for piece in stream.text])
        assert CHOSEN_SEED == stream.started.params.seed
        assert FinishReason.STOP_STRING == stream.finished.reason
        assert len(ANSWER) == stream.done.usage.output_tokens

    async def test_many_streams_share_a_connection(self, client):
        """
        Streams of one client run side by side and none gets another's text.
        """

        async def one():
            return "".join([piece async for piece in client.generate("hi").text])

        assert [ANSWER] * 20 == await asyncio.gather(*(one() for _ in range(20)))

    async def test_broken_stream_goes_on_after_what_was_delivered(self, client, server):
        """
        A stream that breaks is asked for again with its seed; nothing is lost or repeated.
        """
        server.play(Act(num_tokens=7, error=Draining("bye")), Act(piece_lens=(5, 2)))
        events = [event async for event in client.generate("hi")]

        assert ANSWER == "".join(event.text for event in events if isinstance(event, Delta))
        assert 1 == sum(isinstance(event, Started) for event in events)
        assert CHOSEN_SEED == server.seen.generate[1].sampling.seed

    async def test_leaving_the_block_cancels_the_request(self, client, server):
        """
        Leaving a stream's `async with` block before its end cancels the call.
        """
        server.play(Act(num_tokens=5, hang=True))
        async with client.generate("hi") as stream:
            await anext(stream)
            assert await asyncio.to_thread(server.seen.hanging.wait, PATIENCE_S)

        assert await asyncio.to_thread(server.seen.cancelled.wait, PATIENCE_S)
        assert not [event async for event in stream if not isinstance(event, Delta)]

    async def test_cancelled_task_cancels_the_request(self, client, server):
        """
        Cancelling the task that reads a stream cancels the call, and the task ends cancelled.
        """
        server.play(Act(num_tokens=5, hang=True))

        async def read():
            async for _ in client.generate("hi"):
                pass

        task = asyncio.create_task(read())
        assert await asyncio.to_thread(server.seen.hanging.wait, PATIENCE_S)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(server.seen.cancelled.wait, PATIENCE_S)

    async def test_deadline_cancels(self, client, server):
        """
        A passed deadline raises DeadlineExceeded that names the gRPC code.
        """
        server.play(Act(num_tokens=2, hang=True))

        with pytest.raises(DeadlineExceeded) as passed:
            async for _ in client.generate("hi", deadline_s=0.3):
                pass
        assert "DEADLINE_EXCEEDED" == passed.value.metadata["grpc_code"]


class TestUnaryCalls:
    async def test_complete_returns_all_of_it(self, client, server):
        """
        `complete` recovers from overload and returns the whole output.
        """
        server.play(Act(error=QueueFull("full", retry_after_s=0.001)), Act())
        completion = await client.complete("hi")

        assert (ANSWER, FinishReason.EOS) == (completion.text, completion.reason)

    async def test_abort_of_an_unknown_id_is_not_found(self, client):
        """
        Abort succeeds for a live request and raises RequestNotFound for any other.
        """
        await client.abort("live")

        with pytest.raises(RequestNotFound):
            await client.abort("gone")

    async def test_model_is_described(self, client):
        """
        `get_model` returns what is served.
        """
        assert "fake" == (await client.get_model()).name

    async def test_unsendable_argument_is_refused_before_any_call(self, client, server):
        """
        An argument that the message cannot carry raises InvalidParameter and sends nothing.
        """
        with pytest.raises(InvalidParameter):
            client.generate("hi", max_tokens=-1)
        assert [] == server.seen.generate
