"""Log probabilities on their way to frontends: split, held back, and before the ends."""

import numpy as np
import pytest

from scheduler_svc.core.request.events import CoreEvents, TokenLogprobs
from scheduler_svc.ipc.messages import Update
from scheduler_svc.service.publisher import RETRY_S, Publisher
from tandem.link.logprobs import LogprobColumns
from tests.scheduler_svc.service.test_publisher import FakeSender, _ended, _tokens


@pytest.fixture
def sender() -> FakeSender:
    return FakeSender()


@pytest.fixture
def publisher(sender) -> Publisher:
    publisher = Publisher(sender)
    publisher.open(0)
    publisher.open(1)
    return publisher


def told(*rows: tuple[int, int, int, int]) -> CoreEvents:
    """
    Return events with one token each of (frontend, stream, offset, number of likeliest ids) rows,
    with its log probabilities.
    """
    events = _tokens(*((f, s, offset, 7) for f, s, offset, _ in rows))
    count = [num_top for _, _, _, num_top in rows]
    columns = LogprobColumns(
        row=np.arange(len(rows), dtype=np.int32),
        chosen=np.array([-offset for _, _, offset, _ in rows], np.float32),
        top_start=np.cumsum([0, *count]).astype(np.int32),
        top_token=np.arange(sum(count), dtype=np.int32),
        top=-np.arange(sum(count), dtype=np.float32),
    )
    events.logprobs = [
        TokenLogprobs(handle=events.token_handle, offset=events.token_offset, columns=columns)
    ]
    return events


def entries(update: Update) -> list[tuple[int, int, float, list[int]]]:
    """Return (stream, offset, log probability, likeliest ids) of each entry."""
    found = []
    for one in update.logprobs:
        streams = np.frombuffer(one.stream, "<u4").tolist()
        offsets = np.frombuffer(one.offset, "<i4").tolist()
        chosen = np.frombuffer(one.chosen, "<f4").tolist()
        bounds = np.frombuffer(one.top_start, "<i4").tolist()
        ids = np.frombuffer(one.top_token, "<i4").tolist()
        assert len(ids) == len(np.frombuffer(one.top, "<f4")) == bounds[-1]
        tops = [ids[bounds[at] : bounds[at + 1]] for at in range(len(streams))]
        found += zip(streams, offsets, chosen, tops, strict=True)
    return found


def test_each_frontend_gets_its_own(publisher, sender):
    """
    Entries go with the tokens to the frontend of their request, each with its own ids.
    """
    publisher.add(told((0, 1, 4, 2), (1, 5, 6, 0), (0, 2, 9, 1)))
    publisher.flush(0.0)
    (first, ours), (second, theirs) = sender.sent
    assert (0, [(1, 4, -4.0, [0, 1]), (2, 9, -9.0, [2])]) == (first, entries(ours))
    assert (1, [(5, 6, -6.0, [])]) == (second, entries(theirs))


def test_nothing_is_lost_while_a_pipe_is_full(publisher, sender):
    """
    Entries that a full pipe holds back are sent in order and once, before the end of their request.
    """
    sender.full.add(0)
    for offset in range(50):
        publisher.add(told((0, 1, offset, 3)))
        publisher.flush(0.0)
    publisher.add(CoreEvents(ended=[_ended(0, 1, 50)]))
    publisher.flush(0.0)
    assert not sender.sent
    sender.full.clear()
    publisher.flush(RETRY_S)
    updates = [update for _, update in sender.sent]
    offsets = [offset for update in updates for _, offset, _, _ in entries(update)]
    assert list(range(50)) == offsets
    assert [1] == [len(update.ended) for update in updates if update.ended]
    assert updates[-1].ended


def test_a_lagging_frontend_gets_messages_of_limited_size(publisher, sender, monkeypatch):
    """
    Many steps of many entries are divided among messages; the end comes with the last.
    """
    monkeypatch.setattr("scheduler_svc.service.publisher.MAX_LOGPROB_BYTES", 40)
    sender.full.add(0)
    for offset in range(9):
        publisher.add(told((0, 1, offset, 4)))
    publisher.add(CoreEvents(ended=[_ended(0, 1, 9)]))
    sender.full.clear()
    publisher.flush(0.0)
    updates = [update for _, update in sender.sent]
    assert [2, 2, 2, 2, 1] == [len(update.logprobs) for update in updates]
    assert [0, 0, 0, 0, 1] == [len(update.ended) for update in updates]


def test_a_refused_message_is_tried_again_whole(publisher, sender):
    """
    A message that a pipe did not take is sent again whole, with what came meanwhile.
    """
    sender.room[0] = 1
    publisher.add(told((0, 1, 0, 1)))
    publisher.flush(0.0)
    publisher.add(told((0, 1, 1, 1)))
    publisher.flush(0.0)
    publisher.add(told((0, 1, 2, 1)))
    sender.full.clear()
    sender.room.clear()
    publisher.flush(RETRY_S)
    assert [0, 1, 2] == [offset for _, update in sender.sent for _, offset, _, _ in entries(update)]


def test_entries_of_a_closed_frontend_are_dropped(publisher, sender):
    """
    A frontend that is gone gets nothing, and the others get theirs.
    """
    publisher.close(0)
    publisher.add(told((0, 1, 0, 1), (1, 3, 0, 1)))
    publisher.flush(0.0)
    assert [1] == [index for index, _ in sender.sent]
