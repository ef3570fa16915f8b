"""Messages to a GenerateBatch stream, gathered while the stream is busy."""

from __future__ import annotations

import asyncio
import queue

import pytest

from tandem.inference.v1 import inference_service_pb2 as pb
from tandem_client.many.items import END_OF_REQUESTS, MAX_SHARED_BYTES, at_once, gather


def added(number, size=8):
    """Make the message that adds one item with a prompt of this size."""
    request = pb.GenerateRequest(text="x" * size)
    return pb.GenerateBatchRequest(add=[pb.BatchItem(item=number, request=request)])


def numbers(request):
    return [item.item for item in request.add]


class TestGather:
    def test_all_that_waits_goes_in_one_message(self):
        """
        Items and cancels that wait are added to the message that is about to be sent.
        """
        request = added(1)
        waiting = [added(2), pb.GenerateBatchRequest(cancel=[1]), added(3)]

        assert gather(request, waiting) is None
        assert [1, 2, 3] == numbers(request)
        assert [1] == list(request.cancel)

    @pytest.mark.parametrize("sizes", [(MAX_SHARED_BYTES, 8), (8, MAX_SHARED_BYTES)])
    def test_no_message_grows_beyond_the_limit(self, sizes):
        """
        A message that would make it larger than MAX_SHARED_BYTES is given back, the rest not taken.
        """
        first, second, third = (added(number, size) for number, size in enumerate((*sizes, 8)))
        waiting = iter([second, third])

        assert second is gather(first, waiting)
        assert [0] == numbers(first)
        assert [third] == list(waiting)

    def test_end_is_given_back(self):
        """
        END_OF_REQUESTS, behind which nothing comes, ends the gathering.
        """
        request = added(1)

        assert END_OF_REQUESTS is gather(request, [added(2), END_OF_REQUESTS])
        assert [1, 2] == numbers(request)


class TestAtOnce:
    @pytest.mark.parametrize("kind", [queue.SimpleQueue, asyncio.Queue])
    def test_queue_is_read_until_it_is_empty(self, kind):
        """
        A queue, of either kind, gives what it has and does not wait for more.
        """
        waiting = kind()
        for number in (1, 2):
            waiting.put_nowait(added(number))

        assert [[1], [2]] == [numbers(one) for one in at_once(waiting.get_nowait)]
