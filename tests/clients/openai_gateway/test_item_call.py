"""Output of one stream of a batch that waits for its reader."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from tandem.inference.v1 import batch_pb2, stream_pb2
from tandem.status import from_rpc_error
from tandem_openai_gateway.scheduler_calls.item_call import MAX_WAITING_BYTES, ItemCall
from tandem_openai_gateway.upstream import Delta


def delta(text, *, choice=0, offset=0):
    told = [stream_pb2.TokenLogprobs(logprob=-ord(one)) for one in text]
    ids = [ord(one) for one in text]
    return batch_pb2.BatchEvent(
        delta=stream_pb2.Delta(
            choice=choice, first_token_offset=offset, token_ids=ids, text=text, logprobs=told
        )
    )


def finished(choice=0):
    return batch_pb2.BatchEvent(finished=stream_pb2.Finished(choice=choice))


DONE = batch_pb2.BatchEvent(done=stream_pb2.Done())


def item(*events, joins=True, leave=lambda _: None):
    call = ItemCall(1, leave, start_alone=lambda: None, joins=joins)
    for event in events:
        call.take(event, event.WhichOneof("event"))
    return call


def read(call):
    """Return what a reader gets: deltas as choice, offset and text, and names of other events."""

    async def all_of():
        return [event async for event in call]

    return [
        (one.choice, one.first_token_offset, one.text)
        if isinstance(one, Delta)
        else one.WhichOneof("event")
        for one in asyncio.run(all_of())
    ]


class TestJoining:
    def test_output_that_waits_becomes_one_delta(self):
        """
        Deltas that the reader has not taken are one, with all ids, all text and all logprobs.
        """
        call = item(delta("ab"), delta("c", offset=2), delta("d", offset=3), DONE)

        async def first():
            return await anext(aiter(call))

        joined = asyncio.run(first())
        assert (0, "abcd", (97, 98, 99, 100)) == (
            joined.first_token_offset,
            joined.text,
            joined.token_ids,
        )
        assert [-97, -98, -99, -100] == [one.logprob for one in joined.logprobs]

    def test_choices_stay_apart(self):
        """
        Output of one choice is joined past that of others, and each ends after its output.
        """
        call = item(
            delta("a"), delta("x", choice=1), delta("b", offset=1), finished(),
            delta("y", choice=1, offset=1), finished(1), DONE,
        )  # fmt: skip
        assert [(0, 0, "ab"), (1, 0, "xy"), "finished", "finished", "done"] == read(call)

    def test_nothing_is_joined_where_each_delta_is_wanted(self):
        """
        Without joining, each delta stays one.
        """
        call = item(delta("a"), delta("b", offset=1), finished(), DONE, joins=False)
        assert [(0, 0, "a"), (0, 1, "b"), "finished", "done"] == read(call)

    def test_what_was_taken_is_not_touched(self):
        """
        Output that comes after the reader took what waited is a delta of its own.
        """

        async def steps():
            call = item(delta("a"))
            events = aiter(call)
            taken = [await anext(events)]
            for event in (delta("b", offset=1), delta("c", offset=2), DONE):
                call.take(event, event.WhichOneof("event"))
            return [*taken, await anext(events)]

        assert ["a", "bc"] == [one.text for one in asyncio.run(steps())]


class TestSlowReader:
    @pytest.mark.slow
    @pytest.mark.parametrize("joins", [True, False], ids=["joined", "each"])
    def test_waiting_output_is_bounded(self, joins):
        """
        A stream whose reader does not read is cancelled at the scheduler and ends SLOW_CONSUMER.
        """
        left = []
        call = item(joins=joins, leave=left.append)
        offset = 0
        while not left:
            event = delta("a" * 1000, offset=offset)
            call.take(event, "delta")
            offset += 1000
            assert offset < MAX_WAITING_BYTES
        assert not call.is_ended  # so that the batch cancels it
        with pytest.raises(grpc.RpcError) as failure:
            read(call)
        assert "SLOW_CONSUMER" == from_rpc_error(failure.value).reason
