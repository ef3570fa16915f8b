"""Open streams of a frontend: stream numbers, and tokens in order with what ends them."""

import numpy as np
import pytest

from scheduler_svc.core.request.request import FinishReason
from scheduler_svc.frontend.stream import open_streams
from scheduler_svc.frontend.stream.inbox import Received
from scheduler_svc.frontend.stream.open_streams import OpenStreams
from scheduler_svc.ipc.messages import Update
from scheduler_svc.process.frontend_settings import FrontendSettings
from tests.scheduler_svc.frontend.fake_core import ended

SETTINGS = FrontendSettings(index=0, ipc_path="unused", listen="127.0.0.1:0")


def opened(streams, num_choices=1):
    return streams.opened(
        [Received()] * num_choices, with_logprobs=False, with_scores=False, bell=None
    )


def tokens(stream_id, offset, token_ids, **others):
    """Return an update with tokens of one stream."""
    streams = np.full(len(token_ids), stream_id, np.uint32).tobytes()
    offsets = np.arange(offset, offset + len(token_ids), dtype=np.int32).tobytes()
    ids = np.array(token_ids, np.int32).tobytes()
    return Update(token_stream=streams, token_offset=offsets, token=ids, **others)


@pytest.fixture
def streams():
    """Return streams of a frontend whose clock stands still."""
    return OpenStreams(SETTINGS, lambda: 0.0)


async def test_choices_have_consecutive_numbers_that_are_used_once(streams):
    """
    Each choice has a number of its own, which no later request gets; closed streams do not count.
    """
    with opened(streams, 3) as first:
        assert [1, 2, 3] == [choice.stream_id for choice in first.choices]
        assert 1 == len(streams)
    with opened(streams) as second:
        assert [4] == [choice.stream_id for choice in second.choices]
    assert 0 == len(streams)


async def test_numbers_that_are_used_up_are_an_error(streams, monkeypatch):
    """
    A number never serves twice: past the last one a request is refused, and told what to do.
    """
    monkeypatch.setattr(open_streams, "MAX_STREAM_ID", 4)
    with opened(streams, 3):
        pass
    with pytest.raises(open_streams.InternalError, match="restart it"), opened(streams):
        pass
    assert 0 == len(streams)


async def test_tokens_wait_for_delivery_but_never_for_the_end_behind_them(streams):
    """
    Steps are kept as a run until they are delivered, and an end delivers what came before it.
    """
    with opened(streams) as inbox:
        (choice,) = inbox.choices
        streams.apply(tokens(1, 0, [5]))
        streams.apply(tokens(1, 1, [6]))
        assert 0 == choice.num_received
        streams.deliver_run()
        assert (2, 1) == (choice.num_received, streams.take_num_fed())
        end = ended(1, FinishReason.MAX_TOKENS, 3)
        streams.apply(tokens(1, 2, [7], ended=[end]))
        assert (3, True) == (choice.num_received, choice.is_over)
        news = choice.take()
        assert ([5, 6, 7], end) == (news.token_ids, news.end)


async def test_output_for_nobody_is_dropped(streams):
    """
    Output for a stream whose client has left harms no other stream.
    """
    with opened(streams):
        pass
    with opened(streams) as inbox:
        streams.apply(tokens(1, 0, [5]))
        streams.apply(tokens(2, 0, [6]))
        streams.deliver_run()
        assert 1 == inbox.choices[0].num_received
