"""Outgoing messages of a call."""

from __future__ import annotations

from tandem.network.outgoing import OutgoingMessages


class TestOutgoing:
    def test_messages_leave_one_at_a_time_in_order(self):
        """
        A message begins when the one before has left.
        """
        begun: list[bytes] = []
        outgoing = OutgoingMessages(begun.append)
        assert outgoing.is_empty
        for message in (b"1", b"2", b"3"):
            outgoing.put(message)
        assert [b"1"] == begun
        outgoing.left()
        assert [b"1", b"2"] == begun
        assert not outgoing.is_empty
        outgoing.left()
        outgoing.left()
        assert outgoing.is_empty
        outgoing.put(b"4")
        assert [b"1", b"2", b"3", b"4"] == begun

    def test_message_that_leaves_at_once_begins_the_next(self):
        """
        A call that has ended takes every message at once, however many wait.
        """
        begun: list[bytes] = []

        def begin(message: bytes) -> None:
            begun.append(message)
            if len(begun) > 1:
                outgoing.left()

        outgoing = OutgoingMessages(begin)
        for message in (b"1", b"2", b"3"):
            outgoing.put(message)
        outgoing.left()
        assert [b"1", b"2", b"3"] == begun
        assert outgoing.is_empty

    def test_close_waits_for_what_was_put(self):
        """
        A closed call takes no more messages, and the caller is told when the last one has left.
        """
        begun: list[bytes] = []
        told: list[str] = []
        outgoing = OutgoingMessages(begun.append)
        outgoing.put(b"1")
        outgoing.put(b"2")
        outgoing.close(lambda: told.append("empty"))
        outgoing.put(b"late")
        outgoing.left()
        assert [] == told
        outgoing.left()
        assert ["empty"] == told
        assert [b"1", b"2"] == begun

    def test_close_of_an_empty_call_tells_at_once(self):
        """
        A close with no message waiting is over at once.
        """
        told: list[str] = []
        OutgoingMessages(lambda _: None).close(lambda: told.append("empty"))
        assert ["empty"] == told

    def test_dropped_messages_do_not_begin(self):
        """
        Messages that wait when a call ends are dropped, and so are later ones.
        """
        begun: list[bytes] = []
        outgoing = OutgoingMessages(begun.append)
        outgoing.put(b"1")
        outgoing.put(b"2")
        outgoing.drop()
        outgoing.left()
        outgoing.put(b"3")
        assert [b"1"] == begun
        assert outgoing.is_empty
